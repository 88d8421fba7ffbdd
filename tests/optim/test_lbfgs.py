"""L-BFGS on the reference problem: the history of the plain loops, any rank count, bitwise resume, failing searches."""

from __future__ import annotations

import numpy as np
import pytest
import reference_peaks as reference
import torch

from lpnet.errors import NumericsError
from lpnet.optim.lbfgs import LBFGS, Evaluation
from lpnet.parallel.comm import Comm
from lpnet.parallel.partition import Partition, uniform
from lpnet.parallel.shard import Shard

LAYERS, WIDTH, CLASSES = 7, 4, 5


class ReferenceProblem:
    """The numpy problem as local parameters of one rank; every rank evaluates all of it and hands on its share."""

    def __init__(self, comm: Comm, *, spoil: bool = False) -> None:
        self.comm, self.spoil = comm, spoil
        self.problem = reference.PeaksProblem(reference.generate_samples(100, 3), 5.0, 1e-4, 1e-4, 1e-4)
        start = reference.random_parameters(LAYERS, WIDTH, CLASSES, 0.1, 1)
        self.partition = uniform(LAYERS, comm.size)
        low, high = self.rows = self.partition.block(comm.rank)
        tensors = {"stack.weight": start["hidden_weight"][low:high], "stack.bias": start["hidden_bias"][low:high, None]}
        if comm.rank == comm.size - 1:
            tensors |= {"closing.weight": start["classifier_weight"], "closing.bias": start["classifier_bias"]}
        self.tensors = {name: torch.from_numpy(value.copy()).requires_grad_() for name, value in tensors.items()}
        self.evaluations = 0

    def shards(self) -> list[Shard]:
        stacked = [Shard(name, t, self.rows, LAYERS) for name, t in self.tensors.items() if name.startswith("stack.")]
        return stacked + [Shard(name, t) for name, t in self.tensors.items() if name.startswith("closing.")]

    def parameters(self) -> reference.Parameters:
        parts = self.comm.all_gather_objects({name: t.detach().numpy().copy() for name, t in self.tensors.items()})
        return {
            "hidden_weight": np.concatenate([p["stack.weight"] for p in parts]),
            "hidden_bias": np.concatenate([p["stack.bias"] for p in parts])[:, 0],
            "classifier_weight": parts[-1]["closing.weight"],
            "classifier_bias": parts[-1]["closing.bias"],
        }

    def evaluate(self) -> np.ndarray:
        self.evaluations += 1
        self.at = self.parameters()
        objective, loss = self.problem.objective(self.at)
        return np.array([objective, loss]) if self.comm.rank == 0 else np.zeros(2)

    def read(self, summed: np.ndarray) -> Evaluation:
        objective = np.inf if self.spoil and self.evaluations > 2 else summed[0]
        return Evaluation(float(objective), float(summed[1]), bool(np.isfinite(objective)))

    def gradient(self) -> np.ndarray:
        gradient = self.problem.gradient(self.at)
        low, high = self.rows
        full = {
            "stack.weight": gradient["hidden_weight"][low:high],
            "stack.bias": gradient["hidden_bias"][low:high, None],
            "closing.weight": gradient["classifier_weight"],
            "closing.bias": gradient["classifier_bias"],
        }
        for name, tensor in self.tensors.items():
            tensor.grad = torch.from_numpy(full[name].copy())
        return np.array([float(self.comm.rank)])

    def read_gradient(self, summed: np.ndarray) -> None:
        assert summed[0] == self.comm.size * (self.comm.size - 1) / 2


def optimizer(problem: ReferenceProblem, memory: int = 5) -> LBFGS:
    return LBFGS(problem.shards(), problem, problem.comm, problem.partition, memory=memory)


def histories(comm: Comm, steps: int, memory: int = 5) -> list[tuple[float, float, float]]:
    problem = ReferenceProblem(comm)
    lbfgs = optimizer(problem, memory)
    lbfgs.start()
    out = []
    for _ in range(steps):
        assert lbfgs.evaluation is not None
        out.append((lbfgs.evaluation.objective, lbfgs.grad_norm, lbfgs.step_size))
        lbfgs.step()
    return out


