"""The units of one module: a run of a Sequential's children, with their global names and indices.

A unit draws its random numbers (dropout masks) from a stream named by (seed, batch, global unit index): the same mask
on any number of modules, and again when a forward is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from lpnet.errors import LpnetError, UsageError
from lpnet.parallel.comm import Comm
from lpnet.seeding import stream_seed


class Chain(torch.nn.Module):
    """Units low .. high - 1 of a network, run one after another.

    Args:
        units: all units of the network by name.
        low: index of the first unit of this module.
        high: index after the last.
        seed: seed of the run.
    """

    def __init__(self, units: Mapping[str, torch.nn.Module], low: int, high: int, *, seed: int = 0) -> None:
        super().__init__()
        self.low, self.high, self.seed = low, high, seed
        self.names = list(units)
        self.batch = 0
        self.between: Callable[[], None] | None = None  # called after every unit: lets messages make progress
        for name, unit in list(units.items())[low:high]:
            self.add_module(name, unit)
        tensors = [*self.parameters(), *self.buffers()]
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) to (batch, ...). No communication but progress of messages under way.

        Raises:
            LpnetError: a unit returns something that is no tensor; its name.
        """
        if not self.training:
            return self._run(x)
        generators = [torch.default_generator]
        if self.device.type == "cuda":
            generators.append(torch.cuda.default_generators[self.device.index or 0])
        states = [generator.get_state() for generator in generators]
        try:
            return self._run(x, generators)
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def _run(self, x: Tensor, generators: Sequence[torch.Generator] = ()) -> Tensor:
        for index, (name, unit) in enumerate(self.named_children(), self.low):
            if generators:
                seed = stream_seed(self.seed, "fdg.unit", layer=index, step=self.batch)
                for generator in generators:
                    generator.manual_seed(seed)
            x = unit(x)
            if not isinstance(x, Tensor):
                raise LpnetError(
                    f"unit {index} ({name!r}) returns a {type(x).__name__}; a unit takes one tensor and returns one"
                )
            if self.between is not None:
                self.between()
                if x.requires_grad and not x.is_cuda:  # on an accelerator backward runs in a thread of its own
                    x.register_hook(self._progress)
        return x

    def _progress(self, _: Tensor) -> None:
        if self.between is not None:
            self.between()

    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Every unit of this module by its global name, one that is used twice included."""
        for name in self.names[self.low : self.high]:
            unit = self._modules[name]
            assert unit is not None
            yield name, unit

    def first_bad_unit(self, x: Tensor, weights: Mapping[str, Tensor]) -> int | None:
        """Global index of the first unit whose output is not finite, None if there is none. Leaves no trace.

        Args:
            x: input of the first unit.
            weights: parameters to use in place of the current ones, by global name.
        """
        with torch.no_grad():
            x = x.detach().clone()
            for index, (name, unit) in enumerate(self.named_children(), self.low):
                copies = {local: buffer.clone() for local, buffer in unit.named_buffers()}
                head = f"{name}."
                copies |= {full[len(head) :]: tensor for full, tensor in weights.items() if full.startswith(head)}
                x = torch.func.functional_call(unit, copies, (x,))
                if not is_finite(x):
                    return index
        return None

    def unit_of(self, parameter: str) -> int:
        """Global index of the unit that a parameter's name begins with."""
        return self.names.index(parameter.partition(".")[0])


def is_finite(value: Tensor) -> bool:
    """Whether all entries are finite: by their sum, in one pass without a tensor of flags."""
    if not value.is_floating_point() and not value.is_complex():
        return True
    if bool(torch.isfinite(value.detach().sum(dtype=_wide(value.dtype)))):
        return True
    return bool(torch.isfinite(value.detach()).all())  # the sum alone may have overflowed


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


class SharedUnit(torch.nn.Module):
    """Stands for a unit that several ranks share, until these make it.

    Args:
        factory: makes the unit from the communicator of its ranks; collective over it.
    """

    def __init__(self, factory: Callable[[Comm], torch.nn.Module]) -> None:
        super().__init__()
        self.factory = factory

    def forward(self, x: Tensor) -> Tensor:
        """Never: the unit takes its place."""
        raise UsageError("a unit that several ranks share cannot run by itself; give explicit cuts, not by_cost")


def units_of(network: torch.nn.Sequential | Sequence[Any]) -> dict[str, torch.nn.Module]:
    """Units of a network by global name. No communication.

    Args:
        network: a Sequential, or a list of modules; a function in it makes a unit that several ranks share.

    Raises:
        UsageError: it is no sequence of modules, or has none.
    """
    if isinstance(network, torch.nn.Sequential):
        pairs: list[tuple[str, Any]] = [(name, unit) for name, unit in network._modules.items()]
    elif isinstance(network, list | tuple):
        pairs = [(str(index), unit) for index, unit in enumerate(network)]
    else:
        raise UsageError(
            f"the network is a {type(network).__name__}; give a torch.nn.Sequential, whose children are the units that "
            "the modules share"
        )
    for place, (name, unit) in enumerate(pairs):
        if isinstance(unit, FunctionType):
            pairs[place] = (name, SharedUnit(unit))
        elif not isinstance(unit, torch.nn.Module):
            raise UsageError(f"unit {name!r} is a {type(unit).__name__}, not a torch.nn.Module")
    if not pairs:
        raise UsageError("the network has no units")
    return dict(pairs)


def check_cuts(cuts: Sequence[int], units: int, modules: int) -> tuple[int, ...]:
    """Bounds 0, cuts ..., units of the modules.

    Args:
        cuts: index of the first unit of every module after the first.
        units: units of the network.
        modules: K.

    Raises:
        UsageError: more modules than units, or cuts that are not K - 1 increasing indices.
    """
    if modules > units:
        raise UsageError(f"{units} units cannot be shared by {modules} modules; use at most {units} modules")
    bounds = (0, *cuts, units)
    if len(cuts) != modules - 1 or any(low >= high for low, high in pairwise(bounds)):
        raise UsageError(
            f"cuts are {list(cuts)}; {modules} modules of {units} units need {modules - 1} increasing indices between "
            f"1 and {units - 1}: the first unit of every module after the first"
        )
    return bounds


def check_ties(units: Mapping[str, torch.nn.Module], bounds: Sequence[int]) -> None:
    """Refuse parameters and buffers that two modules share. No communication.

    Raises:
        UsageError: both names and both modules.
    """
    seen: dict[tuple[Any, ...], tuple[str, int]] = {}
    for module, (low, high) in enumerate(pairwise(bounds), 1):
        for name, unit in list(units.items())[low:high]:
            tensors = [
                *unit.named_parameters(remove_duplicate=False),
                *unit.named_buffers(remove_duplicate=False),
            ]
            for local, tensor in tensors:
                full = f"{name}.{local}"
                place = (tensor.device, tensor.data_ptr()) if tensor.numel() else (id(tensor),)
                other, where = seen.setdefault(place, (full, module))
                if where != module:
                    raise UsageError(
                        f"{other} of module {where} and {full} of module {module} are the same tensor; tied parameters "
                        "cannot be trained by two modules: cut elsewhere, or untie them"
                    )
