"""The report page: self-contained, its words follow the numbers, bad folders are refused."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from lpnet.cli import main
from lpnet.errors import LpnetError
from lpnet.io.report import find_runs, write_report
from lpnet.io.report_words import facts_of, verdict

CONFIG = "method: mgrit\nmgrit: {control: %s, levels: 2}\nrun: {steps: 4}\nmodel: {layers: 8}\ndata: {name: peaks}\n"


def write_run(folder, cosines, *, control="fixed", levels=2, trace=False):
    folder.mkdir(parents=True)
    rows = [
        {"step": step, "loss": 1.0 / (1 + step), "objective": 1.0, "grad_norm": 1.0, "val_accuracy": 50.0 + step,
         "train_accuracy": 50.0, "forward_residuals": [0.1, 0.01], "adjoint_residuals": [0.1, 0.02],
         "rho_forward": 0.1, "rho_adjoint": 0.2, "gradient_cosine": cosine, "gradient_error": 0.01,
         "gradient_cosine_rejected": None, "mgrit_levels": levels, "forward_iterations": 2, "adjoint_iterations": 1,
         "seconds": 0.1}
        for step, cosine in enumerate(cosines)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(CONFIG % control)
    (folder / "env.json").write_text(json.dumps({"evaluations": 1000, "evaluations_compared": 20}))
    (folder / "log.txt").write_text("INFO step 3: gradient cosine 0.2 <b>\n")
    if trace:
        events = [{"name": "f_relax", "ph": "X", "ts": 0, "dur": 2e6, "tid": 0, "pid": 0}]
        (folder / "trace.json").write_text(json.dumps({"traceEvents": events}))
    return folder


class Page(HTMLParser):
    """Tags must nest; what they refer to is noted."""

    def __init__(self):
        super().__init__()
        self.open, self.sources = [], []

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(path):
    page = Page()
    page.feed(path.read_text())
    assert page.open == []
    assert all(source.startswith("data:") for source in page.sources)  # readable without a server or a network
    return path.read_text()


def test_a_page_of_one_run(tmp_path):
    run = write_run(tmp_path / "run", [1.0, 0.999, None, 0.98], trace=True)
    text = read(write_report([run], tmp_path / "report.html"))
    assert text.count("data:image/png;base64,") == 2  # curves; residuals and gradients
    assert "1 of 3 known gradients were wrong" in text and 'class="verdict bad"' in text
    assert "f_relax" in text and "2.000 s" in text and "&lt;b&gt;" in text and "control: fixed" in text
    assert "1,000" in text and "2.0%" in text


def test_a_page_of_a_folder_of_runs(tmp_path):
    write_run(tmp_path / "study" / "fixed", [1.0, 0.2])
    write_run(tmp_path / "study" / "adaptive", [1.0, 0.9999], control="adaptive")
    text = read(write_report([tmp_path / "study"], tmp_path / "out" / "report.html"))
    assert text.count("data:image/png;base64,") == 5 and "Settings that differ" in text
    assert [run.label for run in find_runs([tmp_path / "study"])] == ["adaptive", "fixed"]


def test_the_command(tmp_path, capsys):
    run = write_run(tmp_path / "run", [1.0])
    assert main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 0
    assert "r.html" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "nowhere")]) != 0
    (tmp_path / "empty").mkdir()
    for bad, words in ((tmp_path / "nowhere", "is no folder"), (tmp_path / "empty", "holds no metrics.jsonl")):
        with pytest.raises(LpnetError, match=words):
            write_report([bad], tmp_path / "r.html")


@pytest.mark.parametrize("rows, config, expected, good", [
    ([{"step": 4, "gradient_cosine": 0.999, "mgrit_levels": 2}], {}, "all 1 gradients .* were right", True),
    ([{"step": 4, "gradient_cosine": None, "mgrit_levels": 2}], {}, "nothing is known of their quality", True),
    ([{"step": 4, "gradient_cosine": 1.0, "mgrit_levels": 1}], {}, "100% of the steps fell back to serial", True),
    ([{"step": 2}], {"run.steps": 4}, "Ended at step 2 of 4", False),
    ([{"step": 4, "loss": 1.5}], {"run.steps": 4}, "loss 1.5000.*not watched", True),
])  # fmt: skip
def test_the_verdict(rows, config, expected, good):
    words, found = verdict(facts_of(rows, {"mgrit.control": "adaptive", **config}, {}))
    assert re.search(expected, words) and found is good
