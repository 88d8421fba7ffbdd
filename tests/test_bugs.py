"""One test per bug that was found after the code had been written, so that it does not come back."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_case import differences

from lpnet.errors import CheckpointError, SaveError
from lpnet.io.metrics import read

MGRIT = """
method: mgrit
model: {layers: 7, width: 4, activation: tanh}
data: {name: peaks, train_samples: 40, validation_samples: 20}
mgrit: {levels: 2, coarsening: 2, forward_iterations: 2, adjoint_iterations: 1}
optim: {name: lbfgs, lr: 0.1}
run: {steps: 4, eval_every: 0, checkpoint_every: 2, plots: false}
"""
FDG = """
method: fdg
model: {layers: 7, width: 6, activation: tanh, opening: dense}
data: {name: peaks, train_samples: 60, validation_samples: 20, batch_size: 20}
fdg: {modules: 3, shrink: 0.7, prediction: full, cuts: [3, 5]}
optim: {name: sgd, lr: 0.05, momentum: 0.9}
run: {steps: 16, eval_every: 0, checkpoint_every: 0, plots: false}
"""


def train(comm: Any, text: str, out: Path, *flags: object) -> int:
    """`lpnet train` in this process. Collective over comm."""
    from lpnet.configfile import from_yaml, parse, to_yaml
    from lpnet.parallel.comm import Comm
    from lpnet.train.trainer import train

    config = out.parent / "config.yaml"
    if comm.rank == 0:
        config.write_text(to_yaml(from_yaml(text, "test")))
    comm.barrier()
    mine = Comm(comm)
    try:
        return train(parse([str(config), "--run.out", str(out), *map(str, flags)]).config, mine)
    finally:
        if sys.exc_info()[0] is None:
            mine.free()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_stop_of_decoupled_modules_ends_with_the_run_that_was_asked(comm, who, shared_tmp_path, monkeypatch):
    """The wish to stop was saved with the messages in flight: every run that went on stopped after a tick."""
    from lpnet.train.progress import Progress
    from lpnet.train.stopping import Stopping

    whole, parts, last = shared_tmp_path / "whole", shared_tmp_path / "parts", "checkpoints/step-00000016.h5"
    assert train(comm, FDG, whole) == 0
    update, requested, asked = Progress.update, Stopping.requested, []

    def ask(self, step, report, scores):
        update(self, step, report, scores)
        if step == 5 and comm.rank == who:
            asked.append("a test")

    def answer(self):
        self.reason = asked[0] if asked else None
        return requested(self)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "update", ask)
        patch.setattr(Stopping, "requested", answer)
        assert train(comm, FDG, parts) == 75
    assert train(comm, FDG, parts, "--resume", "auto") == 0
    if comm.rank == 0:
        assert differences(whole / last, parts / last) == []


@pytest.mark.ranks(3)
def test_cuts_that_were_measured_are_kept_by_the_run_that_goes_on(comm, shared_tmp_path, monkeypatch):
    """Cuts by cost were measured again: what was in flight between the old ones went to other units, silently."""
    from lpnet.fdg import network

    whole, parts, last = shared_tmp_path / "whole", shared_tmp_path / "parts", "checkpoints/step-00000016.h5"
    find = network.find_cuts

    def measured(*cuts: int):
        plan = find
        return lambda *arguments, **more: (list(cuts), plan(*arguments, **more)[1])

    monkeypatch.setattr(network, "find_cuts", measured(2, 4))
    by_cost = ("--fdg.cuts", "by_cost")
    assert train(comm, FDG, whole, *by_cost) == 0
    assert train(comm, FDG, parts, *by_cost, "--run.steps", 7, "--run.checkpoint_every", 5) == 0
    flying = shared_tmp_path / "parts" / "checkpoints" / "step-00000005.h5"  # the last one is drained
    monkeypatch.setattr(network, "find_cuts", measured(3, 5))
    assert train(comm, FDG, shared_tmp_path / "again", *by_cost, "--resume", flying) == 0
    if comm.rank == 0:
        assert differences(whole / last, shared_tmp_path / "again" / last) == []
    with pytest.raises(
        CheckpointError, match=r"cut before unit 2, 4, and this run cuts before unit 3, 5; set fdg.cuts"
    ):
        train(comm, FDG, shared_tmp_path / "other", "--resume", flying, "--fdg.cuts", "[3, 5]")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["config.yaml", "env.json", "metrics.jsonl"])
def test_a_file_that_cannot_be_written_is_no_traceback(comm, name, shared_tmp_path):
    """An OSError of rank 0 at the start left the other ranks waiting, and the user with a traceback."""
    out = shared_tmp_path / "run"
    if comm.rank == 0:
        (out / name).mkdir(parents=True)
    comm.barrier()
    with pytest.raises(SaveError, match=rf"{name} cannot be written: Is a directory; make room, or give another"):
        train(comm, MGRIT, out, "--resume", "auto")


@pytest.mark.ranks(2)
def test_a_damaged_line_in_the_metrics_does_not_keep_a_run_from_going_on(comm, shared_tmp_path):
    out = shared_tmp_path / "run"
    assert train(comm, MGRIT, out, "--run.steps", 2) == 0
    if comm.rank == 0:
        lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        (out / "metrics.jsonl").write_bytes(lines[0] + b"\x00\xff\x00 no row\n" + b"".join(lines[1:]) + b"half a li")
    comm.barrier()
    assert train(comm, MGRIT, out, "--resume", "auto") == 0
    if comm.rank == 0:
        assert [row["step"] for row in read(out / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def optimiser(name: str) -> list[str]:
    return ["--optim.name", name, *([] if name == "lbfgs" else ["--optim.lr", "0.01"])]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("name", ["lbfgs", "adam", "sgd", "fdg"])
def test_a_stop_before_the_first_step_ends_with_the_run_that_was_asked(comm, name, shared_tmp_path):
    """L-BFGS went on from a starting point that it had not evaluated: the run was done, with exit code 0, at step 0."""
    text, flags = (FDG, []) if name == "fdg" else (MGRIT, optimiser(name))
    if name == "fdg" and comm.size == 1:
        flags += ["--fdg.modules", "3"]
    flags += ["--run.eval_every", "4"]  # which is where a stop is heard first
    whole, parts = shared_tmp_path / "whole", shared_tmp_path / "parts"
    assert train(comm, text, whole, *flags) == 0
    for _ in range(2):
        if comm.rank == 0:
            parts.mkdir(exist_ok=True)
            (parts / "STOP").touch()
        comm.barrier()
        assert train(comm, text, parts, *flags, "--resume", "auto") == 75
    assert train(comm, text, parts, *flags, "--resume", "auto") == 0
    if comm.rank == 0:
        last = (whole / "checkpoints" / "latest").read_text().strip()
        assert int(last[5:13]) > 0 and differences(whole / "checkpoints" / last, parts / "checkpoints" / last) == []
        assert [row["step"] for row in read(parts / "metrics.jsonl")] == list(range(int(last[5:13]) + 1))


ENDS = """
import atexit, os, signal, sys
from lpnet import cli
if sys.argv.pop(1) == "late":
    atexit.register(os.kill, os.getpid(), signal.SIGUSR1)
