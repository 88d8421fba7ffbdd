"""Spatial coarsening: coarse levels evaluate the layers on smaller states.

On a level with restriction R and prolongation P the step from a C-point is

    Phi_c(u) = u + h P F(R u)            its transpose   lam + h R' F'(R u)' P' lam

so that the coarse equation v_j = E_j + (Phi_c(v_{j-1}) - Phi_c(u_{j-1})) changes the states by prolonged differences of
restricted evaluations only: an exact guess stays a bitwise fixed point, and what R drops travels unchanged. Spatial
coarsening in multigrid in time: Falgout et al., "Multigrid reduction in time with Richardson extrapolation", and in
parareal: Ruprecht, "Convergence of parareal with spatial coarsening", PAMM 2014.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpnet.config import MGRIT
from lpnet.errors import UsageError
from lpnet.nn import parts
from lpnet.nn.context import Context
from lpnet.nn.kernels import Op
from lpnet.nn.steps import DenseStep, Index, corrected

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Transfer:
    """Linear maps between states (batch, ...) and smaller ones.

    Args:
        restrict: R, a state to a smaller one; any torch function or module.
        prolong: P, back to the shape of the state.
    """

    restrict: Map
    prolong: Map

    def check(self, shape: Sequence[Any], dtype: torch.dtype) -> tuple[int, ...]:
        """The shape of restricted states. No communication.

        Raises:
            UsageError: maps that fail, do not fit each other, or are not linear.
        """
        if parts.is_tuple(shape):
            raise UsageError(f"spatial coarsening takes states of one tensor, and this one is a tuple {tuple(shape)}")
        with torch.no_grad():
            probe = torch.linspace(-1, 2, torch.Size(shape).numel(), dtype=dtype).sin().reshape(tuple(shape))
            try:
                small = self.restrict(probe)
                back = self.prolong(small)
            except Exception as error:
                raise UsageError(
                    f"restrict and prolong cannot take a state {tuple(shape)}: {error}; give maps for states of this "
                    "shape, or set mgrit.spatial none"
                ) from error
            if tuple(back.shape) != tuple(shape) or back.dtype != dtype or small.dtype != dtype:
                raise UsageError(
                    f"prolong makes {tuple(back.shape)} {back.dtype} of the restriction {tuple(small.shape)} of a "
                    f"state {tuple(shape)} {dtype}; it must give the shape and dtype of the state back"
                )
            for name, map_, x in (("restrict", self.restrict, probe), ("prolong", self.prolong, small)):
                y, tolerance = map_(x), 1e3 * torch.finfo(dtype).eps
                off = float((map_(-2.0 * x + 3.0 * x.flip(0)) - (-2.0 * y + 3.0 * map_(x.flip(0)))).abs().max())
                if off > tolerance * (1.0 + float(y.abs().max())):
                    raise UsageError(
                        f"{name} is not linear (it is off by {off:.1e}); its transpose, which the adjoint needs, would "
                        "be wrong: give a linear map"
                    )
        return tuple(small.shape)


def resampling(kind: str, factor: int) -> Transfer:
    """Built-in maps of images (batch, channels, height, width) by a factor in height and width. No communication.

    Args:
        kind: average: means of blocks, constant blocks back; bilinear: linear interpolation both ways.
        factor: 2, 4, ...; sizes that it does not divide are rounded up.
    """
    sizes: dict[tuple[int, int], tuple[int, int]] = {}

    def restrict(u: Tensor) -> Tensor:
        if u.dim() != 4:
            raise UsageError(f"spatial coarsening {kind} takes images (batch, channels, height, width)")
        height, width = u.shape[2:]
        small = -(-height // factor), -(-width // factor)
        sizes[small] = (height, width)
        if kind == "average":
            return torch.nn.functional.interpolate(u, size=small, mode="area")
        return torch.nn.functional.interpolate(u, size=small, mode="bilinear", align_corners=False)

    def prolong(v: Tensor) -> Tensor:
        back = sizes[tuple(v.shape[2:])]  # type: ignore[index]
        if kind == "average":
            return torch.nn.functional.interpolate(v, size=back, mode="nearest")
        return torch.nn.functional.interpolate(v, size=back, mode="bilinear", align_corners=False)

    return Transfer(restrict, prolong)


def transfers(mgrit: MGRIT, user: Transfer | None, step: Any) -> tuple[Transfer | None, ...]:
    """The maps of every level; None where it has full states. No communication.

    Raises:
        UsageError: settings, maps and layers that do not fit each other.
    """
    if (user is None) == (mgrit.spatial == "user"):
        raise UsageError(
            "mgrit.spatial user and transfer= go together: give LayerParallel(..., "
            "transfer=lpnet.nn.Transfer(restrict, prolong)) and MGRIT(spatial='user')"
        )
    if mgrit.spatial == "none":
        return ()
    if step is None or isinstance(step, DenseStep):
        what = (
            "a network of several stacks" if step is None else "dense layers, whose weights fix the size of the state"
        )
        raise UsageError(
            f"mgrit.spatial is {mgrit.spatial}, which is not for {what}; use it for convolutional layers or modules, "
            "or set it to none"
        )
    if mgrit.batching not in ("off", ["off"]):
        raise UsageError(
            f"mgrit.batching is {mgrit.batching}, and levels with spatial coarsening run layer by layer; set it to off"
        )
    if user is not None:
        return tuple(user if level else None for level in range(mgrit.levels))
    made = {factor: resampling(mgrit.spatial, factor) for factor in mgrit.spatial_factors if factor > 1}
    return tuple(made.get(factor) for factor in mgrit.spatial_factors)


class SpatialWorkspace:
    """The layers of a block on restricted states, beside the workspace of the full ones.

    Args:
        fine: workspace of the full states.
        engine: the layers' parameters.
        shape: of a full state.
        small: of a restricted one.
        transfer: R and P.
        sizes: numbers of slots, those of the fine workspace.
    """

    def __init__(
        self,
        fine: Any,
        engine: Any,
        shape: Sequence[int],
        small: Sequence[int],
        transfer: Transfer,
        sizes: dict[str, int],
    ) -> None:
        self.fine, self.transfer = fine, transfer
        self.inner: Any = engine.workspace(tuple(small), **sizes)
        self._restrict_back = _transposed(transfer.restrict, fine.like.new_zeros(tuple(shape)))
        self._prolong_back = _transposed(transfer.prolong, fine.like.new_zeros(tuple(small)))

    def begin(self, context: Context) -> None:
        """A pass begins; running statistics are those of the full states, so that nothing here is committed."""
        self.inner.begin(context)

    def evaluate(self, layer: Index, u: Index, z: Index) -> list[Op]:
        """z = F(R u)."""
        state, small = self.fine.state(u), self.inner.state(u)

        def run() -> None:
            with torch.no_grad():
                self.inner.pack(self.transfer.restrict(self.fine.unpack(state)), small)

        return [run, *self.inner.evaluate(layer, u, z)]

    def advance(self, u: Index, z: Index, h: float, out: Tensor, minus: Tensor | None, plus: Tensor | None) -> list[Op]:
        """out = (u + h P z) [- minus] [+ plus], in this order."""
        to = out if minus is None or plus is None else torch.empty_like(out)
        state, change = self.fine.state(u), torch.empty_like(out)

        def run() -> None:
            with torch.no_grad():
                self.fine.pack(self.transfer.prolong(self.inner.unpack(self.inner.z[z])), change)
            torch.add(state, change, alpha=h, out=to)

        return [run, *corrected(to, minus, plus, out)]

    def pull(
        self,
        layer: Index,
        z: Index,
        d: Index,
        source: Tensor,
        h: float,
        out: Tensor,
        minus: Tensor | None,
        plus: Tensor | None,
    ) -> list[Op]:
        """out = (source + h R' F' P' source) [- minus] [+ plus], in this order."""
        to = out if minus is None or plus is None else torch.empty_like(out)
        small, pulled, change = self.inner.rows(1)[0], self.inner.rows(1)[0], torch.empty_like(out)
        ops = self.inner.pull(layer, z, d, small, h, pulled, None, None)

        def begin() -> None:
            self.inner.pack(self._prolong_back(self.fine.unpack(source)), small)

        def end() -> None:
            self.fine.pack(self._restrict_back(self.inner.unpack(pulled.sub_(small))), change)
            torch.add(source, change, out=to)

        return [begin, *ops, end, *corrected(to, minus, plus, out)]


def _transposed(map_: Map, like: Tensor) -> Map:
    """The transpose of a linear map, by autograd."""

    def apply(y: Tensor) -> Tensor:
        with torch.enable_grad():
            x = like.requires_grad_(True)
            (found,) = torch.autograd.grad(map_(x), x, y)
        return found

    return apply


def rehearse(user: Sequence[Transfer | None], shape: Sequence[Any], stack: Any, context: Context) -> None:
    """Try the maps and the first local layer on restricted states. No communication.

    Raises:
        UsageError: maps or layers that do not take them.
    """
    for transfer in dict.fromkeys(user):
        if transfer is None:
            continue
        small = transfer.check(shape, stack.dtype)
        try:
            stack.check(small)
            stack.rehearse(small, context)
        except UsageError as error:
            raise UsageError(
                f"the layers cannot take states {tuple(shape)} restricted to {small}: {error}; set mgrit.spatial none"
            ) from error
