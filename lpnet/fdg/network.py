"""A network cut into modules, one per rank or all in one process: what all ways of training it share.

The same calls must be made on all ranks in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from lpnet.errors import LpnetError, NumericsError, UsageError
from lpnet.fdg.chain import Chain, SharedUnit, check_cuts, check_ties, units_of
from lpnet.fdg.cuts import CutPlan, find_cuts
from lpnet.fdg.flight_state import load_state, state_shards
from lpnet.fdg.mailbox import Mailbox, in_memory
from lpnet.fdg.member import Member, Score, drive
from lpnet.fdg.message import KINDS
from lpnet.fdg.mpi_mailbox import MPIMailbox
from lpnet.fdg.options import Makers, Options, check_same
from lpnet.fdg.place import arrange, check_ranks
from lpnet.fdg.reports import Evaluation, StepReport
from lpnet.fdg.times import Stopwatch
from lpnet.parallel.comm import Comm
from lpnet.parallel.shard import Shard

Cuts = Literal["by_cost", "uniform"] | Sequence[int]
M = TypeVar("M", bound=Member)


class CutNetwork(Generic[M]):
    """A network in K modules. Collective over comm when made: the ranks compare what they were given.

    Args:
        network: a Sequential whose children are the units; all ranks give the same.
        comm: ranks, one per module, or a multiple of that for data replicas; None or one rank: all modules here.
        modules: K; None: as many as ranks.
        cuts: by_cost | uniform | index of the first unit of every module after the first.
        makers: of optimisers, schedulers and losses.
        options: given K, the settings that all modules share.
        example: (samples, labels) to measure the cuts on; None: the first batch.
        ranks_per_module: ranks that share each module; None: one each.
        more: further settings that all ranks must share.

    Raises:
        UsageError: on every rank; see the messages.
    """

    def __init__(
        self,
        network: torch.nn.Sequential | Sequence[torch.nn.Module],
        *,
        comm: Any,
        modules: int | None,
        cuts: Cuts,
        makers: Makers,
        options: Callable[[int], Options],
        example: tuple[Tensor, Tensor] | None,
        ranks_per_module: Sequence[int] | None = None,
        more: object = None,
    ) -> None:
        # no message meets one of another network
        self.comm = comm.duplicate() if isinstance(comm, Comm) else Comm(comm)
        self.stopwatch = Stopwatch(self.comm)
        self.members: list[M] = []
        self.bounds: tuple[int, ...] = ()
        self.batches = 0  # given to `step` so far
        self.plan: CutPlan | None = None  # shares and memory, where the cuts were measured
        self._cuts, self._makers = cuts, makers
        self._boxes: Sequence[Mailbox] = ()
        self._dead: str | None = None
        self._wished = False

        def validated() -> Options:
            self.units = units_of(network)
            self.unit_names = tuple(self.units)
            every = self.comm.size if ranks_per_module is None else len(ranks_per_module)
            self.modules = every if modules is None else modules
            return options(self.modules)

        self.options: Options = self.comm.together(validated)
        check_same(self.units, (self.options, cuts, more, ranks_per_module), self.comm)
        self.comm.together(lambda: self._check_cuts(ranks_per_module))
        self.place = arrange(self.comm, self.modules, ranks_per_module)
        self.comm.alike(("modules", *self.place.local))
        if cuts != "by_cost" or self.modules == 1 or example is not None:
            self._build(*(example or (None, None)))

    def _check_cuts(self, ranks_per_module: Sequence[int] | None) -> None:
        if self.modules > len(self.units):
            check_cuts([], len(self.units), self.modules)
        check_ranks(self.comm.size, self.modules, ranks_per_module)
        if not isinstance(self._cuts, str):
            check_ties(self.units, check_cuts(self._cuts, len(self.units), self.modules))

    # modules

    def _build(self, x: Tensor | None, y: Tensor | None) -> None:
        """Cut the network and make this rank's modules. Collective over comm."""
        cuts, options = self._cuts, self.options
        if isinstance(cuts, str):
            cuts, self.plan = find_cuts(
                self.units,
                cuts,
                options.schedule,
                options.backward,
                comm=self.comm,
                example=(x, y),
                loss=self._makers.loss,
                autocast=options.autocast,
            )
        self.bounds = check_cuts(cuts, len(self.unit_names), self.modules)
        self.comm.together(self._make_shared_units)
        self.members = self.comm.together(self._make_members)
        mine = [name for member in self.members for name, _ in member.stage.chain.named_children()]
        self.units = {name: self.units[name] for name in mine}  # the others are on other ranks
        self._share_weights()
        if self._wished:
            self.request_stop()

    def _make_shared_units(self) -> None:
        """Units of this rank that are shared with others. Collective over the ranks of their module."""
        names = self.unit_names
        for module, share in enumerate(self.place.shares, 1):
            unit = self.units[names[self.bounds[module - 1]]]
            if share > 1 and (self.bounds[module] - self.bounds[module - 1] > 1 or not isinstance(unit, SharedUnit)):
                raise UsageError(
                    f"module {module} of {self.bounds[module] - self.bounds[module - 1]} units is shared by {share} "
                    "ranks; such a module is one unit, given as a function that makes it from their communicator"
                )
        for module in self.place.local:
            for name in names[self.bounds[module - 1] : self.bounds[module]]:
                unit = self.units[name]
                if isinstance(unit, SharedUnit):
                    self.units[name] = unit.factory(self.place.group.duplicate() if self.place.group else Comm())

    def _make_members(self) -> list[M]:
        check_ties(self.units, self.bounds)
        place, options = self.place, self.options
        chains = [
            Chain(self.units, self.bounds[module - 1], self.bounds[module], seed=options.seed) for module in place.local
        ]
        device = chains[0].device
        if self.comm.size == 1:
            self._boxes = in_memory(self.modules, gradient_dtype=options.gradient_dtype, device=device)
        else:
            ranks = (place.chain, place.group, place.peers)
            self._boxes = [MPIMailbox(*ranks, gradient_dtype=options.gradient_dtype, device=device)]
            chains[0].between = self._boxes[0].poll
        made = zip(place.local, chains, self._boxes, strict=True)
        return [self._make_member(module, chain, box) for module, chain, box in made]

    def _share_weights(self) -> None:
        """Data replicas begin with the parameters and buffers of the first. Collective over those."""
        if self.place.peers is not None:
            for member in self.members:
                for tensor in member.stage.chain.state_dict().values():
                    dense = tensor.contiguous()
                    tensor.copy_(self.place.peers.broadcast(dense, 0))

    def _make_member(self, module: int, chain: Chain, box: Mailbox) -> M:
        raise NotImplementedError

    def flush(self) -> tuple[StepReport, ...]:
        """Finish what is in flight. Neighbour messages only."""
        raise NotImplementedError

    @property
    def cuts(self) -> list[int]:
        """Index of the first unit of every module after the first: to be kept with the run, and given again."""
        self._built()
        return list(self.bounds[1:-1])

    @property
    def is_first(self) -> bool:
        """Whether this rank owns module 1, which reads the samples."""
        return self.place.local[0] == 1

    @property
    def is_last(self) -> bool:
        """Whether this rank owns module K, which reads the labels."""
        return self.place.local[-1] == self.modules

    @property
    def lr(self) -> float:
        """Learning rate of the next batch to land on this rank's first module."""
        return self._first.update.rate

    @property
    def _first(self) -> M:
        return self._built()[0]

    def _built(self) -> list[M]:
        if not self.members:
            raise UsageError(
                "cuts by_cost are found on the first batch, and there was none; give example=(samples, labels), or cuts"
            )
        return self.members

    # failing and stopping

    def request_stop(self) -> None:
        """Ask all modules to stop: a report soon says when, at the same step on every rank. No communication."""
        self._wished = True
        for member in self.members:
            member.wish()

    def _raise_failure(self) -> None:
        failure = self._first.news.failure
        if failure is not None:
            name = self.unit_names[failure.unit]
            what = {"input": "the samples are", "loss": "the loss is", "gradient": "the gradient is"}
            raise NumericsError(
                f"module {failure.module}/{self.modules}, batch {failure.batch}, unit {failure.unit} ({name!r}): "
                f"{what.get(KINDS[failure.kind], 'the output is')} not finite. Lower the learning rate, or clip the "
                "gradients"
            )

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """An error here ends the other modules too."""
        if self._dead is not None:
            raise LpnetError(f"training has ended with an error: {self._dead}; make a new FDG, or resume a checkpoint")
        try:
            yield
        except BaseException as error:
            if isinstance(error, NumericsError):  # all modules stop by themselves
                self._dead = str(error)
            else:
                self.fail(error, what)
            raise

    def fail(self, error: BaseException, what: str) -> None:
        """End training on all modules with an error of this rank. Neighbour messages only.

        Args:
            error: what the others will raise.
            what: was being done.
        """
        self._dead = str(error)
        if self.members:
            member = self.members[0]
            for box in self._boxes:
                box.alarm(error, f"module {member.module}/{self.modules}, {what} at tick {member.tick}")

    # evaluation

    def evaluate(
        self, batches: Iterable[tuple[Tensor | None, Tensor | None]], score: Score | None = None
    ) -> Evaluation | tuple[float, ...]:
        """Forward only, in evaluation mode, while the work in flight stays parked. Neighbour messages only.

        Every module uses its current weights; training goes on as if there had been no evaluation, bit for bit.

        Args:
            batches: samples and labels, as many on every rank; needed where `step` needs them. Data replicas may each
                give their part, of one batch or more, whose sums are added.
            score: of output and labels, some numbers to be summed over all batches; None: loss and accuracy.

        Returns:
            The sums of `score`, or an `Evaluation`; the same on every rank.

        Raises:
            UsageError: samples or labels are missing.
            LpnetError: another module has failed, or the ranks were given different numbers of batches.
        """
        with self._guarded("evaluation"):
            self._evaluate(batches, score or self._score)
            sums = self._first.sums
        if score is not None:
            return sums
        loss, correct, samples, classes = sums or (0.0, 0.0, 0.0, 0.0)
        count = max(samples, 1.0)
        return Evaluation(loss / count, 100.0 * correct / count if classes else None, int(samples))

    def predict(self, x: Tensor | None) -> Tensor | None:
        """Output in evaluation mode on the rank of the last module, None elsewhere. Neighbour messages only.

        Args:
            x: samples, needed on the rank of module 1.
        """
        outputs: list[Tensor] = []

        def keep(out: Tensor, _: Tensor | None) -> tuple[float, ...]:
            outputs.append(out)
            return ()

        with self._guarded("prediction"):
            self._evaluate([(x, None)], keep)
        return outputs[0] if outputs else None

    def _evaluate(self, batches: Iterable[tuple[Tensor | None, Tensor | None]], score: Score) -> None:
        members = self._built()
        given = itertools.tee(batches, len(members))  # the queues keep the modules within a few batches of each other
        drive(members, [member.evaluate(own, score) for member, own in zip(members, given, strict=True)])

    def _score(self, out: Tensor, y: Tensor | None) -> tuple[float, ...]:
        if y is None:
            raise UsageError("evaluation needs labels on the rank of the last module")
        if out.dtype in (torch.bfloat16, torch.float16):
            out = out.float()
        count = len(y)
        classes = not y.is_floating_point() and out.dim() == 2 and y.dim() == 1
        correct = int((out.argmax(1) == y).sum()) if classes else 0
        return float(self._makers.loss(out, y)) * count, float(correct), float(count), float(classes)

    # parameters and checkpoints

    def shards(self) -> list[Shard]:
        """What a checkpoint holds of this rank's modules: `all_shards` on the first data replica, nothing on others.

        No communication.
        """
        return self.all_shards() if self.place.saves else []

    def all_shards(self) -> list[Shard]:
        """Parameters and buffers of this rank's modules by global name; trainable ones as the optimiser has them.

        To be filled from a checkpoint, on all data replicas. No communication.
        """
        return [shard for member in self._built() for shard in member.shards()]

    @property
    def optimizers(self) -> list[tuple[torch.optim.Optimizer, list[Shard]]]:
        """Optimisers of this rank's modules, each with its parameters by global name, on all data replicas."""
        out = []
        for member in self._built():
            optimizer = member.update.optimizer
            if optimizer is not None:
                own = {id(p) for group in optimizer.param_groups for p in group["params"]}
                out.append((optimizer, [shard for shard in member.shards() if id(shard.tensor) in own]))
        return out

    def state_shards(self) -> list[Shard]:
        """The work in flight of this rank, for a checkpoint: see `lpnet.fdg.flight_state`. Neighbour messages only.

        Every rank calls it after the same tick. With `mixed`, drain first (`drain_before_save`).
        """
        self._built()
        if self.options.backward == "mixed" and self.in_flight:
            raise UsageError("backward mixed cannot rebuild its graphs; call drain_before_save() before saving")
        return state_shards(self)

    def drain_before_save(self) -> tuple[StepReport, ...]:
        """What must be done before saving: `mixed` drains, nothing else does. Neighbour messages only."""
        return self.flush() if self.options.backward == "mixed" else ()

    def load_state(self, names: Sequence[str], read: Callable[[str], Tensor]) -> None:
        """Take over the work in flight, after parameters, buffers and optimisers. No communication.

        Args:
            names: of all entries of the checkpoint's section.
            read: gives the tensor of a name.

        Raises:
            CheckpointError: work in flight of another number of modules, or of other settings.
        """
        self._built()
        load_state(self, names, read)

    @property
    def in_flight(self) -> int:
        """Batches that some module has yet to learn from."""
        member = self._first
        count = self.batches - member.origin
        return count - max(0, min(count, member.since - self.options.schedule.delay(1)))

    def gather_state_dict(self) -> dict[str, Tensor] | None:
        """A plain torch state_dict of the whole network on rank 0, None elsewhere. Collective over comm."""
        self._built()
        whole = self.place.group is None and self.place.saves  # with the second names of tied parameters
        mine = [Shard(*pair) for m in self.members for pair in m.stage.chain.state_dict().items()] if whole else []
        own = mine or self.shards()
        parts = self.comm.gather_objects([replace(shard, tensor=shard.tensor.detach().clone()) for shard in own])
        if parts is None:
            return None
        found: dict[str, list[Shard]] = {}
        for shard in itertools.chain.from_iterable(parts):
            found.setdefault(shard.name, []).append(shard)
        rows = {name: sorted(blocks, key=lambda shard: shard.rows or (0, 0)) for name, blocks in found.items()}
        return {
            name: blocks[0].tensor if len(blocks) == 1 else torch.cat([shard.tensor for shard in blocks])
            for name, blocks in rows.items()
        }

    def close(self) -> None:
        """Training is over: give the communicator back. Collective over comm, unless training ended with an error."""
        for box in self._boxes:
            box.close()
        if self._dead is None:
            self._dead = "it was closed"
            for comm in (self.place.chain, self.place.group, self.place.peers, self.comm):
                if comm is not None:
                    comm.free()
