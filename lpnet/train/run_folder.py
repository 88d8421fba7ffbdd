"""The folder of one run: made, refused when it already holds a run, or gone on from.

runs/NAME/  config.yaml  env.json  metrics.jsonl  log.txt  checkpoints/  *.png  trace.json
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lpnet.config import Config
from lpnet.configfile import to_yaml
from lpnet.errors import CheckpointError, LpnetError, SaveError, UsageError
from lpnet.io import plots
from lpnet.io.checkpoint import Checkpoint, open_newest
from lpnet.parallel.comm import Comm
from lpnet.train.saving import config_of

CONFIG, METRICS, CHECKPOINTS = "config.yaml", "metrics.jsonl", "checkpoints"


class RunFolder:
    """Where a run writes, and the checkpoint it goes on from, if any.

    Args:
        path: the folder, the same on all ranks.
        checkpoint: open checkpoint to go on from; None: from the start.
    """

    def __init__(self, path: Path, checkpoint: Checkpoint | None) -> None:
        self.path, self.checkpoint = path, checkpoint
        self.checkpoints = path / CHECKPOINTS
        self.metrics = path / METRICS

    @classmethod
    def open(cls, config: Config, comm: Comm) -> RunFolder:
        """Make the folder of a run, or find the run to go on with. Collective over comm.

        Raises:
            UsageError: on every rank; the folder holds a run that is not resumed, or cannot be made.
            CheckpointError: on every rank; the checkpoint is missing, damaged or of another network.
        """
        path = Path(comm.broadcast_object(config.run.out or _default_name(config)))
        resume = config.run.resume
        holds = comm.broadcast_object(_holds_run(path))
        checkpoint = None
        if resume == "auto":
            checkpoint = open_newest(path / CHECKPOINTS, comm)
        elif resume != "never":
            checkpoint = Checkpoint.open(resume, comm)
        own = checkpoint is not None and checkpoint.path.resolve().parent == (path / CHECKPOINTS).resolve()
        if holds and resume != "auto" and not own:
            raise UsageError(
                f"{path} already holds a run ({holds}); give another folder with --run.out, or go on with it by "
                "--resume auto"
            )
        if checkpoint is not None:
            _check_same_network(config, checkpoint)
        comm.together(lambda: _make(path) if comm.rank == 0 else None)
        return cls(path, checkpoint)

    def write_config(self, config: Config) -> None:
        """Write the resolved configuration; one of before that differs steps aside. Rank 0 only; no communication.

        Raises:
            SaveError: it cannot be written.
        """
        target, text = self.path / CONFIG, to_yaml(config)
        try:
            if target.exists() and target.read_text(encoding="utf-8", errors="replace") != text:
                number = 1
                while (aside := self.path / f"config-{number}.yaml").exists():
                    number += 1
                os.replace(target, aside)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            remedy = "make room, or give another run.out"
            raise SaveError(f"{target} cannot be written: {error.strerror}; {remedy}") from error

    def row_at(self, step: int) -> dict[str, Any]:
        """The row of a step that a run before wrote to metrics.jsonl; empty where there is none. No communication."""
        if not self.metrics.exists():
            return {}
        try:
            rows = [row for row in plots.read_metrics(self.metrics) if row["step"] == step]
        except (LpnetError, ValueError):  # damaged: the writer drops what is no row
            return {}
        return rows[-1] if rows else {}


def _default_name(config: Config) -> str:
    return f"runs/{config.data.name}-{config.method}-{time.strftime('%Y%m%d-%H%M%S')}"


def _holds_run(path: Path) -> str | None:
    """What tells that a folder holds a run."""
    return next((name for name in (CONFIG, METRICS, CHECKPOINTS) if (path / name).exists()), None)


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be made: {error.strerror}; give a folder you may write to with --run.out"
        ) from error
    if not os.access(path, os.W_OK):
        raise UsageError(f"{path} cannot be written to; give a folder you may write to with --run.out")


def _check_same_network(config: Config, checkpoint: Checkpoint) -> None:
    """What shapes do not tell: activation, final time. No communication.

    Raises:
        CheckpointError: names the first difference.
    """
    saved = config_of(checkpoint)
    if saved is None:
        return
    before, now = asdict(saved.model), asdict(config.model)
    for key in before:
        if key not in ("initial_parameters", "init_scale") and before[key] != now[key]:
            raise CheckpointError(
                f"{checkpoint.path} is of another network: model.{key} is {before[key]} in the file and {now[key]} "
                f"in this run; start anew with another --run.out, or set --model.{key} {before[key]}"
            )
    if saved.optim.name != config.optim.name:
        raise CheckpointError(
            f"{checkpoint.path} was saved with optim.name {saved.optim.name}, and this run uses {config.optim.name}; "
            f"set --optim.name {saved.optim.name}, or start anew with another --run.out"
        )
