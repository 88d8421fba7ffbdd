"""Hyperspectral scenes: every labelled pixel is a sample, its spectrum the features.

Reads the public .mat files of SalinasA, Indian Pines, Pavia and their kin (a cube and a ground truth), and tables of
spectra. Labels are renumbered, bands normalised by the training pixels, the split is stratified by the seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lpnet.config import DataConfig
from lpnet.data.samples import Data, Samples, folder, missing, stratified_subset
from lpnet.errors import DataError
from lpnet.seeding import numpy_generator_for

Kind = Literal["cube", "map", "table", "labels"]

_SHAPES: dict[Kind, str] = {
    "cube": "a numeric array (rows, columns, bands)",
    "map": "an array of whole numbers (rows, columns)",
    "table": "a numeric array (samples, bands)",
    "labels": "an array of whole numbers (samples, 1)",
}


@dataclass(frozen=True)
class Scene:
    """Where every sample lies in the scene.

    Args:
        classes: class of every pixel, (rows, columns), int64; -1 is unlabelled.
        labels: the file's label of every class, (classes,).
        train: flat pixel index of every training sample, (samples,).
        validation: flat pixel index of every validation sample, (samples,).
    """

    classes: np.ndarray
    labels: np.ndarray
    train: np.ndarray
    validation: np.ndarray

    @property
    def rows(self) -> int:
        """Rows of the scene."""
        return int(self.classes.shape[0])

    @property
    def columns(self) -> int:
        """Columns of the scene."""
        return int(self.classes.shape[1])

    def paint(self, train: np.ndarray, validation: np.ndarray) -> np.ndarray:
        """Predicted classes of all samples as a map, (rows, columns), int64; -1 where there is no sample.

        No communication.

        Args:
            train: predicted class of every training sample, (samples,).
            validation: predicted class of every validation sample, (samples,).
        """
        painted = np.full(self.classes.size, -1, dtype=np.int64)
        painted[self.train] = train
        painted[self.validation] = validation
        return painted.reshape(self.classes.shape)


def read(config: DataConfig, seed: int, dtype: torch.dtype) -> Data:
    """A scene: cube and ground truth. No communication.

    Raises:
        DataError: names the file and the variable, what was expected, and what the file holds.
    """
    cube_path, truth_path = _paths(config)
    cube_name, cube = read_variable(cube_path, "cube", config.cube_variable, key="data.cube_variable")
    truth_name, truth = read_variable(truth_path, "map", config.ground_truth_variable, key="data.ground_truth_variable")
    if cube.shape[:2] != truth.shape:
        raise DataError(
            f"{cube_path.name}, variable {cube_name}, has {cube.shape[0]} x {cube.shape[1]} pixels; {truth_path.name}, "
            f"variable {truth_name}, has {truth.shape[0]} x {truth.shape[1]}; the two files must be of one scene"
        )
    spectra = cube.reshape(-1, cube.shape[2])
    source = f"{truth_path}, variable {truth_name}"
    _finite(cube, truth > 0, f"{cube_path}, variable {cube_name}", ("row", "column", "band"))
    data, classes, labels, train, validation = _split(config, seed, dtype, spectra, truth, source)
    scene = Scene(classes.reshape(truth.shape), labels, train, validation)
    return Data(data.train, data.validation, data.classes, data.features, data.class_names, scene=scene)


def read_spectra(config: DataConfig, seed: int, dtype: torch.dtype) -> Data:
    """A table of spectra and its labels, without a scene. No communication.

    Raises:
        DataError: names the file and the variable, what was expected, and what the file holds.
    """
    table_path, labels_path = _paths(config)
    table_name, table = read_variable(table_path, "table", config.cube_variable, key="data.cube_variable")
    labels_name, labels = read_variable(
        labels_path, "labels", config.ground_truth_variable, key="data.ground_truth_variable"
    )
    if len(table) != labels.size:
        raise DataError(
            f"{table_path.name}, variable {table_name}, holds {len(table)} spectra; {labels_path.name}, variable "
            f"{labels_name}, holds {labels.size} labels; the two files must belong together"
        )
    _finite(table, labels.ravel() > 0, f"{table_path}, variable {table_name}", ("sample", "band"))
    return _split(config, seed, dtype, table, labels, f"{labels_path}, variable {labels_name}")[0]


def _paths(config: DataConfig) -> tuple[Path, Path]:
    root = folder(config)
    return root / str(config.cube), root / str(config.ground_truth)


def read_variable(path: Path, kind: Kind, name: str | None, *, key: str) -> tuple[str, np.ndarray]:
    """The variable `name` of a .mat file, or the only one that fits `kind`. No communication.

    Args:
        path: the file.
        kind: cube (three axes), map (two axes longer than 1, whole numbers), table (two axes longer than 1) or
            labels (one axis longer than 1, whole numbers).
        name: None: found by shape.
        key: configuration key that names the variable, for the message.

    Returns:
        Name and values; whole numbers as int64.

    Raises:
        DataError: no such file, not a .mat file, or no or several variables fit; lists what the file holds.
    """
    variables = _load(path, kind)
    holds = "; ".join(f"{n} {_shape(v)} {v.dtype}" for n, v in variables.items()) or "no variables"
    if name is not None:
        if name not in variables:
            raise DataError(f"{path} has no variable {name!r}; it holds: {holds}; correct {key}")
        if not _fits(variables[name], kind):
            raise DataError(
                f"{path}, variable {name}, is {_shape(variables[name])} {variables[name].dtype}; expected "
                f"{_SHAPES[kind]}; the file holds: {holds}; correct {key}"
            )
        fitting = [name]
    else:
        fitting = [n for n, v in variables.items() if _fits(v, kind)]
    if not fitting:
        raise DataError(f"{path}: no variable is {_SHAPES[kind]}; it holds: {holds}; give another file")
    if len(fitting) > 1:
        raise DataError(f"{path}: {' and '.join(fitting)} could all be {_SHAPES[kind]}; it holds: {holds}; set {key}")
    values = variables[fitting[0]]
    return fitting[0], values.astype(np.int64) if kind in ("map", "labels") else values


def _load(path: Path, kind: Kind) -> dict[str, np.ndarray]:
    """All arrays of a .mat file by name."""
    try:
        import scipy.io
    except ImportError as error:
        raise DataError(
            f"{path}: .mat files need scipy, which cannot be imported ({error}); pip install scipy"
        ) from error
    if not path.is_file():
        raise missing(path, f"a .mat file with {_SHAPES[kind]}", "*.mat")
    try:
        variables = scipy.io.loadmat(path, appendmat=False)
    except NotImplementedError:
        raise DataError(
            f"{path} is a MATLAB 7.3 file, which this reader does not know; save it again with save -v7"
        ) from None
    except Exception as error:  # scipy raises whatever the damaged bytes lead to: ValueError, TypeError, zlib.error ...
        raise DataError(
            f"{path} ({path.stat().st_size:,} bytes) cannot be read as a .mat file ({type(error).__name__}: {error}); "
            f"expected {_SHAPES[kind]}; fetch the file again, it may be truncated or of another format"
        ) from error
    return {n: v for n, v in variables.items() if not n.startswith("__") and isinstance(v, np.ndarray)}


def _shape(values: np.ndarray) -> str:
    return "(" + ", ".join(map(str, values.shape)) + ")"


def _fits(values: np.ndarray, kind: Kind) -> bool:
    if values.dtype.kind not in "iuf":
        return False
    if kind == "cube":
        return values.ndim == 3 and values.size > 0
    if values.ndim != 2:
        return False
    if kind == "labels":
        return 1 in values.shape and values.size > 1 and _whole(values)
    return min(values.shape) > 1 and (kind == "table" or _whole(values))


def _whole(values: np.ndarray) -> bool:
    return values.dtype.kind in "iu" or bool(np.isfinite(values).all() and (values == np.rint(values)).all())


def _finite(values: np.ndarray, labelled: np.ndarray, source: str, axes: tuple[str, ...]) -> None:
    """Refuse labelled spectra with a number that is not finite; a masked background may hold what it likes."""
    if values.dtype.kind != "f":
        return
    wrong = np.argwhere(~np.isfinite(values) & labelled[..., None])
    if len(wrong):
        place = ", ".join(f"{axis} {index}" for axis, index in zip(axes, wrong[0], strict=True))
        raise DataError(
            f"{source}: {values[tuple(wrong[0])]} at {place} is not a finite number ({len(wrong)} of {values.size:,} "
            "values are not); repair the values, drop the band, or set those labels to 0"
        )


def _split(
    config: DataConfig, seed: int, dtype: torch.dtype, spectra: np.ndarray, truth: np.ndarray, source: str
) -> tuple[Data, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Renumber, split, subset and normalise.

    Returns:
        The data, the class of every row of `spectra` (-1: unlabelled), the file's label of every class, and the rows
        that train and validate.
    """
    truth = truth.ravel()
    if truth.min() < 0:
        where = int(np.argmin(truth))
        raise DataError(
            f"{source}: label {truth[where]} at flat index {where} is out of range; labels are 0 (unlabelled) or more"
        )
    labels = np.unique(truth[truth > 0])
    if len(labels) < 2:
        raise DataError(f"{source}: {len(labels)} labels above 0; a classification needs two or more")
    classes = np.where(truth > 0, np.searchsorted(labels, truth), -1)
    train, validation = split_rows(classes, config.train_fraction, seed=seed, labels=labels, source=source)
    train = train[
        stratified_subset(
            classes[train], config.train_samples, seed=seed, stream="subset/training", key="data.train_samples"
        )
    ]
    validation = validation[
        stratified_subset(
            classes[validation],
            config.validation_samples,
            seed=seed,
            stream="subset/validation",
            key="data.validation_samples",
        )
    ]
    x = spectra[train].astype(np.float64)
    mean, deviation = x.mean(0), x.std(0)
    # A band that never changes carries nothing: it becomes zero instead of dividing by zero.
    deviation[deviation == 0] = 1.0
    samples = [
        Samples(
            torch.from_numpy((spectra[rows].astype(np.float64) - mean) / deviation).to(dtype),
            torch.from_numpy(classes[rows]),
        )
        for rows in (train, validation)
    ]
    names = tuple(f"class {label}" for label in labels)
    data = Data(samples[0], samples[1], len(labels), spectra.shape[1], names)
    return data, classes, labels, train, validation


def split_rows(
    classes: np.ndarray, fraction: float, *, seed: int, labels: np.ndarray, source: str
) -> tuple[np.ndarray, np.ndarray]:
    """Training and validation rows, `fraction` of every class, at least one of each. No communication.

    Args:
        classes: class of every row, (rows,); -1 is unlabelled.
        fraction: share of a class that trains.
        seed: seed of the run.
        labels: the file's label of every class, for the message.
        source: where the labels come from, for the message.

    Returns:
        Increasing row numbers: training, validation.

    Raises:
        DataError: a class has a single row.
    """
    train, validation = [], []
    for c, label in enumerate(labels):
        members = np.flatnonzero(classes == c)
        if len(members) < 2:
            raise DataError(
                f"{source}: label {label} occurs once; a split into training and validation needs two or more; "
                "set it to 0 (unlabelled) or merge it with another label"
            )
        members = members[numpy_generator_for(seed, "split", layer=c).permutation(len(members))]
        count = min(max(int(fraction * len(members) + 0.5), 1), len(members) - 1)
        train.append(members[:count])
        validation.append(members[count:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(validation))
