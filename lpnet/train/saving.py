"""What of a network and its optimiser goes into a checkpoint, and how it comes back on any number of ranks.

model/   parameters and buffers         optim/   slots of the optimiser
mgrit/   kept C-point states and adjoints per fixed batch, without which a resumed one-shot run differs
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from lpnet.config import Config
from lpnet.errors import CheckpointError, UsageError
from lpnet.io.checkpoint import Attribute, Checkpoint, describe_shards, open_newest
from lpnet.io.checkpoint import save as write_checkpoint
from lpnet.optim.select import load_optimizer, optimizer_shards
from lpnet.parallel.comm import Comm
from lpnet.parallel.shard import Shard
from lpnet.train.decoupled import DecoupledNet

if TYPE_CHECKING:
    from lpnet.mgrit.layer_parallel import LayerParallel

log = logging.getLogger("lpnet.train")


class Stateful(Protocol):
    """An optimiser with a state of its own format, such as `Strategy`."""

    @property
    def kind(self) -> str:
        """Name of the optimiser; a checkpoint of another one is refused."""

    def shards(self) -> list[Shard]:
        """The state. No communication."""

    def load(self, names: Sequence[str], read: Callable[[Shard], torch.Tensor]) -> None:
        """Take the state over; communicates as `read` does."""


class TorchState:
    """The state of an optimiser of torch.optim on the parameters of a network, which may be updated by any loop.

    Args:
        optimizer: over net.parameters().
        net: the network.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, net: LayerParallel | DecoupledNet) -> None:
        self._optimizer, self._net = optimizer, net
        self.kind = type(optimizer).__name__

    def shards(self) -> list[Shard]:
        """The state. No communication."""
        return optimizer_shards(self._optimizer, self._net.shards(), rank=self._net.comm.rank)

    def load(self, names: Sequence[str], read: Callable[[Shard], torch.Tensor]) -> None:
        """Take the state over; communicates as `read` does."""
        load_optimizer(self._optimizer, self._net.shards(), names, read)


class Loaded(NamedTuple):
    """Where a checkpoint was made: steps and epochs done, and the run's configuration where there was one."""

    step: int
    epoch: int
    config: Config | None


def save(
    path: str | Path,
    net: LayerParallel | DecoupledNet,
    optimizer: torch.optim.Optimizer | Stateful | None = None,
    *,
    step: int,
    epoch: int = 0,
    keep: int = 2,
    attributes: Mapping[str, Attribute] | None = None,
) -> Path:
    """Write a checkpoint that any number of ranks, and any grid of them, can load. Collective over net.world.

    Args:
        path: folder; the file in it is named after the step.
        net: the network; states kept for warm starts are saved too.
        optimizer: on net.parameters().
        step: optimisation steps done.
        epoch: passes over the data done.
        keep: newest checkpoints kept in the folder.
        attributes: further attributes of the file.

    Returns:
        The file.

    Raises:
        SaveError: on every rank; the checkpoint before is intact.
    """
    shards, written = contents(net, optimizer, epoch=epoch, attributes=attributes)
    return write_checkpoint(path, net.world, step=step, shards=shards, attributes=written, keep=keep)


def contents(
    net: LayerParallel | DecoupledNet,
    optimizer: torch.optim.Optimizer | Stateful | None = None,
    *,
    epoch: int = 0,
    attributes: Mapping[str, Attribute] | None = None,
) -> tuple[dict[str, list[Shard]], dict[str, Attribute]]:
    """What a checkpoint of this moment holds, in the memory that training goes on to use. Collective over net.world.

    Where there are data replicas, parameters and optimiser come from the first one, which all others equal.

    Returns:
        Shards by section, and root attributes.
    """
    if not isinstance(net, DecoupledNet):
        net.share_buffers()
    shards: dict[str, list[Shard]] = {"model": net.shards() if net.saves else []}
    if isinstance(net, DecoupledNet):
        shards["fdg"] = net.flight_shards()
    else:
        shards["mgrit"] = _kept_shards(net)
    written: dict[str, Attribute] = {
        "method": "mgrit",
        "epoch": epoch,
        "layers": net.unit_count if isinstance(net, DecoupledNet) else net.partition.layers,
        **(attributes or {}),
    }
    if not isinstance(net, DecoupledNet) and net.stack.starts is not None:
        written["parts"] = " ".join(f"{name}:{first}" for name, first in net.stack.starts.items())
    if optimizer is not None:
        state = _stateful(optimizer, net)
        shards["optim"] = state.shards() if net.saves else []
        written["optimizer"] = state.kind
    return shards, written


