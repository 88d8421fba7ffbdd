"""What the tests of networks share: converged solves, the serial twin on every rank, closeness."""

from __future__ import annotations

import torch

DOUBLE = torch.float64
CONVERGED = {"forward_iterations": None, "adjoint_iterations": None, "tolerance": 1e-13}


def twin_of(net):
    """A serial twin on every rank. Collective over net.comm."""
    return net.comm.broadcast_object(net.to_serial())


def near(found, expected, name=""):
    scale = float(expected.abs().max()) + 1e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * scale, msg=lambda m: f"{name}: {m}")
