"""Nothing that is read is run, and nothing is written for more people than the user's umask allows."""

from __future__ import annotations

import ast
import stat
from pathlib import Path

import pytest
from forked import Forked

from lpnet.configfile import from_yaml
from lpnet.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
WITHIN_ONE_PROCESS = ROOT / "lpnet" / "parallel" / "virtual.py"  # its pickles never leave the memory of the process
SOURCES = sorted(
    [*(ROOT / "lpnet").rglob("*.py"), *(ROOT / "drivers").rglob("*.py"), *(ROOT / "jobscripts").glob("*.py")]
)

# what a call of these must say; None: it may not be called at all
RULES: dict[str, str | None] = {
    "torch.load": "weights_only=True",
    "np.load": "allow_pickle=False",
    "numpy.load": "allow_pickle=False",
    "eval": None,
    "exec": None,
    "os.system": None,
    "pickle.load": None,
    "pickle.loads": None,
    "pickle.Unpickler": None,
    "marshal.loads": None,
    "yaml.load": "_Loader",  # of lpnet.configfile, a SafeLoader
    "yaml.unsafe_load": None,
    "yaml.full_load": None,
    "tempfile.mktemp": None,
    "os.umask": None,
    "os.chmod": None,
    "tar.extractall": None,
    "tarfile.extractall": None,
    "shutil.unpack_archive": None,
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_call_that_runs_what_it_reads(source: Path) -> None:
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name, words = ast.unparse(node.func), ast.unparse(node)
        if name in RULES and not (name == "pickle.loads" and source == WITHIN_ONE_PROCESS):
            wanted = RULES[name]
            assert wanted is not None and wanted in words, f"{source}:{node.lineno}: {words}"
        assert "shell=True" not in words, f"{source}:{node.lineno}: {words}"


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch {}']",
        "!!python/object/new:os.system ['touch {}']",
        "!!python/name:os.system",
        "!!python/module:os",
        "!lpnet x",
    ],
)
def test_a_configuration_is_no_program(tag: str, tmp_path: Path) -> None:
    victim = tmp_path / "touched"
    for text in (f"seed: {tag}", f"{tag}", f"model: {{layers: {tag}}}", f"? {tag}\n: 1"):
        with pytest.raises(ConfigError):
            from_yaml(text.replace("{}", str(victim)), "x.yaml")
    assert not victim.exists()


@pytest.mark.parametrize("mask", [0o077, 0o027, 0o022])
def test_files_have_the_rights_of_the_users_umask(mask: int, tmp_path: Path, forked: Forked) -> None:
    flags = ["--model.layers", "4", "--data.train_samples", "20", "--data.validation_samples", "10", "--run.steps", "2"]
    flags += ["--run.checkpoint_every", "1", "--run.trace", "true", "--optim.name", "lbfgs"]
    done = forked(["train", *flags, "--run.out", tmp_path / "run"], umask=mask)
    assert done.code == 0, done.err
    files = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert len(files) > 10
    for path in files:
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


@pytest.fixture(scope="module")
def forked():  # type: ignore[no-untyped-def]
    with Forked() as server:
        yield server
