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

from lpnet.config import RESNETS, Config, DataConfig
from lpnet.configfile import read_tree, tree_to_config
from lpnet.errors import ConfigError, UsageError
from lpnet.mgrit.plan import partition_of
from lpnet.parallel.grid_shape import grid_of, layered_modules
from lpnet.parallel.interconnect import NetworkModel, named

MGRIT_KEYS = (
    *("levels", "coarsening", "relaxation", "forward_iterations", "adjoint_iterations", "batching"),
    *("coarse", "coarse_messages"),
)
FDG_KEYS = ("schedule", "shrink", "backward")
GRID = ("ranks", "replicas", "modules", "layers", "layers_per_rank", "method", "microbatches", *MGRIT_KEYS, *FDG_KEYS)
METHODS = ("serial", "mgrit", "pipeline", "data", "fdg")
"""data: replicas alone; pipeline: exact propagation of parts of a batch, one behind the other."""
TOP = (
    *("name", "scaling", "run", "launch", "network", "networks", "steps", "gradient_error", "equal_loss"),
    *("serial_each", "base", "grid"),
)


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Args:
        method: one of METHODS.
        ranks: MPI ranks.
        layers: depth of the network.
        settings: of the method's section that differ from the base, by key.
        replicas: data replicas.
        modules: FDG modules of a replica, or pipeline modules of a residual network; None: one per rank.
        microbatches: pipeline: parts of the batch of a replica; None: as the base says.
    """

    method: str
    ranks: int
    layers: int
    settings: tuple[tuple[str, Any], ...] = ()
    replicas: int = 1
    modules: int | None = None
    microbatches: int | None = None

    def config(self, base: Config) -> Config:
        """The run.

        Raises:
            UsageError: more ranks than layers, a grid that does not fit the ranks, serial on several ranks, a method
                that the network does not have.
            ConfigError: a value out of range.
        """
        try:
            config = self._config(base)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if config.method == "serial":
            if self.ranks > 1:
                raise UsageError(f"method serial runs on one rank, not {self.ranks}")
            return config
        samples = base.data.batch_size or base.data.train_samples
        if samples is not None and config.parallel.replicas > samples:
            raise UsageError(f"{config.parallel.replicas} replicas cannot share a batch of {samples} samples")
        shape = grid_of(config, self.ranks)
        if config.method == "mgrit":
            partition_of(config, shape.layers)
        elif layered_modules(config) and shape.modules * shape.layers > self.layers:
            raise UsageError(f"{self.layers} layers cannot be shared by {shape.modules * shape.layers} ranks")
        return config

    def _config(self, base: Config) -> Config:
        stacked = base.model.name not in RESNETS
        if self.method == "mgrit" and not stacked:
            raise UsageError(f"method mgrit trains stacks of equal layers, not {base.model.name}; use fdg or pipeline")
        model = replace(base.model, layers=self.layers) if stacked else base.model
        replicas = self.ranks if self.method == "data" else self.replicas
        parallel = replace(base.parallel, replicas=replicas, modules=None, layers="auto")
        common = replace(base, model=model, parallel=parallel)
        changes = {key: _plain(value) for key, value in self.settings}
        if self.method == "serial":
            return replace(common, method="serial", parallel=replace(parallel, replicas=1))
        if self.method == "mgrit":
            return replace(common, method="mgrit", mgrit=replace(base.mgrit, **changes))
        if self.method == "fdg":
            modules = self.modules or max(self.ranks // replicas, 1)
            shared = stacked and self.ranks > modules * replicas  # several ranks to a module
            fdg = replace(base.fdg, **changes, modules=None if shared else modules)
            parallel = replace(parallel, modules=modules if shared else None)
            return replace(common, method="fdg", fdg=fdg, parallel=parallel)
        if stacked:
            parts = 1 if self.method == "data" else self.microbatches or base.fdg.microbatches
            mgrit = replace(base.mgrit, levels=1, microbatches=parts, adjoint={})
            return replace(common, method="mgrit", mgrit=mgrit)
        modules = 1 if self.method == "data" else self.modules or max(self.ranks // replicas, 1)
        parts = 1 if self.method == "data" else self.microbatches or base.fdg.microbatches
        return replace(common, method="pipeline", fdg=replace(base.fdg, modules=modules, microbatches=parts))

    def as_dict(self) -> dict[str, Any]:
        """The cell for files."""
        return {**asdict(self), "settings": {key: _plain(value) for key, value in self.settings}}

    @property
    def exact(self) -> bool:
        """Whether its gradient is that of serial training."""
        return self.method in ("serial", "data", "pipeline")

    def label(self) -> str:
        """Method and settings, without ranks and layers."""
        words = [f"{key} {_plain(value)}" for key, value in self.settings]
        words += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        words += [f"{self.microbatches} parts"] if self.microbatches is not None and self.method == "pipeline" else []
        words += [f"{self.modules} modules"] if self.modules is not None and self.method == "fdg" else []
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
        equal_loss: training steps after which each MGRIT setting's loss is compared with that of serial training, on
            one rank; 0: not compared.
        serial_each: time method serial before and after every cell, which is compared with the mean of the two: the
            speed of a shared machine changes within minutes.
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
    equal_loss: int
    serial_each: bool
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
    equal_loss = tree.get("equal_loss", 0)
    if not isinstance(equal_loss, int) or equal_loss < 0:
        raise UsageError(f"{path}: equal_loss is {equal_loss!r}; expected a number of training steps, or 0")
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
        equal_loss,
        bool(tree.get("serial_each", False)),
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
        if method not in METHODS:
            raise UsageError(f"{path}: there is no method {method!r}; known: {', '.join(METHODS)}")
        ranks = chosen.get("ranks", 1)
        per_rank = chosen.get("layers_per_rank")
        layers = per_rank * ranks if per_rank is not None else chosen.get("layers", base.model.layers)
        numbers = {key: chosen.get(key, 1) for key in ("replicas", "modules", "microbatches")}
        for key, value in {"ranks": ranks, "layers": layers, **numbers}.items():
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{path}: grid: {key} is {value!r}; expected a whole number greater than 0")
        keys = {"mgrit": MGRIT_KEYS, "fdg": FDG_KEYS}.get(method, ())
        settings = tuple((key, _frozen(chosen[key])) for key in keys if key in chosen)
        replicas = 1 if method in ("serial", "data") else numbers["replicas"]
        modules = chosen.get("modules") if method in ("fdg", "pipeline") else None
        parts = chosen.get("microbatches") if method == "pipeline" else None
        yield Cell(method, ranks, layers, settings, replicas, modules, parts)


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
