"""lpnet commands in processes of their own, without the seconds that importing torch takes.

A server imports everything once and forks per command: `Forked()(["train", "x.yaml"], cwd=...)`. One rank, no MPI.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Done:
    """How a command ended; code 124: it was ended after the time allowed."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def errors(self) -> list[str]:
        """Lines that the log marks as errors."""
        return [line.partition("] ")[2] for line in self.err.splitlines() if " ERROR] " in line]

    @property
    def traceback(self) -> bool:
        """Whether the user was shown a Python traceback, or the process died of a signal."""
        return "Traceback (most recent call last)" in self.out + self.err or self.code < 0 or self.code > 128


class Forked:
    """A server; use with `with`."""

    def __enter__(self) -> Forked:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()  # type: ignore[union-attr]
        self._server.wait()

    def __call__(self, arguments: list[Any], *, cwd: Path = ROOT, timeout: float = 150, umask: int = 0o022) -> Done:
        words = [str(word) for word in arguments]
        order = {"arguments": words, "cwd": str(cwd), "timeout": timeout, "umask": umask}
        self._server.stdin.write(json.dumps(order) + "\n")  # type: ignore[union-attr]
        self._server.stdin.flush()  # type: ignore[union-attr]
        return Done(**json.loads(self._server.stdout.readline()))  # type: ignore[union-attr]


def serve() -> None:
    """Fork for every line of the standard input."""
    import h5py  # noqa: F401
    import torch

    import lpnet.cli
    import lpnet.configfile
    import lpnet.train.trainer  # noqa: F401

    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # imports what the first optimiser imports
    lpnet.configfile.parse([])
    for line in sys.stdin:
        order = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            began = time.monotonic()
            child = os.fork()
            if child == 0:
                os.umask(order["umask"])
                os._exit(command(order["arguments"], order["cwd"], out.fileno(), err.fileno()))
            code = wait(child, order["timeout"])
            seconds = time.monotonic() - began
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        print(json.dumps({"code": code, "out": texts[0], "err": texts[1], "seconds": seconds}), flush=True)


def command(arguments: list[str], cwd: str, out: int, err: int) -> int:
    """In the child: the exit code of one command."""
    import traceback

    from lpnet import cli

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(cwd)
    sys.argv = ["lpnet", *arguments]
    try:
        code = cli.main(arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def wait(child: int, timeout: float) -> int:
    """The exit code of a child, negative for a signal; 124 where it had to be ended."""
    began = time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - began > timeout:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return 124
        time.sleep(0.002)


if __name__ == "__main__":
    serve()
