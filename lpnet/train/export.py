"""A checkpoint as a plain torch state_dict, with a name per layer, for programs that know nothing of lpnet."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lpnet.errors import SaveError
from lpnet.train.saving import open_checkpoint


def export_checkpoint(path: str | Path, out: str | Path) -> Path:
    """Write opening.*, layers.0.weight ... closing.* to a file that torch.load reads. No communication.

    Args:
        path: a checkpoint file, or a run folder (its newest one).
        out: the file to write.

    Returns:
        `out`.

    Raises:
        CheckpointError: missing or damaged.
        SaveError: the file cannot be written.
    """
    out = Path(out)
    state: dict[str, torch.Tensor] = {}
    with open_checkpoint(path) as checkpoint:
        for name in checkpoint.names("model"):
            plain, value = name.removeprefix("model/"), checkpoint.read(name)
            if not checkpoint.datasets[name].stacked:
                state[plain] = value
                continue
            parameter = plain.split(".", 1)[1]
            state.update({f"layers.{layer}.{parameter}": row.clone() for layer, row in enumerate(value)})
    partial = out.with_name(out.name + ".partial")
    try:
        torch.save(state, partial)
        os.replace(partial, out)
    except (OSError, RuntimeError) as error:
        raise SaveError(
            f"{out} cannot be written: {error}; choose a file in a folder that exists and that you may write to"
        ) from error
    return out
