"""Independent MGRIT over the layers: plain numpy float64, plain loops, one process, nothing of lpnet.

FAS multigrid in the layer axis (Falgout, Friedhoff, Kolev, MacLachlan, Schroder 2014, doi:10.1137/130944230) for
residual networks (Günther et al. 2020, arXiv:1812.04352). States are (batch, features), points are 0..N, and a
level is the list of its points in the order in which the solve passes them: 0, ..., N forward, N, ..., 0 adjoint.

    level 0   o - - - o - - - o - - - o - -      o C-point, - F-point; c = 4, N = 14
    level 1   o       o       o       o          forward: coarse step from b to a: layer b with step h (a - b)
    reversed  o       o       o       o   o      adjoint: the same C-points plus N
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray
Guess = str | Array
ETA = 0.1


def activate(name: str, x: Array) -> Array:
    """sigma(x), elementwise."""
    if name == "tanh":
        return np.tanh(x)
    if name == "relu":
        return np.where(x > 0, x, 0.0)
    if name == "smooth_relu":
        return np.where(np.abs(x) < ETA, x * x / (4 * ETA) + x / 2 + ETA / 4, np.where(x > 0, x, 0.0))
    raise ValueError(name)


def slope(name: str, x: Array) -> Array:
    """sigma'(x), elementwise."""
    if name == "tanh":
        return 1 - np.tanh(x) ** 2
    if name == "relu":
        return np.where(x > 0, 1.0, 0.0)
    if name == "smooth_relu":
        return np.where(np.abs(x) < ETA, x / (2 * ETA) + 0.5, np.where(x > 0, 1.0, 0.0))
    raise ValueError(name)


