"""Small layer-parallel networks with known weights, for the tests of lpnet.mgrit against reference_mgrit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import reference_mgrit as ref
import torch

import lpnet

WIDTH, BATCH, INPUTS, CLASSES = 4, 5, 3, 6
LIMIT = 1e-12  # iterates against the reference
CONVERGED = {"forward_iterations": None, "adjoint_iterations": None, "tolerance": 1e-13}
WARM = {"initial_guess": "kept", "forward_iterations": 1, "adjoint_iterations": 1}
MADE: list[lpnet.LayerParallel] = []  # freed after every test


@dataclass(frozen=True)
class Case:
    """One way to solve: the network's depth, the multigrid settings, the iterations."""

    layers: int
    levels: int = 2
    coarsening: int | tuple[int, ...] = 4
    relaxation: str | tuple[str, ...] = "F"
    cycle: str = "V"
    iterations: int = 1
    guess: str = "constant"
    c_weight: float = 1.0
    activation: str = "tanh"
    bias: str = "vector"
    coarse: str = "injected"

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        words = [value for name, value in values.items() if value != getattr(Case, name, None)]
        return "-".join("x".join(map(str, word)) if isinstance(word, tuple) else str(word) for word in words)

    def mgrit(self, **changes: Any) -> lpnet.MGRIT:
        """lpnet's settings."""
        def plain(value: Any) -> Any:
            return list(value) if isinstance(value, tuple) else value

        settings = {
            "levels": self.levels, "coarsening": plain(self.coarsening), "relaxation": plain(self.relaxation),
            "cycle": self.cycle, "forward_iterations": self.iterations, "adjoint_iterations": self.iterations,
            "initial_guess": self.guess, "c_weight": self.c_weight,
            "coarse": self.coarse,
        }
        return lpnet.MGRIT(**settings | changes)

    def exact_points(self) -> int:
        """Points that are exact after the solve at least: the first ones, for two levels and F-relaxation or more."""
        if self.levels > 2 or self.c_weight != 1:
            return 0
        assert isinstance(self.coarsening, int)
        return self.coarsening * ((1 + self.relaxation.count("C")) * self.iterations + 1)

    def dense(self, seed: int = 3) -> ref.Dense:
        """The layers, with weights that vary over the depth."""
        return ref.random_dense(
            self.layers, WIDTH, final_time=3.0, activation=self.activation, bias=self.bias, seed=seed)

    def grids(self) -> list[list[int]]:
        """The reference's levels."""
        return ref.coarsen(self.layers, self.levels, self.coarsening)

    def options(self) -> dict[str, Any]:
        """The reference's settings."""
        return {"relaxation": self.relaxation, "cycle": self.cycle, "c_weight": self.c_weight,
                "iterations": self.iterations, "guess": self.guess, "coarse": self.coarse}

    def forward(self, dense: ref.Dense, u0: np.ndarray, **changes: Any) -> ref.Solution:
        """The reference's forward solve."""
        return ref.solve_forward(dense, u0, self.grids(), **self.options() | changes)

    def adjoint(self, dense: ref.Dense, states: np.ndarray, lam: np.ndarray, **changes: Any) -> ref.Solution:
        """The reference's adjoint solve."""
        return ref.solve_adjoint(dense, states, lam, self.grids(), **self.options() | changes)


def vectors(count: int, seed: int = 7, width: int = WIDTH) -> np.ndarray:
    """`count` random states (batch, width)."""
    return np.random.default_rng(seed).standard_normal((count, BATCH, width))


def make(dense: ref.Dense, comm: Any, mgrit: lpnet.MGRIT, *, opening: Any = None, closing: Any = None,
         dtype: torch.dtype = torch.float64, partition: Any = None) -> lpnet.LayerParallel:
    """The layers of `dense` as a LayerParallel. Collective over comm."""
    width = dense.weight.shape[1]
    step = lpnet.nn.DenseStep(width=width, activation=dense.activation,
                              bias="vector" if dense.bias.shape[1] > 1 else "scalar")
    stack = lpnet.LayerStack(step, num_layers=dense.layers, final_time=dense.h * dense.layers, comm=comm, seed=0,
                             dtype=dtype, partition=partition)
    net = lpnet.LayerParallel(stack, opening=opening or torch.nn.Identity(), closing=closing or torch.nn.Identity(),
                              mgrit=mgrit)
    MADE.append(net)
    with torch.no_grad():
        for shard in net.shards():
            if shard.name.startswith("stack."):
                low, high = shard.rows
                shard.tensor.copy_(torch.tensor(getattr(dense, shard.name.removeprefix("stack."))[low:high]))
    return net


def ends() -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same opening and closing on every rank."""
    torch.manual_seed(5)
    return torch.nn.Linear(INPUTS, WIDTH, dtype=torch.float64), torch.nn.Linear(WIDTH, CLASSES, dtype=torch.float64)


def samples(seed: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch (batch, inputs) and its labels."""
    return torch.tensor(vectors(1, seed=seed, width=INPUTS)[0]), torch.arange(BATCH) % CLASSES


def network(case: Case, comm: Any, **changes: Any) -> lpnet.LayerParallel:
    """A whole network of a case. Collective over comm."""
    opening, closing = ends()
    return make(case.dense(), comm, case.mgrit(**changes), opening=opening, closing=closing)


def bare(case: Case, comm: Any, **changes: Any) -> lpnet.LayerParallel:
    """One without opening and closing: x is u_0, the logits are u_N. Collective over comm."""
    return make(case.dense(), comm, case.mgrit(**changes))


def gather(net: lpnet.LayerParallel, points: range, states: torch.Tensor) -> np.ndarray:
    """States of all points from all ranks, on every rank. Collective over net.comm."""
    assert len(points) == len(states)
    held = dict(zip(points, states.detach().numpy(), strict=True))
    everywhere = net.comm.all_gather_objects(held)
    merged = {point: state for part in everywhere for point, state in part.items()}
    assert sorted(merged) == list(range(len(merged)))
    return np.stack([merged[point] for point in sorted(merged)])


def gather_rows(net: lpnet.LayerParallel, tensor: torch.Tensor) -> np.ndarray:
    """A stacked tensor's rows from all ranks, on every rank. Collective over net.comm."""
    return np.concatenate(net.comm.all_gather_objects(tensor.detach().numpy().copy()))


def gather_parameters(net: lpnet.LayerParallel) -> dict[str, np.ndarray]:
    """All parameters by global name, on every rank. Collective over net.comm."""
    parts = net.comm.all_gather_objects([(shard.name, shard.tensor.detach().numpy().copy()) for shard in net.shards()])
    names = sorted({name for part in parts for name, _ in part})
    return {name: np.concatenate([np.atleast_1d(a) for part in parts for n, a in part if n == name]) for name in names}
