"""The planner: its event simulation, its choices against the default and against a full search, its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lpnet.cli import main
from lpnet.config import MGRIT, Config, DataConfig, ModelConfig
from lpnet.configfile import from_yaml
from lpnet.mgrit.hierarchy import build
from lpnet.mgrit.programs import critical_path, parts, record, simulate
from lpnet.parallel.interconnect import named
from lpnet.scaling import tune as planner
from lpnet.scaling.layer_cost import LayerCost, measure, program_cycles

INFINIBAND = named("infiniband")


def config(layers: int = 64, width: int = 4, samples: int = 50, **mgrit: Any) -> Config:
    return Config(
        method="mgrit",
        model=ModelConfig(layers=layers, width=width),
        data=DataConfig(train_samples=samples, validation_samples=20),
        mgrit=MGRIT(**mgrit),
    )


def programs(run: Config, ranks: int) -> tuple[Any, Any]:
    cycles = program_cycles(build(run.model.layers, run.mgrit), run, ranks)
    names = parts(2, coarse_start=False, levels=run.mgrit.levels)
    return [[action for name in names for action in record(cycle, name)] for cycle in cycles], cycles


def test_the_simulation_with_unit_costs_is_the_critical_path() -> None:
    actions, cycles = programs(config(levels=3, coarsening=4), 8)
    unit = simulate(actions, cycles, lambda a: a.edges.number if a.kind == "evaluate" else 0, lambda s, d: 0.0)
    assert max(unit) == critical_path(actions, cycles)
    late = simulate(actions, cycles, lambda a: a.edges.number if a.kind == "evaluate" else 0, lambda s, d: 1000.0)
    assert max(late) > max(unit) + 1000


def test_costs_of_a_layer() -> None:
    costs = measure(config(samples=2000))
    assert costs.at_batch.samples == 2000 and costs.at_batch.payload == 4 * 2000 * 4
    assert min(costs.at_batch.evaluate, costs.at_batch.advance, costs.at_batch.pull, costs.at_batch.gradient) > 0
    assert costs.floor + 2000 * costs.each == pytest.approx(costs.at_batch.step, rel=0.01)


def fake(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Costs and times of a made-up processor, so that the choice is the same every day."""
    cost = LayerCost(100, 20e-6 * scale, 10e-6 * scale, 20e-6 * scale, 10e-6 * scale, 2e-6 * scale, 8000)

    def emulated(plan: planner.Plan, network: Any) -> planner.Plan:
        error = 0.0 if plan.exact else 0.01 * plan.config.mgrit.levels
        return replace(plan, emulated_seconds=plan.model_seconds, gradient_error=error)

    monkeypatch.setattr(planner, "measure", lambda config: planner.Costs(cost, 1e-5 * scale, 5e-7 * scale))
    monkeypatch.setattr(planner, "_emulated", emulated)


def test_within_ten_percent_of_a_full_search(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, 1.0)
    for layers, ranks in ((64, 8), (128, 32), (256, 16)):
        run = config(layers=layers)
        choice = planner.tune(run, ranks, INFINIBAND)
        grids = [g for g in planner._grids(layers) if len(g) < 4]
        every = [
            planner._judged(
                replace(run, mgrit=replace(planner._warm(run.mgrit), levels=len(g) + 1, coarsening=list(g))),
                ranks, planner.measure(run), INFINIBAND,
            ).model_seconds
            for g in grids
        ]
        assert choice.best.model_seconds <= 1.1 * min(every), (layers, ranks, choice.best.label())
        default = choice.plans[[plan.config.mgrit.coarsening for plan in choice.plans].index(4)]
        assert choice.best.model_seconds <= default.model_seconds


def test_exact_where_it_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, 1e-3)  # layers so cheap that messages cost more
    choice = planner.tune(config(layers=16), 4, INFINIBAND)
    assert choice.best.config.method == "serial" and choice.best.ranks == 1
    assert "because nothing inexact is more than 5 % faster" in choice.table()
    assert "more than 1 rank(s) do not make it faster" in choice.table()


def test_too_large_an_error_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, 1.0)
    choice = planner.tune(config(layers=128), 32, INFINIBAND, most_error=0.001)
    assert choice.best.config.method == "serial"


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    path, out = tmp_path / "run.yaml", tmp_path / "tuned.yaml"
    path.write_text(
        "method: mgrit\nmodel: {layers: 64, width: 4}\ndata: {train_samples: 500, validation_samples: 20}\n"
        "mgrit: {levels: 2, coarsening: 4}\n"
    )
    assert main(["tune", str(path), "--ranks", "8", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "a layer's training step takes" in text and "-> " in text and "chosen: " in text and "serial" in text
    tuned = from_yaml(out.read_text(), str(out))
    assert tuned.model.layers == 64 and tuned.method in ("serial", "mgrit")
    lines = [line.replace("->", "  ") for line in text.splitlines()]
    rows = [line.split() for line in lines if " mgrit " in line or line.endswith("  serial")]
    times = [float(row[2]) for row in rows if row[0].isdecimal() and row[3] != "mgrit" and "levels," not in row[3]]
    assert times[0] == min(times)  # sorted: the default configuration is among them


@pytest.mark.parametrize(("flags", "message"), [
    (["--ranks", "0"], "--ranks is '0'"),
    ([], "--ranks is ''"),
    (["--ranks", "99"], "99 ranks"),
    (["--ranks", "2", "--max-error", "-1"], "--max-error is '-1'"),
    (["--ranks", "2", "--network", "x"], "known: loopback"),
])
def test_bad_input(tmp_path: Path, capsys: Any, flags: list[str], message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("method: mgrit\nmodel: {layers: 16}\ndata: {train_samples: 40}\n")
    assert main(["tune", str(path), *flags, "--out", str(tmp_path / "o.yaml")]) == 2
    assert message in capsys.readouterr().err
