"""Samples: readers, splits and the order of batches, the same on every rank without a message."""

from lpnet.data.batches import Batch, BatchOrder
from lpnet.data.samples import Data, Samples, load

__all__ = ["Batch", "BatchOrder", "Data", "Samples", "load"]
