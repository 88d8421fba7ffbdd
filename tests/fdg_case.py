"""Small networks and batches for the tests of decoupled training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = 7


def dense(units: int = 5, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Residual-free small maps; unit k has 6 features."""
    torch.manual_seed(SEED)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(units - 1)]
    return nn.Sequential(*layers, nn.Linear(6, 4)).to(dtype)


def conv(dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> nn.Sequential:
    """Convolutions with batch norm and units that write on their input."""
    torch.manual_seed(SEED)
    blocks = [
        nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)),
        nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(4, 5, 3, stride=2, padding=1), nn.Dropout(dropout)),
        nn.Sequential(nn.BatchNorm2d(5), nn.ReLU()),
    ]
    stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 4))
    return nn.Sequential(stem, *blocks, head).to(dtype)


def batches(count: int, *, image: bool = False, size: int = 8, short: int | None = None, dtype=torch.float64,
            seed: int = 3) -> list[tuple[Tensor, Tensor]]:  # fmt: skip
    """`count` batches of `size` samples, the last of `short`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 6, 6) if image else (6,)
    out = []
    for k in range(count):
        n = short if short is not None and k == count - 1 else size
        x = torch.randn((n, *shape), generator=generator, dtype=torch.float64).to(dtype)
        y = torch.randint(0, 4, (n,), generator=generator)
        out.append((x, y))
    return out


def sgd(lr: float = 0.05, momentum: float = 0.9, decay: float = 1e-3) -> Callable:
    return lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum, weight_decay=decay)


def plain(network: nn.Module, data, optimizer, *, scheduler=None, clip=None) -> list[float]:
    """An ordinary training loop on a network, which it changes."""
    optim = optimizer(list(network.parameters()))
    rate = scheduler(optim) if scheduler else None
    losses = []
    for x, y in data:
        optim.zero_grad()
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        optim.step()
        if rate:
            rate.step()
        losses.append(float(loss.detach()))
    return losses


def run(fdg, data, *, every: int = 0, evaluation=()) -> list[tuple[int, float]]:
    """All reports (batch, loss) of training on `data` and a flush; evaluates every so many steps."""
    reports = []
    for k, (x, y) in enumerate(data):
        reports.append(fdg.step(x, y))
        if every and k % every == 0:
            fdg.evaluate(evaluation)
    reports += fdg.flush()
    return [(report.batch, report.loss) for report in reports if report.batch is not None]


def twin(network: nn.Module) -> nn.Module:
    return copy.deepcopy(network)


def differences(one: dict[str, Tensor], two: dict[str, Tensor]) -> Iterator[str]:
    """Names of tensors that differ by a bit."""
    assert list(one) == list(two)
    return (name for name in one if not torch.equal(one[name], two[name]))


# checkpoints


def save(fdg, folder, step: int):
    """Everything of a run, as the trainer saves it. Collective over fdg.comm."""
    from lpnet.io.checkpoint import save as write
    from lpnet.optim.select import optimizer_shards

    fdg.drain_before_save()
    parts, rank = fdg.optimizers if fdg.place.saves else [], 0 if fdg.place.leads else 1
    slots = [slot for optimizer, shards in parts for slot in optimizer_shards(optimizer, shards, rank=rank)]
    sections = {"model": fdg.shards(), "optim": slots, "fdg": fdg.state_shards()}
    return write(folder, fdg.comm, step=step, shards=sections, attributes={"method": "fdg"}, keep=99)


def load(fdg, path) -> None:
    """Take a checkpoint over. Collective over fdg.comm."""
    from lpnet.io.checkpoint import Checkpoint, describe_shards
    from lpnet.optim.select import load_optimizer

    with Checkpoint.open(path, fdg.comm) as checkpoint:
        checkpoint.compare("model", describe_shards("model", fdg.shards(), fdg.comm))
        checkpoint.load_into("model", fdg.all_shards())
        names = [name.removeprefix("optim/") for name in checkpoint.names("optim")]

        def read(shard):
            name = f"optim/{shard.name}"
            return checkpoint.read(name) if shard.rows is None else checkpoint.read_rows(name, *shard.rows)

        for optimizer, own in fdg.optimizers:
            load_optimizer(optimizer, own, names, read)
        names = [name.removeprefix("fdg/") for name in checkpoint.names("fdg")]
        fdg.load_state(names, lambda name: checkpoint.read(f"fdg/{name}"))
