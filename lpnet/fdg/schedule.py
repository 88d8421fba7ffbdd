"""Which batch goes forward and which goes backward on every module at every tick: pure data.

Zhuang, Wang, Liu, Lin, "Fully decoupled neural network learning using delayed gradients", IEEE TNNLS 33(10), 2022,
arXiv 1906.09108 (fdg); Huo, Gu, Yang, Huang, "Decoupled parallel backpropagation with convergence guarantee", ICML
2018 (ddg); Huo, Gu, Huang, "Training neural networks using features replay", NeurIPS 2018 (fr).

    tick         0    1    2    3    4    5    6
    module 1     F0   F1   F2   F3   F4B0 F5B1 F6B2        delay 4
    module 2          F0   F1   F2B0 F3B1 F4B2 F5B3        delay 2
    module 3               F0B0 F1B1 F2B2 F3B3 F4B4        delay 0

Modules k = 1 .. K; ticks and batches count from 0. Module k takes batch b forward at tick b + lag (k - 1) and back
d_k ticks later. fdg: d_k = 2 (K - k), all messages are used one tick after they were made. ddg, fr: activations pass
all modules within the tick, d_k = K - k. bp: both directions within the tick, d_k = 0. No communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from lpnet.errors import UsageError

ScheduleName = Literal["fdg", "ddg", "fr", "bp"]
Order = Literal["backward_first", "forward_first"]


class Action(NamedTuple):
    """What a module does with one batch: kind is "F" (forward) or "B" (backward and update)."""

    kind: Literal["F", "B"]
    batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.batch}"


@dataclass(frozen=True)
class Schedule:
    """The delay table of K modules.

    Args:
        modules: K.
        name: fdg | ddg | fr (ddg that runs the forward again, see `Stage`) | bp (no delay: backpropagation).
        order: what comes first inside a tick. backward_first: the forward sees the weights just updated, so that they
            are d - 1 updates old when their gradient lands; forward_first: d updates, but the output leaves earlier.
            None: as published, backward_first for fdg and forward_first otherwise. A module without delay runs forward
            first always.

    Raises:
        UsageError: fewer than one module, or an unknown word.
    """

    modules: int
    name: ScheduleName = "fdg"
    order: Order | None = None

    def __post_init__(self) -> None:
        if self.modules < 1:
            raise UsageError(f"there are {self.modules} modules; at least 1 is needed")
        if self.name not in get_args(ScheduleName):
            raise UsageError(f"the schedule is {self.name!r}; it must be one of {', '.join(get_args(ScheduleName))}")
        if self.order is not None and self.order not in get_args(Order):
            raise UsageError(f"the order is {self.order!r}; it must be one of {', '.join(get_args(Order))}")

    @property
    def forward_lag(self) -> int:
        """Ticks between the making of an activation and its use by the next module."""
        return 1 if self.name == "fdg" else 0

    @property
    def backward_lag(self) -> int:
        """Ticks between the making of a gradient and its use by the module before."""
        return 0 if self.name == "bp" else 1

    def delay(self, module: int) -> int:
        """d_k: ticks between forward and backward of a batch on module k."""
        return (self.forward_lag + self.backward_lag) * (self.modules - module)

    def backward_first(self, module: int) -> bool:
        """Whether the module runs the backward before the forward when a tick has both."""
        if self.delay(module) == 0:
            return False
        return self.order == "backward_first" or (self.order is None and self.name == "fdg")

    # ticks and batches

    def forward_tick(self, module: int, batch: int) -> int:
        """Tick at which the module takes the batch forward."""
        return batch + self.forward_lag * (module - 1)

    def backward_tick(self, module: int, batch: int) -> int:
        """Tick at which the module takes the batch back and updates its weights."""
        return self.forward_tick(module, batch) + self.delay(module)

    def ticks(self, batches: int) -> int:
        """Ticks that so many batches need from the first forward to the last update: fdg T + 2K - 2."""
        return batches + self.delay(1) if batches else 0

    def actions(self, module: int, tick: int, batches: int | None = None) -> tuple[Action, ...]:
        """What the module does at the tick, in order.

        Args:
            module: k.
            tick: since the first forward of module 1.
            batches: how many there are in all; None: no end, so that nothing drains.
        """
        forward = tick - self.forward_tick(module, 0)
        backward = tick - self.backward_tick(module, 0)
        steps = []
        if forward >= 0 and (batches is None or forward < batches):
            steps.append(Action("F", forward))
        if backward >= 0 and (batches is None or backward < batches):
            steps.append(Action("B", backward))
        return tuple(reversed(steps)) if self.backward_first(module) else tuple(steps)

    # staleness

    def landed(self, module: int, batch: int) -> int:
        """Gradients that have landed on the module when it takes the batch forward."""
        return min(batch, max(0, batch - self.delay(module) + (1 if self.backward_first(module) else 0)))

    def outstanding(self, module: int, batch: int, accumulate: int = 1) -> int:
        """Updates made on the module between the forward of the batch and the update that its gradient is part of.

        d - 1 (backward_first) or d (forward_first) in the steady state, fewer while the modules fill; with
        accumulation over M batches about d / M.

        Args:
            module: k.
            batch: counted from the start of the schedule.
            accumulate: M.
        """
        return batch // accumulate - self.landed(module, batch) // accumulate

    def in_flight(self, module: int, tick: int, batches: int | None = None) -> int:
        """Batches that have gone forward on the module by the end of the tick and not yet back: rises while filling,
        is d in the steady state, falls while draining."""
        forward = tick - self.forward_tick(module, 0) + 1
        backward = tick - self.backward_tick(module, 0) + 1
        if batches is not None:
            forward, backward = min(forward, batches), min(backward, batches)
        return max(0, forward) - max(0, backward)

    def stash(self, module: int) -> int:
        """Batches the module holds at most, during a tick: d, or d + 1 where the forward comes first."""
        return self.delay(module) + (0 if self.backward_first(module) else 1)

    # pictures

    def rows(self, batches: int | None = None, ticks: int | None = None) -> Iterator[list[str]]:
        """The cells of the grid, one list per module: forward and backward of a tick, in this order."""
        count = self.ticks(batches) if batches is not None and ticks is None else ticks or 0
        for module in range(1, self.modules + 1):
            cells = [sorted(self.actions(module, tick, batches), reverse=True) for tick in range(count)]
            yield ["".join(map(str, cell)) for cell in cells]

    def grid(self, batches: int | None = None, ticks: int | None = None) -> str:
        """The table of the module's docstring.

        Args:
            batches: how many there are in all; None: no end.
            ticks: columns; None: until the last of the batches has landed.
        """
        rows = list(self.rows(batches, ticks))
        heads = [str(tick) for tick in range(len(rows[0]))]
        width = max([4, *(len(cell) for row in [heads, *rows] for cell in row)]) + 1
        names = ["tick", *(f"module {module}" for module in range(1, self.modules + 1))]
        left = max(map(len, names)) + 5
        lines = [
            f"{name:{left}}" + "".join(f"{cell:{width}}" for cell in row)
            for name, row in zip(names, [heads, *rows], strict=True)
        ]
        ends = ["", *(f"       delay {self.delay(module)}" for module in range(1, self.modules + 1))]
        return "\n".join((line + end).rstrip() for line, end in zip(lines, ends, strict=True))
