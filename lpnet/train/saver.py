"""When a checkpoint is written, and what happens where it cannot be: the run goes on, or stops, as configured.

The last checkpoint of a run is always waited for, and an error of the last one is always an error of the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from lpnet.errors import SaveError
from lpnet.io.checkpoint import Attribute
from lpnet.io.checkpoint import save as write_checkpoint
from lpnet.parallel.comm import Comm
from lpnet.train.async_saving import Shards, Snapshot, StepWriter, ThreadWriter, Writer, threads_may_send

log = logging.getLogger("lpnet.train")


class Saver:
    """Writes the checkpoints of one run. Collective over comm when made.

    Args:
        folder: of the checkpoints.
        comm: ranks.
        keep: newest checkpoints kept.
        mode: run.async_save.
        on_error: run.on_save_error.
        written: step of the newest checkpoint; None: there is none.
    """

    def __init__(
        self,
        folder: Path,
        comm: Comm,
        *,
        keep: int,
        mode: Literal["off", "thread", "step"] = "off",
        on_error: Literal["stop", "continue"] = "stop",
        written: int | None = None,
    ) -> None:
        self._folder, self._comm, self._keep, self._on_error = folder, comm, keep, on_error
        if comm.size > 1 and comm.mpi is None:
            mode = "off"  # emulated ranks are threads themselves
        if mode == "thread" and comm.size > 1 and not all(comm.all_gather_objects(threads_may_send())):
            self._say("this MPI does not grant THREAD_MULTIPLE: checkpoints are written between the steps")
            mode = "step"
        self._writer: Writer | None = {"off": lambda _: None, "thread": ThreadWriter, "step": StepWriter}[mode](comm)
        self._snapshot = Snapshot()
        self._under_way: int | None = None
        self._began = 0.0
        self._failed: SaveError | None = None
        self.written = written
        """Step of the newest checkpoint that is known to be written."""
        self.longest = 0.0
        """Seconds that the longest save has taken so far."""

    def save(self, step: int, shards: Shards, attributes: Mapping[str, Attribute], *, last: bool = False) -> None:
        """Write a checkpoint, or begin to. Collective over comm.

        Args:
            step: optimisation steps done.
            shards: what it holds, by section.
            attributes: root attributes.
            last: nothing comes after it: it is waited for, and an error is raised in any case.

        Raises:
            SaveError: on every rank; this one, or the one under way, cannot be written.
        """
        before = self._under_way
        began = time.perf_counter()
        self.finish()
        if before is not None and not last and time.perf_counter() - began > 0.1:
            self._say(
                "waited %.1f s for the checkpoint of step %d to be written; raise run.checkpoint_every",
                time.perf_counter() - began,
                before,
            )
        self._began = time.perf_counter()
        if self._writer is not None and not last:
            self._under_way = step
            self._writer.start(self._folder, step, self._snapshot.take(shards), attributes, self._keep)
            return
        try:
            path = write_checkpoint(
                self._folder, self._comm, step=step, shards=shards, attributes=attributes, keep=self._keep
            )
        except SaveError as error:
            if last:
                raise
            self._refused(error)
            if self._failed is not None:
                raise
        else:
            self._wrote(step, path)

    def poll(self) -> bool:
        """Go on with a save that is under way, between two steps: whether the run must stop for one that has failed.

        Collective over comm while one is under way and run.async_save is `step`.
        """
        if self._under_way is not None and self._writer is not None:
            try:
                path = self._writer.advance()
            except SaveError as error:
                self._refused(error)
            else:
                if path is not None:
                    self._wrote(self._under_way, path)
        return self._failed is not None

    def finish(self) -> None:
        """Wait for a save that is under way. Collective over comm.

        Raises:
            SaveError: on every rank; it cannot be written, and run.on_save_error is stop.
        """
        if self._under_way is not None and self._writer is not None:
            try:
                path = self._writer.wait()
            except SaveError as error:
                self._refused(error)
            else:
                self._wrote(self._under_way, path)
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Give back thread and communicator; no save is under way. Collective over comm."""
        if self._writer is not None:
            self._writer.close()

    def _wrote(self, step: int, path: Path) -> None:
        self.written = step
        seconds = time.perf_counter() - self._began
        self.longest = max(self.longest, seconds)
        beside = f" in {seconds:.2f} s beside the training" if self._under_way is not None else ""
        self._under_way = None
        self._say("saved %s%s", path, beside)

    def _refused(self, error: SaveError) -> None:
        self._under_way = None
        if self._on_error == "stop":
            self._failed = error
        elif self._comm.rank == 0:
            log.warning("%s; the run goes on, as run.on_save_error says", error)

    def _say(self, message: str, *values: object) -> None:
        if self._comm.rank == 0:
            log.info(message, *values)
