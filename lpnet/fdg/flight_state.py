"""The work in flight as tensors for a checkpoint, so that training goes on with the same bits.

    NAME               of module NUMBER, in the section fdg
    NUMBER/clock       counters: see CLOCK
    NUMBER/bounds      index of the first unit of every module, and of the end: what is in flight belongs to these
    NUMBER/flights     (in flight, 3): batch, version of the weights, number of the set of weights
    NUMBER/stash/BATCH/header, payload      input, in the form in which it would travel
    NUMBER/weights/SET/PARAMETER            what the forward ran on (stash)
    NUMBER/waiting/PARAMETER                gradients that wait for an accumulation to be complete
    NUMBER/message/STREAM/header, payload   made at the last tick, to be used at the next
    NUMBER/labels/BATCH, NUMBER/digests     of batches on their way to the last module
    replica1/NUMBER/...                     the same of further data replicas, and their buffers

Dropout masks follow from (seed, batch, unit) and running statistics are in the model, so that graphs are rebuilt
without either. After a drain only the clock is left, and any number of modules goes on from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from lpnet.errors import CheckpointError
from lpnet.fdg.member import Member
from lpnet.fdg.message import Message, decode, encode, without_wish
from lpnet.fdg.schedule import ScheduleName
from lpnet.fdg.stage import Backward
from lpnet.parallel.shard import Shard

if TYPE_CHECKING:
    from lpnet.fdg.network import CutNetwork

CLOCK = (
    "modules",
    "schedule",
    "backward",
    "backward_first",
    "accumulate",
    "batches",
    "origin",
    "since",
    "tick",
    "version",
    "grouped",
    "landed",
)
Read = Callable[[str], Tensor]


def state_shards(net: CutNetwork[Any]) -> list[Shard]:
    """The work in flight of this rank's modules, at a tick boundary. Neighbour messages only (none are sent).

    Args:
        net: every rank calls this after the same tick.
    """
    out: list[Shard] = []
    for member in net.members:
        before = _before(member)
        rows = {id(shard.tensor): shard for shard in member.shards()}
        for name, parameter in member.update.parameters.items():
            if parameter.grad is not None:
                own = rows[id(parameter)]
                out.append(Shard(f"{before}waiting/{name}", parameter.grad, own.rows, own.layers))
        if member.place.leads:
            out.append(Shard(f"{before}clock", torch.tensor([_clock(net, member)[key] for key in CLOCK])))
            out.append(Shard(f"{before}bounds", torch.tensor(net.bounds)))
            out += [Shard(before + name, tensor) for name, tensor in _entries(member)]
    return out


def _before(member: Member) -> str:
    """What the names of a member's entries begin with."""
    return f"{member.module}/" if member.place.replica == 0 else f"replica{member.place.replica}/{member.module}/"


def _clock(net: CutNetwork[Any], member: Member) -> dict[str, int]:
    return {
        "modules": net.modules,
        "schedule": get_args(ScheduleName).index(net.options.schedule.name),
        "backward": get_args(Backward).index(net.options.backward),
        "backward_first": int(net.options.schedule.backward_first(1)),
        "accumulate": member.update.accumulate,
        "batches": net.batches,
        "origin": member.origin,
        "since": member.since,
        "tick": member.tick,
        "version": member.update.version,
        "grouped": member.update.grouped,
        "landed": member.update.landed,
    }


def _entries(member: Member) -> list[tuple[str, Tensor]]:
    out: list[tuple[str, Tensor]] = []
    sets: dict[int, int] = {}
    table = []
    for batch, flight in member.stage.flights.items():
        number = -1
        if flight.weights is not None:
            if id(flight.weights) not in sets:
                sets[id(flight.weights)] = len(sets)
                for name, tensor in flight.weights.items():
                    out.append((f"weights/{sets[id(flight.weights)]}/{name}", tensor.detach()))
            number = sets[id(flight.weights)]
        table.append([batch, flight.version, number])
        out += _message(f"stash/{batch}", *encode(Message(batch, flight.x)))
    if table:
        out.append(("flights", torch.tensor(table)))
    if member.place.replica > 0:  # running statistics are each replica's own
        out += [(f"buffers/{name}", buffer) for name, buffer in member.stage.chain.named_buffers()]
    for stream in member.parked():
        out += _message(f"message/{stream}", *member.mailbox.parked(stream))
    out += [(f"labels/{batch}", y) for batch, y in member.labels.items()]
    if member.digests:
        out.append(("digests", torch.tensor([[batch, *pair] for batch, pair in member.digests.items()])))
    return out


