"""The configuration: files and flags in, dataclasses out, and a message with a remedy for every mistake."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpnet.config import MGRIT, Config, ModelConfig, OptimConfig, ParallelConfig, RunConfig
from lpnet.configfile import from_yaml, parse, to_yaml
from lpnet.configkeys import help_text, known_keys
from lpnet.errors import ConfigError, LpnetError, UsageError

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "drivers" / "configs").glob("*.yaml"))


def one_line(error: pytest.ExceptionInfo[LpnetError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert error.value.exit_code == 2
    return text


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


# what works


def test_no_file_and_no_flags_is_the_default() -> None:
    parsed = parse([])
    assert parsed.config == Config()
    assert parsed.warnings == ()


def test_flags_win_over_the_file_in_any_order(yaml_file: Path) -> None:
    yaml_file.write_text("method: mgrit\nmgrit:\n  levels: 2\n  coarsening: [4, 2]\noptim: {lr: 1e-2}\n")
    for arguments in (
        [str(yaml_file), "--mgrit.levels", "3", "--run.out=here", "--resume", "auto", "--ranks", "4"],
        ["--mgrit.levels=3", "--ranks=4", "--run.out", "here", str(yaml_file), "--run.resume", "auto"],
    ):
        parsed = parse(arguments, options=("ranks",))
        assert parsed.options == {"ranks": "4"}
        assert parsed.config == Config(
            method="mgrit",
            mgrit=MGRIT(levels=3, coarsening=[4, 2]),
            optim=OptimConfig(lr=0.01),
            run=RunConfig(out="here", resume="auto"),
        )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--mgrit.coarsening", "[4, 2]"], Config(mgrit=MGRIT(coarsening=[4, 2]))),
        (["--mgrit.relaxation", "[FCF,F]"], Config(mgrit=MGRIT(relaxation=["FCF", "F"]))),
        (["--mgrit.tolerance", "1e-9"], Config(mgrit=MGRIT(tolerance=1e-9))),
        (["--mgrit.tolerance", "null"], Config()),
        (["--mgrit.batching", "on"], Config(mgrit=MGRIT(batching="on"))),
        (
            ["--mgrit.adjoint.levels", "1", "--mgrit.adjoint.tolerance", "1e-3"],
            Config(mgrit=MGRIT(adjoint={"levels": 1, "tolerance": 1e-3})),
        ),
        (["--parallel.partition", "[3, 4]"], Config(parallel=ParallelConfig(partition=[3, 4]))),
        (["--run.out", "2024-01-01", "--run.trace", "true"], Config(run=RunConfig(out="2024-01-01", trace=True))),
        (["--run.out", "5"], Config(run=RunConfig(out="5"))),
    ],
)
def test_flags_take_the_type_of_their_key(arguments: list[str], expected: Config) -> None:
    assert parse(arguments).config == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Config()),
        ("# nothing\n", Config()),
        ("mgrit:\n", Config()),
        ("mgrit: {adjoint: {}}", Config()),
        ("mgrit: {batching: on, tolerance: 1e-13}", Config(mgrit=MGRIT(batching="on", tolerance=1e-13))),
        (
            "mgrit: {adjoint: {relaxation: FCF, tolerance: 1e-3}}",
            Config(mgrit=MGRIT(adjoint={"relaxation": "FCF", "tolerance": 1e-3})),
        ),
        ("run: {out: 2024-01-01, resume: on}", Config(run=RunConfig(out="2024-01-01", resume="on"))),
        ("model: {final_time: 5}", Config(model=ModelConfig(final_time=5.0))),
    ],
)
def test_yaml_is_read_as_people_mean_it(text: str, expected: Config) -> None:
    assert from_yaml(text, "x.yaml") == expected


ROUND_TRIPS = [
    Config(),
    Config(method="mgrit"),
    Config(mgrit=MGRIT(levels=3)),
    Config(
        method="mgrit",
        mgrit=MGRIT(
            levels=3,
            coarsening=[4, 2],
            tolerance=1e-13,
            batching="off",
            adjoint={"relaxation": ["FCF", "F"], "tolerance": None},
        ),
        run=RunConfig(out="1e-3", resume="on"),
        parallel=ParallelConfig(partition=[3, 4]),
    ),
]


@pytest.mark.parametrize("config", ROUND_TRIPS)
def test_the_resolved_file_gives_the_same_run(config: Config) -> None:
    assert from_yaml(to_yaml(config), "config.yaml") == config


@given(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])),
    st.floats(1e-300, 1e300),
    st.lists(st.integers(2, 99), min_size=1),
)
@settings(max_examples=50)
def test_any_text_and_number_survives_the_resolved_file(out: str, lr: float, coarsening: list[int]) -> None:
    config = Config(
        run=RunConfig(out=out or None, resume=out), optim=OptimConfig(lr=lr), mgrit=MGRIT(coarsening=coarsening)
    )
    if out.strip().lower() in ("null", "~"):  # a text that jsonargparse reads as null
        return
    assert from_yaml(to_yaml(config), "config.yaml") == config


def test_the_resolved_file_leaves_out_a_section_that_nobody_reads() -> None:
    assert "mgrit:" not in to_yaml(Config(method="serial"))
    assert "mgrit:" in to_yaml(Config(method="mgrit"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configurations_of_the_drivers_are_valid(path: Path) -> None:
    parsed = parse([str(path), "--data.root", "folder"])
    assert parsed.warnings == ()
    assert from_yaml(to_yaml(parsed.config), "x") == parsed.config


def test_every_key_has_a_line_in_the_help() -> None:
    text = help_text()
    for key in known_keys():
        if not key.startswith("mgrit.adjoint."):
            assert f"  --{key}\n" in text
    words = " ".join(text.split())
    assert "grids, the finest included; 1 is serial propagation. (a whole number; default 2)" in words
    assert "(one of serial, mgrit, fdg, pipeline; default serial)" in words
    assert all(field.name in known_keys() or f"{field.name}." in text for field in fields(Config))


# what does not


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mgrit.levls", "2"], "--mgrit.levls is not a known key; did you mean --mgrit.levels?"),
        (["--mgrid.levels", "2"], "--mgrid.levels is not a known key; did you mean --mgrit.levels?"),
        (["--levels", "2"], "--levels is not a known key; did you mean --mgrit.levels?"),
        (["--run.step", "2"], "--run.step is not a known key; did you mean --run.steps?"),  # no abbreviations
        (["--resum", "auto"], "--resum is not a known key; did you mean --resume?"),
        (
            ["--xyzzy", "2"],
            "--xyzzy is not a known key; known: data, fdg, method, mgrit, model, optim, parallel, run, seed",
        ),
        (["--run.xyzzy", "2"], "--run.xyzzy is not a known key; known: run.out, run.steps,"),
        (["--mgrit.coarsening+", "2"], "did you mean --mgrit.coarsening?"),
        (["-o", "x"], "-o is not a known key"),
        (["--mgrit", "x.yaml"], "--mgrit is a section; give its keys, such as --mgrit.levels"),
        (["--run.steps"], "--run.steps has no value; expected a whole number"),
        (["--run.steps", "--run.keep", "3"], "--run.steps has no value; expected a whole number"),
        (["--mgrit.levels", "two"], "--mgrit.levels is 'two'; expected a whole number"),
        (["--mgrit.levels", "2.5"], "--mgrit.levels is '2.5'; expected a whole number"),
        (["--mgrit.levels", "null"], "--mgrit.levels is 'null'; expected a whole number"),
        (
            ["--mgrit.coarsening", "[4, x]"],
            "--mgrit.coarsening is '[4, x]'; expected a whole number or a list of whole numbers",
        ),
        (["--mgrit.adjoint.levels", "two"], "--mgrit.adjoint.levels is 'two'; expected a whole number"),
        (["--optim.lr", "fast"], "--optim.lr is 'fast'; expected a number"),
        (["--run.trace", "maybe"], "--run.trace is 'maybe'; expected true or false"),
        (["--method", "magic"], "--method is 'magic'; expected one of serial, mgrit"),
        (["--parallel.threads", "all"], "--parallel.threads is 'all'; expected a whole number or null"),
        (["--mgrit.levels", "0"], "--mgrit.levels is 0; it must be greater than 0"),
        (["--mgrit.coarsening", "1"], "--mgrit.coarsening is 1; it must be 2 or more"),
        (["--mgrit.tolerance", "-1"], "--mgrit.tolerance is -1.0; it must be greater than 0"),
        (["--mgrit.adjoint.forward_iterations", "2"], "mgrit.adjoint has the unknown key 'forward_iterations'; known:"),
        (["--data.name", "peaks_files"], "data.name peaks_files reads files; give --data.root FOLDER"),
    ],
)
def test_a_wrong_flag(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(arguments)
    assert message in one_line(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nmgrit:\n  levls: 2\n", "run.yaml:3: mgrit.levls is not a known key; did you mean mgrit.levels?"),
        ("levels: 2\n", "run.yaml:1: levels is not a known key; did you mean mgrit.levels?"),
        ("mgirt:\n  levels: 2\n", "run.yaml:1: mgirt is not a known key; did you mean mgrit?"),
        (
            "mgrit:\n  adjoint:\n    levls: 2\n",
            "run.yaml:3: mgrit.adjoint.levls is not a known key; did you mean mgrit.adjoint.levels?",
        ),
        ("mgrit:\n  levels: two\n", "run.yaml:2: mgrit.levels is 'two'; expected a whole number"),
        ("mgrit:\n  levels: true\n", "run.yaml:2: mgrit.levels is True; expected a whole number"),
        ("mgrit:\n  adjoint: {levels: []}\n", "run.yaml:2: mgrit.adjoint.levels is []; expected a whole number"),
        ("model:\n  layers:\n", "run.yaml:2: model.layers is null; expected a whole number"),
        ("run:\n  out: 5\n", "run.yaml:2: run.out is 5; expected a text or null"),
        ("run:\n  steps: 1e3\n", "run.yaml:2: run.steps is 1000.0; expected a whole number"),
        ("mgrit: 5\n", "run.yaml:1: mgrit is a section; expected keys with values (levels,"),
        ("- 1\n", "run.yaml:1: a configuration is a mapping; expected keys with values (seed, method, and sections)"),
        ("seed: 1\nmgrit:\n  levels: [2\nrun: {}\n", "run.yaml:4: not valid YAML: while parsing a flow"),
        ("seed: 1\n\tmethod: mgrit\n", "run.yaml:2: not valid YAML: "),
        ("seed: 1\nseed: 2\n", "run.yaml:2: seed is given twice, first in line 1; keep one"),
        ("? [a]\n: 1\n", "run.yaml:1: a key is a word; found a list or a mapping"),
        ("seed: 1\n---\nseed: 2\n", "not valid YAML"),
        ("seed: !!python/object:os.system x\n", "run.yaml:1: not valid YAML: could not determine a constructor"),
        ("optim:\n  lr: !!float x\n", "run.yaml:2: optim.lr does not fit its tag float"),
        ("seed: !!int\n", "run.yaml:1: seed does not fit its tag int"),
        ("seed: !!bool x\n", "run.yaml:1: seed does not fit its tag bool"),
        ("seed: [*nobody]\n", "run.yaml:1: not valid YAML: found undefined alias"),
        ("seed: \x01\n", "run.yaml: not valid YAML"),
        ("seed: &a [*a]\n", "run.yaml:1: not valid YAML"),
        ("seed: " + "9" * 5000, "run.yaml"),
        ("optim:\n  lr: -1\n", "run.yaml:2: optim.lr is -1.0; it must be greater than 0"),
        ("optim:\n  lr: .nan\n", "run.yaml:2: optim.lr is nan; it must be greater than 0"),
        ("run:\n  steps: 3\n  keep: 0\n", "run.yaml:3: run.keep is 0; it must be greater than 0"),
    ],
)
def test_a_wrong_file(yaml_file: Path, text: str, message: str) -> None:
    yaml_file.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse([str(yaml_file)])
    assert one_line(error).startswith(str(yaml_file))
    assert message in str(error.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no.yaml: cannot read the configuration: No such file"):
        parse([str(tmp_path / "no.yaml")])
    with pytest.raises(ConfigError, match=r"cannot read the configuration: Is a directory"):
        parse([str(tmp_path)])
    (tmp_path / "x.yaml").write_bytes(b"seed: \xff\n")
    with pytest.raises(ConfigError, match=r"x.yaml: not a text file in UTF-8 \(byte 6\)"):
        parse([str(tmp_path / "x.yaml")])
    with pytest.raises(UsageError, match="expected one configuration file, got 2: a.yaml, b.yaml"):
        parse(["a.yaml", "b.yaml"])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [(["--mgrit.levels", "2"], "mgrit.levels"), (["--mgrit.adjoint.levels", "2"], "mgrit.adjoint.levels")],
)
def test_a_section_that_is_set_but_unused_warns(arguments: list[str], shown: str) -> None:
    assert parse(arguments).warnings == (f"mgrit is set ({shown}) but method serial does not use it",)
    assert parse([*arguments, "--method", "mgrit"]).warnings == ()


# anything at all

VALUES = [
    "",
    "null",
    "-1",
    "0",
    "2",
    "1e400",
    ".nan",
    "two",
    "[1, 2]",
    "[",
    "{a: 1}",
    "true",
    "!!int x",
    "*a",
    "&a",
    "'",
    "%",
    "\t",
    "---",
    "9" * 30,
]


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A driver's file with lines changed, and a few flags."""
    lines = draw(st.sampled_from(CONFIGS)).read_text().splitlines()
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(lines) - 1))
        key = lines[place].partition(":")[0]
        lines[place] = draw(
            st.sampled_from([lines[place][:-1], lines[place][1:], " " + lines[place], lines[place] * 2, ""])
            | st.sampled_from(VALUES).map((key + ": {}").format)
            | st.text(max_size=12)
        )
    keys = st.sampled_from(sorted(known_keys()))
    flag = st.one_of(keys, keys.map(lambda key: key[:-1]), st.text(max_size=8)).map(lambda key: f"--{key}")
    value = st.one_of(st.sampled_from(VALUES), st.text(max_size=8))
    flags = draw(st.lists(st.tuples(flag, value), max_size=3))
    return "\n".join(lines), [word for pair in flags for word in pair][: draw(st.sampled_from([5, 6]))]


@given(mutated())
@settings(max_examples=30)
def test_no_file_and_no_command_line_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[str, list[str]]
) -> None:
    text, flags = case
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        parse([str(path), *flags])
    except UsageError as error:
        assert re.match(r"\S", str(error))


def test_parsing_needs_neither_torch_nor_mpi() -> None:
    script = (
        "import sys; from lpnet.configfile import parse; parse(sys.argv[1:]); "
        "print([m for m in ('torch', 'mpi4py', 'h5py', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(CONFIGS[0]), "--data.root", "x"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
