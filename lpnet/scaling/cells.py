"""The cells of a scaling study: which configurations on how many ranks, and why some of them cannot run.

A study file holds a configuration (`base`) and a grid: a mapping, or a list of mappings, from keys to lists of values,
every combination of which is a cell. Every study has a cell `serial` on one rank for each depth, the reference of its
speed-ups. Pure data; neither torch nor MPI. No communication.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lpnet.config import Config, DataConfig
from lpnet.configfile import read_tree, tree_to_config
from lpnet.errors import ConfigError, UsageError
from lpnet.mgrit.plan import partition_of
from lpnet.parallel.interconnect import NetworkModel, named

MGRIT_KEYS = ("levels", "coarsening", "relaxation", "forward_iterations", "adjoint_iterations", "batching")
GRID = ("ranks", "replicas", "modules", "layers", "layers_per_rank", "method", *MGRIT_KEYS)
LATER = ("fdg", "pipeline", "data")
"""Methods that studies may name and this version does not have."""
TOP = ("name", "scaling", "run", "launch", "network", "networks", "steps", "gradient_error", "base", "grid")


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Args:
        method: serial, mgrit, or one that this version refuses.
        ranks: MPI ranks.
        layers: depth of the network.
        mgrit: settings that differ from the base, by key.
        replicas: data replicas.
        modules: FDG or pipeline modules.
    """

    method: str
    ranks: int
    layers: int
    mgrit: tuple[tuple[str, Any], ...] = ()
    replicas: int = 1
    modules: int = 1

    def config(self, base: Config) -> Config:
        """The run.

        Raises:
            UsageError: a method that this version does not have, more ranks than layers, serial on several ranks.
            ConfigError: a value out of range.
        """
        if self.method in LATER or self.replicas > 1 or self.modules > 1:
            what = self.method if self.method in LATER else "replicas" if self.replicas > 1 else "modules"
            raise UsageError(f"{what} is not in this version of lpnet, which has serial and mgrit on one replica")
        if self.method == "serial" and self.ranks > 1:
            raise UsageError(f"method serial runs on one rank, not {self.ranks}")
        model = replace(base.model, layers=self.layers)
        try:
            mgrit = replace(base.mgrit, **{key: _plain(value) for key, value in self.mgrit})
        except ValueError as error:
            raise ConfigError(str(error)) from error
        config = replace(base, method=self.method, model=model, mgrit=mgrit)  # type: ignore[arg-type]
        partition_of(config, self.ranks)
        return config

    def as_dict(self) -> dict[str, Any]:
        """The cell for files."""
        return {**asdict(self), "mgrit": {key: _plain(value) for key, value in self.mgrit}}

    def label(self) -> str:
        """Method and settings, without ranks and layers."""
        words = [f"{key} {_plain(value)}" for key, value in self.mgrit]
        return " ".join([self.method, ", ".join(words)]).strip()


@dataclass(frozen=True)
class Study:
    """A study file.

    Args:
        name: title of tables and pictures.
        scaling: strong (fixed depth) | weak (fixed layers per rank).
        run: emulated (predicted times) | measured (each cell is launched).
        launch: measured: how a cell starts; {ranks} is replaced.
        network: emulated: costs of messages.
        steps: training steps timed per cell.
        gradient_error: compare each MGRIT setting's gradient with the exact one, on one rank.
        base: the run that the cells vary.
        cells: what is run, serial references first.
    """

    name: str
    scaling: str
    run: str
    launch: str
    network: NetworkModel
    steps: int
    gradient_error: bool
    base: Config
    cells: tuple[Cell, ...]


def read_study(path: str, *, data_root: str | None = None, run: str | None = None, launch: str | None = None) -> Study:
    """Read a study file.

    Args:
        path: YAML.
        data_root: folder of the data files, where it differs.
        run: emulated or measured, in place of the file's.
        launch: how measured cells start, in place of the file's.

    Raises:
        UsageError: not a study, an unknown key, preset or method.
        ConfigError: a mistake in `base`.
    """
    tree = read_tree(path)
    if not isinstance(tree, dict) or "grid" not in tree:
        raise UsageError(f"{path}: a study is a mapping with a grid; known keys: {', '.join(TOP)}")
    _known(path, tree, TOP)
    values = {"scaling": ("strong", "weak"), "run": ("emulated", "measured")}
    for key, allowed in values.items():
        if tree.get(key, allowed[0]) not in allowed:
            raise UsageError(f"{path}: {key} is {tree[key]!r}; expected {' or '.join(allowed)}")
    tree |= {key: value for key, value in (("run", run), ("launch", launch)) if value is not None}
    steps = tree.get("steps", 5)
    if not isinstance(steps, int) or steps < 1:
        raise UsageError(f"{path}: steps is {steps!r}; expected a whole number greater than 0")
    base = dict(tree.get("base") or {})
    if data_root is not None:
        base["data"] = {**(base.get("data") or {}), "root": data_root}
    config = tree_to_config(base, f"{path}: base")
    blocks = tree["grid"] if isinstance(tree["grid"], list) else [tree["grid"]]
    cells = [cell for block in blocks for cell in _expand(path, block, config)]
    depths = dict.fromkeys(cell.layers for cell in cells)
    cells = [*(Cell("serial", 1, depth) for depth in depths), *cells]
    return Study(
        str(tree.get("name", path)),
        tree.get("scaling", "strong"),
        tree.get("run", "emulated"),
        str(tree.get("launch", "mpirun -n {ranks}")),
        named(tree.get("network", "infiniband"), tree.get("networks")),
        steps,
        bool(tree.get("gradient_error", False)),
        config,
        tuple(dict.fromkeys(cells)),
    )


def _expand(path: str, block: Any, base: Config) -> Iterator[Cell]:
    if not isinstance(block, dict):
        raise UsageError(f"{path}: grid is a mapping of lists, or a list of such mappings; known: {', '.join(GRID)}")
    _known(f"{path}: grid", block, GRID)
    if "layers" in block and "layers_per_rank" in block:
        raise UsageError(f"{path}: grid has layers and layers_per_rank; give one of them")
    lists = {key: value if isinstance(value, list) else [value] for key, value in block.items()}
    for values in itertools.product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        method = chosen.get("method", "mgrit")
        if method not in ("serial", "mgrit", *LATER):
            raise UsageError(f"{path}: there is no method {method!r}; known: serial, mgrit, {', '.join(LATER)}")
        ranks = chosen.get("ranks", 1)
        per_rank = chosen.get("layers_per_rank")
        layers = per_rank * ranks if per_rank is not None else chosen.get("layers", base.model.layers)
        for key, value in (("ranks", ranks), ("layers", layers)):
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{path}: grid: {key} is {value!r}; expected a whole number greater than 0")
        mgrit = tuple((key, _frozen(chosen[key])) for key in MGRIT_KEYS if key in chosen and method == "mgrit")
        yield Cell(method, ranks, layers, mgrit, chosen.get("replicas", 1), chosen.get("modules", 1))


def _known(place: str, tree: Mapping[str, Any], known: Sequence[str]) -> None:
    from difflib import get_close_matches

    for key in tree:
        if key not in known:
            nearest = get_close_matches(str(key), known, 1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known)}"
            raise UsageError(f"{place}: unknown key {key!r}; {hint}")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def without_root(data: DataConfig) -> dict[str, Any]:
    """The data section without the place of its files, which does not change a result."""
    return {key: value for key, value in asdict(data).items() if key != "root"}