sys.exit(cli.main())
"""


@pytest.mark.parametrize("when", ["never", "late"])
def test_a_signal_to_a_run_that_is_done_changes_nothing(when, tmp_path):
    """SIGUSR1 between the last line and the end of the process ended it: exit code 138 for a run that was done."""
    (tmp_path / "config.yaml").write_text(MGRIT)
    words = [when, "train", "config.yaml", "--run.out", "out", "--run.steps", "1"]
    done = subprocess.run(
        [sys.executable, "-c", ENDS, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "done in out" in done.stderr, done.stderr


def test_measured_choices_of_a_checkpoint_are_kept():
    from lpnet.config import MGRIT, Config
    from lpnet.train.build import measured_before

    auto = Config(method="mgrit", mgrit=MGRIT(levels=3, batching="auto"))
    saved = replace(auto, mgrit=replace(auto.mgrit, batching=["on", "off", "off"]))
    assert measured_before(auto, saved, 2).mgrit.batching == ["on", "off", "off"]
    assert measured_before(auto, replace(saved, method="serial"), 2) == auto
    assert measured_before(auto, None, 2) == auto
    other = replace(auto, mgrit=replace(auto.mgrit, coarsening=2))
    assert measured_before(other, saved, 2) == other


EARLY = """
method: fdg
model: {layers: 16, width: 4, activation: tanh, dtype: float64}
data: {name: peaks, train_samples: 60, validation_samples: 20, batch_size: 20}
fdg: {backward: recompute}
optim: {lr: 0.02}
run: {steps: 7, eval_every: 0, checkpoint_every: 1, keep: 10, plots: false}
"""
EARLY_RUNS = {  # grid, optimiser, steps to go on from
    "layers, adam": (["--parallel.modules", "2"], ["adam"], [1, 2]),
    "layers, adagrad": (["--parallel.modules", "2"], ["adagrad"], [1]),
    "replicas, rmsprop": (["--parallel.modules", "2", "--parallel.replicas", "2"], ["rmsprop", "0.9"], [1]),
    "four modules, momentum": (["--parallel.modules", "4"], ["sgd", "0.9"], [2, 4]),
    "four modules, predicted": (["--parallel.modules", "4", "--fdg.prediction", "full"], ["adam"], [1, 4]),
    "units, momentum": (["--fdg.modules", "4"], ["sgd", "0.9"], [3]),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", EARLY_RUNS)
def test_checkpoints_before_every_module_has_updated(comm, case, shared_tmp_path):
    """The slots of a stack had gaps where a module's optimiser had none yet, and nothing could be saved."""
    grid, (name, *momentum), steps = EARLY_RUNS[case]
    whole, last = shared_tmp_path / "whole", "checkpoints/step-00000007.h5"
    flags = [*grid, "--optim.name", name, *(["--optim.momentum", *momentum] if momentum else [])]
    assert train(comm, EARLY, whole, *flags) == 0
    for step in steps:
        again = shared_tmp_path / f"from-{step}"
        assert train(comm, EARLY, again, *flags, "--resume", whole / f"checkpoints/step-{step:08}.h5") == 0
        if comm.rank == 0:
            for file in ("checkpoints/step-00000005.h5", last):
                assert differences(whole / file, again / file) == []


