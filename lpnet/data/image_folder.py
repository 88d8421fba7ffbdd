"""Folders of images, one per class, as ImageNet is kept: ROOT/train/CLASS/*.jpg and ROOT/val/CLASS/*.jpg.

Images are decoded when their batch is made, never all at once; that needs pillow. Training crops follow Szegedy et
al., "Going deeper with convolutions", CVPR 2015, section 6: a random part of 8 to 100 % of the image and of a side
ratio of 3/4 to 4/3, scaled to the size of the network, mirrored or not; validation takes the middle. What is random
depends on (seed, epoch, sample) only (see `augment`). No communication.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lpnet.config import DataConfig
from lpnet.data.augment import below, counted_bits, fraction
from lpnet.data.pixels import standardised
from lpnet.data.samples import Data, Samples, folder, stratified_subset
from lpnet.errors import DataError, UsageError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp")
# pillow knows formats that call other programs; only these are opened
_FORMATS = ("JPEG", "PNG", "BMP", "PPM", "WEBP")
# of the ImageNet training images, the published numbers of the ResNet codes
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)
_TRIES = 10

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class ImageFolder:
    """The images of one part, decoded when asked for.

    Args:
        root: folder of the part, such as ROOT/train.
        files: file of every sample, relative to `root`, in the order of class and name.
        y: class of every sample, (samples,), int64.
        class_names: names of the classes, which are those of the folders.
        size: height and width of the samples.
        seed: seed of the run.
        dtype: precision of the samples.
        mean: of every channel of pixels in [0, 1].
        deviation: of every channel.
        workers: threads that decode the images of one batch.
        augment: whether an epoch means random crops and mirrors.
    """

    root: Path
    files: tuple[str, ...]
    y: torch.Tensor
    class_names: tuple[str, ...]
    size: int = 224
    seed: int = 0
    dtype: torch.dtype = torch.float32
    mean: tuple[float, ...] = IMAGENET_MEAN
    deviation: tuple[float, ...] = IMAGENET_DEVIATION
    workers: int = 1
    augment: bool = True

    @property
    def x(self) -> torch.Tensor:
        """All images, (samples, 3, size, size), decoded now: the middle of each. No communication."""
        return self.take(torch.arange(len(self))).x

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return 3, self.size, self.size

    def __len__(self) -> int:
        return len(self.files)

    def take(self, indices: torch.Tensor, *, epoch: int | None = None) -> Samples:
        """Decode the samples at `indices`, (batch, 3, size, size), in that order. No communication.

        Args:
            indices: of the samples, (batch,).
            epoch: passes completed, decides the random crops and mirrors; None: the middle of every image, whose
                shorter side is scaled to 8/7 of the size.

        Raises:
            DataError: a file that is missing, damaged or no image; names it.
            UsageError: there is no pillow.
        """
        image_module = _pillow()
        bits = None
        if epoch is not None and self.augment:
            count = 3 * _TRIES + 3
            bits = counted_bits(self.seed, "augment/resized", epoch=epoch, indices=indices.numpy(), count=count)

        def decode(place: int) -> np.ndarray:
            return self._decode(image_module, int(indices[place]), None if bits is None else bits[place])

        if self.workers > 1:
            with ThreadPoolExecutor(self.workers, "lpnet-decode") as pool:  # pillow works without Python's lock
                images = list(pool.map(decode, range(len(indices))))
        else:
            images = [decode(place) for place in range(len(indices))]
        pixels = np.stack(images) if images else np.zeros((0, self.size, self.size, 3), np.uint8)
        x = standardised(pixels.transpose(0, 3, 1, 2), self.mean, self.deviation, self.dtype)
        return Samples(x, self.y[indices])

    def parts(self, size: int) -> Iterator[Samples]:
        """All samples in order, the middle of every image, decoded at most `size` at a time. No communication."""
        for indices in torch.arange(len(self)).split(size):
            yield self.take(indices)

    def subset(self, kept: np.ndarray) -> ImageFolder:
        """The samples at the indices `kept`. No communication."""
        return replace(self, files=tuple(self.files[k] for k in kept), y=self.y[torch.from_numpy(kept)])

    def _decode(self, image_module: Any, index: int, bits: np.ndarray | None) -> np.ndarray:
        """One image, (size, size, 3), uint8."""
        path = self.root / self.files[index]
        try:
            with image_module.open(path, formats=_FORMATS) as image:
                colour = image.convert("RGB")
            width, height = colour.size
            box = middle_box(width, height) if bits is None else random_box(width, height, bits)
            # reads only the part in the box; for strong shrinking first by a whole number, which is fast and smooth
            small = colour.resize((self.size, self.size), image_module.Resampling.BILINEAR, box, reducing_gap=2.0)
        except Exception as error:  # pillow raises many kinds for damaged files
            raise DataError(
                f"{path} (sample {index}) cannot be decoded ({error or type(error).__name__}); replace or remove it"
            ) from None
        pixels = np.asarray(small)
        return pixels[:, ::-1] if bits is not None and below(bits[-1:], 2)[0] else pixels


def read(config: DataConfig, seed: int, dtype: torch.dtype) -> Data:
    """The images that a configuration asks for, listed but not decoded. No communication.

    The training accuracy is that of as many training images as there are validation images.

    Raises:
        DataError: a missing folder, classes that do not fit, or more samples asked for than there are.
        UsageError: there is no pillow.
    """
    _pillow()
    train, validation = open_folders(folder(config), size=config.crop, seed=seed, dtype=dtype, workers=config.workers)
    train = replace(train, augment=config.augment == "crop_flip")
    limits = {"training": (train, config.train_samples), "validation": (validation, config.validation_samples)}
    found = []
    for part, (images, count) in limits.items():
        key = "data.train_samples" if part == "training" else "data.validation_samples"
        kept = stratified_subset(images.y.numpy(), count, seed=seed, stream=f"subset/{part}", key=key)
        found.append(images if count is None else images.subset(kept))
    train, validation = found
    classes = len(train.class_names)
    scored = min(len(train), max(len(validation), classes))
    kept = stratified_subset(train.y.numpy(), scored, seed=seed, stream="subset/scored", key="data.train_samples")
    names = train.class_names
    return Data(train, validation, classes, math.prod(train.shape), names, scored=train.subset(kept))


def open_part(
    root: Path,
    *,
    class_names: tuple[str, ...] | None = None,
    size: int = 224,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    workers: int = 1,
) -> ImageFolder:
    """List the images of one part, such as ROOT/train or ROOT/val; decodes none. No communication.

    Args:
        root: folder with one folder per class.
        class_names: classes in the order of their labels; None: the folders in the order of their names.
        size: height and width of the samples.
        seed: seed of the run.
        dtype: precision of the samples.
        workers: threads that decode the images of one batch.

    Raises:
        DataError: no such folder, no classes, a class that is not expected, or a class without images.
        UsageError: a size or a number of workers below 1.
    """
    if min(size, workers) < 1:
        raise UsageError(f"images of size {size} decoded by {workers} threads: both numbers must be 1 or more")
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; expected one folder per class in it, with images inside")
    found = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise DataError(f"{root} holds no folders; expected one per class, with images inside")
    names = tuple(found) if class_names is None else class_names
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise DataError(
            f"{root} holds {len(unknown)} classes that the training part lacks, such as {unknown[0]}; both parts must "
            f"use the same {len(names)} folder names"
        )
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        if name not in found:
            continue  # a part need not show every class
        images = sorted(entry.name for entry in os.scandir(root / name) if entry.name.lower().endswith(EXTENSIONS))
        if not images:
            raise DataError(f"{root / name} holds no images ({', '.join(EXTENSIONS)}); add some or remove the folder")
        files += [f"{name}/{image}" for image in images]
        labels += [label] * len(images)
    y = torch.tensor(labels, dtype=torch.int64)
    return ImageFolder(root, tuple(files), y, names, size, seed, dtype, workers=workers)


def open_folders(
    root: Path, *, size: int = 224, seed: int = 0, dtype: torch.dtype = torch.float32, workers: int = 1
) -> tuple[ImageFolder, ImageFolder]:
    """ROOT/train and ROOT/val (or ROOT/validation, ROOT/test) with the labels of the first. No communication.

    Args: as `open_part`.

    Raises:
        DataError: a missing folder, or classes that do not fit.
    """
    train = open_part(root / "train", size=size, seed=seed, dtype=dtype, workers=workers)
    other = next((name for name in ("val", "validation", "test") if (root / name).is_dir()), "val")
    validation = open_part(
        root / other, class_names=train.class_names, size=size, seed=seed, dtype=dtype, workers=workers
    )
    return train, validation


def middle_box(width: int, height: int) -> Box:
    """(left, top, right, bottom) of the middle square, 7/8 of the shorter side wide. No communication."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width: int, height: int, bits: np.ndarray) -> Box:
    """(left, top, right, bottom) of a random part in whole pixels. No communication.

    The first of ten tries that fits inside; if none does, the largest middle part whose side ratio is allowed.

    Args:
        width: of the image.
        height: of the image.
        bits: at least 32 random 64-bit numbers.
    """
    tries = fraction(bits[: 3 * _TRIES]).reshape(_TRIES, 3)
    area = width * height * (0.08 + 0.92 * tries[:, 0])
    ratio = np.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * tries[:, 1])
    wide = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    high = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = np.flatnonzero((wide >= 1) & (wide <= width) & (high >= 1) & (high <= height))
    if len(fits):
        w, h = int(wide[fits[0]]), int(high[fits[0]])
        place = bits[3 * _TRIES : 3 * _TRIES + 2]
        left, top = int(below(place[:1], width - w + 1)[0]), int(below(place[1:], height - h + 1)[0])
    else:
        w = max(1, min(width, round(height * 4 / 3)))
        h = max(1, min(height, round(width * 4 / 3)))
        left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _pillow() -> Any:
    """PIL.Image."""
    try:
        from PIL import Image
    except ImportError:
        raise UsageError("reading images needs the package pillow; install it, or the extra lpnet[data]") from None
    return Image