@pytest.mark.ranks(1, 2, 3, 4)
def test_history_equals_the_plain_loops(comm):
    comm = Comm(comm)
    problem = ReferenceProblem(comm)
    expected = reference.train(problem.problem, problem.parameters(), reference.generate_samples(50, 4), 24, memory=5)
    reductions = comm.traffic.reductions
    got = histories(comm, 25)
    for row, (objective, grad_norm, step_size) in zip(expected, got, strict=True):
        assert step_size == row.step_size
        assert objective == pytest.approx(row.objective, rel=1e-9)
        assert grad_norm == pytest.approx(row.grad_norm, rel=1e-7)
    assert any(row.step_size < 1 for row in expected), "no line search backtracked; the test shows little"
    trials = sum(1 - round(np.log2(step_size)) for _, _, step_size in got[1:])
    if comm.size > 1:
        assert comm.traffic.reductions - reductions >= 2 + 2 * len(got) + (trials - len(got) + 1)
    assert comm.all_gather_objects(got)[0] == histories(Comm(), 25), "bits depend on the number of ranks"
    comm.free()


@pytest.mark.ranks(1, 3)
def test_resume_is_bitwise(comm):
    comm = Comm(comm)
    for steps in (0, 2, 13):
        first = ReferenceProblem(comm)
        lbfgs = optimizer(first)
        lbfgs.start()
        for _ in range(steps):
            lbfgs.step()
        state = {shard.name: shard.tensor.clone() for shard in lbfgs.shards()}
        scalars = comm.broadcast_object(state.get("lbfgs/scalars"))
        second = ReferenceProblem(comm)
        for name, tensor in first.tensors.items():
            second.tensors[name].data.copy_(tensor.data)
        again = optimizer(second)
        again.load(
            lambda shard, state=state, scalars=scalars: scalars if shard.name == "lbfgs/scalars" else state[shard.name]
        )
        for _ in range(6):
            assert (
                lbfgs.evaluation == again.evaluation
                and lbfgs.grad_norm == again.grad_norm
                and lbfgs.pairs == again.pairs
            )
            assert lbfgs.step() == again.step()
    comm.free()


def test_stops_with_a_reason_when_no_step_decreases():
    problem = ReferenceProblem(Comm(), spoil=True)
    lbfgs = optimizer(problem)
    lbfgs.start()
    lbfgs.step()
    assert lbfgs.pairs == 1
    before = {name: tensor.detach().clone() for name, tensor in problem.tensors.items()}
    report = lbfgs.step()
    assert report.stop is not None and "40 trials" in report.stop and lbfgs.pairs == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in problem.tensors.items())
    problem.spoil = False
    assert lbfgs.step().stop is None


class Quadratic:
    """f = 1/2 sum k^2 (x_k - 1)^2 over eight layers of one number: condition number 64."""

    def __init__(self) -> None:
        self.x = torch.linspace(-1.0, 2.0, 8, dtype=torch.float64)[:, None].requires_grad_()
        self.weights = torch.arange(1.0, 9.0, dtype=torch.float64)[:, None] ** 2

    def evaluate(self) -> np.ndarray:
        self.f = 0.5 * (self.weights * (self.x - 1) ** 2).sum()
        return self.f.detach().reshape(1).numpy()

    def read(self, summed: np.ndarray) -> Evaluation:
        return Evaluation(float(summed[0]), float(summed[0]), bool(np.isfinite(summed[0])))

    def gradient(self) -> np.ndarray:
        self.x.grad = None
        self.f.backward()
        return np.zeros(0)

    def read_gradient(self, summed: np.ndarray) -> None:
        assert not summed.size


def test_quadratic_converges():
    problem = Quadratic()
    lbfgs = LBFGS([Shard("stack.x", problem.x, (0, 8), 8)], problem, Comm(), Partition((0, 8)), memory=8)
    lbfgs.start()
    for _ in range(40):
        if lbfgs.step().stop:
            break
    assert torch.allclose(problem.x, torch.ones(8, 1, dtype=torch.float64), atol=1e-7)


def test_a_starting_point_that_is_not_finite():
    problem = Quadratic()
    problem.x.data[0] = float("nan")
    with pytest.raises(NumericsError, match="starting point"):
        LBFGS([Shard("stack.x", problem.x, (0, 8), 8)], problem, Comm(), Partition((0, 8))).start()


