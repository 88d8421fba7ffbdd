"""Configurations and command lines with mistakes in them: an exit code and a line, never a traceback or a hang.

LPNET_MUTATIONS makes the campaign longer than its 30 cases; the table at the end (pytest -s) counts what came out.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any, Literal, get_args, get_origin

import pytest
from forked import Done, Forked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lpnet.configkeys import known_keys

CASES = int(os.environ.get("LPNET_MUTATIONS", "30"))
BASES = {
    "mgrit": """\
seed: 3
method: mgrit
model: {layers: 6, width: 4, activation: tanh, opening: dense}
data: {name: peaks, train_samples: 40, validation_samples: 20, batch_size: 20}
mgrit: {levels: 2, coarsening: 2, forward_iterations: 2, adjoint_iterations: 1}
optim: {name: adam, lr: 0.01}
run: {steps: 2, eval_every: 1, checkpoint_every: 1, plots: false}
""",
    "lbfgs": """\
# converged solves, L-BFGS
method: mgrit
model:
  layers: 5
  width: 3
  dtype: float64
data:
  name: peaks
  train_samples: 30
  validation_samples: 10
mgrit:
  levels: 3
  coarsening: [2, 2]
  relaxation: FCF
  tolerance: 1e-9
  adjoint: {tolerance: 1e-10}
optim:
  name: lbfgs
  lr: 1.0
  memory: 3
  tikhonov: 1e-4
  ddt: 1e-4
run:
  steps: 2
  eval_every: 0
  plots: false
  async_save: thread
""",
    "fdg": """\
method: fdg
model: {layers: 5, width: 4}
data: {name: peaks, train_samples: 40, validation_samples: 20, batch_size: 20}
fdg: {modules: 2, shrink: 0.7, prediction: full, cuts: [3]}
optim: {name: sgd, lr: 0.1, momentum: 0.9}
run: {steps: 3, eval_every: 1, checkpoint_every: 2, plots: false}
""",
    "serial": """\
