"""Random crops and flips that depend on (seed, epoch, sample) and on nothing else.

He et al., CVPR 2016, section 4.2: pad by 4, crop a window of the old size, flip every other image. The random numbers
are counted, not drawn in turn: number j of sample i is the (i count + j)-th output of a SplitMix64 sequence (Steele,
Lea, Flood, OOPSLA 2014, doi:10.1145/2660193.2660195) that starts from (seed, epoch). So an image is the same in
whatever batch, order and rank it is made. No communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lpnet.errors import ConfigError
from lpnet.seeding import stream_seed

_GOLDEN, _FIRST, _SECOND = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)


def counted_bits(seed: int, stream: str, *, epoch: int, indices: np.ndarray, count: int) -> np.ndarray:
    """`count` random 64-bit numbers for every sample, whatever batch it is in. No communication.

    Args:
        seed: seed of the run.
        stream: what they are for.
        epoch: passes over the data completed.
        indices: of the samples among all training samples, (batch,).
        count: numbers per sample.

    Returns:
        (batch, count), uint64.
    """
    start = np.uint64(stream_seed(seed, stream, step=epoch))
    samples = np.asarray(indices).astype(np.uint64)[:, None]
    bits = start + (samples * np.uint64(count) + np.arange(1, count + 1, dtype=np.uint64)) * _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return bits ^ (bits >> np.uint64(31))


def below(bits: np.ndarray, bound: int) -> np.ndarray:
    """Whole numbers 0..bound-1 from random bits, uniform to one part in 2^32 / bound; int64. No communication."""
    return ((bits >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32)).astype(np.int64)


def fraction(bits: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) from random bits, float64. No communication."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class CropFlip:
    """Pads every image, crops a window of the old size at random, and mirrors it or not.

    The border is zero: the mean colour, when images are standardised first.

    Args:
        seed: seed of the run.
        pad: pixels on every side; 0: no crop.
        flip: mirror left and right with probability 1/2.

    Raises:
        ConfigError: a negative pad.
    """

    seed: int
    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise ConfigError(f"the crop pads by {self.pad} pixels; it must be 0 or more")

    def plan(self, indices: Tensor, *, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """First row and first column of every window in the padded image, and whether it is mirrored, (batch,) each.

        No communication.
        """
        bits = counted_bits(self.seed, "augment/crop_flip", epoch=epoch, indices=indices.numpy(), count=3)
        windows = 2 * self.pad + 1
        mirrored = below(bits[:, 2], 2).astype(bool) & self.flip
        return below(bits[:, 0], windows), below(bits[:, 1], windows), mirrored

    def __call__(self, x: Tensor, indices: Tensor, *, epoch: int) -> Tensor:
        """A new tensor of augmented images. No communication.

        Args:
            x: images of one batch, (batch, channels, height, width).
            indices: which of all training samples they are, (batch,).
            epoch: passes over the data completed.
        """
        rows, columns, mirrored = self.plan(indices, epoch=epoch)
        batch, channels, height, width = x.shape
        padded = torch.nn.functional.pad(x, (self.pad,) * 4)
        # one gather for window and mirror: the place in the padded image that every pixel comes from
        across = np.where(mirrored[:, None], np.arange(width)[::-1], np.arange(width)) + columns[:, None]
        down = (np.arange(height) + rows[:, None]) * padded.shape[3]
        source = torch.from_numpy((down[:, :, None] + across[:, None, :]).reshape(batch, 1, height * width))
        taken = padded.flatten(2).gather(2, source.expand(-1, channels, -1))
        return taken.view(batch, channels, height, width)
