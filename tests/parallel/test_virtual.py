"""Emulated communicators: parts of the ranks, started sums, patient tests; decoupled modules on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lpnet
from lpnet.fdg.decoupled import FDG
from lpnet.fdg.pipeline import Pipeline
from lpnet.parallel.baton import DeadlockError
from lpnet.parallel.comm import Comm

NET = lpnet.NetworkModel(
    name="test", ranks_per_node=2, intra_latency_s=1.0, intra_bandwidth=8.0, inter_latency_s=10.0, inter_bandwidth=4.0,
    send_overhead_s=0.25,
)


def train(comm: Comm, kind: str, modules: int, steps: int = 5) -> tuple[list[float | None], list[torch.Tensor]]:
    """Losses and parameters of this rank's modules after some steps; more ranks than modules are data replicas."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 6, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    torch.manual_seed(1)
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(4)))
    shared: dict[str, Any] = {
        "comm": comm,
        "loss": torch.nn.functional.cross_entropy,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        "modules": modules,
        "cuts": "uniform",
    }
    made = Pipeline(net, micro_batches=3, **shared) if kind == "pipeline" else FDG(net, **shared)
    replica, replicas = comm.rank // modules, max(comm.size // modules, 1)
    losses = [made.step(x[replica::replicas], y[replica::replicas]).loss for _ in range(steps)]
    made.flush()
    return losses, [shard.tensor.detach().clone() for shard in made.all_shards()]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", ["fdg", "pipeline"])
def test_decoupled_modules_equal_mpi_bit_for_bit(comm: Any, kind: str) -> None:
    modules = 2 if comm.size == 4 else comm.size  # on four ranks two replicas of two modules
    found = train(Comm(comm), kind, modules)
    everyone = comm.gather(found)
    if comm.rank == 0:
        emulated = lpnet.emulate(lambda c: train(c, kind, modules), ranks=comm.size)
        for mine, other in zip(emulated.results, everyone, strict=True):
            assert mine[0] == other[0]
            assert all(torch.equal(a, b) for a, b in zip(mine[1], other[1], strict=True))
        assert min(emulated.seconds) > 0


@pytest.mark.parametrize("kind", ["fdg", "pipeline"])
def test_modules_on_ranks_equal_modules_in_one_process(kind: str) -> None:
    one = lpnet.emulate(lambda c: train(c, kind, 4), ranks=1).results[0]
    many = lpnet.emulate(lambda c: train(c, kind, 4), ranks=4).results
    assert many[0][0] == one[0]
    assert all(torch.equal(a, b) for a, b in zip([t for _, own in many for t in own], one[1], strict=True))


def test_parts_of_the_ranks_talk_among_themselves() -> None:
    def program(comm: Comm) -> Any:
        part = comm.split(comm.rank % 2)
        none = comm.split(None if comm.rank else 7)
        assert part is not None and (none is None) == (comm.rank > 0)
        twin = part.duplicate()
        data = torch.zeros(1)
        # the same tag on three communicators; each message meets its own
        for number, talk in enumerate((comm, part, twin)):
            talk.isend(torch.tensor([100.0 * number + talk.rank]), (talk.rank + 1) % talk.size, 3)
        got = []
        for talk in (twin, comm, part):
            talk.irecv(data, (talk.rank - 1) % talk.size, 3).Wait()
            got.append(data.item())
        return part.rank, part.size, got, part.all_gather_objects(comm.rank), part.broadcast_object(comm.rank, 1)

    for rank, found in enumerate(lpnet.emulate(program, ranks=6).results):
        mine = rank // 2
        before = (mine - 1) % 3
        members = [rank % 2, rank % 2 + 2, rank % 2 + 4]
        assert found == (mine, 3, [200 + before, (rank - 1) % 6, 100 + before], members, members[1])


def test_started_sums_end_when_the_slowest_rank_has_come() -> None:
    def program(comm: Comm) -> Any:
        assert comm.meter is not None
        values = torch.full((4,), comm.rank + 1.0)
        comm.meter.now += 5.0 * comm.rank
        request = comm.isum(values)
        early = request.Test()
        comm.meter.now += 1.0
        request.Wait()
        assert request.Test()
        return early, values.tolist(), comm.meter.now

    found = lpnet.emulate(program, ranks=2, network=NET, compute="none").results
    # the later rank starts at 5.25; 1 + 16/8 seconds and two overheads at either end
    assert found == [(False, [3.0] * 4, 5.25 + 3.5)] * 2


def test_a_test_knows_the_clock_and_patience_waits() -> None:
    def program(comm: Comm) -> Any:
        assert comm.meter is not None
        data = torch.zeros(2, dtype=torch.float64)
        if comm.rank == 0:
            comm.isend(torch.ones(2, dtype=torch.float64), 1, 4)
            return None
        request = comm.irecv(data, 0, 4)
        before = request.Test()
        comm.meter.now += 0.5
        patient = comm.patiently(request.Test)
        return before, patient, comm.meter.now, data.tolist()

    # 16 bytes within a node: sent at 0.25, there at 0.25 + 1 + 2
    assert lpnet.emulate(program, ranks=2, network=NET, compute="none").results[1] == (False, True, 3.25, [1.0, 1.0])


def test_a_deadlock_in_a_part_names_the_ranks_of_the_job() -> None:
    def program(comm: Comm) -> None:
        part = comm.split(comm.rank % 2)
        assert part is not None
        if comm.rank % 2:
            part.irecv(torch.zeros(1), 1 - part.rank, 6).Wait()

    with pytest.raises(DeadlockError) as caught:
        lpnet.emulate(program, ranks=4)
    assert "rank 1 waits for a message from rank 3 with tag 6, at " in str(caught.value)
    assert "rank 3 waits for a message from rank 1 with tag 6, at " in str(caught.value)


def test_sums_over_some_ranks_cost_what_their_nodes_cost() -> None:
    near, far = NET.collective((0, 1), 16), NET.collective((0, 2), 16)
    assert (near, far) == (1 + 2 + 0.5, 10 + 4 + 0.5)
    assert NET.collective(range(4), 0) == 1 + 10 + 1
    large = 1 << 20
    assert NET.collective(range(16), large) < 0.6 * large < large / 8 + 3 * large / 4  # parts travel, not all of it
