"""Training: strategies of one step, the trainer around them, evaluation, saving, export."""

from __future__ import annotations

from lpnet.mgrit.serial import gather_state_dict
from lpnet.train.evaluation import evaluate, score
from lpnet.train.export import export_checkpoint
from lpnet.train.saving import load, save
from lpnet.train.stages import refine_checkpoint

__all__ = ["evaluate", "export_checkpoint", "gather_state_dict", "load", "refine_checkpoint", "save", "score"]