def _message(name: str, header: Tensor, payload: Tensor | None) -> list[tuple[str, Tensor]]:
    return [(f"{name}/header", header)] + ([(f"{name}/payload", payload)] if payload is not None else [])


def load_state(net: CutNetwork[Any], names: Sequence[str], read: Read) -> None:
    """Take the work in flight over. No communication.

    Args:
        net: newly made; its parameters, buffers and optimisers are those of the checkpoint already.
        names: of all entries.
        read: gives the tensor of a name.

    Raises:
        CheckpointError: there is work in flight of another number of modules, or of other settings.
    """
    known = set(names)
    if "1/clock" not in known:
        raise CheckpointError("the checkpoint holds no clock of decoupled training; it was saved by another method")
    clock = dict(zip(CLOCK, read("1/clock").tolist(), strict=True))
    if clock["origin"] == clock["batches"]:  # drained
        net.batches = clock["batches"]
        for member in net.members:
            member.origin, member.since, member.tick = net.batches, 0, 0
            member.update.replay(clock["landed"])
        return
    for member in net.members:
        mine = _clock(net, member)
        for key in CLOCK[:5]:
            if clock[key] != mine[key]:
                raise CheckpointError(
                    f"the checkpoint has work in flight and {_words(key, clock[key])}, and this run "
                    f"{_words(key, mine[key])}; go on with the same, or drain (flush) before saving"
                )
    bounds = read("1/bounds").tolist() if "1/bounds" in known else list(net.bounds)
    if bounds != list(net.bounds):
        old, new = _list(bounds[1:-1]), _list(net.bounds[1:-1])
        raise CheckpointError(
            f"the checkpoint has work in flight between modules cut before unit {old}, and this run cuts before unit "
            f"{new}; set fdg.cuts [{old}], or drain (flush) before saving"
        )
    for member in net.members:
        before = _before(member)
        if f"{before}clock" not in known:
            raise CheckpointError(f"the checkpoint has work in flight, and none of data replica {member.place.replica}")
        clock = dict(zip(CLOCK, read(f"{before}clock").tolist(), strict=True))
        net.batches = clock["batches"]
        member.origin, member.since, member.tick = clock["origin"], clock["since"], clock["tick"]
        member.update.version, member.update.grouped = clock["version"], clock["grouped"]
        member.update.replay(clock["landed"])
        mine_names = [name.removeprefix(before) for name in names if name.startswith(before)]
        _load(member, mine_names, lambda name, before=before: read(before + name))  # type: ignore[misc]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _words(key: str, value: int) -> str:
    if key == "schedule":
        return f"schedule {get_args(ScheduleName)[value]}"
    if key == "backward":
        return f"backward {get_args(Backward)[value]}"
    if key == "backward_first":
        return f"order {'backward_first' if value else 'forward_first'}"
    return f"{value} modules" if key == "modules" else f"accumulate {value}"


def _load(member: Member, names: Sequence[str], read: Read) -> None:
    sets: dict[int, dict[str, Tensor]] = {}
    parameters, buffers = member.stage.trainable(), dict(member.stage.chain.named_buffers())
    rows = {id(shard.tensor): shard.rows for shard in member.shards()}
    for name in names:
        kind, _, rest = name.partition("/")
        if kind == "weights":
            number, _, parameter = rest.partition("/")
            own = torch.empty_like(parameters[parameter], requires_grad=False)
            sets.setdefault(int(number), {})[parameter] = own.copy_(read(name))
        elif kind == "waiting":
            target = member.update.parameters[rest]
            block = slice(*(rows[id(target)] or (None, None))) if target.dim() else ...
            target.grad = torch.empty_like(target, requires_grad=False).copy_(read(name)[block])
        elif kind == "buffers":
            buffers[rest].copy_(read(name))
        elif kind == "labels":
            member.labels[int(rest)] = read(name)
        elif kind == "digests":
            member.digests = {int(row[0]): (int(row[1]), int(row[2])) for row in read(name).tolist()}
    for batch, version, number in read("flights").tolist() if "flights" in names else []:
        x = decode(*_read_message(f"stash/{batch}", names, read), device=member.stage.chain.device).tensor
        assert x is not None
        weights = sets[number] if number >= 0 else None
        member.stage.restore(batch, x, version, {name: weights[name] for name in parameters} if weights else None)
    for stream in member.parked():
        header, payload = _read_message(f"message/{stream}", names, read)
        member.mailbox.restore(stream, without_wish(header), payload)


def _read_message(name: str, names: Sequence[str], read: Read) -> tuple[Tensor, Tensor | None]:
    payload = f"{name}/payload"
    return read(f"{name}/header"), read(payload) if payload in names else None