def load(
    path: str | Path, net: LayerParallel | DecoupledNet, optimizer: torch.optim.Optimizer | Stateful | None = None
) -> Loaded:
    """Fill a network and its optimiser from a checkpoint of any number of ranks. Collective over net.world.

    Args:
        path: a checkpoint file, a folder of them or a run folder (the newest valid one counts).
        net: a network of the same shape.
        optimizer: an optimiser of the same kind, on net.parameters().

    Returns:
        step, epoch, config; config is None where the file holds none.

    Raises:
        CheckpointError: on every rank; missing, damaged, or of another network or optimiser.
    """
    with open_checkpoint(path, net.world) as checkpoint:
        load_model(checkpoint, net)
        if optimizer is not None:
            _load_optimizer(checkpoint, net.world, _stateful(optimizer, net))
        if isinstance(net, DecoupledNet):
            _load_flight(checkpoint, net)
        else:
            _load_kept(checkpoint, net)
        return Loaded(checkpoint.step, int(checkpoint.attributes.get("epoch", 0)), config_of(checkpoint))


def open_checkpoint(path: str | Path, comm: Comm | None = None) -> Checkpoint:
    """A checkpoint file, or the newest valid one of a folder of them or of a run folder. Collective over comm.

    Raises:
        CheckpointError: on every rank; there is none, or it is damaged.
    """
    path = Path(path)
    folder = comm.broadcast_object(path.is_dir()) if comm is not None else path.is_dir()
    if not folder:
        return Checkpoint.open(path, comm)
    inner = (path / "checkpoints").is_dir()
    found = open_newest(
        path / "checkpoints" if (comm.broadcast_object(inner) if comm is not None else inner) else path, comm
    )
    if found is None:
        raise CheckpointError(
            f"{path} holds no checkpoint; give a checkpoint file or the folder of a run that saved one"
        )
    return found


def load_model(checkpoint: Checkpoint, net: LayerParallel | DecoupledNet) -> None:
    """Fill parameters and buffers, of every data replica. Collective over net.world.

    Raises:
        CheckpointError: on every rank; the file is of another network.
    """
    shards = net.all_shards()
    checkpoint.compare("model", describe_shards("model", shards, net.world))
    net.world.together(lambda: checkpoint.load_into("model", shards))


def config_of(checkpoint: Checkpoint) -> Config | None:
    """The configuration of the run that made a checkpoint; None where the file holds none. No communication."""
    from lpnet.configfile import from_yaml

    text = checkpoint.attributes.get("config")
    return from_yaml(str(text), f"{checkpoint.path}, attribute config") if text else None


def _stateful(optimizer: torch.optim.Optimizer | Stateful, net: LayerParallel | DecoupledNet) -> Stateful:
    if isinstance(optimizer, torch.optim.Optimizer):
        return TorchState(optimizer, net)
    if not hasattr(optimizer, "shards"):
        raise UsageError(
            f"a {type(optimizer).__name__} cannot be saved; give an optimiser of torch.optim on net.parameters()"
        )
    return optimizer


