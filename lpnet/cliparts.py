"""Parts of the command line that need nothing of it: the parser of a command, and the command `report`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lpnet.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of ending the process.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{self.prog}: {message}; see {self.prog} --help")


def parser_of(command: Callable[..., int]) -> Parser:
    """The parser of a command, which is described by its docstring. No communication."""
    name = command.__name__.lstrip("_")
    return Parser(prog=f"lpnet {name}", description=command.__doc__, allow_abbrev=False)


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether help is asked for. No communication."""
    return "-h" in arguments or "--help" in arguments


def report(arguments: Sequence[str], job: Any) -> int:
    """Write one self-contained HTML page about runs: curves, residuals, gradients, timeline, settings, a verdict."""
    parser = parser_of(report)
    parser.add_argument("paths", metavar="RUN", nargs="+", help="run folders, or folders of them")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="page to write (default report.html)")
    options = parser.parse_args(arguments)
    from lpnet.io.report import write_report

    print(write_report(options.paths, options.out))
    return 0