class Tilted(Quadratic):
    """The quadratic with an objective or gradients that are wrong by a known amount."""

    def __init__(self) -> None:
        super().__init__()
        self.raised, self.tilt, self.evaluations = 0.0, 0.0, 0

    def evaluate(self) -> np.ndarray:
        self.evaluations += 1
        return super().evaluate() + (self.raised if self.evaluations > 1 else 0.0)

    def gradient(self) -> np.ndarray:
        riders = super().gradient()
        self.x.grad += self.tilt * torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)[:, None]
        return riders

    def optimizer(self, **options) -> LBFGS:
        shard = Shard("stack.x", self.x, (0, 8), 8)
        return LBFGS([shard], self, Comm(), Partition((0, 8)), lr=1e-3, trials=4, **options)


@pytest.mark.parametrize(("error", "accepted"), [(0.0, False), (0.9, False), (1.1, True)])
def test_a_step_may_raise_the_objective_by_twice_its_known_error(error, accepted):
    problem = Tilted()
    problem.raised = 400.0
    lbfgs = problem.optimizer(noise=lambda: (error * needed / 2, 0.0))
    start, slope = lbfgs.start().objective, -(lbfgs.grad_norm**2)
    # the first trial's objective beyond what Armijo allows
    x, g = problem.x.detach().clone(), problem.x.grad.clone()
    trial = 0.5 * float((problem.weights * (x - 1e-3 * g - 1) ** 2).sum()) + problem.raised
    needed = trial - (start + 1e-4 * 1e-3 * slope)
    report = lbfgs.step()
    assert (report.stop is None) == accepted and report.trials == (1 if accepted else 4)
    assert torch.equal(problem.x, x) != accepted, "a failed search leaves the parameters as they were"


@pytest.mark.parametrize(("share", "kept"), [(0.0, 1), (0.9, 1), (1.1, 0)])
def test_a_pair_needs_more_curvature_than_errors_of_the_gradients_explain(share, kept):
    problem = Tilted()
    known = [0.0]
    lbfgs = problem.optimizer(noise=lambda: (0.0, known[0]))
    lbfgs.start()
    before, g = lbfgs.grad_norm, problem.x.grad.clone()
    s = -1e-3 * g
    after = g + problem.weights * s
    curvature = float((s * problem.weights * s).sum()) / float(s.norm())
    known[0] = share * curvature / (before + float(after.norm()))
    assert lbfgs.step().stop is None
    assert lbfgs.pairs == kept


@pytest.mark.parametrize("restart", [False, True])
def test_a_revised_gradient_replaces_the_wrong_one(restart):
    """With a restart the pairs made of wrong gradients go; without, the pair is that of the revised gradient."""
    problem, exact, asked = Tilted(), Quadratic(), []

    def revise(at: Evaluation, square: float) -> tuple[Evaluation, bool] | None:
        asked.append(square)
        if len(asked) != 4:
            return None
        assert square == pytest.approx(float((problem.x.grad**2).sum()), rel=1e-12)
        problem.tilt = 0.0
        with torch.enable_grad():
            problem.evaluate()
            problem.gradient()
        return Evaluation(at.objective, at.loss), restart

    lbfgs = problem.optimizer(revise=revise)
    lbfgs.start()
    for step in range(3):
        problem.tilt = 5.0 if step == 2 else 0.0
        assert lbfgs.step().stop is None
    assert len(asked) == 4 and lbfgs.pairs == (0 if restart else 3)
    exact.x = problem.x.detach().clone().requires_grad_()
    exact.evaluate()
    exact.gradient()
    assert lbfgs.grad_norm == pytest.approx(float(exact.x.grad.norm()), rel=1e-12)


@pytest.mark.parametrize("helps", [True, False])
def test_a_failed_search_goes_on_where_a_rescue_makes_the_objective_better(helps):
    problem, calls = Tilted(), []

    def rescue() -> bool:
        calls.append(lbfgs.pairs)
        if len(calls) == 1 and helps:
            problem.raised = 0.0
            return True
        return False

    lbfgs = problem.optimizer(rescue=rescue)
    lbfgs.start()
    assert lbfgs.step().stop is None and not calls, "no rescue is asked for while steps are found"
    problem.raised = 1e6
    x = problem.x.detach().clone()
    report = lbfgs.step()
    assert calls == [0], "asked once, after steepest descent, with an empty memory"
    if helps:  # the start is evaluated anew, and the search from it succeeds
        assert report.stop is None and report.step_size > 0 and lbfgs.evaluation.objective < 1e6 and lbfgs.pairs == 1
    else:
        assert "no decrease along steepest descent" in report.stop and torch.equal(problem.x, x)