def _load_optimizer(checkpoint: Checkpoint, comm: Comm, state: Stateful) -> None:
    """Collective over comm."""
    kind = checkpoint.attributes.get("optimizer")
    if kind != state.kind:
        raise CheckpointError(
            f"{checkpoint.path}: was saved with the optimiser {kind}, and this one is {state.kind}; use the same, or "
            "load without an optimiser"
        )

    def read(shard: Shard) -> torch.Tensor:
        name = f"optim/{shard.name}"
        value = checkpoint.read(name) if shard.rows is None else checkpoint.read_rows(name, *shard.rows)
        if value.shape != shard.tensor.shape:
            raise CheckpointError(
                f"{checkpoint.path}: {name} has shape {tuple(value.shape)} in the file and "
                f"{tuple(shard.tensor.shape)} in this optimiser"
            )
        return value.to(shard.tensor.dtype)

    names = [name.removeprefix("optim/") for name in checkpoint.names("optim")]
    comm.together(lambda: state.load(names, read))


def _kept_shards(net: LayerParallel) -> list[Shard]:
    """Kept states, one row per C-point, and the points that the rows belong to. Collective over net.comm.

    Those of further data replicas, which are of other samples, have names that begin with replica1/ and so on.
    """
    before = _replica(net)
    entries = [(name.removeprefix("mgrit/"), point, payload) for name, point, payload in net.kept_state()]
    mine = {
        kind: sorted({point for name, point, _ in entries if name.split("/")[0] == kind})
        for kind in ("state", "adjoint")
    }
    everyone = net.comm.all_gather_objects(mine)
    points = {kind: sorted(point for part in everyone for point in part[kind]) for kind in mine}
    row = {kind: {point: i for i, point in enumerate(order)} for kind, order in points.items()}
    out = []
    for name, point, payload in entries:
        kind = name.split("/")[0]
        at = row[kind][point]
        out.append(Shard(before + name, payload[None], (at, at + 1), len(points[kind])))
    if net.comm.rank == 0:
        out += [
            Shard(f"{before}points/{kind}", torch.tensor(order, dtype=torch.int64))
            for kind, order in points.items()
            if order
        ]
    return out


def _load_flight(checkpoint: Checkpoint, net: DecoupledNet) -> None:
    """The work in flight of the same number of modules. Collective over net.world."""
    names = [name.removeprefix("fdg/") for name in checkpoint.names("fdg")]
    net.world.together(lambda: net.load_flight(names, lambda name: checkpoint.read(f"fdg/{name}")))


def _load_kept(checkpoint: Checkpoint, net: LayerParallel) -> None:
    """Kept states; those of another hierarchy or grid are left, and solves start cold. Collective over net.world."""
    net.forget()
    names, head = checkpoint.names("mgrit"), f"mgrit/{_replica(net)}"
    batches = sorted({int(name.rsplit("/", 1)[1]) for name in names if name.startswith(f"{head}state/")})
    others = {name.split("/")[1] for name in names if name.startswith("mgrit/replica")}
    if len(others) != net.grid.replicas - 1 and names:
        if net.world.rank == 0:
            log.warning(
                "%s: its kept states are of %d data replicas, and there are %d; the next solves start cold",
                checkpoint.path,
                len(others) + 1,
                net.grid.replicas,
            )
        return

    def work() -> bool:
        row = {
            kind: {int(point): i for i, point in enumerate(checkpoint.read(f"{head}points/{kind}"))}
            for kind in ("state", "adjoint")
            if f"{head}points/{kind}" in names
        }
        try:
            for batch in batches:
                net.load_kept_state(
                    batch,
                    {
                        kind: _reader(checkpoint, f"{head}{kind}/{batch}", row[kind])
                        for kind in row
                        if f"{head}{kind}/{batch}" in names
                    },
                )
        except KeyError:
            return False
        return True

    if not all(net.world.all_gather_objects(net.world.together(work))):
        net.forget()
        if net.world.rank == 0:
            log.warning("%s: its kept states are of another hierarchy; the next solves start cold", checkpoint.path)


def _replica(net: LayerParallel) -> str:
    return f"replica{net.grid.replica}/" if net.grid.replica else ""


def _reader(checkpoint: Checkpoint, name: str, row: dict[int, int]) -> Callable[[int], Any]:
    return lambda point: checkpoint.read_rows(name, row[point], row[point] + 1)[0]
