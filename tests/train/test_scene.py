"""A real scene through the trainer: one-shot training on two ranks reaches the serial accuracy, with its class map."""

from __future__ import annotations

from lpnet.io.metrics import read


def test_salinas_a_on_two_ranks_reaches_the_serial_accuracy(data_root, mpirun, tmp_path):
    config, root = "drivers/configs/salinas_a_mgrit.yaml", str(data_root / "salinas_a")
    scores = []
    for ranks, more in ((2, []), (1, ["--method", "serial"])):
        out = tmp_path / f"run{ranks}"
        flags = ["--data.root", root, "--run.out", str(out), "--run.steps", "180", *more]
        result = mpirun(ranks, "lpnet", "train", config, *flags)
        assert result.returncode == 0, result.stderr
        scores.append(read(out / "metrics.jsonl")[-1]["val_accuracy"])
        assert (out / "class_map.png").stat().st_size > 10_000
    assert scores[0] > 95
    assert abs(scores[0] - scores[1]) < 1
