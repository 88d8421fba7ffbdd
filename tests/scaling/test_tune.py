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
from lpnet.scaling.candidates import Measured, Plan, grids, multigrid
from lpnet.scaling.candidates import every as every_candidate
from lpnet.scaling.layer_cost import Costs, LayerCost, measure, program_cycles
from lpnet.train.build import check

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

    def cost(action: Any) -> float:
        return action.edges.number if action.kind == "evaluate" else 0

    unit = simulate(actions, cycles, cost, lambda source, dest, level: 0.0)
    assert max(unit) == critical_path(actions, cycles)
    late = simulate(actions, cycles, cost, lambda source, dest, level: 1000.0)
    assert max(late) > max(unit) + 1000
    coarse = simulate(actions, cycles, cost, lambda source, dest, level: 1000.0 * (level > 0))
    assert max(unit) + 1000 < max(coarse) < max(late)


def test_costs_of_a_layer() -> None:
    costs = measure(config(samples=2000))
    assert costs.at_batch.samples == 2000 and costs.at_batch.payload == 4 * 2000 * 4
    assert min(costs.at_batch.evaluate, costs.at_batch.advance, costs.at_batch.pull, costs.at_batch.gradient) > 0
    assert costs.floor + 2000 * costs.each == pytest.approx(costs.at_batch.step, rel=0.01)


def fake(monkeypatch: pytest.MonkeyPatch, scale: float, floor: float = 0.5, beside: float = 1.0) -> None:
    """Costs and times of a made-up processor, so that the choice is the same every day.

    Args:
        monkeypatch: of the test.
        scale: of all costs.
        floor: share of the cost of a whole batch that a batch of one sample has too.
        beside: what a further layer costs in a call that does several.
    """
    seconds = (20e-6, 10e-6, 20e-6, 10e-6, 2e-6)
    cost = LayerCost(50, *(value * scale for value in seconds), 8000, beside)
    share = floor + (1 - floor) / 8
    small = LayerCost(6, *(value * scale * share for value in seconds), 960, beside)

    def emulated(plan: Plan, network: Any) -> Plan:
        error = 0.0 if plan.exact else 0.5 if plan.family.startswith("fdg") else 0.01 * plan.config.mgrit.levels
        return replace(plan, emulated_seconds=plan.model_seconds, gradient_error=error)

    made = Costs(cost, cost.step * floor, cost.step * (1 - floor) / 50, small)
    monkeypatch.setattr(planner, "measure", lambda config: made)
    monkeypatch.setattr(planner, "_emulated", emulated)


def measured(run: Config) -> Measured:
    costs = planner.measure(run)
    return Measured(costs, (), costs.at_batch.samples, INFINIBAND)


def test_within_ten_percent_of_a_full_search(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, 1.0, floor=0.95)  # replicas do not pay
    for layers, ranks in ((64, 8), (128, 32), (256, 16)):
        run = config(layers=layers)
        choice = planner.tune(run, ranks, INFINIBAND)
        warm = planner.warm(run.mgrit)
        every = [
            multigrid(replace(run, mgrit=replace(warm, levels=len(g) + 1, coarsening=list(g))), ranks, replicas,
                      measured(run)).model_seconds
            for g in grids(layers) if len(g) < 4 for replicas in (1, 2)
        ]  # fmt: skip
        assert choice.best.model_seconds <= 1.1 * min(every), (layers, ranks, choice.best.label())
        default = next(plan for plan in choice.plans if plan.config.mgrit.coarsening == 4 and plan.family == "mgrit")
        assert choice.best.model_seconds <= default.model_seconds


def test_a_large_batch_is_shared_by_replicas_or_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, 1.0, floor=0.0)  # half the samples, half the time
    choice = planner.tune(config(layers=64, samples=50), 8, INFINIBAND)
    assert choice.best.exact and choice.best.family in ("data", "pipeline") and choice.best.ranks == 8
    assert choice.best.config.parallel.replicas in (2, 4, 8)
    text = choice.table()
    assert "because nothing inexact is more than 5 % faster" in text
    families = ("serial", "data", "pipeline", "mgrit", "fdg", "fdg of 2 modules x mgrit")
    assert all(f" {family}" in text for family in families)


