"""A scaling study: runs its cells, one file each, so that an interrupted study goes on where it was.

    DIR/cells/KEY.json   one finished cell
    DIR/study.json       all rows      study.csv, study.md: the same as tables
    DIR/*.png            speed-up, efficiency, time by span, critical path, residuals

Emulated cells run in this process and are labelled predicted; measured ones are launched, as `lpnet bench` under
mpirun or srun.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lpnet.config import Config
from lpnet.configfile import to_yaml
from lpnet.errors import LpnetError, NumericsError, UsageError
from lpnet.io.plots import require_matplotlib
from lpnet.scaling.cells import Cell, Study, without_root
from lpnet.scaling.emulated import Request, bench
from lpnet.scaling.profile import read_profile
from lpnet.scaling.rows import Row, derive
from lpnet.scaling.tables import write_tables
from lpnet.train.stopping import Stopping

log = logging.getLogger("lpnet.study")
RISE = 2.0  # a loss that has grown by this factor has diverged


def run_study(study: Study, out: Path) -> list[Row] | None:
    """Run what has not been run, then write tables and pictures. Emulates, or launches other processes.

    A signal, a file STOP in the folder and the end of a job's time stop it between two cells.

    Args:
        study: what to run.
        out: folder of the results; finished cells in it are kept.

    Returns:
        A row per cell; None: stopped early.
    """
    require_matplotlib()
    (out / "cells").mkdir(parents=True, exist_ok=True)
    stopping = Stopping(out)
    found: list[tuple[Cell, dict[str, Any]]] = []
    for number, cell in enumerate(study.cells, start=1):
        path = out / "cells" / f"{_key(study, cell)}.json"
        done = _load(path)
        if done is None and stopping.begin_step():
            log.info("stopped early after %d of %d cells: %s", len(found), len(study.cells), stopping.reason)
            stopping.done()
            return None
        if done is None:
            began = time.perf_counter()
            done = _run(study, cell, out)
            if done["status"] in ("done", "diverged"):  # what was skipped or failed may be able to run next time
                _save(path, done)
            took = time.perf_counter() - began
            log.info(
                "%d/%d %s, %d layers on %d ranks: %s in %.1f s%s",
                number,
                len(study.cells),
                cell.label(),
                cell.layers,
                cell.ranks,
                done["status"],
                took,
                f" ({done['reason']})" if done["reason"] else "",
            )
        found.append((cell, done))
    rows = derive(study, found)
    write_tables(study, rows, out)
    return rows


def _key(study: Study, cell: Cell) -> str:
    """Everything that a cell's result depends on."""
    base = asdict(study.base)
    network = study.network.as_dict() if study.run == "emulated" else study.launch
    parts = [cell.as_dict(), study.run, network, study.steps, study.gradient_error, study.equal_loss, study.serial_each]
    parts += [base[key] for key in ("seed", "model", "mgrit", "fdg", "optim", "parallel")]
    parts.append(without_root(study.base.data))
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return f"{cell.method}-{cell.layers}-{cell.ranks}-{digest}"


def _load(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return None


def _save(path: Path, content: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _run(study: Study, cell: Cell, out: Path) -> dict[str, Any]:
    """A cell's numbers, or why there are none."""
    try:
        config = cell.config(study.base)
    except UsageError as error:
        return _nothing("skipped", str(error))
    try:
        each = study.serial_each and cell.method != "serial"
        before = _serial(study, cell, out) if each else 0.0
        profile = _profile(study, cell, config, out)
        after = _serial(study, cell, out) if each else 0.0
        first, last = profile["losses"]
        if not math.isfinite(last) or last > RISE * first:
            return _nothing("diverged", f"the loss went from {first:.3g} to {last:.3g}")
        inexact, cosine = _error(config) if study.gradient_error and cell.method == "mgrit" else (None, None)
        ratio = _steps(config, study.equal_loss) if study.equal_loss and cell.method == "mgrit" else None
    except NumericsError as caught:
        return _nothing("diverged", str(caught))
    except UsageError as caught:
        return _nothing("skipped", str(caught))
    except LpnetError as caught:
        return _nothing("failed", str(caught))
    return {
        **_nothing("done", ""),
        "profile": profile,
        "gradient_error": inexact,
        "cosine": cosine,
        "steps_ratio": ratio,
        "serial_seconds": (before + after) / 2 or None,
    }


def _profile(study: Study, cell: Cell, config: Config, out: Path) -> dict[str, Any]:
    """Emulate or launch a cell."""
    if study.run == "emulated":
        return asdict(bench(config, Request((cell.ranks,), study.network), steps=study.steps)[0])
    return _measured(study, cell, config, out)


def _serial(study: Study, cell: Cell, out: Path) -> float:
    """Seconds of a step of method serial on the cell's network, now."""
    alone = Cell("serial", 1, cell.layers)
    return read_profile(_profile(study, alone, alone.config(study.base), out)).seconds


_ERRORS: dict[str, tuple[float, float]] = {}
_STEPS: dict[str, float | None] = {}


def _error(config: Config) -> tuple[float, float]:
    """The gradient's error does not depend on the ranks and replicas: found once per setting."""
    from lpnet.scaling.accuracy import gradient_error

    alone = _alone(config)
    key = repr(alone)
    if key not in _ERRORS:
        _ERRORS[key] = gradient_error(alone)
    return _ERRORS[key]


def _steps(config: Config, steps: int) -> float | None:
    """Steps to the loss of serial training, relative; found once per setting."""
    from lpnet.scaling.accuracy import steps_to_loss

    alone = _alone(config)
    key = repr((alone, steps))
    if key not in _STEPS:
        _STEPS[key] = steps_to_loss(alone, steps=steps)
    return _STEPS[key]


def _alone(config: Config) -> Config:
    """The same training on one rank."""
    return replace(config, parallel=replace(config.parallel, replicas=1, partition="uniform"))


def _nothing(status: str, reason: str) -> dict[str, Any]:
    blank = dict.fromkeys(("profile", "gradient_error", "cosine", "steps_ratio", "serial_seconds"))
    return {"status": status, "reason": reason, **blank}


def _measured(study: Study, cell: Cell, config: Config, out: Path) -> dict[str, Any]:
    """Launch `lpnet bench` on real ranks and read its numbers.

    Raises:
        UsageError: the configuration cannot run.
        LpnetError: the launch failed.
    """
    name = _key(study, cell)
    config_path, result = out / "cells" / f"{name}.yaml", out / "cells" / f"{name}.bench"
    config_path.write_text(to_yaml(config), encoding="utf-8")
    launch = shlex.split(study.launch.format(ranks=cell.ranks)) if cell.ranks > 1 else []
    words = [*launch, sys.executable, "-m", "lpnet", "bench", str(config_path), "--steps", str(study.steps)]
    try:
        done = subprocess.run([*words, "--json", str(result)], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise LpnetError(f"{words[0]} cannot be started: {error.strerror}; set launch in the study") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        message = f"exit code {done.returncode}: {lines[-1] if lines else 'no message'}"
        raise UsageError(message) if done.returncode == 2 else LpnetError(message)
    content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    result.unlink()
    config_path.unlink()
    return content
