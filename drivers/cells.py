"""Cells of a study of ours: files that are whole or not there, and what a table says of several seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def save(path: Path, found: dict[str, Any]) -> None:
    """Write what came of a run; an interrupted study finds all of it, or nothing."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.replace(path)


def rounded(value: Any) -> Any:
    """Six digits are enough."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def column(found: Sequence[dict[str, Any]], key: str) -> list[float]:
    """A number of every seed."""
    return [cell[key] for cell in found]


def spread(values: Sequence[float], form: str) -> str:
    """Median and range."""
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} [{min(values):{form}}, {max(values):{form}}]"