@dataclass(frozen=True)
class Dense:
    """Layers Phi_i(u) = u + h sigma(u W_i^T + b_i).

    Args:
        weight: (layers, width, width).
        bias: (layers, width), or (layers, 1) for one number per layer.
        h: step of the finest level.
        activation: tanh, relu or smooth_relu.
    """

    weight: Array
    bias: Array
    h: float
    activation: str

    @property
    def layers(self) -> int:
        return len(self.weight)

    def argument(self, i: int, u: Array) -> Array:
        return u @ self.weight[i].T + self.bias[i]

    def step(self, i: int, u: Array, span: float = 1) -> Array:
        """Layer i with the step h span."""
        return u + self.h * span * activate(self.activation, self.argument(i, u))

    def jvp(self, i: int, u: Array, v: Array, span: int = 1) -> Array:
        """Its derivative at u in the direction v."""
        return v + self.h * span * slope(self.activation, self.argument(i, u)) * (v @ self.weight[i].T)

    def vjp(self, i: int, u: Array, lam: Array, span: float = 1) -> Array:
        """Its transposed derivative at u, applied to lam."""
        return lam + self.h * span * (slope(self.activation, self.argument(i, u)) * lam) @ self.weight[i]

    def pieces(self, b: int, a: int, coarse: str) -> list[tuple[Dense, int, float]]:
        """Steps (layers, index, length) that a coarse step from b to a is made of, one after the other."""
        span = a - b
        if coarse == "averaged":
            mean = [np.mean(values[b:a], axis=0, keepdims=True) for values in (self.weight, self.bias)]
            return [(Dense(*mean, self.h, self.activation), 0, span)]
        if coarse == "half_steps" and span > 1:
            return [(self, b, span / 2), (self, b + span // 2, span / 2)]
        return [(self, b, span)]

    def coarse_step(self, b: int, a: int, u: Array, coarse: str) -> Array:
        """The step of a coarse level from b to a."""
        for net, i, span in self.pieces(b, a, coarse):
            u = net.step(i, u, span)
        return u

    def coarse_vjp(self, b: int, a: int, u: Array, lam: Array, coarse: str) -> Array:
        """Its transposed derivative at u, applied to lam."""
        pieces, states = self.pieces(b, a, coarse), [u]
        for net, i, span in pieces[:-1]:
            states.append(net.step(i, states[-1], span))
        for (net, i, span), state in zip(reversed(pieces), reversed(states), strict=True):
            lam = net.vjp(i, state, lam, span)
        return lam

    def gradient(self, i: int, u: Array, lam: Array) -> tuple[Array, Array]:
        """(dPhi_i/d(W_i, b_i))^T lam at u."""
        dz = self.h * slope(self.activation, self.argument(i, u)) * lam
        per_feature = dz.sum(axis=0)
        return dz.T @ u, per_feature if self.bias.shape[1] > 1 else per_feature.sum(keepdims=True)


def random_dense(layers: int, width: int, *, final_time: float, activation: str = "tanh", bias: str = "vector",
                 scale: float = 0.5, seed: int = 0) -> Dense:
    """Layers that vary smoothly with depth, so that coarse levels mean something, plus a rough part."""
    rng = np.random.default_rng(seed)
    t = np.linspace(0.0, 1.0, layers)[:, None, None]
    a, b, c = rng.standard_normal((3, width, width))
    weight = scale * (a * np.cos(2 * t) + b * t + 0.1 * c * np.sin(9 * t)) / np.sqrt(width)
    biases = 0.3 * rng.standard_normal((1, width if bias == "vector" else 1)) + 0.1 * np.cos(3 * t[:, 0])
    return Dense(weight, biases, final_time / layers, activation)


def propagate(net: Dense, u0: Array) -> Array:
    """All states (layers + 1, batch, width) by serial propagation."""
    states = [u0]
    for i in range(net.layers):
        states.append(net.step(i, states[-1]))
    return np.stack(states)


def backpropagate(net: Dense, states: Array, lam_n: Array) -> Array:
    """All adjoints (layers + 1, batch, width), linearised at `states`."""
    adjoints = [lam_n]
    for i in reversed(range(net.layers)):
        adjoints.append(net.vjp(i, states[i], adjoints[-1]))
    return np.stack(adjoints[::-1])


def gradients(net: Dense, states: Array, adjoints: Array) -> tuple[Array, Array]:
    """Gradients of all weights and biases: layer i from state i and adjoint i + 1."""
    pairs = [net.gradient(i, states[i], adjoints[i + 1]) for i in range(net.layers)]
    return np.stack([w for w, _ in pairs]), np.stack([b for _, b in pairs])


def coarsen(layers: int, levels: int, coarsening: int | Sequence[int], min_coarse: int = 2) -> list[list[int]]:
    """Points of every level, increasing; no level with fewer than `min_coarse` points."""
    grids = [list(range(layers + 1))]
    for level in range(levels - 1):
        c = coarsening if isinstance(coarsening, int) else coarsening[min(level, len(coarsening) - 1)]
        coarse = grids[-1][::c]
        if len(coarse) < min_coarse:
            break
        grids.append(coarse)
    return grids


def reverse(grids: Sequence[Sequence[int]]) -> list[list[int]]:
    """The adjoint's levels: the same points and the last one, from the last one down."""
    last = grids[0][-1]
    return [sorted({*grid, last}, reverse=True) for grid in grids]


def _per_level(value: Any, level: int) -> Any:
    return value[min(level, len(value) - 1)] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Solution:
    """States of all points (points, batch, width) by point index; residual norms, the first one before iteration 1
    (after it, for a coarse start); plain step evaluations per level."""

    states: Array
    residuals: list[float]
    evaluations: list[int]


@dataclass
class Solver:
    """One multigrid solve of u_a = step(u_b) over the points of `grids[0]`.

    Args:
        grids: points per level in the order of the solve.
        step: (b, a, x) -> the plain step from point b to point a of a level.
        relaxation: F, FCF, ...; one, or one per level.
        c_weight: w in new = w C + (1 - w) old; one, or one per level.
        cycle: V or F.
        again: levels on which an F-cycle follows the first coarse solve by a second one, a V-cycle's; None: all but
            the finest and the coarsest (levels 0 1 2 1 2 1 0), so that F equals V on two levels.
    """

    grids: Sequence[Sequence[int]]
    step: Callable[[int, int, Array], Array]
    relaxation: str | Sequence[str] = "F"
    c_weight: float | Sequence[float] = 1.0
    cycle: str = "V"
    again: Sequence[int] | None = None
    evaluations: list[int] = field(init=False)
    u: list[dict[int, Array]] = field(init=False)  # per level: state by point
    source: list[dict[int, tuple[Array, Array]]] = field(init=False)  # per level: (E, Phi_c(old)) by point

    def __post_init__(self) -> None:
        self.evaluations = [0] * len(self.grids)
        self.u = [{} for _ in self.grids]
        self.source = [{} for _ in self.grids]

    def _plain(self, level: int, b: int, a: int, x: Array) -> Array:
        self.evaluations[level] += 1
        return self.step(b, a, x)

    def _advance(self, level: int, b: int, a: int) -> Array:
        """Phi(u_b) + g_a on a level; on coarse levels as E_a + (Phi(u_b) - Phi(old_b))."""
        plain = self._plain(level, b, a, self.u[level][b])
        if level == 0:
            return plain
        fine, old = self.source[level][a]
        return fine + (plain - old)

    def sweep(self, level: int) -> dict[int, Array]:
        """F-relaxation. Returns E, what the C-points would become."""
        grid, coarse = self.grids[level], set(self.grids[level + 1])
        arriving = {}
        for b, a in pairwise(grid):
            value = self._advance(level, b, a)
            if a in coarse:
                arriving[a] = value
            else:
                self.u[level][a] = value
        return arriving

    def relax_further(self, level: int, arriving: dict[int, Array]) -> dict[int, Array]:
        """What follows the first F of FCF..F."""
        w = _per_level(self.c_weight, level)
        for _ in range(_per_level(self.relaxation, level).count("C")):
            for a, value in arriving.items():
                self.u[level][a] = w * value + (1 - w) * self.u[level][a]
            arriving = self.sweep(level)
        return arriving

    def coarse_solve(self, level: int, arriving: dict[int, Array], kind: str) -> None:
        """Restrict, solve on the next level, put its values on the C-points."""
        coarse = self.grids[level + 1]
        self.u[level + 1] = {a: self.u[level][a] for a in coarse}
        self.source[level + 1] = {
            a: (arriving[a], self._plain(level + 1, b, a, self.u[level][b]))
            for b, a in pairwise(coarse)
        }
        self.visit(level + 1, kind)
        for a in coarse:
            self.u[level][a] = self.u[level + 1][a]

    def visit(self, level: int, kind: str, arriving: dict[int, Array] | None = None) -> None:
        """One cycle on a level; `arriving` is E where the first F-sweep has been done already."""
        grid = self.grids[level]
        if level == len(self.grids) - 1:
            for b, a in pairwise(grid):
                self.u[level][a] = self._advance(level, b, a)
            return
        arriving = self.sweep(level) if arriving is None else arriving
        self.coarse_solve(level, self.relax_further(level, arriving), kind)
        if kind == "F" and (level > 0 if self.again is None else level in self.again):
            self.coarse_solve(level, self.relax_further(level, self.sweep(level)), "V")
        if level > 0:
            self.sweep(level)

    def coarse_start(self, u_first: Array) -> None:
        """Plain propagation on the coarsest level, then on finer ones from their C-points."""
        self.u[0] = {self.grids[0][0]: u_first}
        for level in reversed(range(len(self.grids))):
            known = set(self.grids[level + 1]) if level + 1 < len(self.grids) else {self.grids[level][0]}
            if level == 0:
                break  # the first F-sweep does the same
            for b, a in pairwise(self.grids[level]):
                if a not in known:
                    self.u[0][a] = self._plain(level, b, a, self.u[0][b])

    def residual(self, arriving: dict[int, Array], batch: int) -> float:
        """sqrt(sum over C-points ||E - u||^2 / batch)."""
        return float(np.sqrt(sum(np.sum((e - self.u[0][a]) ** 2) for a, e in arriving.items()) / batch))

    def solve(self, u_first: Array, guess: Guess, iterations: int) -> Solution:
        """`iterations` cycles from a guess: zero, constant, coarse, or states (points, batch, width) by point index."""
        grid = self.grids[0]
        if len(self.grids) == 1:
            self.u[0] = {grid[0]: u_first}
            self.visit(0, self.cycle)
            return Solution(self._states(), [], self.evaluations)
        if isinstance(guess, str) and guess == "coarse":
            self.coarse_start(u_first)
            iterations -= 1
        elif isinstance(guess, str):
            self.u[0] = dict.fromkeys(grid, {"zero": np.zeros_like(u_first), "constant": u_first}[guess])
        else:
            self.u[0] = {a: guess[a].copy() for a in grid}
        self.u[0][grid[0]] = u_first
        arriving = self.sweep(0)
        residuals = [self.residual(arriving, len(u_first))]
        for _ in range(iterations):
            self.visit(0, self.cycle, arriving)
            arriving = self.sweep(0)
            residuals.append(self.residual(arriving, len(u_first)))
        return Solution(self._states(), residuals, self.evaluations)

    def _states(self) -> Array:
        return np.stack([self.u[0][a] for a in sorted(self.grids[0])])


def solve_forward(net: Dense, u0: Array, grids: Sequence[Sequence[int]], *, iterations: int, guess: Guess = "zero",
                  coarse: str = "injected", **options: Any) -> Solution:
    """MGRIT for u_{i+1} = Phi_i(u_i); `grids` from `coarsen`."""
    return Solver(grids, lambda b, a, x: net.coarse_step(b, a, x, coarse), **options).solve(u0, guess, iterations)


def solve_adjoint(net: Dense, states: Array, lam_n: Array, grids: Sequence[Sequence[int]], *, iterations: int,
                  guess: Guess = "zero", coarse: str = "injected", **options: Any) -> Solution:
    """MGRIT for lambda_i = Phi_i'(u_i)^T lambda_{i+1} at `states`; `grids` are the forward ones."""
    return Solver(reverse(grids), lambda b, a, x: net.coarse_vjp(a, b, states[a], x, coarse), **options).solve(
        lam_n, guess, iterations)


def propagate_coarse(net: Dense, u0: Array, grid: Sequence[int]) -> dict[int, Array]:
    """Plain propagation on the points of one level."""
    states = {grid[0]: u0}
    for b, a in pairwise(grid):
        states[a] = net.step(b, states[b], a - b)
    return states


def tangent(net: Dense, states: Array | dict[int, Array], v: Array, grid: Sequence[int]) -> Array:
    """J v: derivative of the propagation over the points of one level, linearised at `states` (by point)."""
    for b, a in pairwise(grid):
        v = net.jvp(b, states[b], v, a - b)
    return v


def twin(net: Dense, opening: Any, closing: Any) -> Any:
    """The same network as ordinary torch modules for autograd: Sequential(opening, steps, closing)."""
    import torch

    class Step(torch.nn.Module):
        def __init__(self, i: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(net.weight[i]))
            self.bias = torch.nn.Parameter(torch.tensor(net.bias[i]))

        def forward(self, u: torch.Tensor) -> torch.Tensor:
            z = torch.nn.functional.linear(u, self.weight) + self.bias
            if net.activation == "tanh":
                f = torch.tanh(z)
            elif net.activation == "relu":
                f = torch.relu(z)
            else:
                f = torch.where(z.abs() < ETA, z * z / (4 * ETA) + z / 2 + ETA / 4, torch.relu(z))
            return u + net.h * f

    return torch.nn.Sequential(opening, torch.nn.Sequential(*(Step(i) for i in range(net.layers))), closing)
