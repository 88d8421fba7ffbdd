"""One self-contained HTML page about a run, or about several beside each other: readable without a server or a network.

Everything comes from the files of the run folders: metrics.jsonl, config.yaml, log.txt, trace.json. Pictures are inside
the page. A folder without a run of its own stands for the runs in the folders below it. No communication.
"""

from __future__ import annotations

import base64
import html
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lpnet.errors import LpnetError
from lpnet.io import plots
from lpnet.io.plot_monitors import comparison, solves
from lpnet.io.report_words import Facts, facts_of, verdict

METRICS = "metrics.jsonl"
PICTURES = ("decision_regions.png", "class_map.png")
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#2f3437;margin:0 auto;max-width:1120px;padding:0 20px 60px}
h1{font-size:26px;margin:28px 0 4px}h2{font-size:20px;margin:36px 0 8px;border-bottom:1px solid #e6e8ea}
h3{font-size:16px;margin:20px 0 6px}p.sub{color:#80868b;margin:0 0 14px}
table{border-collapse:collapse;margin:10px 0;font-size:14px}td,th{padding:4px 12px 4px 0;text-align:right;
border-bottom:1px solid #eef0f1}td:first-child,th:first-child{text-align:left}th{font-weight:600}
img{max-width:100%;height:auto;display:block;margin:10px 0}pre{background:#f6f7f8;padding:12px;overflow:auto;
font-size:12.5px;line-height:1.4}
.verdict{background:#eef6f3;border-left:4px solid #009e73;padding:10px 16px;margin:12px 0}
.verdict.bad{background:#fdf1ea;border-color:#d55e00}.bar{background:#0072b2;height:10px;display:inline-block}
.scroll{overflow-x:auto}.bars td:last-child{text-align:left}
"""


@dataclass(frozen=True)
class Run:
    """What a run folder holds.

    Args:
        path: the folder.
        label: what it is called in the page.
        rows: of metrics.jsonl.
        config: its settings, flat; empty where there is no config.yaml.
        work: what env.json knows of the run's work.
    """

    path: Path
    label: str
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    work: dict[str, Any]


def find_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs that some folders are or hold. No communication.

    Raises:
        LpnetError: a folder that does not exist or holds no run.
    """
    folders: list[Path] = []
    for given in map(Path, paths):
        if not given.is_dir():
            raise LpnetError(f"{given} is no folder; give run folders, or a folder of them")
        inside = [given] if (given / METRICS).exists() else sorted(p.parent for p in given.rglob(METRICS))
        if not inside:
            raise LpnetError(f"{given} holds no {METRICS}; give a run folder, or a folder of them")
        folders += [folder for folder in inside if folder not in folders]
    names = _labels(folders)
    return [Run(f, names[f], plots.read_metrics(f / METRICS), _settings(f), _work(f)) for f in folders]


def _labels(folders: Sequence[Path]) -> dict[Path, str]:
    """The shortest ends of the paths that tell them apart."""
    resolved = {folder: folder.resolve().parts for folder in folders}
    for length in range(1, 9):
        names = {folder: "/".join(parts[-length:]) for folder, parts in resolved.items()}
        if len(set(names.values())) == len(names):
            return names
    return {folder: str(folder) for folder in folders}


def _settings(folder: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    flat: dict[str, Any] = {}
    for key, value in (tree or {}).items():
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _work(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_report(paths: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page. No communication.

    Args:
        paths: run folders, or folders of runs.
        out: HTML file to write.

    Raises:
        LpnetError: there is no run, or the page cannot be written.
    """
    runs, target = find_runs(paths), Path(out)
    plots.require_matplotlib()
    with tempfile.TemporaryDirectory() as scratch:
        body = _page(runs, Path(scratch))
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>lpnet: {html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise LpnetError(f"{target} cannot be written: {error.strerror}; give another --out") from error
    return target


def _page(runs: Sequence[Run], scratch: Path) -> str:
    facts = {run.label: facts_of(run.rows, run.config, run.work) for run in runs}
    parts = []
    if len(runs) > 1:
        parts += [
            f"<h1>{len(runs)} runs</h1>",
            _verdicts(facts),
            _table(facts),
            _picture(scratch, "comparison", lambda out: comparison({r.label: r.path / METRICS for r in runs}, out)),
            _differences(runs),
        ]
    for run in runs:
        parts.append(_run(run, facts[run.label], scratch, heading="h1" if len(runs) == 1 else "h2"))
    return "\n".join(part for part in parts if part)


def _run(run: Run, facts: Facts, scratch: Path, *, heading: str) -> str:
    metrics = run.path / METRICS
    parts = [
        f"<{heading}>{html.escape(run.label)}</{heading}>",
        f'<p class="sub">{html.escape(facts.what)}</p>',
        _verdicts({run.label: facts}, named=False),
        _table({run.label: facts}) if heading == "h1" else "",
        _picture(scratch, "curves", lambda out: plots.curves(metrics, out)),
    ]
    parts.append(_picture(scratch, "solves", lambda out: solves(metrics, out)))
    parts += [_embedded(run.path / name) for name in PICTURES if (run.path / name).exists()]
    parts += [_timeline(run.path / "trace.json"), _decisions(run.path / "log.txt")]
    try:
        settings = (run.path / "config.yaml").read_text(encoding="utf-8")
        parts.append(f"<details><summary>Settings</summary><pre>{html.escape(settings)}</pre></details>")
    except (OSError, UnicodeDecodeError):
        pass
    return "\n".join(part for part in parts if part)


def _picture(scratch: Path, name: str, draw: Callable[[Path], Path | None]) -> str:
    drawn = draw(scratch / f"{name}.png")
    return "" if drawn is None else _embedded(drawn)


def _embedded(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}">'


def _verdicts(facts: Mapping[str, Facts], *, named: bool = True) -> str:
    lines = []
    for label, known in facts.items():
        words, good = verdict(known)
        name = f"<b>{html.escape(label)}</b>: " if named else ""
        lines.append(f'<div class="verdict{"" if good else " bad"}">{name}{html.escape(words)}</div>')
    return "\n".join(lines)


def _table(facts: Mapping[str, Facts]) -> str:
    columns: dict[str, Callable[[Facts], str]] = {
        "steps": lambda f: f"{f.steps:,}",
        "final loss": lambda f: _number(f.loss, "{:.4f}"),
        "validation accuracy": lambda f: _number(f.accuracy, "{:.2f} %"),
        "layer evaluations": lambda f: _number(f.evaluations, "{:,.0f}"),
        "of them comparing": lambda f: _number(f.compared_share, "{:.1%}"),
        "lowest cosine": lambda f: _number(f.lowest, "{:.4f}"),
        "thrown away": lambda f: str(f.rejected),
        "serial steps": lambda f: _number(f.serial_share, "{:.0%}"),
        "time in steps": lambda f: _number(f.seconds, "{:.1f} s"),
    }
    head = "".join(f"<th>{name}</th>" for name in columns)
    body = "".join(
        f"<tr><td>{html.escape(label)}</td>" + "".join(f"<td>{show(f)}</td>" for show in columns.values()) + "</tr>"
        for label, f in facts.items()
    )
    return f'<div class="scroll"><table><tr><th>run</th>{head}</tr>{body}</table></div>'


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _differences(runs: Sequence[Run]) -> str:
    """The settings in which the runs differ."""
    keys = sorted({key for run in runs for key in run.config if key != "run.out"})
    differing = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]
    if not differing:
        return ""
    head = "".join(f"<th>{html.escape(run.label)}</th>" for run in runs)
    body = "".join(
        f"<tr><td>{html.escape(key)}</td>" + "".join(f"<td>{html.escape(str(r.config.get(key)))}</td>" for r in runs)
        + "</tr>"
        for key in differing
    )  # fmt: skip
    return f'<h3>Settings that differ</h3><div class="scroll"><table><tr><th></th>{head}</tr>{body}</table></div>'


def _timeline(path: Path) -> str:
    """Where the time went, per span over all ranks; spans lie within each other."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError, KeyError):
        return ""
    totals: dict[str, tuple[int, float]] = {}
    ranks = set()
    for event in events:
        if event.get("ph") == "X":
            count, seconds = totals.get(event["name"], (0, 0.0))
            totals[event["name"]] = count + 1, seconds + event["dur"] / 1e6
            ranks.add(event["tid"])
    if not totals:
        return ""
    most = max(seconds for _, seconds in totals.values())
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{count:,}</td><td>{seconds:.3f} s</td>"
        f'<td><span class="bar" style="width:{max(1, round(300 * seconds / most))}px"></span></td></tr>'
        for name, (count, seconds) in sorted(totals.items(), key=lambda pair: -pair[1][1])
    )
    return (
        f"<h3>Timeline: seconds by span, {len(ranks)} rank(s) together</h3>"
        f'<table class="bars">'
        f"<tr><th>span</th><th>times</th><th>seconds</th><th></th></tr>{rows}</table>"
    )


def _decisions(path: Path, most: int = 60) -> str:
    """The lines of the log that say what was decided about gradients."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = [line for line in lines if any(word in line for word in ("gradient cosine", "no decrease", "WARNING"))]
    if not found:
        return ""
    more = "" if len(found) <= most else f"\n... and {len(found) - most} more in log.txt"
    return f"<h3>Decisions and warnings</h3><pre>{html.escape(chr(10).join(found[:most]) + more)}</pre>"
