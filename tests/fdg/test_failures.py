"""What cannot work is refused with names and numbers; what fails on one module ends all of them, and nothing hangs."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from fdg_case import batches, dense, sgd

from lpnet.errors import LpnetError, NumericsError, UsageError
from lpnet.fdg.compensation import Compensation
from lpnet.fdg.decoupled import FDG


def make(network, comm=None, modules=3, cuts=(1, 3), **options):
    options = {"loss": F.cross_entropy, "optimizer": sgd(), **options}
    return FDG(network, comm=comm, modules=modules, cuts=cuts, **options)


def tied():
    network = dense()
    network[3][0].weight = network[1][0].weight
    return network


class Tuple(torch.nn.Module):
    def forward(self, x):
        return x, x


class Integers(torch.nn.Module):
    def forward(self, x):
        return x.long()


def with_unit(unit, place):
    network = dense()
    network[place] = unit
    return network


# refused before the first message


@pytest.mark.parametrize(("network", "options", "text"), [
    (dense(), {"modules": 6, "cuts": "uniform"}, r"5 units cannot be shared by 6 modules; use at most 5 modules"),
    (dense(), {"modules": 6, "cuts": "by_cost"}, r"5 units cannot be shared by 6 modules"),
    (dense(), {"cuts": [3, 2]}, r"cuts are \[3, 2\]; 3 modules of 5 units need 2 increasing indices between 1 and 4"),
    (dense(), {"cuts": [2]}, r"cuts are \[2\]; 3 modules of 5 units need 2 increasing"),
    (dense(), {"cuts": [0, 2]}, r"cuts are \[0, 2\]"),
    (dense(), {"cuts": [2, 5]}, r"cuts are \[2, 5\]"),
    (dense(), {"cuts": "by_size"}, r"cuts is 'by_size'; it must be by_cost, uniform or a list"),
    (dense(), {"shrink": 0.0}, r"shrink is 0.0; it must lie in \(0, 1\]"),
    (dense(), {"shrink": 1.5}, r"shrink is 1.5; it must lie in \(0, 1\]"),
    (dense(), {"modules": 0, "cuts": []}, r"there are 0 modules; at least 1 is needed"),
    (tied(), {}, r"1\.0\.weight of module 2 and 3\.0\.weight of module 3 are the same tensor; tied parameters"),
    ([dense()[0], 3, dense()[1]], {}, r"unit '1' is a int, not a torch.nn.Module"),
    (torch.nn.Linear(3, 3), {}, r"the network is a Linear; give a torch.nn.Sequential"),
    (torch.nn.Sequential(), {}, r"the network has no units"),
    (dense(), {"schedule": "pipedream"}, r"the schedule is 'pipedream'; it must be one of fdg, ddg, fr, bp"),
    (dense(), {"order": "last"}, r"the order is 'last'"),
    (dense(), {"backward": "old"}, r"backward is 'old'; it must be stash, recompute or mixed"),
    (dense(), {"backward": "mixed", "autocast": torch.bfloat16}, r"backward mixed sees the weights that autocast"),
    (dense(), {"clip_norm": 0.0}, r"clip_norm is 0.0; it must be greater than 0"),
    (dense(), {"gradient_dtype": torch.int8}, r"gradient_dtype is torch.int8; it must be"),
    (dense(), {"optimizer": lambda p: 3}, r"optimizer= returned a int"),
    (dense(), {"optimizer": torch.optim.LBFGS}, r"torch.optim.LBFGS evaluates the loss again"),
    (dense(), {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, r"ReduceLROnPlateau cannot be used"),
    (dense(), {"optimizer": sgd(momentum=0.0), "compensation": Compensation(prediction="full")},
     r"weight prediction needs the velocity .* this is SGD with momentum 0.0"),
    (dense(), {"optimizer": torch.optim.NAdam, "compensation": Compensation(nesterov=True)},
     r"discounted Nesterov .* NAdam discounts its gradient by itself"),
    (dense(), {"optimizer": torch.optim.Adam, "compensation": Compensation(spike=True)}, r"spike compensation needs"),
])  # fmt: skip
def test_refused(network, options, text):
    with pytest.raises(UsageError, match=text):
        make(network, **options)


@pytest.mark.parametrize(("options", "text"), [
    ({"accumulate": 0}, "accumulate is 0"),
    ({"anneal": -1}, "anneal is -1"),
    ({"prediction": "quarter"}, "prediction is 'quarter'"),
    ({"shrink": -0.1}, "shrink is -0.1"),
])  # fmt: skip
def test_remedies_out_of_range(options, text):
    with pytest.raises(UsageError, match=text):
        Compensation(**options)


def test_tied_parameters_inside_a_module_are_fine():
    fdg = make(tied(), cuts=(1, 4))
    for x, y in batches(7):
        fdg.step(x, y)
    fdg.flush()


def test_cuts_by_cost_without_a_batch():
    fdg = make(dense(), cuts="by_cost")
    for ask in (lambda: fdg.cuts, fdg.shards, lambda: fdg.evaluate(batches(1))):
        with pytest.raises(UsageError, match="cuts by_cost are found on the first batch, and there was none"):
            ask()


@pytest.mark.ranks(2, 3)
def test_refused_on_all_ranks(comm):
    with pytest.raises(UsageError, match=f"{comm.size + 1} modules on {comm.size} ranks; use one rank per module"):
        make(dense(), comm, modules=comm.size + 1, cuts="uniform")
    last = comm.rank == comm.size - 1
    with pytest.raises(UsageError, match=f"rank {comm.size - 1}/{comm.size}: the network has other names, shapes"):
        make(dense(6 if last else 5), comm, modules=None, cuts="uniform")
    with pytest.raises(UsageError, match=f"rank {comm.size - 1}/{comm.size}: the options differ than on rank 0"):
        make(dense(), comm, modules=None, cuts="uniform", shrink=0.5 if last else 0.6)
    with pytest.raises(UsageError, match="optimizer= returned a int"):
        make(dense(), comm, modules=None, cuts="uniform", optimizer=(lambda p: 3) if last else sgd())


# failing on the way


def failing_step(fdg, data, kind, text):
    began = time.monotonic()
    with pytest.raises(kind, match=text) as caught:
        for x, y in data:
            fdg.step(x, y)
        fdg.flush()
    assert time.monotonic() - began < 60
    with pytest.raises(LpnetError, match="training has ended with an error"):
        fdg.step(*data[0])
    fdg.close()
    return caught.value


@pytest.mark.parametrize(("unit", "text"), [
    (Tuple(), r"unit 2 \('2'\) returns a tuple; a unit takes one tensor and returns one"),
    (Integers(), r"unit 2 \('2'\) returns a tensor of shape \(8, 6\) and dtype torch.int64 at a cut"),
])  # fmt: skip
def test_a_unit_returns_no_activation(unit, text):
    failing_step(make(with_unit(unit, 2)), batches(6), LpnetError, text)


@pytest.mark.ranks(3)
def test_a_unit_returns_no_tensor_on_one_rank(comm):
    text = r"unit 2 \('2'\) returns a tuple; a unit takes one tensor and returns one"
    failing_step(make(with_unit(Tuple(), 2), comm), batches(12), LpnetError, text)


@pytest.mark.ranks(2, 3, 4)
def test_an_exception_on_one_module_ends_all(comm):
    class Breaks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == 4:
                raise ValueError("the cat sat on the unit")
            return x

    for place in range(5):
        fdg = make(with_unit(Breaks(), place) if place < 4 else with_unit(torch.nn.Sequential(Breaks(), dense()[4]), 4),
                   comm, modules=None, cuts="uniform")  # fmt: skip
        error = failing_step(fdg, batches(12), (ValueError, LpnetError), "the cat sat on the unit")
        if not isinstance(error, ValueError):
            assert str(error).startswith("module ") and "at tick" in str(error)


@pytest.mark.ranks(2, 3)
def test_an_exception_during_evaluation_ends_all(comm):
    class Breaks(torch.nn.Module):
        def forward(self, x):
            if not self.training:
                raise ValueError("no evaluation today")
            return x

    for place in (0, 3):
        fdg = make(with_unit(Breaks(), place), comm, modules=None, cuts="uniform")
        began = time.monotonic()
        with pytest.raises((ValueError, LpnetError), match="no evaluation today"):
            fdg.evaluate(batches(9))
        assert time.monotonic() - began < 60
        fdg.close()


@pytest.mark.ranks(2, 3)
def test_batches_that_differ_between_the_ranks(comm):
    for which in range(2):
        data = batches(12)
        if comm.rank == comm.size - 1:
            x, y = data[4]
            data[4] = (x + 1, y) if which == 0 else (x, (y + 1) % 4)
        fdg = make(dense(), comm, modules=None, cuts="uniform")
        what = ("samples", "labels")[which]
        text = f"the {what} of batch 4 on module {comm.size}/{comm.size} are not those that module 1 was given"
        failing_step(fdg, data, UsageError, text)


@pytest.mark.ranks(2, 3)
def test_evaluation_on_different_numbers_of_batches(comm):
    for more in (-1, 1):
        fdg = make(dense(), comm, modules=None, cuts="uniform")
        began = time.monotonic()
        with pytest.raises(LpnetError):
            fdg.evaluate(batches(4 + (more if comm.rank == comm.size - 1 else 0)))
        assert time.monotonic() - began < 60
        fdg.close()


@pytest.mark.ranks(2, 3)
def test_data_missing_where_it_is_needed(comm):
    fdg = make(dense(), comm, modules=None, cuts="uniform")
    data = [(x, None if k == 3 else y) for k, (x, y) in enumerate(batches(9))]
    failing_step(fdg, data, UsageError, "batch 3 comes without labels on module")


@pytest.mark.ranks(2)
def test_batches_out_of_order_are_fatal(comm):
    """A message of another batch, as a program gone wrong might send it: both ids are named."""
    fdg = make(dense(), comm, modules=None, cuts="uniform")
    if comm.rank == 0:
        fdg.members[0].origin = 5
        fdg.members[0].inputs = dict(enumerate((x for x, _ in batches(9)), 5))
    failing_step(fdg, batches(6), LpnetError, "the activation of batch 0 is due, and that of batch 5 has arrived")


# numbers that are not finite


class Spoils(torch.nn.Module):
    """Puts a NaN into its output, or into the gradient of its input, at one call."""

    def __init__(self, at, backward=False):
        super().__init__()
        self.at, self.backward, self.calls = at, backward, 0
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        self.calls += self.training and torch.is_grad_enabled()  # not when the culprit is looked for
        x = x * self.weight
        if self.calls == self.at + 1 and self.training:
            if not self.backward:
                return x * float("nan")
            x.register_hook(lambda gradient: gradient * float("nan"))
        return x


def spoilt(comm, place, at, modules, backward=False):
    network = dense()
    network[place] = torch.nn.Sequential(network[place], Spoils(at, backward))
    return network, make(network, comm, modules=modules, cuts="uniform")


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("backward", [False, True])
def test_nan_stops_all_modules_at_the_same_tick(comm, backward):
    for place in range(5):
        network, fdg = spoilt(comm, place, 6, comm.size, backward)
        module = next(k for k in range(comm.size, 0, -1) if fdg.bounds[k - 1] <= place)
        what = "gradient" if backward else "output"
        text = rf"module {module}/{comm.size}, batch 6, unit {place} \('{place}'\): the {what} is not finite"
        failing_step(fdg, batches(30), NumericsError, text)
        ticks = comm.allgather(fdg.members[0].tick)
        assert ticks == [ticks[0]] * comm.size and ticks[0] <= 6 + 5 * comm.size
        for worker in fdg.members:  # nothing has been learnt from them
            assert all(torch.isfinite(p).all() for p in worker.update.parameters.values())


@pytest.mark.parametrize("modules", [1, 3])
def test_nan_in_the_last_batch_is_found_by_the_flush(modules):
    for backward in (False, True):
        _, fdg = spoilt(None, 0, 6, modules, backward)
        text = r"batch 6, unit 0 \('0'\): the (output|gradient) is not finite"
        failing_step(fdg, batches(7), NumericsError, text)


def test_nan_in_the_samples_and_in_the_loss():
    data = batches(8)
    data[2][0][3, 1] = float("nan")
    failing_step(make(dense()), data, NumericsError, r"module 1/3, batch 2, unit 0 \('0'\): the samples are not finite")
    fdg = make(dense(), loss=lambda out, y: F.cross_entropy(out, y) + float("inf"))
    failing_step(fdg, batches(8), NumericsError, r"module 3/3, batch 0, unit 4 \('4'\): the loss is not finite")


def test_a_loss_of_many_numbers():
    fdg = make(dense(), loss=lambda out, y: F.cross_entropy(out, y, reduction="none"))
    failing_step(fdg, batches(8), LpnetError, r"the loss returns a tensor of shape \(8,\) .* must return one number")
