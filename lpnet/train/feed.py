"""The batches of a run, step by step: taken, decoded and augmented by a thread that runs ahead, or when needed.

What a step sees depends on (seed, step) only. Ranks that read no inputs make none. No communication.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from lpnet.config import DataConfig
from lpnet.data.augment import CropFlip
from lpnet.data.batches import BatchOrder
from lpnet.data.prefetch import Prefetch
from lpnet.data.samples import Samples, without_inputs
from lpnet.errors import LpnetError

if TYPE_CHECKING:
    from lpnet.data.samples import Data

Item = tuple[Samples, int | None]


class Feed:
    """Batches in the order of the steps.

    Args:
        data: samples.
        order: which of them a step sees.
        config: how they are augmented, and how many batches are made ahead.
        seed: seed of the run.
        first: the first step.
        last: one past the last step.
        reads: whether this rank reads inputs, or labels alone.
        threads: whether a thread may make them; emulated ranks take turns instead.
        tell: called with an error that this rank alone may have met, before it is raised.
    """

    def __init__(
        self,
        data: Data,
        order: BatchOrder,
        config: DataConfig,
        seed: int,
        *,
        first: int,
        last: int,
        reads: bool = True,
        threads: bool = True,
        tell: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._data, self._order, self._reads, self._tell = data, order, reads, tell
        decoded = config.name == "image_folder"  # cropped and mirrored while it is decoded
        self._augment = CropFlip(seed) if config.augment == "crop_flip" and not decoded else None
        self._whole = Samples(data.train.x, data.train.y) if order.full and reads and not decoded else None
        self.ahead = config.ahead if threads and reads and first < last else 0
        self._items = Prefetch(self.make, first=first, last=last, ahead=self.ahead) if self.ahead else None

    def make(self, step: int) -> Item:
        """The samples of a step and the id of its batch: a pure function, for any thread. No communication."""
        batch = self._order.at(step)
        if not self._reads:
            return without_inputs(self._data.train.y[batch.indices]), batch.id
        samples = self._whole or self._data.train.take(batch.indices, epoch=batch.epoch)
        if self._augment is not None:
            samples = Samples(self._augment(samples.x, batch.indices, epoch=batch.epoch), samples.y)
        return samples, batch.id

    def next(self, step: int) -> Item:
        """The batch of the next step. No communication.

        Args:
            step: one more than at the last call.

        Raises:
            DataError: a sample that cannot be decoded.
        """
        try:
            return next(self._items) if self._items is not None else self.make(step)
        except LpnetError as error:
            if self._tell is not None:
                self._tell(error)
            raise

    def close(self) -> None:
        """End the thread. No communication."""
        if self._items is not None:
            with suppress(LpnetError):
                self._items.close()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
