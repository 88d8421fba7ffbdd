"""Random streams keyed by what is drawn, never by who draws it.

A stream is named by (seed, stream, layer, step); the rank is no part of it, so any number of ranks
draws the same initial network, the same batch order and the same masks, bit for bit.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import torch


def stream_seed(seed: int, stream: str, *, layer: int = 0, step: int = 0) -> int:
    """The 63-bit seed of one stream. No communication.

    Args:
        seed: seed of the run.
        stream: what is drawn, such as "stack.weight" or "batch_order".
        layer: global layer index.
        step: training step or epoch.
    """
    key = f"{seed}/{stream}/{layer}/{step}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator_for(seed: int, stream: str, *, layer: int = 0, step: int = 0) -> torch.Generator:
    """A torch generator for one stream (see `stream_seed`). No communication."""
    import torch

    return torch.Generator().manual_seed(stream_seed(seed, stream, layer=layer, step=step))


def numpy_generator_for(seed: int, stream: str, *, layer: int = 0, step: int = 0) -> numpy.random.Generator:
    """A numpy generator for one stream (see `stream_seed`). No communication."""
    import numpy

    return numpy.random.default_rng(stream_seed(seed, stream, layer=layer, step=step))
