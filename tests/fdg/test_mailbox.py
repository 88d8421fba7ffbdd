"""Messages arrive as they were sent, in order, over MPI as in memory; queues are bounded."""

from __future__ import annotations

import math
import time

import pytest
import torch

from lpnet.errors import LpnetError, UsageError
from lpnet.fdg.mailbox import in_memory
from lpnet.fdg.message import NO_NEWS, Failure, Message, News, dense, digest, encode, expect
from lpnet.fdg.mpi_mailbox import MPIMailbox
from lpnet.parallel.comm import Comm

torch.manual_seed(4)  # the same on all ranks
TENSORS = [
    torch.randn(3, 4),
    torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    torch.randn(7, 2).t(),
    torch.arange(6, dtype=torch.int64),
    torch.randn(5).to(torch.bfloat16),
    torch.tensor([True, False]),
    torch.randn(()),
    torch.empty(0, 3),
    torch.randn(2, 1, 1, 1, 1, 1, 1, 3, dtype=torch.float64),
    torch.randn(300_000),  # above the eager limit
]
NEWS = News(True, 17, Failure(3, 2, 1, 5, 1))


def messages():
    out = [Message(k, tensor.clone(), digest=(k, k + 1), loss=0.1 * k, square=2.5) for k, tensor in enumerate(TENSORS)]
    return [*out, Message(), Message(3, news=NEWS, sums=(1.5, -2.0))]


def assert_equal(got: Message, sent: Message) -> None:
    assert (got.batch, got.digest, got.square, got.sums, got.news) == (
        sent.batch, sent.digest, sent.square, sent.sums, sent.news)  # fmt: skip
    assert got.loss == sent.loss or (math.isnan(got.loss) and math.isnan(sent.loss))
    assert (got.tensor is None) == (sent.tensor is None)
    if got.tensor is not None:
        assert got.tensor.dtype == sent.tensor.dtype and torch.equal(got.tensor, sent.tensor)
        assert got.tensor.stride() == dense(sent.tensor).stride()


def test_in_memory():
    first, second = in_memory(2, capacity=99)
    for message in messages():
        first.post("activation", message)
        second.post("gradient", message)
    for message in messages():
        assert second.ready("activation")
        got = second.take("activation")
        assert_equal(got, message)
        assert_equal(first.take("gradient"), message)
        if got.tensor is not None and message.batch < len(TENSORS):
            assert got.tensor.data_ptr() != TENSORS[message.batch].data_ptr() or got.tensor.numel() == 0
    assert not second.ready("activation")
    with pytest.raises(LpnetError, match="taken before it was posted"):
        second.take("activation")
    with pytest.raises(LpnetError, match="there is no module to send to"):
        first.post("gradient", Message())


def test_queues_in_memory_are_bounded():
    first, second = in_memory(2, capacity=2)
    for _ in range(2):
        assert first.vacant("activation")
        first.post("activation", Message())
    assert not first.vacant("activation") and first.vacant("evaluation")
    second.take("activation")
    assert first.vacant("activation")


@pytest.mark.ranks(2)
def test_over_mpi(comm):
    box = MPIMailbox(Comm(comm))
    if comm.rank == 0:
        for message in messages():
            box.post("activation", message)
        for message in messages():
            assert_equal(box.take("gradient"), message)
    else:
        for message in messages():
            got = box.take("activation")
            assert_equal(got, message)
            box.post("gradient", message)
    box.settle()
    comm.barrier()
    box.close()


@pytest.mark.ranks(2)
def test_a_sender_waits_when_its_queue_is_full_and_no_sooner(comm):
    box, big = MPIMailbox(Comm(comm), capacity=2), torch.randn(500_000)
    comm.barrier()
    if comm.rank == 0:
        box.post("activation", Message(0, big))
        box.post("activation", Message(1, big))
        assert box.waited_send == 0 and not box.vacant("activation")
        box.post("activation", Message(2, big))
        assert box.waited_send > 0
    else:
        time.sleep(0.5)
        began = time.perf_counter()
        for k in range(3):
            assert box.take("activation").batch == k
        assert box.waited_receive <= time.perf_counter() - began  # the sleep was no waiting
    box.settle()
    box.close()


@pytest.mark.ranks(2)
def test_messages_arrive_while_the_receiver_computes(comm):
    box, big = MPIMailbox(Comm(comm)), torch.randn(2_000_000)
    if comm.rank == 0:
        comm.barrier()
        box.post("activation", Message(0, big))
        box.settle()
    else:
        box.prepare("activation")
        comm.barrier()
        deadline = time.perf_counter() + 60
        while not box.ready("activation") and time.perf_counter() < deadline:
            time.sleep(0.001)  # computing
            box.poll()
        box.take("activation")
        assert box.waited_receive == 0.0
    box.close()


@pytest.mark.ranks(3)
def test_an_alarm_reaches_a_rank_that_waits(comm):
    """Rank 1 waits for a message that rank 2 will never send; rank 0 hears of it from rank 1."""
    box = MPIMailbox(Comm(comm))
    began = time.monotonic()
    if comm.rank == 2:
        box.alarm(UsageError("the third rank is ill"), "module 3")
    else:
        with pytest.raises(UsageError, match="the third rank is ill") as caught:
            box.take("gradient")
        box.alarm(caught.value, "module 2")
    assert time.monotonic() - began < 60
    comm.barrier()
    box.close()


def test_half_precision_on_the_wire():
    value = torch.randn(1000) * 1e-9
    for dtype, bound in ((torch.bfloat16, 2**-8), (torch.float16, 2**-10)):
        first, second = in_memory(2, gradient_dtype=dtype)
        second.post("gradient", Message(0, value))
        got = first.take("gradient").tensor
        assert got.dtype == torch.float32
        assert float((got - value).abs().max()) <= bound * float(value.abs().max())
        first.post("activation", Message(0, value))  # activations travel as they are
        assert torch.equal(second.take("activation").tensor, value)
    for special in (torch.zeros(3), torch.full((3,), float("nan")), torch.tensor([1e38, -1e38])):
        header, payload = encode(Message(0, special), torch.float16)
        assert payload.dtype == torch.float16


def test_what_cannot_travel():
    with pytest.raises(UsageError, match="at most 8 dimensions"):
        encode(Message(0, torch.zeros((1,) * 9)))
    with pytest.raises(LpnetError, match="the gradient of batch 4 is due, and that of batch 3 has arrived"):
        expect(Message(3, torch.zeros(1)), 4, "gradient", 1)


def test_news_merge_to_the_first():
    late, early = News(stop_at=9, failure=Failure(5, 1, 0, 0, 0)), News(True, 7, Failure(4, 3, 0, 0, 0))
    merged = late.merged(early)
    assert merged == early.merged(late) == News(True, 7, Failure(4, 3, 0, 0, 0))
    assert News().merged(News()) == News(False, NO_NEWS, None)


def test_digests_tell_batches_apart():
    x = torch.randn(64, 3, 8, 8)
    assert digest(None) == 0 and digest(x) == digest(x.clone()) != 0
    assert digest(x) != digest(x + 1) and digest(x) != digest(x.double()) and digest(x) != digest(x[:63])
    assert digest(torch.arange(5)) != digest(torch.arange(1, 6))
