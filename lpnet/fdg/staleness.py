"""How stale the gradients are: now and then, against those that backpropagation would have.

    batch b lands on module k at tick T_k; before that tick all modules take b forward and back with the weights of now

The cosine compares the gradient that lands, made of old weights here, before and behind, with the fresh one; the drift
is how far the module's weights have moved since its forward of b, over their norm (Chen, Yang, Cheng, arXiv 1809.02839,
section 3, measure such a distance). Training does not change by a bit. Neighbour messages only, but for the exchange of
the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lpnet.fdg.gauge import Gauge
from lpnet.fdg.member import Member, Work, drive
from lpnet.fdg.message import Message, expect
from lpnet.fdg.reports import Staleness
from lpnet.fdg.worker import Worker
from lpnet.parallel.comm import Comm


class Followed:
    """A batch that is followed until it has landed on all modules.

    Args:
        batch: its id.
        members: the modules of this process.
        x: samples, where module 1 is here.
        y: labels, where module K is here.
    """

    def __init__(self, batch: int, members: Sequence[Worker], x: Tensor | None, y: Tensor | None) -> None:
        self.batch = batch
        # a loader may use its memory again
        self._x = x.detach().clone() if x is not None and members[0].is_first else None
        self._y = y.detach().clone() if y is not None and members[-1].is_last else None
        self._gauges = {member.module: Gauge() for member in members}
        for member in members:
            member.gauges[batch] = self._gauges[member.module]

    def _due(self, member: Worker) -> list[int]:
        """Modules on which the batch lands at the next tick."""
        schedule, number = member.schedule, self.batch - member.origin
        modules = range(1, schedule.modules + 1)
        return [k for k in modules if schedule.backward_tick(k, number) == member.since]

    def before_tick(self, members: Sequence[Worker]) -> None:
        """Where the batch is about to land: its fresh gradient. Neighbour messages only."""
        due = self._due(members[0])
        if due:
            gauges = [self._gauges[member.module] if member.module in due else None for member in members]
            drive(members, [self._fresh(m, gauge) for m, gauge in zip(members, gauges, strict=True)])

    def _fresh(self, member: Member, gauge: Gauge | None) -> Work:
        """One module's part of backpropagation with the weights of now; nothing that trains is changed."""
        stage, x, gradient = member.stage, self._x, None
        if not member.is_first:
            x = expect((yield from member.take("evaluation")), self.batch, "evaluation", member.module).tensor
        assert x is not None
        leaf, out = stage.fresh_forward(self.batch, x, self._y if member.is_last else None)
        if not member.is_last:
            yield from member.post("evaluation", Message(self.batch, out.detach()))
            gradient = expect((yield from member.take("closing")), self.batch, "closing", member.module).tensor
        back, gradients = stage.fresh_backward(leaf, out, gradient)
        if not member.is_first:
            yield from member.post("closing", Message(self.batch, back))
        if gauge is not None:
            gauge.compare(gradients, member.update.parameters)

    def landed(self, member: Worker) -> bool:
        """Whether the batch has landed on module 1, after it has on all others. No communication."""
        return member.since > member.schedule.backward_tick(1, self.batch - member.origin)

    def collect(self, comm: Comm) -> Staleness:
        """The numbers of all modules, on every rank. Collective over comm."""
        mine = [(module, gauge.cosine, gauge.drift) for module, gauge in self._gauges.items()]
        rows = sorted(row for part in comm.all_gather_objects(mine) for row in part)
        return Staleness(self.batch, tuple(row[1] for row in rows), tuple(row[2] for row in rows))