def test_replicas_choose_alike_what_their_part_of_a_batch_was_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`batching: auto` was measured on the whole batch, and each replica decided by its own times."""
    import numpy as np

    from lpnet.config import MGRIT as Settings
    from lpnet.config import Config, DataConfig, ModelConfig, ParallelConfig
    from lpnet.data.batches import BatchOrder
    from lpnet.data.samples import load
    from lpnet.mgrit import batching
    from lpnet.nn.models import DTYPES
    from lpnet.parallel.comm import Comm
    from lpnet.parallel.emulator import emulate
    from lpnet.train.build import build

    shapes = []
    config = Config(
        method="mgrit",
        model=ModelConfig(layers=8, width=4),
        data=DataConfig(train_samples=20, validation_samples=10),
        mgrit=Settings(batching="auto"),
        parallel=ParallelConfig(replicas=2),
    )

    def seconds(stack: Any, hierarchy: Any, mgrit: Any, shape: Any, *, runs: int) -> np.ndarray:
        shapes.append(tuple(shape))
        return np.array([[2.0], [1.0 if len(shapes) == 1 else 4.0]])  # the replicas do not agree

    monkeypatch.setattr(batching, "sweep_seconds", seconds)

    def program(comm: Comm) -> list[str]:
        data = load(config.data, 0, DTYPES["float32"])
        _, _, resolved = build(config, data, BatchOrder(20, None, 0, "fixed"), comm)
        return resolved.mgrit.batching

    assert emulate(program, ranks=2).results == [["off"], ["off"]]
    assert shapes == [(10, 4)] * 2


def test_the_planner_measures_convolutions() -> None:
    """Their gradients are made block by block; the measurement asked for all at once, and nothing could be planned."""
    import os

    from lpnet.config import Config, DataConfig, ModelConfig
    from lpnet.scaling.layer_cost import measure

    if "LPNET_DATA" not in os.environ:
        pytest.skip("needs LPNET_DATA")
    root = f"{os.environ['LPNET_DATA']}/mnist"
    config = Config(
        method="mgrit",
        model=ModelConfig(name="conv", layers=16, width=4, opening="replicate"),
        data=DataConfig(name="mnist", root=root, train_samples=10, validation_samples=10),
    )
    cost = measure(config).at_batch
    assert cost.payload == 4 * 28 * 28 * 10 * 4
    assert min(cost.evaluate, cost.advance, cost.pull, cost.gradient, cost.copy) > 0


def test_modules_of_one_emulated_rank_are_metered_one_by_one() -> None:
    """The work of all modules ended at one line: the clock took the median of long and short pieces for each."""
    from lpnet.fdg.member import Need, drive
    from lpnet.parallel.emulator import emulate

    class Half:
        def __init__(self, module: int) -> None:
            self.module, self.mailbox = module, self

        def ready(self, stream: str) -> bool:
            return True

    def work() -> Any:
        yield Need("message", "activation")

    words: list[Any] = []
    drive([Half(1), Half(2)], [work(), work()], clock=lambda word: float(words.append(word) or 0))
    assert [word for word in words if word != "before"] == [(1, 1), (2, 1), (1, 2), (2, 2)]

    def program(comm: Any) -> int:
        for word in ("short", "long", "short"):
            comm.now(word)
        return sum(word in key[2] for key in comm.world.costs._samples for word in ("short", "long"))

    assert emulate(program, ranks=1).results == [3]  # what came before each of them differs too


@pytest.mark.parametrize("features", [4, 5000])
def test_scalar_products_of_no_tensors(features: int) -> None:
    """Small rows went through a reshape that cannot tell the shape of nothing."""
    import torch

    from lpnet.optim.rows import dots

    right = torch.ones(3, features)
    assert dots(right.new_empty(0, 3, features), right, stacked=True).shape == (0, 3)
    assert dots(right.new_empty(0, 3, features), right, stacked=False).shape == (0,)