seed: 1
model: {layers: 4, width: 4, bias: scalar}
data: {name: peaks, train_samples: 40, validation_samples: 20}
optim: {name: sgd, lr: 0.1, momentum: 0.9, clip_norm: 1.0}
run: {steps: 2, eval_every: 1, plots: false, on_save_error: continue, stall_s: 20}
""",
}
# Sizes stay small, so that a case ends within seconds.
VALUES = [
    *("0", "1", "2", "3", "7", "60", "-1", "-3", "1.5", "1e-3", "1e-300", "1e300", "-0.0", ".inf", "-.inf", ".nan"),
    *("true", "off", "on", "null", "~", "''", "auto", "never", "x", "0x10", "1_0", "2026-11-30", "é", "'\\0'"),
    *("[]", "[2]", "[2, 2]", "[1, -2]", "[x]", "[[2]]", "{}", "{a: 1}", "[2, {a: b}]", "&a [*a]", "*b", "<<"),
    *("!!int x", "!!float abc", "!!binary x", "!!python/object/apply:os.system ['touch pwned']", "!!python/name:os.x"),
    *("F", "FC", "FCF", "mgrit", "serial", "lbfgs", "adam", "dense", "bfloat16", "float64", "thread", "step", "."),
    *(
        "/",
        "/proc/nothing",
        "/dev/null",
        "nowhere/at/all",
        "config.yaml",
        "a b",
        "a" * 300,
        "| x",
        "> x",
        "%",
        "@",
        "`",
    ),
]
CHARACTERS = ":{}[]&*!|>%@`\t\"'#-, \n.?=~\x00\x07é\u2028\U0001f600"
WRONG = ["mgrit", "mgrit.adjoint", "run", "modle.layers", "mgrit.levls", "x", "", "a.b.c"]
KEYS = [*3 * sorted(set(known_keys()) - {"run.log_level"}), *WRONG]


def fitting(hint: Any) -> list[str]:
    """Values of a type, most of them in range."""
    if get_origin(hint) is Literal:
        return [str(choice) for choice in get_args(hint)]
    if get_origin(hint) is list:
        return [f"[{value}, {value}]" for value in fitting(get_args(hint)[0])[:4]]
    if get_args(hint):
        return [value for part in get_args(hint) for value in fitting(part)]
    return {
        int: ["0", "1", "1", "2", "2", "3", "4", "5", "20", "-1"],
        float: ["0", "0.5", "0.5", "1", "1", "1.5", "1e-6", "1e-3", "1e6", "1e30", "1e30", "-1", ".nan"],
        bool: ["true", "false"],
        str: ["F", "FCF", "auto", "x", "."],
    }.get(hint, ["null"])


def value_of(rng: Random, key: str) -> str:
    """A value for a key, most often one of its type."""
    return rng.choice(fitting(known_keys()[key]) if key in known_keys() and rng.random() < 0.85 else VALUES)


def edited(rng: Random, text: str) -> str:
    """A YAML text with a few mistakes."""
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        lines = text.split("\n")
        at, line = rng.randint(0, len(text)), rng.randrange(len(lines))
        kind = rng.choice(("value",) * 6 + ("key", "key", "insert", "delete", "line", "cut", "indent"))
        if kind == "value":
            found = list(re.finditer(r"(\w+): ([^{},\n]+)", text))
            if found:
                one = rng.choice(found)
                names = [key for key in known_keys() if key.rpartition(".")[2] == one.group(1)] or [""]
                text = text[: one.start(2)] + value_of(rng, names[0]) + text[one.end(2) :]
        elif kind == "key":
            section, _, name = rng.choice(KEYS).rpartition(".")
            new = f"{name}: {value_of(rng, f'{section}.{name}' if section else name)}"
            inside = f"{section}: {{" if section else ""
            text = text.replace(inside, f"{inside}{new}, ", 1) if inside and inside in text else f"{text}{new}\n"
        elif kind == "insert":
            text = text[:at] + rng.choice(CHARACTERS) + text[at:]
        elif kind == "delete":
            text = text[:at] + text[at + rng.randint(1, 3) :]
        elif kind == "cut":
            text = text[:at]
        else:
            if kind == "line":
                lines.insert(rng.randint(0, len(lines)), lines[line])
            else:
                lines[line] = rng.choice((" ", "  ", "\t", "- ")) + lines[line]
            text = "\n".join(lines)
    return text


def command(rng: Random, base: str) -> tuple[str, list[str]]:
    """A configuration text and the words after `lpnet`."""
    text = edited(rng, base)
    words = [rng.choice(("train",) * 20 + ("plan", "plan", "trian", "show", "eval", "export")), "config.yaml"]
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        key = rng.choice(KEYS)
        value = value_of(rng, key)
        words += rng.choice(
            ([f"--{key}", value],) * 16 + ([f"--{key}={value}"], [f"--{key}"], [key, value], [f"-{key}", value])
        )
    if words[0] == "plan":
        words += rng.choice(([], ["--ranks", "2"], ["--ranks", "99"], ["--ranks", "-1"], ["--ranks"]))
    return text, [word.replace("\0", "") for word in words]  # no command line can hold it


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    with Forked() as server:
        yield server


@pytest.fixture(scope="module")
def table() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    yield counts
    print("\nmutated configurations and command lines")
    for name, count in sorted(counts.items()):
        print(f"  {name:24} {count:5d}")
    print(f"  {'all':24} {sum(counts.values()):5d}")


def judge(done: Done, words: list[str], text: str) -> str:
    """The outcome in words, or a failure."""
    what = f"lpnet {' '.join(words)}\n--- config.yaml\n{text}\n--- exit code {done.code}\n{done.err[-3000:]}"
    assert done.code != 124, f"hangs: {what}"
    assert not done.traceback, f"traceback: {what}"
    assert done.code in (0, 1, 2), f"exit code: {what}"
    assert len(done.errors) == (done.code > 0), f"{len(done.errors)} lines of errors: {what}"
    return {0: "0 it runs", 1: "1 it fails, one line", 2: "2 refused, one line"}[done.code]


@pytest.mark.parametrize("base", sorted(BASES))
@settings(max_examples=-(-CASES // len(BASES)), suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**9))
def test_campaign(
    base: str, seed: int, forked: Forked, table: Counter[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text, words = command(Random(f"{base} {seed}"), BASES[base])
    folder = tmp_path_factory.mktemp("case", numbered=True)
    (folder / "config.yaml").write_bytes(text.encode(errors="surrogatepass"))
    table[judge(forked(words, cwd=folder, timeout=100), words, text)] += 1
    assert not (folder / "pwned").exists()
    shutil.rmtree(folder)
