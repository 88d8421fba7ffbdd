"""Caches of emulated ranks: what operations compute on, and when it is warm."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from lpnet.parallel.meter import Costs, Meter
from lpnet.parallel.warmth import Cache, operands, touch


def test_operands_of_partials_methods_and_closures() -> None:
    a, b, c, d = (torch.ones(4, 8) for _ in range(4))
    half = torch.ones(3, dtype=torch.bfloat16)

    def closure() -> None:
        d.add_(half)

    ops = [partial(torch.add, a, b, alpha=2.0, out=c), partial(np.tanh, a.numpy(), a.numpy()), c.tanh_, closure]
    found = {array.ctypes.data for array in operands(ops)}
    assert found == {tensor.data_ptr() for tensor in (a, b, c, d, half)}
    touch(operands(ops))
    touch([a.numpy().T, np.ones((4, 6))[:, ::2]])
    assert a.equal(torch.ones(4, 8))


def test_what_was_used_last_is_warm() -> None:
    """Room for 4 arrays and a little: the one that has not been used for longest leaves."""
    memory = np.ones((8, 2048))
    cache = Cache(4.2 * 2048 * 8)
    used = cache.placed(list(memory))

    def warm(*rows: int) -> list[int]:
        held = cache.use([used[row] for row in rows])
        return [row for row in range(8) if any(array is used[row][0] for array in held)]

    assert warm(0, 1, 2) == []
    assert warm(0, 1, 2) == [0, 1, 2]
    assert warm(3, 0) == [0]
    assert warm(4) == []  # in the place of 1
    assert warm(1) == []
    assert warm(0, 4) == [0, 4]
    cache.lose(memory[4][:10])
    assert warm(4, 0) == [0]
    assert warm(4) == [4]


def test_an_array_larger_than_the_cache_is_never_warm() -> None:
    large = np.ones(100_000)
    for size in (0.0, 1000.0, 65536.0):
        cache = Cache(size)
        used = cache.placed([large, large[:4]])
        assert all(array.size == 4 for _ in range(3) for array in cache.use(used))


def test_metered_work_runs_once_however_warm() -> None:
    counted = torch.zeros(3)
    for cache in (0.0, 1e6):
        meter = Meter(Costs("median", cache), "middle")
        meter.start()
        run = meter.metered("add", [partial(counted.add_, 1.0)])
        run()
        assert meter.now > 0
    assert counted.tolist() == [2.0] * 3
