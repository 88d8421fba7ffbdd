"""The loop around the steps: data, network, resume, evaluation, checkpoints, metrics, pictures.

for step in steps:   [evaluate exactly]  ->  strategy.step  ->  metrics row  ->  [checkpoint]
at the end:          evaluate exactly, last row, checkpoint, pictures, trace
asked to stop:       last row, checkpoint; heard at every step, trial of a line search and part of an evaluation
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from lpnet.config import Config
from lpnet.configfile import to_yaml
from lpnet.data.batches import BatchOrder
from lpnet.data.samples import load as load_data
from lpnet.errors import EXIT_STOPPED, ConfigError, LpnetError, NumericsError, SaveError
from lpnet.fdg.times import lines as time_lines
from lpnet.io import environment, trace
from lpnet.io import log as run_log
from lpnet.io.metrics import MetricsWriter
from lpnet.io.plots import require_matplotlib
from lpnet.mgrit.layer_parallel import LayerParallel
from lpnet.nn.models import DTYPES
from lpnet.parallel.comm import Comm
from lpnet.train import build
from lpnet.train.decoupled import DecoupledNet
from lpnet.train.evaluation import Scores, evaluate, score
from lpnet.train.feed import Feed
from lpnet.train.pictures import draw
from lpnet.train.progress import Progress
from lpnet.train.records import Work, completed, row, trace_row
from lpnet.train.run_folder import RunFolder
from lpnet.train.saver import Saver
from lpnet.train.saving import config_of, contents, load
from lpnet.train.stages import at_layers, refined, stage_of
from lpnet.train.stopping import Stopping
from lpnet.train.watchdog import Watchdog

__all__ = ["EXIT_STOPPED", "Trainer", "evaluate", "train"]

log = logging.getLogger("lpnet.train")


def train(config: Config, comm: Comm) -> int:
    """Train as a configuration says and leave a run folder. Collective over comm.

    Returns:
        Exit code: 0 done, 75 stopped early with a checkpoint.

    Raises:
        UsageError: on every rank, before any message of the training: a configuration that cannot run, data or a
            checkpoint that cannot be read, a run folder that already holds a run.
        NumericsError: on every rank; loss or gradient is not finite.
        SaveError: on every rank; a checkpoint cannot be written, and run.on_save_error is stop or it is the last one.
    """
    check(config, comm)
    folder = RunFolder.open(config, comm)
    speaks = comm.rank == 0 or comm.meter is None  # emulated ranks share the log of one process
    if speaks:
        run_log.setup(comm.rank, comm.size, folder=folder.path, level=config.run.log_level)
    if config.run.trace:
        trace.start(comm)
    try:
        code = Trainer(config, comm, folder).run()
        if config.run.trace:
            trace.stop()
            try:
                trace.write(folder.path / "trace.json", comm)
            except (OSError, LpnetError) as error:
                if comm.rank == 0:
                    log.warning("%s cannot be written: %s", folder.path / "trace.json", error)
        return code
    finally:
        trace.stop()
        if speaks:
            run_log.close()


def check(config: Config, comm: Comm) -> None:
    """What cannot run is refused before anything is written. No communication.

    Raises:
        UsageError: on every rank.
    """
    build.check(config, comm.size)
    if config.run.plots:
        require_matplotlib()


class Trainer:
    """One run.

    Collective over comm when made (data, network, resume).

    Args:
        config: the run.
        comm: ranks.
        folder: where to write, and the checkpoint to go on from.
    """

    def __init__(self, config: Config, comm: Comm, folder: RunFolder) -> None:
        if folder.checkpoint is not None:
            config = build.measured_before(config, config_of(folder.checkpoint), comm.size)
        self.config, self.comm, self.folder = config, comm, folder
        self.data = comm.shared(lambda: load_data(config.data, config.seed, DTYPES[config.model.dtype]))
        self.order = BatchOrder(
            len(self.data.train),
            config.data.batch_size,
            config.seed,
            "fixed" if build.keeps_states(config) else "reshuffled",
        )
        if config.optim.name == "lbfgs" and not self.order.full:
            raise ConfigError(
                f"optim.name lbfgs needs the full batch of {len(self.data.train)} samples, and data.batch_size is "
                f"{config.data.batch_size}; set data.batch_size null, or use adam or sgd"
            )
        self.layers = config.train.layers_at(0)  # of this stage; None: there is one
        if folder.checkpoint is not None:
            self.layers = stage_of(folder.checkpoint, config)
        self.net, self.strategy, made = build.build(at_layers(config, self.layers), self.data, self.order, comm)
        self.config = config if self.layers is not None else made
        self.step, self.work = 0, Work()
        if folder.checkpoint is not None:
            self.work = Work.of(folder.checkpoint.attributes)
            loaded = load(folder.checkpoint.path, self.net, self.strategy)
            folder.checkpoint.close()
            self.step = self.strategy.steps = loaded.step
            self._say("going on from %s at step %d", folder.checkpoint.path, self.step)
            if loaded.config is not None and not same_batches(loaded.config, config):
                self.net.forget()
                log.warning("data or seed differ from those of the checkpoint: its kept states are not used")
        run = config.run
        self.stopping = Stopping(folder.path, rank=comm.rank, margin_s=run.stop_margin_s)
        self.saver = Saver(
            folder.checkpoints,
            comm,
            keep=run.keep,
            mode=run.async_save,
            on_error=run.on_save_error,
            written=self.step if folder.checkpoint is not None else None,
        )
        self.watchdog = Watchdog(run.stall_s, rank=comm.rank, size=comm.size, mpi=comm.mpi)
        environment.write(folder.path, comm)
        comm.together(lambda: folder.write_config(self.config) if comm.rank == 0 else None)

    def run(self) -> int:
        """Train to run.steps, or until the optimiser is done or a stop is asked for. Collective over comm.

        Returns:
            Exit code.
        """
        with self.watchdog:
            try:
                return self._run()
            except NumericsError:  # on every rank: what is being written still holds finite numbers
                with suppress(SaveError):
                    self.saver.finish()
                raise

    def _run(self) -> int:
        run, comm = self.config.run, self.comm
        parameters = sum(shard.tensor.numel() for shard in self.net.shards())
        self._say(
            "%d training and %d validation samples, %s on %d rank(s), %d parameters on this one, in %s",
            len(self.data.train),
            len(self.data.validation),
            build.describe(self.net, self.config),
            comm.size,
            parameters,
            self.folder.path,
        )
        if comm.predicted is not None:
            self._say("times are %s", comm.predicted)
        began, stopped = comm.now(), False
        before = self.folder.row_at(self.step) if comm.rank == 0 else {}
        resume_at = self.step if self.folder.checkpoint is not None or self.folder.metrics.exists() else None
        with (
            comm.together(lambda: MetricsWriter(self.folder.metrics, rank=comm.rank, resume_at=resume_at)) as metrics,
            Progress(run.steps, self.step, rank=comm.rank) as progress,
            self._feed() as feed,
        ):
            while self.step < run.steps and not stopped:
                self.watchdog.beat(f"step {self.step}")
                failed = self.saver.poll()
                self.strategy.stop_requested |= self.stopping.begin_step() or failed
                scores = None
                if run.eval_every and self.step % run.eval_every == 0:
                    scores = self._score()
                    if stopped := scores is None:
                        break
                self._begin_stage()
                comm.at_step(self.step)
                with trace.span("step", step=self.step):
                    report = self.strategy.step(*feed.next(self.step))
                if stopped := report.abandoned:
                    break
                if report.finished is not None:
                    self._say("stopped at step %d: %s", self.step, report.finished)
                    break
                self.work.add(report)
                shown = completed(row(self.step, report, scores), before)
                metrics.write(shown)
                trace_row(shown)
                progress.update(self.step, report, scores)
                self.step += 1
                stopped = report.stop
                due = run.checkpoint_every and self.step % run.checkpoint_every == 0 and self.step < run.steps
                if due and not stopped:
                    self._save()
            if not stopped:
                self.strategy.finish()
            self.saver.finish()
            if self.saver.written != self.step:
                self._save(last=True)
            self.saver.close()
            scores = None if stopped else self._score()
            metrics.write(row(self.step, self.strategy.current, scores) | self._module_times())
        self.watchdog.stop()
        self._summarise()
        if scores is None:
            self._say("step %d: stopped early in %s, %.1f s", self.step, self.folder.path, comm.now() - began)
            self.stopping.done()
            return EXIT_STOPPED
        self._say(
            "step %d: training accuracy %.2f %%, validation accuracy %.2f %%, validation loss %.4f, %.1f s",
            self.step,
            scores.train_accuracy,
            scores.val_accuracy,
            scores.val_loss,
            comm.now() - began,
        )
        if run.plots:
            with trace.span("pictures"):
                draw(
                    self.folder,
                    self.net,
                    self.data,
                    title=f"{self.config.data.name}, {self.config.method}, step {self.step}",
                )
        self._say("done in %s", self.folder.path)
        return 0

    def _feed(self) -> Feed:
        return Feed(
            self.data,
            self.order,
            self.config.data,
            self.config.seed,
            first=self.step,
            last=self.config.run.steps,
            reads=getattr(self.net, "reads_samples", True),
            threads=self.comm.meter is None,
            tell=getattr(self.net, "tell", None),
        )

    def _begin_stage(self) -> None:
        """Refine the network where a stage of depth begins with this step. Collective there."""
        layers = self.config.train.layers_at(self.step)
        if layers is None or layers == self.layers:
            return
        assert isinstance(self.net, LayerParallel)
        self._say("step %d: from %s to %d layers", self.step, self.layers, layers)
        self.layers = layers
        self.net, self.strategy = refined(self.net, self.strategy, self.config, layers, self.order.batches)

    def _summarise(self) -> None:
        """What the steps cost, and how good their gradients were. No communication."""
        watch = getattr(self.strategy, "watch", None)
        if watch is None or not watch.on or self.comm.rank != 0:
            return
        environment.add(self.folder.path, self.work.attributes())
        self._say(
            "%s; %d layer evaluations on the longest chain, %.1f %% of them for comparing",
            watch.controller.summary() or "no gradient was compared with an exact one",
            self.work.evaluations,
            100 * self.work.compared / max(self.work.evaluations, 1),
        )

    def _score(self) -> Scores | None:
        """Accuracies; None where a rank was asked to stop."""

        def interrupted() -> bool:
            self.watchdog.beat(f"an evaluation at step {self.step}")
            return self.stopping.requested()

        with trace.span("evaluate", step=self.step):
            return score(self.net, self.data, interrupted)

    def _module_times(self) -> dict[str, Any]:
        """Decoupled modules: for the last row, and said, how they spent their time. Collective over comm."""
        if not isinstance(self.net, DecoupledNet):
            return {}
        times = self.net.module_times()
        for line in time_lines(times):
            self._say(line)
        return {"modules": [asdict(time) for time in times]}

    def _save(self, *, last: bool = False) -> None:
        epoch, position = divmod(self.step, self.order.batches)
        attributes = {
            "method": self.config.method,
            "seed": self.config.seed,
            "position_in_epoch": position,
            "config": to_yaml(self.config),
            **self.work.attributes(),
        }
        self.watchdog.beat(f"the checkpoint of step {self.step}")
        with trace.span("save", step=self.step):
            self.strategy.before_save()
            shards, written = contents(self.net, self.strategy, epoch=epoch, attributes=attributes)
            self.saver.save(self.step, shards, written, last=last)
        self.stopping.saved(self.saver.longest)

    def _say(self, message: str, *values: Any) -> None:
        if self.comm.rank == 0:
            log.info(message, *values)


def same_batches(one: Config, two: Config) -> bool:
    """Whether two runs see the same samples in the same batches. No communication."""
    return one.seed == two.seed and replace(one.data, root=".") == replace(two.data, root=".")
