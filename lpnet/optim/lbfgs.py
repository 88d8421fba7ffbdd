"""Distributed L-BFGS: two reductions per iteration and one more per extra line-search trial.

Liu and Nocedal, "On the limited memory BFGS method", Math. Programming 45, 1989, with the two-loop recursion on the
Gram matrix of (S, Y, g) of Chen, Wang, Zhou, "Large-scale L-BFGS using MapReduce", NeurIPS 2014: the vectors stay
where they are, every rank runs the same recursion on the same few numbers. Armijo backtracking (Nocedal and Wright,
algorithm 3.1).

    reduction 1   objective of a trial point              (once per trial)
    reduction 2   scalar products with the new s, y and g (once per accepted step)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lpnet.errors import NumericsError, UsageError
from lpnet.optim.rows import RowSum, dots, trainable
from lpnet.parallel.comm import Comm
from lpnet.parallel.partition import Partition
from lpnet.parallel.shard import Shard


class NotFinite(NumericsError):
    """The objective or the gradient at an accepted point is not finite."""


@dataclass(frozen=True)
class Evaluation:
    """The objective at one point; `finite` is False when any rank met a value that is not finite."""

    objective: float
    loss: float
    finite: bool = True


@dataclass(frozen=True)
class LBFGSReport:
    """One iteration: the step size accepted, trials made, and the reason to stop, if there is one.

    After an `interrupted` one all is as it was before, and nothing was accepted.
    """

    step_size: float
    trials: int
    stop: str | None = None
    interrupted: bool = False


class Problem(Protocol):
    """What is minimised, at the current values of the local parameters."""

    def evaluate(self) -> np.ndarray:
        """Forward: local contributions, float64, of the same length on every rank. Neighbour messages only."""

    def read(self, summed: np.ndarray) -> Evaluation:
        """The evaluation from the contributions summed over the ranks. No communication."""

    def gradient(self) -> np.ndarray:
        """Backward of the latest evaluate: fills .grad of every local parameter; returns local contributions that
        ride on the reduction of the scalar products (empty where there are none). Neighbour messages only."""

    def read_gradient(self, summed: np.ndarray) -> None:
        """Takes the sum of what `gradient` returned. No communication."""


class LBFGS:
    """L-BFGS on local parameters, which it changes in place.

    Collective over comm in `start` and in `step`.

    Args:
        shards: this rank's parameters (see `Shard`); those without requires_grad are left alone.
        problem: objective and gradient.
        comm: ranks.
        partition: which rank owns which layers.
        lr: first trial step of every line search.
        memory: pairs (s, y) kept.
        trials: trials before a line search counts as failed.
        armijo: c1 of the sufficient decrease.
        factor: the step shrinks by this from trial to trial.
        interrupted: asked after every rejected trial, the same answer on every rank: whether to give up the iteration.
        starts: first layer of each part of a network of several stacks, see RowSum.
        leads: whether this rank's parameters count in sums over comm: those of other data replicas are the same.
        revise: asked after every gradient with the evaluation and the square of its norm: None, or another evaluation
            of the same point, whose gradient is in .grad now, and whether the memory must start anew.
        rescue: asked where steepest descent fails too: whether objective and gradient are better from now on.
        noise: errors of the objective (absolute) and of the gradient (relative) as far as they are known. A step may
            raise the objective by twice the first, and a pair needs more curvature than twice the second explains
            (Shi, Xie, Byrd, Nocedal, "A noise-tolerant quasi-Newton algorithm for unconstrained optimization", SIAM J.
            Optim. 32(1), 2022).
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        problem: Problem,
        comm: Comm,
        partition: Partition,
        *,
        lr: float = 1.0,
        memory: int = 20,
        trials: int = 20,
        armijo: float = 1e-4,
        factor: float = 0.5,
        interrupted: Callable[[], bool] = lambda: False,
        starts: Mapping[str, int] | None = None,
        leads: bool = True,
        revise: Callable[[Evaluation, float], tuple[Evaluation, bool] | None] = lambda at, square: None,
        rescue: Callable[[], bool] = lambda: False,
        noise: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
    ) -> None:
        self._leads = leads
        self._shards = trainable(shards)
        self._problem, self._comm = problem, comm
        self.rows = RowSum(self._shards, partition, starts=starts)
        self._lr, self._memory, self._trials, self._armijo, self._factor = lr, memory, trials, armijo, factor
        self._interrupted, self._revise, self._rescue, self._noise = interrupted, revise, rescue, noise
        slots = memory + 1  # one more than the pairs kept: a pair without curvature must not cost the oldest one
        self._s = [torch.zeros(slots, *shard.tensor.shape, dtype=shard.tensor.dtype) for shard in self._shards]
        self._y = [torch.zeros_like(s) for s in self._s]
        self._g, self._before, self._direction = (
            [torch.zeros_like(shard.tensor, requires_grad=False) for shard in self._shards] for _ in range(3)
        )
        self._order: list[int] = []  # slots of the pairs, oldest first
        self._sy, self._yy = np.zeros((slots, slots)), np.zeros((slots, slots))
        self._sg, self._yg, self._gg = np.zeros(slots), np.zeros(slots), 0.0
        self._eps = max((torch.finfo(shard.tensor.dtype).eps for shard in self._shards), default=1e-16)
        self.evaluation: Evaluation | None = None
        self.step_size = lr

    @property
    def grad_norm(self) -> float:
        """Norm of the gradient at the current point, all ranks together. No communication."""
        return float(np.sqrt(self._gg))

    @property
    def pairs(self) -> int:
        """Pairs (s, y) in the memory. No communication."""
        return len(self._order)

    def start(self) -> Evaluation:
        """Evaluate the starting point, once before the first `step`. Collective, two reductions.

        Raises:
            NumericsError: objective or gradient is not finite there.
        """
        self.evaluation = self._evaluate()
        if not self.evaluation.finite:
            raise NotFinite(f"the objective is not finite at the starting point ({self.evaluation.objective})")
        self._take_gradient(pair=False)
        return self.evaluation

    @torch.no_grad()
    def step(self) -> LBFGSReport:
        """One iteration from the current point. Collective, two reductions and one per extra trial.

        A failed line search empties the memory and tries steepest descent once; when that fails too the parameters
        are as they were and the report gives the reason to stop.

        Raises:
            NumericsError: the gradient at the accepted point is not finite.
        """
        if self.evaluation is None:
            raise UsageError("call LBFGS.start() once before LBFGS.step()")
        parameters = [shard.tensor for shard in self._shards]
        torch._foreach_copy_(self._before, parameters)
        order, done = self._order, 0
        while True:
            newton = bool(self._order)
            slope = self._set_direction()
            step_size = self._lr
            for _ in range(self._trials if slope < 0 else 0):
                for parameter, before, direction in zip(parameters, self._before, self._direction, strict=True):
                    torch.add(before, direction, alpha=step_size, out=parameter)
                done += 1
                trial = self._evaluate()
                most = self.evaluation.objective + self._armijo * step_size * slope + 2 * self._noise()[0]
                if trial.finite and trial.objective <= most:
                    self.evaluation, self.step_size = trial, step_size
                    self._take_gradient(pair=True)
                    return LBFGSReport(step_size, done)
                step_size *= self._factor
                if self._interrupted():
                    torch._foreach_copy_(parameters, self._before)
                    self._order = order
                    return LBFGSReport(0.0, done, interrupted=True)
            torch._foreach_copy_(parameters, self._before)
            self._order = []
            if not newton and self._rescue():
                self.start()
            elif not newton:
                found = f"objective {self.evaluation.objective:.6e}, gradient norm {self.grad_norm:.3e}"
                reason = f"no decrease along steepest descent, {done} trials in all ({found})"
                return LBFGSReport(0.0, done, stop=reason)

    def _evaluate(self) -> Evaluation:
        with torch.enable_grad():
            local = self._problem.evaluate()
        return self._problem.read(self._comm.sum(local))

    def _set_direction(self) -> float:
        """Fill the direction -H g by the two-loop recursion on the scalar products; its slope g'd. No communication."""
        order, sy, yy, sg, yg = self._order, self._sy, self._yy, self._sg, self._yg
        gamma, of_s, of_y = 1.0, dict.fromkeys(order, 0.0), dict.fromkeys(order, 0.0)
        for index in range(len(order) - 1, -1, -1):
            i = order[index]
            product = sg[i] + sum(of_y[j] * sy[i, j] for j in order[index + 1 :])
            of_y[i] = -product / sy[i, i]
        if order:
            gamma = sy[order[-1], order[-1]] / yy[order[-1], order[-1]]
        alphas = {i: -of_y[i] for i in order}
        of_y = {i: gamma * of_y[i] for i in order}
        for index, i in enumerate(order):
            product = (
                gamma * yg[i] + sum(of_y[j] * yy[i, j] for j in order) + sum(of_s[j] * sy[j, i] for j in order[:index])
            )
            of_s[i] = alphas[i] - product / sy[i, i]
        for position, direction in enumerate(self._direction):
            torch.mul(self._g[position], -gamma, out=direction)
            for i in order:
                direction.add_(self._s[position][i], alpha=-of_s[i]).add_(self._y[position][i], alpha=-of_y[i])
        return -float(gamma * self._gg + sum(of_y[i] * yg[i] + of_s[i] * sg[i] for i in order))

    def _take_gradient(self, *, pair: bool) -> None:
        """Gradient at the current point and, after a step, the new pair: the second reduction. Collective."""
        with torch.enable_grad():
            riders = self._problem.gradient()
        slot = next(i for i in range(self._memory + 1) if i not in self._order)
        before = self._noise()[1] * np.sqrt(self._gg) if pair else 0.0
        ss, curvature, yy = self._reduce(slot, riders, pair=pair)
        assert self.evaluation is not None
        other = self._revise(self.evaluation, self._gg)
        if other is not None:
            self.evaluation, restart = other
            if restart:  # what was learnt from gradients that were wrong goes with them
                self._order, pair = [], False
            ss, curvature, yy = self._reduce(slot, None, pair=pair)
        if not np.isfinite(self._gg):
            raise NotFinite(f"the gradient is not finite (objective {self.evaluation.objective})")
        if not pair:
            return
        noise = before + self._noise()[1] * np.sqrt(self._gg)  # of y, from both gradients
        # Cauchy-Schwarz: rounding of s'y is eps |s| |y|
        if curvature > max(self._eps * np.sqrt(ss * yy), noise * np.sqrt(ss)):
            self._order = [*self._order, slot][-self._memory :]

    def _reduce(self, slot: int, riders: np.ndarray | None, *, pair: bool) -> tuple[float, float, float]:
        """Take .grad over, with the pair it makes; scalar products of it. Collective, one reduction.

        Args:
            slot: of the pair.
            riders: what the problem's gradient returned; None: this gradient is another one.
            pair: whether there is one.

        Returns:
            s's, y's and y'y of the pair.
        """
        terms = []
        for position, shard in enumerate(self._shards):
            gradient, g, s, y = shard.tensor.grad, self._g[position], self._s[position], self._y[position]
            if pair and riders is not None:
                torch.sub(shard.tensor.detach(), self._before[position], out=s[slot])
                torch.neg(g, out=y[slot])
            elif pair:  # y = g - g_old with another g
                y[slot].sub_(g)
            g.zero_() if gradient is None else g.copy_(gradient)
            if pair:
                y[slot].add_(g)
            terms.append(self._products(position, slot, stacked=shard.rows is not None))
        packed = self.rows.pack(terms) * float(self._leads)
        summed = self._comm.sum(packed.ravel() if riders is None else np.concatenate([packed.ravel(), riders]))
        if riders is not None:
            self._problem.read_gradient(summed[packed.size :])
        sg, yg, ys, yy, sy, last = np.split(
            self.rows.total(summed[: packed.size].reshape(packed.shape)), np.arange(1, 6) * (self._memory + 1)
        )
        self._sg, self._yg, self._gg = sg, yg, float(last[0])
        if pair:
            self._sy[slot], self._sy[:, slot] = ys, sy
            self._yy[slot], self._yy[:, slot] = yy, yy
        return float(last[1]), float(self._sy[slot, slot]), float(yy[slot])

    def _products(self, position: int, slot: int, *, stacked: bool) -> np.ndarray:
        """Terms of all scalar products that the newest s, y and g take part in (5 (memory + 1) + 2 of them)."""
        s, y, g = self._s[position], self._y[position], self._g[position]
        # y_new with every s gives a column of S'Y, s_new with every y a row
        return np.concatenate(
            [
                dots(s, g, stacked=stacked),
                dots(y, g, stacked=stacked),
                dots(y, s[slot], stacked=stacked),
                dots(y, y[slot], stacked=stacked),
                dots(s, y[slot], stacked=stacked),
                dots(g[None], g, stacked=stacked),
                dots(s[slot][None], s[slot], stacked=stacked),
            ]
        )

    # checkpoints

    def shards(self) -> list[Shard]:
        """The state: pairs and gradient, whose rows lie with their layers, and scalar products. No communication."""
        out = []
        for shard, s, y, g in zip(self._shards, self._s, self._y, self._g, strict=True):
            for slot, pairs in (("s", s), ("y", y)):
                kept = pairs[self._padded()]
                stacked = kept.transpose(0, 1).contiguous() if shard.rows is not None else kept.contiguous()
                out.append(Shard(f"{shard.name}/{slot}", stacked, shard.rows, shard.layers))
            out.append(Shard(f"{shard.name}/gradient", g, shard.rows, shard.layers))
        if self._comm.rank == 0:
            out.append(Shard("lbfgs/scalars", torch.from_numpy(self._scalars())))
        return out

    def load(self, read: Callable[[Shard], torch.Tensor]) -> None:
        """Take the state over from a checkpoint of any number of ranks.

        Communicates as `read` does: it is given the shards that this rank needs, every one of them described by its
        name, shape and rows, and returns their values; "lbfgs/scalars" is read on every rank.
        """
        slots, kept = self._memory + 1, range(self._memory)
        for shard, s, y, g in zip(self._shards, self._s, self._y, self._g, strict=True):
            for slot, pairs in (("s", s), ("y", y)):
                view = pairs[: self._memory].transpose(0, 1) if shard.rows is not None else pairs[: self._memory]
                view.copy_(
                    read(
                        Shard(
                            f"{shard.name}/{slot}",
                            torch.empty_like(view, memory_format=torch.contiguous_format),
                            shard.rows,
                            shard.layers,
                        )
                    )
                )
            g.copy_(read(Shard(f"{shard.name}/gradient", torch.empty_like(g), shard.rows, shard.layers)))
        values = read(Shard("lbfgs/scalars", torch.empty(self._scalars().size, dtype=torch.float64))).numpy()
        head, rest = values[:5], values[5:]
        self.step_size = float(head[0])
        # nan: saved before the first iteration, by a run that was asked to stop at once; `start` is still to come
        self.evaluation = None if np.isnan(head[1]) else Evaluation(float(head[1]), float(head[2]))
        self._gg, self._order = float(head[3]), list(range(int(head[4])))
        square = self._memory * self._memory
        self._sy, self._yy = np.zeros((slots, slots)), np.zeros((slots, slots))
        self._sg, self._yg = np.zeros(slots), np.zeros(slots)
        self._sy[: self._memory, : self._memory] = rest[:square].reshape(self._memory, -1)
        self._yy[: self._memory, : self._memory] = rest[square : 2 * square].reshape(self._memory, -1)
        self._sg[list(kept)], self._yg[list(kept)] = (
            rest[2 * square : 2 * square + self._memory],
            rest[2 * square + self._memory :],
        )

    def _padded(self) -> list[int]:
        """Slots of the pairs, oldest first, then as many free ones as fill the memory."""
        free = [i for i in range(self._memory + 1) if i not in self._order]
        return (self._order + free)[: self._memory]

    def _scalars(self) -> np.ndarray:
        at, order = self.evaluation or Evaluation(np.nan, np.nan), self._padded()
        head = [self.step_size, at.objective, at.loss, self._gg, len(self._order)]
        return np.concatenate(
            [
                head,
                self._sy[np.ix_(order, order)].ravel(),
                self._yy[np.ix_(order, order)].ravel(),
                self._sg[order],
                self._yg[order],
            ]
        )
