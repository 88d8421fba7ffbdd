"""The pictures a run leaves: curves, residuals, decision regions or the class map, from exact propagation."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from lpnet.io import plots
from lpnet.io.plot_monitors import solves
from lpnet.train.evaluation import Classifier, predict

if TYPE_CHECKING:
    from lpnet.data.samples import Data
    from lpnet.train.run_folder import RunFolder

log = logging.getLogger("lpnet.train")


def draw(folder: RunFolder, net: Classifier, data: Data, *, title: str = "") -> None:
    """Draw what the data allow on rank 0; one that fails costs a warning, not the run. Collective over net.comm."""
    regions = painted = None
    if data.square is not None:
        regions = predict(net, data.square.points(torch.float64)).reshape(data.square.classes.shape)
    if data.scene is not None:
        painted = data.scene.paint(predict(net, data.train.x), predict(net, data.validation.x))
    if net.comm.rank != 0:
        return
    path = folder.path
    try:
        plots.curves(folder.metrics, path / "curves.png", title=title)
        solves(folder.metrics, path / "residuals.png", title=title)
        if data.square is not None and regions is not None:
            plots.decision_regions(
                path / "decision_regions.png",
                axis=data.square.axis,
                predicted=regions,
                truth=data.square.classes,
                names=data.class_names,
                title=title,
            )
        if data.scene is not None and painted is not None:
            plots.class_map(
                path / "class_map.png", predicted=painted, truth=data.scene.classes, names=data.class_names, title=title
            )
    except Exception as error:
        log.warning("pictures could not be drawn: %s", error)
