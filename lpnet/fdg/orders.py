"""Orders of the exact, synchronous pipeline, as pure tables. No communication.

gpipe: all micro-batches forward, then all backward: Huang et al., "GPipe", NeurIPS 2019, arXiv 1811.06965.
1f1b: one forward, one backward, as soon as that can be: Narayanan et al., "PipeDream", SOSP 2019 (PipeDream-Flush).
Both take (M + K - 1) forwards and backwards of time; 1f1b holds min(K - k + 1, M) micro-batches instead of M.

    1f1b, 3 modules, 4 micro-batches
    module 1     F0   F1   F2             B0   F3   B1        B2        B3
    module 2          F0   F1        B0   F2   B1   F3   B2        B3
    module 3               F0   B0   F1   B1   F2   B2   F3   B3
"""

from __future__ import annotations

from typing import Literal, get_args

from lpnet.errors import UsageError
from lpnet.fdg.schedule import Action

PipelineOrder = Literal["gpipe", "1f1b"]


def actions(order: PipelineOrder, module: int, modules: int, micro_batches: int) -> tuple[Action, ...]:
    """What a module does in one step, in order.

    Args:
        order: gpipe | 1f1b.
        module: k, counted from 1.
        modules: K.
        micro_batches: M.

    Raises:
        UsageError: an unknown order, or fewer than one micro-batch.
    """
    if order not in get_args(PipelineOrder):
        raise UsageError(f"the order is {order!r}; it must be one of {', '.join(get_args(PipelineOrder))}")
    if micro_batches < 1:
        raise UsageError(f"there are {micro_batches} micro-batches; at least 1 is needed")
    warm = held(order, module, modules, micro_batches)
    out = [Action("F", number) for number in range(warm)]
    for number in range(micro_batches):
        out.append(Action("B", number))
        if number + warm < micro_batches:
            out.append(Action("F", number + warm))
    return tuple(out)


def held(order: PipelineOrder, module: int, modules: int, micro_batches: int) -> int:
    """Micro-batches that a module holds at most between their forward and their backward."""
    return micro_batches if order == "gpipe" else min(modules - module + 1, micro_batches)


def times(order: PipelineOrder, modules: int, micro_batches: int) -> list[list[int]]:
    """Slot of every action of every module, each as early as can be where all take equally long.

    An action starts when the one before it on this module is done and its message has been made.
    """
    tables = [actions(order, module, modules, micro_batches) for module in range(1, modules + 1)]
    done: dict[tuple[int, Action], int] = {}
    slots: list[list[int]] = [[] for _ in tables]
    while any(len(row) < len(table) for row, table in zip(slots, tables, strict=True)):
        for k, (row, table) in enumerate(zip(slots, tables, strict=True)):
            while len(row) < len(table):
                action = table[len(row)]
                before = (k - 1, action) if action.kind == "F" else (k + 1, action)
                if 0 <= before[0] < modules and before not in done:
                    break
                start = max(done.get(before, 0), row[-1] + 1 if row else 0)
                row.append(start)
                done[k, action] = start + 1
    return slots


def grid(order: PipelineOrder, modules: int, micro_batches: int) -> str:
    """The table of the module's docstring: one column per forward or backward."""
    slots = times(order, modules, micro_batches)
    count = 1 + max(row[-1] for row in slots)
    width = len(str(micro_batches - 1)) + 4
    left = len(f"module {modules}") + 5
    lines = []
    for module, row in enumerate(slots, 1):
        cells = [""] * count
        for slot, action in zip(row, actions(order, module, modules, micro_batches), strict=True):
            cells[slot] = str(action)
        lines.append((f"{f'module {module}':{left}}" + "".join(f"{cell:{width}}" for cell in cells)).rstrip())
    return "\n".join(lines)
