"""Bytes of images to standardised numbers, per channel, by a table of the 256 possible values.

Standardisation by channel follows Zagoruyko, Komodakis, "Wide residual networks", BMVC 2016, section 3. The mean and
deviation come from the counts of the values, so that they are exact and no float copy of all images is made.
No communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def channel_statistics(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of every channel, of pixels scaled to [0, 1]. No communication.

    Args:
        images: (samples, channels, height, width), uint8.

    Returns:
        Two float64 arrays (channels,); a channel of one value everywhere has deviation 1.
    """
    values = np.arange(256) / 255
    means, deviations = [], []
    for c in range(images.shape[1]):
        counts = np.bincount(images[:, c].ravel(), minlength=256)
        mean = float(counts @ values) / counts.sum()
        means.append(mean)
        deviations.append((float(counts @ (values - mean) ** 2) / counts.sum()) ** 0.5 or 1.0)
    return np.array(means), np.array(deviations)


def standardised(
    images: np.ndarray, mean: Sequence[float] | np.ndarray, deviation: Sequence[float] | np.ndarray, dtype: torch.dtype
) -> torch.Tensor:
    """(pixel / 255 - mean) / deviation, rounded to `dtype`. No communication.

    Args:
        images: (samples, channels, height, width), uint8.
        mean: one number per channel.
        deviation: one number per channel.
        dtype: precision of the result.

    Returns:
        The same shape, contiguous.
    """
    exact = np.float64 if dtype == torch.float64 else np.float32
    result = torch.empty(images.shape, dtype=dtype)
    for c in range(images.shape[1]):
        table = ((np.arange(256) / 255 - mean[c]) / deviation[c]).astype(exact)
        result[:, c] = torch.from_numpy(table[images[:, c]])
    return result
