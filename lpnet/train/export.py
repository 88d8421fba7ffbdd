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
        starts = _starts(str(checkpoint.attributes.get("parts", "")))
        for name in checkpoint.names("model"):
            plain, value = name.removeprefix("model/"), checkpoint.read(name)
            if not checkpoint.datasets[name].stacked:
                part, _, rest = plain.partition(".")
                state[f"layers.{starts[part]}.{rest}" if part in starts else plain] = value  # a transition is a layer
                continue
            part, parameter = plain.split(".", 1)
            first = starts.get(part, 0)
            state.update({f"layers.{first + layer}.{parameter}": row.clone() for layer, row in enumerate(value)})
    partial = out.with_name(out.name + ".partial")
    try:
        torch.save(state, partial)
        os.replace(partial, out)
    except (OSError, RuntimeError) as error:
        raise SaveError(
            f"{out} cannot be written: {error}; choose a file in a folder that exists and that you may write to"
        ) from error
    return out


def _starts(text: str) -> dict[str, int]:
    """First layer of every stack and transition, from the attribute `parts`; empty where there is one stack."""
    pairs = [word.split(":") for word in text.split()]
    return {name: int(first) for name, first in pairs}
