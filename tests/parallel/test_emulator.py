"""Emulated ranks: the numbers of real ones bit for bit, exact virtual times, deadlocks and faults reported."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from mgrit_case import Case, gather_parameters, network, samples

import lpnet
from lpnet.errors import ConfigError, LpnetError, UsageError
from lpnet.parallel.baton import DeadlockError
from lpnet.parallel.comm import Comm, Traffic
from lpnet.parallel.emulator import Faults, RankDiedError
from lpnet.parallel.interconnect import named, presets

NET = lpnet.NetworkModel(
    name="test", ranks_per_node=2, intra_latency_s=1.0, intra_bandwidth=8.0, inter_latency_s=10.0, inter_bandwidth=4.0,
    send_overhead_s=0.25,
)
CASES = {
    "two levels": (Case(14, iterations=2), {}),
    "three levels, FCF": (Case(23, 3, (4, 2), relaxation="FCF"), {}),
    "c-points": (Case(14, iterations=2), {"storage": "c_points"}),
    "tolerance": (Case(23, coarsening=2), {"forward_iterations": None, "adjoint_iterations": None, "tolerance": 1e-6}),
    "averaged": (Case(23, 3, (5, 2), coarse="averaged"), {}),
    "half steps": (Case(14, iterations=2, coarse="half_steps"), {}),
    "short messages": (Case(23, 3, (4, 2), iterations=2), {"coarse_messages": "bfloat16"}),
    "one level": (Case(9, 1), {}),
}


def steps(comm: Any, name: str = "two levels", count: int = 3) -> tuple[list[float], dict[str, np.ndarray], Traffic]:
    """Losses of some warm Adam steps in an ordinary loop, then all parameters and the traffic of this rank."""
    case, changes = CASES[name]
    net = network(case, comm, initial_guess="kept", **changes)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    x, y = samples()
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x, batch=0), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    traffic = Traffic(**vars(net.comm.traffic))
    return losses, gather_parameters(net), traffic


def same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for key, value in expected[1].items():
        assert np.array_equal(found[1][key], value), key


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_mpi_bit_for_bit(comm: Any, name: str) -> None:
    found = steps(comm, name)
    everyone = comm.gather(found)
    if comm.rank == 0:
        emulated = lpnet.emulate(lambda c: steps(c, name), ranks=comm.size)
        for mine, other in zip(emulated.results, everyone, strict=True):
            same(mine, other)
            assert mine[2] == other[2]  # messages, bytes, reductions, broadcasts


def test_128_ranks_train_with_backward() -> None:
    case = Case(128, 4, (4, 2, 2), iterations=2)
    CASES["wide"] = (case, {})
    one, many = (lpnet.emulate(lambda c: steps(c, "wide", 2), ranks=ranks) for ranks in (1, 128))
    same(many.results[77], one.results[0])
    assert all(result[0] == one.results[0][0] for result in many.results)
    assert max(many.seconds) > 0 and many.switches > 1000


def test_reordering_delays_and_jitter_change_no_bit() -> None:
    plain = lpnet.emulate(steps, ranks=3)
    for faults in (Faults(reorder=True, seed=1), Faults(delay={(0, 1): 5.0}), Faults(jitter=1e-3, reorder=True)):
        faulty = lpnet.emulate(steps, ranks=3, faults=faults)
        for found, expected in zip(faulty.results, plain.results, strict=True):
            same(found, expected)
        if faults.delay:
            assert max(faulty.seconds) > 5.0 > max(plain.seconds)


def test_virtual_time_is_that_of_the_network_model() -> None:
    def program(comm: Comm) -> float:
        data = torch.zeros(4, dtype=torch.float64)  # 32 bytes
        if comm.rank > 0:
            comm.irecv(data, comm.rank - 1, 5).Wait()
        if comm.rank < comm.size - 1:
            comm.isend(data, comm.rank + 1, 5).Wait()
        return comm.now()

    found = lpnet.emulate(program, ranks=4, network=NET, compute="none")
    # within a node 1 + 32/8 = 5, between nodes 10 + 32/4 = 18, a quarter to send and a quarter to post
    first = 0.25 + 5
    second = first + 0.25 + 18
    third = second + 0.25 + 5
    assert found.results == [0.25, first + 0.25, second + 0.25, third]
    assert found.waiting == [0, first - 0.25, second - 0.25, third - 0.25]
    assert found.describe().startswith("predicted for 4 emulated rank(s) on test: 2 ranks per node")


def test_a_reduction_costs_log2_messages_after_the_last_rank() -> None:
    def program(comm: Comm) -> tuple[float, float]:
        assert comm.meter is not None
        comm.meter.now += comm.rank
        total = comm.sum(np.array([1.0, comm.rank]))
        return float(total[1]), comm.now()

    found = lpnet.emulate(program, ranks=4, network=NET, compute="none")
    cost = 3 + (1 + 16 / 8) + (10 + 16 / 4) + 2 * 0.5
    assert found.results == [(6.0, cost)] * 4


def test_compute_is_charged_by_the_median_of_its_kind() -> None:
    from lpnet.parallel.meter import Costs

    costs = Costs("median")
    assert [costs.charge("a", ns) for ns in (10, 1000, 20)] == pytest.approx([1e-8, 1e-8, 2e-8])
    assert costs.charge("b", 7) == pytest.approx(7e-9)
    costs.forget()
    assert costs.charge("a", 5) == pytest.approx(5e-9)
    assert Costs("cpu").charge("a", 5) == pytest.approx(5e-9) and Costs("none").charge("a", 5) == 0


def test_objects_are_copies_and_collectives_agree() -> None:
    def program(comm: Comm) -> Any:
        mine = [comm.rank]
        everyone = comm.all_gather_objects(mine)
        mine.append(9)
        root = comm.broadcast_object({"a": comm.rank}, 1)
        gathered = comm.gather_objects(comm.rank, 2)
        tensor = comm.broadcast(torch.full((2,), float(comm.rank)), 2)
        made: list[int] = comm.shared(lambda: [comm.rank])
        return everyone, root, gathered, tensor.tolist(), made

    for rank, found in enumerate(lpnet.emulate(program, ranks=3).results):
        assert found == ([[0], [1], [2]], {"a": 1}, [0, 1, 2] if rank == 2 else None, [2.0, 2.0], [0])


def test_a_deadlock_names_both_ranks_tags_and_lines() -> None:
    def program(comm: Comm) -> None:
        data = torch.zeros(3)
        other = 1 - comm.rank
        comm.isend(data, other, 40 + comm.rank)
        comm.irecv(data, other, 7 + comm.rank).Wait()

    line = program.__code__.co_firstlineno
    with pytest.raises(DeadlockError) as caught:
        lpnet.emulate(program, ranks=2)
    text = str(caught.value)
    assert "2 of 2 ranks wait for ever" in text
    for rank in (0, 1):
        waits = f"rank {rank} waits for a message from rank {1 - rank} with tag {7 + rank}"
        assert f"{waits}, at {__file__}:{line + 4}" in text
        assert (f"rank {rank} has sent rank {1 - rank} a message with tag {40 + rank} that is not received, "
                f"at {__file__}:{line + 3}") in text


def test_a_rank_that_leaves_strands_the_others_and_is_reported() -> None:
    with pytest.raises(DeadlockError, match=r"(?s)2 of 3 ranks wait for ever, 1 have finished.*3 ranks in barrier"):
        lpnet.emulate(lambda comm: comm.barrier() if comm.rank else None, ranks=3)


def test_different_collectives_are_reported() -> None:
    def program(comm: Comm) -> None:
        comm.barrier() if comm.rank else comm.sum(np.zeros(1))

    with pytest.raises(LpnetError, match=r"different collectives: rank 0 in sum at .*rank 1 in barrier at"):
        lpnet.emulate(program, ranks=2)


def test_a_failing_rank_ends_the_others() -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError("here")
        comm.barrier()

    with pytest.raises(ZeroDivisionError, match="here"):
        lpnet.emulate(program, ranks=3)

    def agreed(comm: Comm) -> None:
        comm.agree(UsageError("no") if comm.rank == 1 else None)

    with pytest.raises(UsageError, match="no"):
        lpnet.emulate(agreed, ranks=3)


def test_a_planned_death() -> None:
    def program(comm: Comm) -> None:
        for step in range(4):
            comm.at_step(step)
            comm.barrier()

    with pytest.raises(RankDiedError, match="rank 1 of 3 died at step 2"):
        lpnet.emulate(program, ranks=3, faults=Faults(kill=(1, 2)))


def test_gradient_modes_belong_to_the_rank() -> None:
    def program(comm: Comm) -> list[bool]:
        seen = []
        with torch.set_grad_enabled(comm.rank == 0):
            for _ in range(3):
                comm.barrier()
                seen.append(torch.is_grad_enabled())
        return seen

    assert lpnet.emulate(program, ranks=2).results == [[True] * 3, [False] * 3]


def test_a_message_longer_than_its_buffer() -> None:
    def program(comm: Comm) -> None:
        if comm.rank:
            comm.irecv(torch.zeros(1), 0, 3).Wait()
        else:
            comm.isend(torch.zeros(2), 1, 3)

    with pytest.raises(LpnetError, match="into 4 bytes, and the message has 8"):
        lpnet.emulate(program, ranks=2)


def test_networks(tmp_path: Any) -> None:
    assert set(presets()) == {"loopback", "infiniband", "slingshot", "ethernet"}
    with pytest.raises(ConfigError, match=r"no network 'infinband'; did you mean infiniband\?; known: loopback, inf"):
        named("infinband")
    with pytest.raises(ConfigError, match="inter_latency_s is -1.0; it must not be negative"):
        lpnet.NetworkModel(inter_latency_s=-1.0)
    file = tmp_path / "mine.yaml"
    file.write_text("mine:\n  ranks_per_node: 4\n  inter_latency_s: 3e-6\n")
    assert named("mine", file).inter_latency_s == 3e-6 and named("ethernet", file) == named("ethernet")
    file.write_text("mine:\n  latency: 4\n")
    with pytest.raises(ConfigError, match="unknown key 'latency'; known: ranks_per_node"):
        presets(file)
    with pytest.raises(UsageError, match="ranks is 0"):
        lpnet.emulate(lambda comm: None, ranks=0)


def test_needs_no_mpi() -> None:
    code = "import sys, lpnet; lpnet.emulate(lambda c: c.barrier(), ranks=4); assert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    assert pickle.loads(pickle.dumps(NET)) == NET
