"""Caches of emulated ranks: what operations compute on, and when it is warm."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from lpnet.parallel.meter import Costs, Meter
from lpnet.parallel.warmth import Resident, operands, touch


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


def test_warm_where_all_of_it_fits() -> None:
    block = np.ones((4, 256))  # 8 KiB
    resident = Resident(9000)
    assert not resident.is_warm()
    resident.add([block[:2], block[1:]])  # overlapping parts count once
    assert resident.size == 8192 and resident.is_warm()
    resident.add([np.ones(512)])
    assert resident.size == 12288 and not resident.is_warm()
    assert not Resident(0).is_warm()


def test_metered_work_runs_once_however_warm() -> None:
    counted = torch.zeros(3)
    for cache in (0.0, 1e6):
        meter = Meter(Costs("median", cache), "middle")
        meter.start()
        run = meter.metered("add", [partial(counted.add_, 1.0)])
        run()
        assert meter.now > 0
    assert counted.tolist() == [2.0] * 3
