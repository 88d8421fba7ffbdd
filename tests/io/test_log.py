"""The logger: who speaks, with which prefix, and what the run folder keeps."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lpnet.io import log


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    yield
    log.close()


def speak() -> None:
    logger = logging.getLogger("lpnet.train")
    logger.debug("a detail")
    logger.info("an event")
    logger.warning("a warning")


def test_rank_0_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(0, 4, folder=tmp_path)
    speak()
    assert capsys.readouterr().err == "[lpnet 0/4 INFO] an event\n[lpnet 0/4 WARNING] a warning\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in lines] == [
        "[lpnet 0/4 INFO] an event",
        "[lpnet 0/4 WARNING] a warning",
    ]
    assert lines[0][:2] == "20"


def test_other_ranks_only_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(1, 4, folder=tmp_path, level="DEBUG")
    logging.getLogger("lpnet").info("an event")
    assert not (tmp_path / "log.txt").exists()
    speak()
    assert capsys.readouterr().err == "[lpnet 1/4 WARNING] a warning\n"
    log.setup(0, 4, folder=tmp_path)  # ranks append to the same file
    speak()
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 3


def test_level(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(level="DEBUG")
    speak()
    assert "[lpnet 0/1 DEBUG] a detail" in capsys.readouterr().err
    log.setup(level="WARNING")  # a second call replaces the first
    speak()
    assert capsys.readouterr().err == "[lpnet 0/1 WARNING] a warning\n"


def test_every_line_has_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(2, 3)
    try:
        raise ValueError("wrong\nin two lines")
    except ValueError:
        logging.getLogger("lpnet").exception("failed")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3 and all(line.startswith("[lpnet 2/3 ERROR] ") for line in lines)


def test_close_gives_the_logger_back(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup()
    log.close()
    logger = logging.getLogger("lpnet")
    assert logger.handlers == [] and logger.propagate and logger.level == logging.NOTSET


def test_a_lost_folder_does_not_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup(folder=tmp_path / "gone")
    speak()
    assert "Traceback" not in capsys.readouterr().err
