"""What is trained on: the section `data` of a configuration. No communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lpnet.methodconfig import not_negative, positive, require


@dataclass(frozen=True)
class DataConfig:
    """The samples.

    Args:
        name: peaks (generated) | peaks_files (four .dat files in `root`) | hyperspectral (a scene: two .mat files in
            `root`) | spectra (a table of spectra and its labels: two .mat files in `root`) | mnist (four idx files,
            gzip or not, in `root`) | cifar10, cifar100 (the python version's batches in `root`) | image_folder
            (root/train/CLASS/*.jpg and root/val/CLASS/*.jpg, decoded batch by batch; for networks of units).
        root: folder of the data files.
        train_samples: training samples in all; null: all there are (peaks: 5000). peaks: equally many per class;
            the others: a subset drawn by the seed that keeps the shares of the classes, of all training samples
            (mnist, peaks_files) or of those that train_fraction leaves (hyperspectral, spectra).
        validation_samples: the same for validation; null: all there are (peaks: 1000).
        cube: hyperspectral: .mat file of the scene, (rows, columns, bands); spectra: of the table, (samples, bands).
        ground_truth: hyperspectral: .mat file of the labels, (rows, columns); spectra: (samples, 1). Label 0 means
            unlabelled; the other labels become classes 0, 1, ... in increasing order.
        cube_variable: name of the variable in `cube`; null: the one that has the shape.
        ground_truth_variable: name of the variable in `ground_truth`; null: the one that has the shape.
        train_fraction: hyperspectral, spectra: share of every class's labelled samples that is trained on; the rest
            validates.
        batch_size: samples per step; null is the full batch.
        augment: none, or crop_flip: training images are shifted by up to 4 pixels and mirrored at random, by (seed,
            epoch, sample); of an image_folder a random part of 8 to 100 % of the image is taken and mirrored or not.
        held_out: mnist, cifar10, cifar100: validate on training images that are not trained on (validation_samples of
            them) and leave the test images alone, for choosing settings.
        crop: image_folder: height and width of the samples.
        workers: image_folder: threads that decode the images of one batch.
        prefetch: batches that a thread makes ahead of the step that needs them; 0: none, each step makes its own;
            null: 2 where samples are decoded or augmented, 0 elsewhere. The samples are the same.
    """

    name: Literal[
        "peaks", "peaks_files", "hyperspectral", "spectra", "mnist", "cifar10", "cifar100", "image_folder"
    ] = "peaks"
    root: str | None = None
    train_samples: int | None = None
    validation_samples: int | None = None
    cube: str | None = None
    ground_truth: str | None = None
    cube_variable: str | None = None
    ground_truth_variable: str | None = None
    train_fraction: float = 0.5
    batch_size: int | None = None
    augment: Literal["none", "crop_flip"] = "none"
    held_out: bool = False
    crop: int = 224
    workers: int = 1
    prefetch: int | None = None

    @property
    def ahead(self) -> int:
        """Batches that a thread makes ahead."""
        if self.prefetch is not None:
            return self.prefetch
        return 2 if self.augment != "none" or self.name == "image_folder" else 0

    def __post_init__(self) -> None:
        positive("data", crop=self.crop, workers=self.workers)
        not_negative("data", prefetch=self.prefetch or 0)
        require(
            self.name == "image_folder" or (self.crop == 224 and self.workers == 1),
            f"data.crop and data.workers are for image_folder, not for {self.name}; leave them out",
        )
        require(
            self.name != "image_folder" or self.batch_size is not None,
            "data.name image_folder is decoded batch by batch; set data.batch_size",
        )
        require(
            not self.held_out or self.name in ("mnist", "cifar10", "cifar100"),
            f"data.held_out is for mnist, cifar10 and cifar100, not for {self.name}; leave it out",
        )
        require(
            self.augment == "none" or self.name in ("mnist", "cifar10", "cifar100", "image_folder"),
            f"data.augment crop_flip is for images, not for {self.name}; set it to none",
        )
        positive("data", train_samples=self.train_samples, validation_samples=self.validation_samples)
        positive("data", batch_size=self.batch_size)
        require(
            0 < self.train_fraction < 1, f"data.train_fraction is {self.train_fraction}; it must lie between 0 and 1"
        )
        require(
            self.name == "peaks" or self.root is not None, f"data.name {self.name} reads files; give --data.root FOLDER"
        )
        if self.name in ("hyperspectral", "spectra"):
            require(
                self.cube is not None and self.ground_truth is not None,
                f"data.name {self.name} needs data.cube and data.ground_truth (.mat file names in data.root)",
            )
