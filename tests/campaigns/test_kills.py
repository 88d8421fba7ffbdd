"""SIGKILL of a random rank at a random moment, half of them during a save; the run goes on and ends up the same.

    LPNET_KILLS    kills in all (5)
    LPNET_KILL_CONFIGS   configuration files, separated by colons, in turn; the first line of one says which numbers of
                   ranks it may have (# ranks: 2 3 4); without: L-BFGS with MGRIT, decoupled modules, one-shot MGRIT

Every round of up to ten kills is one run folder, killed and resumed on a random number of ranks until the kills of the
round are spent, then left alone; its last checkpoint must be that of an uninterrupted run. pytest -s prints the table.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import psutil
import pytest
from run_case import Launch, Run, differences, steps_of

KILLS = int(os.environ.get("LPNET_KILLS", "5"))
RANKS = "2 3 4" if KILLS > 5 else "2 3"  # four start slowly on two cores
PER_ROUND, EVERY, PACE_S = 10, 3, 0.03
STEPS = 20 + 11 * min(KILLS, PER_ROUND)  # a start makes about seven before it is killed
LAST = f"checkpoints/step-{STEPS:08d}.h5"
PATIENCE_S = 10.0  # from the kill to the end of the job: of the full campaign, on a machine that does nothing else

MGRIT = f"""# ranks: {RANKS}
seed: 3
method: mgrit
model: {{layers: 12, width: 24, activation: tanh, opening: dense}}
data: {{name: peaks, train_samples: 120, validation_samples: 50, batch_size: 40}}
mgrit: {{levels: 2, coarsening: 2, forward_iterations: 2, adjoint_iterations: 1, check_every: 5}}
optim: {{name: adam, lr: 0.01, clip_norm: 1.0}}
run: {{steps: {STEPS}, eval_every: 7, checkpoint_every: {EVERY}, plots: false}}
"""
LBFGS = f"""# ranks: {RANKS}
method: mgrit
model: {{layers: 12, width: 16, activation: tanh}}
data: {{name: peaks, train_samples: 100, validation_samples: 50}}
mgrit: {{levels: 2, coarsening: 2, relative_tolerance: 1e-9}}
optim: {{name: lbfgs, lr: 0.02, memory: 5, tikhonov: 1e-3, ddt: 1e-3}}
run: {{steps: {STEPS}, eval_every: 7, checkpoint_every: {EVERY}, plots: false}}
"""


FDG = f"""# ranks: 3
method: fdg
model: {{layers: 9, width: 24, activation: tanh, opening: dense}}
data: {{name: peaks, train_samples: 120, validation_samples: 50, batch_size: 40}}
fdg: {{modules: 3, shrink: 0.7, prediction: full, backward: recompute, cuts: [3, 6]}}
optim: {{name: sgd, lr: 0.05, momentum: 0.9}}
run: {{steps: {STEPS}, eval_every: 7, checkpoint_every: {EVERY}, plots: false}}
"""
CONFIGS = {"lbfgs": LBFGS, "fdg": FDG, "mgrit": MGRIT}


def configurations(folder: Path) -> list[Path]:
    """The files of the rounds, in turn."""
    given = os.environ.get("LPNET_KILL_CONFIGS")
    if given:
        return [Path(name).resolve() for name in given.split(":")]
    for name, text in CONFIGS.items():
        (folder / f"{name}.yaml").write_text(text)
    return [folder / f"{name}.yaml" for name in CONFIGS]


def rank_counts(config: Path) -> list[int]:
    """Numbers of ranks that a configuration may have."""
    found = re.match(r"# ranks: ([\d ]+)", config.read_text())
    return [int(word) for word in found.group(1).split()] if found else [2]


def saving(run: Run) -> bool:
    """Whether a checkpoint is being written."""
    return any(run.out.glob("checkpoints/*.partial"))


def kill(run: Run, rng: Random, during_save: bool) -> tuple[int, str, float] | None:
    """Kill a random rank at a random moment: the rank, the moment in words, and seconds until the job has ended.

    None where the run has come to its end before.
    """
    first = run.rows()
    victim = rng.randrange(run.ranks)
    try:
        assert run.until(lambda: run.rows() > first)
        process = run.rank(victim)
    except AssertionError:  # the whole run went by between two looks, on a busy machine
        assert run.wait() == 0, run.text()
        return None
    wanted = run.rows() + rng.randrange(8)
    run.until(lambda: run.rows() >= wanted)
    if during_save:
        run.until(lambda: not saving(run))
        run.until(lambda: saving(run))
        time.sleep(rng.choice((0.0, 0.002, 0.005, 0.01, 0.03)))
    else:
        time.sleep(rng.random() * 0.1)
    try:
        process.send_signal(signal.SIGSTOP)  # so that what is seen next is what it died in
        moment = "writing" if saving(run) else "after a save" if during_save else "between saves"
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        assert run.wait() == 0, run.text()
        return None
    began = time.monotonic()
    assert run.wait() != 0
    return victim, moment, time.monotonic() - began


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Launch, Path], Path]:
    """uninterrupted(launch, config): the last checkpoint of a run on two ranks that nobody disturbs, made once."""
    made: dict[str, Path] = {}

    def of(launch: Launch, config: Path) -> Path:
        if config.stem not in made:
            out = tmp_path_factory.mktemp("whole") / config.stem
            run = launch(rank_counts(config)[0], out, config)
            assert run.wait() == 0, run.text()
            made[config.stem] = out / LAST
        return made[config.stem]

    return of


def one_round(
    launch: Launch, config: Path, folder: Path, kills: int, rng: Random, table: list[str]
) -> tuple[Path, int]:
    """Kill and resume one run: its last checkpoint, and how many kills there were."""
    allowed = rank_counts(config)
    out = folder / "run"
    modes, made = ("off", "thread", "step"), 0
    for number in range(kills):
        ranks, mode, during = rng.choice(allowed), rng.choice(modes), number % 2 == 0
        run = launch(ranks, out, config, "--resume", "auto", "--run.async_save", mode, pace=PACE_S)
        killed = kill(run, rng, during)
        if killed is None:
            break
        made += 1
        victim, moment, seconds = killed
        left = sorted(path.name[5:13] for path in out.glob("checkpoints/step-*.h5"))
        table.append(
            f"{config.stem:8} {ranks:5d} {victim:5d}  {mode:7} {run.starts_from():5d} {run.rows():5d}  {moment:14} "
            f"{left[-1] if left else 'none':>8} {seconds:6.2f} s"
        )
        assert seconds < PATIENCE_S or KILLS <= 5, table[-1]
    run = launch(rng.choice(allowed), out, config, "--resume", "auto")
    assert run.wait() == 0, run.text()
    assert steps_of(out) == list(range(STEPS + 1))
    assert not list(out.glob("checkpoints/*.partial"))
    table.append(f"{config.stem:8} {run.ranks:5d}        from step {run.starts_from()} to the end")
    return out / LAST, made


Whole = Callable[[Launch, Path], Path]


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    lines: list[str] = []
    yield lines
    print("\nconfig   ranks  rank  saving   from  rows  killed           newest  ended in")
    print("\n".join(lines))
    kills, during = sum(" s" in line[-2:] for line in lines), sum(" writing " in line for line in lines)
    print(f"{kills} kills, {during} of them while a checkpoint was being written")


@pytest.mark.parametrize("number", range(-(-KILLS // PER_ROUND)))
def test_campaign(number: int, launch: Launch, tmp_path: Path, uninterrupted: Whole, table: list[str]) -> None:
    rng, left = Random(KILLS + number), min(PER_ROUND, KILLS - PER_ROUND * number)
    files = configurations(tmp_path)
    config = files[number % len(files)]
    while left:  # a run that ends before its kills are spent leaves them to another one
        folder = tmp_path / f"left-{left}"
        folder.mkdir()
        last, made = one_round(launch, config, folder, left, rng, table)
        found = differences(last, uninterrupted(launch, config))
        # check_every auto: what changes no run is compared at other steps on other numbers of ranks
        told = "lbfgs" not in config.read_text() and "check_every" not in config.read_text()
        assert [name for name in found if not told or name != "optim/control/state"] == []
        table[-1] += ": bitwise the same"
        left -= made


def test_a_rank_that_is_stopped_for_three_seconds_changes_nothing(
    launch: Launch, tmp_path: Path, uninterrupted: Whole
) -> None:
    config = configurations(tmp_path)[0]
    run = launch(3, tmp_path / "run", config, pace=0.01)
    assert run.until(lambda: run.rows() > 10)
    process = run.rank(1)
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    rows = run.rows()
    process.send_signal(signal.SIGCONT)
    assert run.wait() == 0, run.text()
    assert rows < STEPS
    assert differences(tmp_path / "run" / LAST, uninterrupted(launch, config)) == []
