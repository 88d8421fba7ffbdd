"""The grid of ranks as pure data: data replicas x modules x ranks that share the layers. No communication.

2 replicas x 1 module x 3 ranks
rank      0    1    2    3    4    5
replica   0    0    0    1    1    1
layers    0    1    2    0    1    2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lpnet.config import Config
from lpnet.errors import ConfigError, UsageError


@dataclass(frozen=True)
class GridShape:
    """How many data replicas, modules of each, and ranks that share the layers of each module: pure data.

    Args:
        replicas: data replicas.
        modules: of one replica.
        layers: ranks of one module.
    """

    replicas: int
    modules: int
    layers: int

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return self.replicas * self.modules * self.layers

    def place(self, rank: int) -> tuple[int, int, int]:
        """Replica, module and layer rank of a rank, counted from 0."""
        replica, within = divmod(rank, self.modules * self.layers)
        return (replica, *divmod(within, self.layers))

    def __str__(self) -> str:
        return f"{self.replicas} replicas x {self.modules} modules x {self.layers} layer ranks"

    def table(self, *, most: int = 16) -> str:
        """Every rank's place, the first `most` ones."""
        shown = min(self.ranks, most)
        lines = [f"grid: {self.ranks} ranks = {self}"]
        width = len(str(self.ranks - 1))
        lines.append("  rank    " + " ".join(f"{rank:{width}}" for rank in range(shown)) + _more(self.ranks, shown))
        for k, word in enumerate(("replica", "module ", "layers ")):
            row = " ".join(f"{self.place(rank)[k]:{width}}" for rank in range(shown))
            lines.append(f"  {word} {row}")
        return "\n".join(lines)


def _more(ranks: int, shown: int) -> str:
    return f" ... {ranks - 1}" if ranks > shown else ""


def grid_shape(ranks: int, *, replicas: int = 1, modules: int = 1, layers: int | Literal["auto"] = "auto") -> GridShape:
    """The grid that uses all ranks. No communication.

    Args:
        ranks: in all.
        replicas: data replicas.
        modules: of one replica.
        layers: ranks of one module; auto: as many as there are.

    Raises:
        UsageError: they do not fit, with the nearest grid that does.
    """
    for name, value in (("replicas", replicas), ("modules", modules), ("layers", 1 if layers == "auto" else layers)):
        if value < 1:
            raise UsageError(f"parallel.{name} is {value}; it must be 1 or more")
    fixed = replicas * modules * (1 if layers == "auto" else layers)
    if ranks % fixed == 0 and (layers == "auto" or ranks == fixed):
        return GridShape(replicas, modules, ranks // (replicas * modules))
    asked = f"{replicas} replicas x {modules} modules" + ("" if layers == "auto" else f" x {layers} layer ranks")
    raise UsageError(
        f"{asked} do not fit {ranks} ranks; the nearest grid is {_nearest(ranks, replicas, modules)}, or start "
        f"{max(1, round(ranks / fixed)) * fixed if layers == 'auto' else fixed} ranks"
    )


def _nearest(ranks: int, replicas: int, modules: int) -> GridShape:
    """The grid of all ranks with the nearest numbers of replicas, then of modules."""
    pairs = [(r, m) for r in range(1, ranks + 1) for m in range(1, ranks + 1) if not ranks % (r * m)]
    found = [GridShape(r, m, ranks // (r * m)) for r, m in pairs]
    return min(found, key=lambda shape: (abs(shape.modules - modules), abs(shape.replicas - replicas), shape.replicas))


def grid_of(config: Config, ranks: int) -> GridShape:
    """The grid that a run on `ranks` ranks uses. No communication.

    Raises:
        UsageError: the numbers do not fit the ranks, with the nearest grid.
        ConfigError: settings that contradict each other.
    """
    parallel, method = config.parallel, config.method
    if method in ("serial", "mgrit"):
        if parallel.modules not in (None, 1):
            raise ConfigError(
                f"parallel.modules is {parallel.modules}, and method {method} trains all layers together; use method "
                "fdg or leave it out"
            )
        return grid_shape(ranks, replicas=parallel.replicas, layers=parallel.layers)
    modules, own = parallel.modules, config.fdg.modules
    if modules is not None and own is not None and modules != own:
        raise ConfigError(f"parallel.modules is {modules} and fdg.modules is {own}; give one of them, or the same")
    layered, layers = layered_modules(config), parallel.layers
    if not layered and layers not in ("auto", 1):
        raise ConfigError(
            f"parallel.layers is {layers}, and only modules of a stack of layers (method fdg, model.name dense or "
            "conv, parallel.modules given) can be shared by several ranks; set it to 1"
        )
    layers = layers if layered else 1
    modules = modules or own
    if modules is None:
        modules = max(1, ranks // parallel.replicas)
    if ranks == 1 and parallel.replicas == 1 and layers in ("auto", 1):
        return GridShape(1, modules, 1)  # all modules in one process
    return grid_shape(ranks, replicas=parallel.replicas, modules=modules, layers=layers)


def layered_modules(config: Config) -> bool:
    """Whether a module is a layer-parallel network, which several ranks may share. No communication."""
    given = config.parallel.modules is not None
    return config.method == "fdg" and given and config.model.name in ("dense", "conv")
