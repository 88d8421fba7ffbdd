"""The command line, and the only library module that names COMM_WORLD.

Mistakes are reported before torch is imported and before MPI starts; one rank without a launcher never starts MPI.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpnet.cliparts import parser_of, report, wants_help
from lpnet.errors import EXIT_STOPPED, LpnetError, UsageError
from lpnet.io import log
from lpnet.parallel import launch, signals

if TYPE_CHECKING:
    from lpnet.config import ParallelConfig
    from lpnet.parallel.comm import Comm

_CONFIG_USAGE = """\
usage: lpnet {command} [CFG.yaml] {usage}[--KEY VALUE ...]

{summary}
Flags win over the file. {more}
"""


_EMULATE = ("emulate", "network", "networks", "faults")
_EMULATE_USAGE = "[--emulate P[,P...]] [--network NAME] [--faults WORDS] "
_EMULATE_HELP = (
    "--emulate P[,P...] runs P virtual ranks in this process, with predicted times, over --network NAME (infiniband, "
    "slingshot, ethernet, loopback, or a name in --networks FILE). --faults delay=0-1:1e-3,jitter=1e-5,reorder,kill=3@9"
    " delays messages, lets ranks overtake each other, ends rank 3 at step 9."
)


@dataclass
class _Job:
    """This process among the ranks of the job, `abort` once MPI runs with several; whether it ends with the command."""

    launcher: launch.Launcher
    rank: int
    size: int
    owns_process: bool = False
    abort: Callable[[int], Any] | None = None

    def start(self, parallel: ParallelConfig) -> Comm:
        """Start MPI where there are several ranks, and set malloc and threads. Collective over COMM_WORLD."""
        if parallel.malloc:  # before torch allocates
            launch.raise_malloc_thresholds(rank=self.rank)
        world = self._world() if self.launcher.several else None
        from lpnet.parallel.comm import Comm

        comm = Comm(world)
        plan = launch.plan_threads(comm, parallel.threads)
        launch.set_threads(plan, rank=comm.rank, size=comm.size)
        return comm

    def _world(self) -> Any:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: the wheel finds no MPI library
            raise UsageError(
                f"{self.launcher.name} started {self.launcher.size or 'several'} ranks ({self.launcher.variable}), but "
                f"mpi4py cannot be loaded ({error}); install mpi4py and an MPI library, or run without a launcher"
            ) from error
        world = MPI.COMM_WORLD
        launch.check_launcher(self.launcher, world.size, MPI.Get_library_version())
        self.rank, self.size = world.rank, world.size
        if world.size > 1:
            self.abort = world.Abort
            launch.install_abort_hook(world.Abort, rank=world.rank, size=world.size)
        return world


def _print_config_help(command: Callable[..., int], usage: str = "", more: str = "") -> None:
    from lpnet.configkeys import help_text

    name = command.__name__.lstrip("_")
    print(_CONFIG_USAGE.format(command=name, usage=usage, summary=command.__doc__, more=more) + help_text(), end="")


def _count(options: Mapping[str, str], name: str, default: int) -> int:
    """An option that is a whole number greater than 0."""
    text = options.get(name, str(default))
    if not (text.isdecimal() and int(text) > 0):
        raise UsageError(f"--{name} is {text!r}; expected a whole number greater than 0")
    return int(text)


def _start_log(job: _Job, level: str, warnings: Sequence[str]) -> None:
    log.setup(job.rank, job.size, level=level)
    if job.rank == 0:
        for warning in warnings:
            logging.getLogger(log.NAME).warning(warning)


# commands; the docstring of each is its help


def _train(arguments: Sequence[str], job: _Job) -> int:
    """Train a network and leave a run folder."""
    if wants_help(arguments):
        more = f"--resume is short for --run.resume. Under mpirun or srun all ranks work. {_EMULATE_HELP}"
        _print_config_help(_train, usage=_EMULATE_USAGE, more=more)
        return 0
    from lpnet.configfile import parse

    signals.install()  # SIGUSR1 would end a process that does not listen yet
    try:
        parsed = parse(arguments, options=_EMULATE)
        _start_log(job, parsed.config.run.log_level, parsed.warnings)
        if any(name in parsed.options for name in _EMULATE):
            from lpnet.scaling.emulated import requested, train_emulated

            return train_emulated(parsed.config, requested(parsed.options, started_ranks=job.size))
        comm = job.start(parsed.config.parallel)
        from lpnet.train.trainer import train

        code = train(parsed.config, comm)
        comm.free()
        return code
    finally:
        signals.restore(at_exit=job.owns_process)


def _eval(arguments: Sequence[str], job: _Job) -> int:
    """Evaluate a checkpoint, or the newest one of a run folder, by exact propagation."""
    parser = parser_of(_eval)
    parser.add_argument("path", metavar="CKPT_OR_RUN", help="a checkpoint file or a run folder")
    parser.add_argument("--data.root", dest="data_root", metavar="DIR", help="folder of the data files, if moved")
    options = parser.parse_args(arguments)
    from lpnet.config import ParallelConfig

    _start_log(job, "INFO", ())
    comm = job.start(ParallelConfig())
    from lpnet.train.evaluation import evaluate

    code = evaluate(options.path, comm, data_root=options.data_root)
    comm.free()
    return code


def _plan(arguments: Sequence[str], job: _Job) -> int:
    """Print who would own what: partition, levels, messages, work and memory per rank; needs no MPI."""
    if wants_help(arguments):
        more = "--ranks P is the number of ranks to plan for (default 1)."
        _print_config_help(_plan, usage="[--ranks P] ", more=more)
        return 0
    from lpnet.configfile import parse

    parsed = parse(arguments, options=("ranks",))
    ranks = _count(parsed.options, "ranks", 1)
    _start_log(job, "INFO", parsed.warnings)
    if parsed.config.method in ("fdg", "pipeline"):
        from lpnet.scaling.cut_plan import cut_plan_text as text_of
    else:
        from lpnet.mgrit.plan import plan_text as text_of
    print(text_of(parsed.config, ranks).rstrip())
    return 0


def _show(arguments: Sequence[str], job: _Job) -> int:
    """Print what a checkpoint holds."""
    parser = parser_of(_show)
    parser.add_argument("path", metavar="CKPT", help="a checkpoint file")
    parser.add_argument("--verify", action="store_true", help="also check every checksum")
    options = parser.parse_args(arguments)
    from lpnet.io.checkpoint import describe

    print(describe(options.path, verify=options.verify).rstrip())
    return 0


def _export(arguments: Sequence[str], job: _Job) -> int:
    """Write the network of a checkpoint as a plain torch state_dict, or a checkpoint of a deeper one (--refine)."""
    parser = parser_of(_export)
    parser.add_argument("path", metavar="CKPT", help="a checkpoint file")
    parser.add_argument("out", metavar="OUT.pt", help="file to write; torch.load reads it")
    parser.add_argument("--refine", type=int, metavar="K", help="OUT is a folder: a checkpoint of K times the layers")
    parser.add_argument("--interpolation", choices=("linear", "constant"), default="linear", help="of a refinement")
    options = parser.parse_args(arguments)
    if options.refine is not None:
        from lpnet.train.stages import refine_checkpoint

        print(refine_checkpoint(options.path, options.out, options.refine, interpolation=options.interpolation))
        return 0
    from lpnet.train.export import export_checkpoint

    export_checkpoint(options.path, options.out)
    return 0


def _info(arguments: Sequence[str], job: _Job) -> int:
    """Print versions and what MPI and HDF5 can do here."""
    parser_of(_info).parse_args(arguments)
    with suppress(ImportError):
        import mpi4py

        mpi4py.rc.initialize = False  # its library's name is known without starting it
    from lpnet.io.environment import describe

    print(describe().rstrip())
    return 0


def _bench(arguments: Sequence[str], job: _Job) -> int:
    """Train a few steps and print where their time goes: by span, level and rank; writes no run folder."""
    if wants_help(arguments):
        more = f"--steps N steps are measured (default 20); --json FILE also writes the numbers. {_EMULATE_HELP}"
        _print_config_help(_bench, usage=f"[--steps N] [--json FILE] {_EMULATE_USAGE}", more=more)
        return 0
    from lpnet.configfile import parse

    parsed = parse(arguments, options=("steps", "json", *_EMULATE))
    steps = _count(parsed.options, "steps", 20)
    _start_log(job, parsed.config.run.log_level, parsed.warnings)
    if any(name in parsed.options for name in _EMULATE):
        from lpnet.scaling.emulated import bench, requested, tables
        from lpnet.scaling.profile import save_all

        profiles = bench(parsed.config, requested(parsed.options, started_ranks=job.size), steps=steps)
        print(tables(profiles))
        if "json" in parsed.options:
            save_all(Path(parsed.options["json"]), profiles)
        return 0
    comm = job.start(parsed.config.parallel)
    from lpnet.scaling.profile import profile
    from lpnet.train.trainer import check

    check(parsed.config, comm)
    found = profile(parsed.config, comm, steps=steps)
    if comm.rank == 0:
        print(found.table())
        if "json" in parsed.options:
            found.save(Path(parsed.options["json"]))
    comm.free()
    return 0


def _data(arguments: Sequence[str], job: _Job) -> int:
    """Download a public data set: lpnet data fetch mnist|cifar10|cifar100 --root DIR."""
    parser = parser_of(_data)
    parser.add_argument("action", choices=["fetch"], help="download with checksums; an interrupted one goes on")
    parser.add_argument("name", metavar="NAME", help="mnist, cifar10 or cifar100")
    parser.add_argument("--root", required=True, metavar="DIR", help="folder to put the files into")
    parser.add_argument("--base-url", dest="base_url", metavar="URL", help="a mirror, in place of the public source")
    options = parser.parse_args(arguments)
    _start_log(job, "INFO", ())
    from lpnet.data.fetch import fetch

    print(fetch(options.name, options.root, options.base_url))
    return 0


def _study(arguments: Sequence[str], job: _Job) -> int:
    """Run a scaling study, real or emulated, and leave its tables and pictures; goes on where it was interrupted."""
    parser = parser_of(_study)
    parser.add_argument("path", metavar="STUDY.yaml", help="a study, such as drivers/scaling_peaks.yaml")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of study.csv, study.json, study.md, PNG")
    parser.add_argument("--data.root", dest="data_root", metavar="DIR", help="folder of the data files")
    parser.add_argument("--run", choices=("emulated", "measured"), help="in place of the file's run")
    parser.add_argument("--launch", metavar="COMMAND", help="how measured cells start, such as 'srun -n {ranks}'")
    options = parser.parse_args(arguments)
    if job.size > 1:
        raise UsageError("lpnet study launches its own ranks; start it without mpirun")
    signals.install()
    from lpnet.scaling.cells import read_study

    study = read_study(options.path, data_root=options.data_root, run=options.run, launch=options.launch)
    _start_log(job, "INFO", ())
    from lpnet.scaling.study import run_study

    try:
        if run_study(study, Path(options.out)) is None:
            return EXIT_STOPPED
    finally:
        signals.restore(at_exit=job.owns_process)
    print((Path(options.out) / "study.md").read_text(encoding="utf-8").rstrip())
    return 0


def _tune(arguments: Sequence[str], job: _Job) -> int:
    """Choose method, ranks and grids from measured costs and emulation; prints why and writes the configuration."""
    own = ("ranks", "out", "max-error", "network", "networks")
    if wants_help(arguments):
        more = (
            "--ranks P: ranks there are; --out FILE is written (default tuned.yaml); --max-error E: largest relative "
            "gradient error (default 0.1); --network NAME [--networks FILE] as in lpnet bench."
        )
        _print_config_help(_tune, usage="--ranks P [--out FILE] [--max-error E] [--network NAME] ", more=more)
        return 0
    from lpnet.configfile import parse, to_yaml

    parsed = parse(arguments, options=own)
    if job.size > 1:
        raise UsageError("lpnet tune emulates the ranks; start it without mpirun")
    _start_log(job, "ERROR", ())  # what candidates warn of is in the table
    from lpnet.scaling.tune import tune_as_asked

    print(tune_as_asked(parsed.config, parsed.options, to_yaml))
    return 0


_COMMANDS = {
    "train": _train,
    "eval": _eval,
    "bench": _bench,
    "study": _study,
    "tune": _tune,
    "plan": _plan,
    "show": _show,
    "export": _export,
    "report": report,
    "data": _data,
    "info": _info,
}
_TOGETHER = ("train", "eval", "bench", "study", "tune")  # all ranks work; of the others, rank 0 only


def _usage() -> str:
    lines = "\n".join(f"  {name:<8} {command.__doc__}" for name, command in _COMMANDS.items())
    return (
        f"usage: lpnet COMMAND ...\n\n{lines}\n\nlpnet COMMAND --help tells more; lpnet --version prints the version.\n"
        "Exit codes: 0 done, 1 failure, 2 usage or configuration, 75 stopped early with a checkpoint."
    )


def _run(arguments: Sequence[str], job: _Job) -> int:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if job.rank > 0 and (name not in _TOGETHER or wants_help(rest)):
        return 0
    if not name:
        raise UsageError(f"no command; known: {', '.join(_COMMANDS)}; see lpnet --help")
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        import lpnet

        print(f"lpnet {lpnet.__version__}")
        return 0
    if name not in _COMMANDS:
        nearest = get_close_matches(name, _COMMANDS, 1)
        remedy = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(_COMMANDS)}"
        raise UsageError(f"{name} is not a command; {remedy}")
    return _COMMANDS[name](rest, job)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; with several ranks, an error ends the job.

    Args:
        arguments: the words after `lpnet`; None: those of this process, which then ends.
    """
    launcher = launch.detect()
    job = _Job(launcher, launcher.rank, launcher.size, owns_process=arguments is None)
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments), job)
        sys.stdout.flush()
        return code
    except SystemExit as finished:  # argparse, after --help
        return finished.code if isinstance(finished.code, int) else 0
    except BrokenPipeError as error:
        if job.abort is not None:
            return launch.fail(error, rank=job.rank, size=job.size, abort=job.abort)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `lpnet plan ... | head` is no failure
        return 0
    except KeyboardInterrupt:
        return launch.fail(LpnetError("interrupted"), rank=job.rank, size=job.size, abort=job.abort)
    except Exception as error:
        if job.size == 1 and not isinstance(error, LpnetError):
            launch.keep_error(error)
            raise
        return launch.fail(error, rank=job.rank, size=job.size, abort=job.abort)
    finally:
        log.close()