def test_a_mix_of_replicas_and_multigrid(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, 1.0, floor=0.25)
    choice = planner.tune(config(layers=512, samples=50), 128, INFINIBAND)
    best = choice.best
    assert best.family == "mgrit" and 1 < best.config.parallel.replicas < 128
    serial = next(plan for plan in choice.plans if plan.family == "serial")
    alone = [plan for plan in choice.plans if plan.family == "mgrit" and plan.config.parallel.replicas == 1]
    assert best.model_seconds < min(plan.model_seconds for plan in alone) < serial.model_seconds


def test_intervals_side_by_side_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four intervals in one call for little more than one: fewer ranks do the work of more."""
    fake(monkeypatch, 1.0, floor=0.95, beside=0.2)
    choice = planner.tune(config(layers=256), 8, INFINIBAND)
    assert choice.best.config.mgrit.batching == "on" and "side by side" in choice.best.label()
    fake(monkeypatch, 1.0, floor=0.95)
    alone = planner.tune(config(layers=256), 8, INFINIBAND)
    assert alone.best.config.mgrit.batching == "off"
    assert choice.best.model_seconds < 0.8 * alone.best.model_seconds


def test_a_further_layer_beside_others_costs_less_than_the_first() -> None:
    """At a small batch, where a call costs more than its samples."""
    assert 0 <= measure(config(samples=10)).at_batch.beside < 1


def test_exact_where_it_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, 1e-3)  # layers so cheap that messages cost more
    choice = planner.tune(config(layers=16), 4, INFINIBAND)
    assert choice.best.config.method == "serial" and choice.best.ranks == 1
    assert "because nothing inexact is more than 5 % faster" in choice.table()
    assert "more than 1 rank(s) do not make it faster" in choice.table()


def test_too_large_an_error_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, 1.0)
    assert planner.tune(config(layers=128), 32, INFINIBAND, most_error=0.001).best.exact


def test_decoupled_finalists_differ_in_their_modules() -> None:
    """The fastest may be too stale: fewer modules are tried as well."""
    run = config(layers=64, samples=50)
    taken = planner._finalists(every_candidate(run, 8, measured(run)))
    for family in ("fdg", "fdg x mgrit"):
        modules = [plan.modules for plan in taken if plan.family == family]
        assert 0 < len(modules) == len(set(modules)) <= planner.EMULATED[family] and None not in modules
    assert all(plan.modules is None for plan in taken if not plan.family.startswith("fdg"))


def test_candidates_run_as_they_are_described() -> None:
    run = config(layers=8, samples=15)
    found = measured(run)
    families = set()
    for plan in every_candidate(run, 4, found):
        check(plan.config, plan.ranks)
        families.add((plan.family, plan.config.parallel.replicas))
        assert plan.model_seconds > 0 and plan.memory > 0
    expected = {"pipeline": (1, 2), "mgrit": (1, 2), "fdg": (1, 2), "fdg x mgrit": (1,), "data": (4,)}
    assert families == {(family, replicas) for family, counts in expected.items() for replicas in counts}


def test_a_network_of_units() -> None:
    from lpnet.fdg.cuts import UnitCost

    model = ModelConfig(name="resnet_cifar", depth=8)
    run = Config(method="fdg", model=model, data=DataConfig(name="cifar10", root="."))
    units = tuple(UnitCost(f"unit{i}", 1e-3, 2e-3, parameters=4000, output=100) for i in range(6))
    plans = every_candidate(run, 6, Measured(None, units, 64, INFINIBAND))
    assert {plan.family for plan in plans} == {"data", "pipeline", "fdg"}
    fastest = {plan.family: plan for plan in reversed(plans)}
    whole = 6 * 3e-3
    assert fastest["fdg"].model_seconds == pytest.approx(whole / 6, rel=0.05)
    assert fastest["data"].model_seconds == pytest.approx(whole / 6, rel=0.05)
    for plan in plans:
        check(plan.config, plan.ranks)


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
    assert tuned.model.layers == 64
    rows = [line.replace("->", "  ").split() for line in text.splitlines() if line[2:8].strip().isdecimal()]
    emulated = [float(row[2]) for row in rows if row[3] == "exact" or "e-" in row[3] or "e+" in row[3]]
    assert emulated == sorted(emulated) and len(emulated) >= 5  # serial, the default and the best of each kind


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
