"""Save at any tick, go on in a new process image: the same bits. After a drain: any number of modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fdg_case import batches, conv, dense, differences, load, save, sgd

from lpnet.errors import CheckpointError, UsageError
from lpnet.fdg.compensation import Compensation
from lpnet.fdg.decoupled import FDG

CUTS = {1: [], 2: [3], 3: [1, 3], 4: [1, 2, 4]}
MODES = {
    "stash": {},
    "forward first": {"order": "forward_first"},
    "recompute": {"backward": "recompute"},
    "ddg": {"schedule": "ddg"},
    "fr": {"schedule": "fr"},
    "bp": {"schedule": "bp"},
    "mixed": {"backward": "mixed"},
    "clipped": {"clip_norm": 0.3},
    "accumulate": {"compensation": Compensation(accumulate=3)},
    "all": {"compensation": Compensation(shrink=0.8, prediction="full", spike=True, accumulate=2, anneal=9,
                                         nesterov=True), "clip_norm": 0.5},
    "bfloat16 gradients": {"gradient_dtype": torch.bfloat16},
    "adam": {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01), "compensation": Compensation(prediction="full")},
}  # fmt: skip


def schedule(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9], 0.3)


def make(comm, modules, network=None, **options):
    options = {"optimizer": sgd(0.1), "scheduler": schedule, **options}
    network = conv(torch.float32, dropout=0.2) if network is None else network
    return FDG(network, comm=comm, modules=modules, loss=F.cross_entropy, cuts=CUTS[modules], **options)


def channels_last(data):
    return [(x.contiguous(memory_format=torch.channels_last), y) for x, y in data]


def train(fdg, data):
    return [(report.batch, report.loss) for report in (fdg.step(x, y) for x, y in data)]


def rest(fdg, data):
    reports = train(fdg, data) + [(report.batch, report.loss) for report in fdg.flush()]
    return reports, fdg.gather_state_dict()


def assert_resumes(comm, folder, modules, stops, **options):
    """One run that saves at `stops` and goes on; at every stop another one starts from the file and ends the same."""
    data = channels_last(batches(12, image=True, short=3, dtype=torch.float32))
    one = make(comm, modules, **options)
    files, at, losses = {}, 0, []
    for stop in stops:
        losses += train(one, data[at:stop])
        files[stop], at = save(one, folder, stop), stop
    tail, final = rest(one, data[at:])
    losses += tail
    for stop in stops:
        torch.manual_seed(stop)
        two = make(comm, modules, network=conv(torch.float32, dropout=0.2), **options)
        load(two, files[stop])
        found, state = rest(two, data[stop:])
        if options.get("backward") != "mixed":  # which drains at every save
            assert found == losses[stop:]
            if state is not None:
                assert not list(differences(state, final))
        two.close()
    one.close()


@pytest.mark.parametrize("mode", MODES)
def test_resume_is_bitwise_in_one_process(mode, tmp_path):
    modules = {"ddg": 4, "bp": 2}.get(mode, 3)
    assert_resumes(None, tmp_path, modules, [1, 2, 3, 5, 8, 12], **MODES[mode])


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("mode", ["stash", "recompute", "all", "ddg"])
def test_resume_is_bitwise_on_ranks(comm, mode, shared_tmp_path):
    assert_resumes(comm, shared_tmp_path, comm.size, [2, 7], **MODES[mode])


@pytest.mark.ranks(3)
def test_ranks_go_on_from_one_process_and_back(comm, shared_tmp_path):
    data = channels_last(batches(12, image=True, short=3, dtype=torch.float32))
    for writer, reader in ((comm, None), (None, comm)):
        folder = shared_tmp_path / ("ranks" if reader is None else "one")
        first = make(writer, 3)
        train(first, data[:7])
        if writer is not None:
            path = save(first, folder, 7)
        else:
            path = comm.bcast(str(save(first, folder, 7)) if comm.rank == 0 else None)
        expected, final = rest(first, data[7:])
        second = make(reader, 3)
        load(second, path)
        found, state = rest(second, data[7:])
        if comm.rank == 0:  # which reports what module 1 sees, as one process does
            assert found == expected
        if state is not None and final is not None:
            assert not list(differences(state, final))
        comm.barrier()


def test_mixed_drains_before_saving_and_both_runs_agree(tmp_path):
    """An uninterrupted run with the same save points == one that is resumed at each of them."""
    data = batches(12, image=True, dtype=torch.float32)
    one = make(None, 3, backward="mixed")
    for part in (data[:4], data[4:9]):
        train(one, part)
        path = save(one, tmp_path / "one", one.batches)
    expected = rest(one, data[9:])
    two = make(None, 3, backward="mixed")
    train(two, data[:4])
    load(middle := make(None, 3, backward="mixed"), save(two, tmp_path / "two", 4))
    train(middle, data[4:9])
    assert save(middle, tmp_path / "two", 9).read_bytes() != path.read_bytes()  # other time stamps
    load(three := make(None, 3, backward="mixed"), tmp_path / "two" / path.name)
    found = rest(three, data[9:])
    assert found[0] == expected[0] and not list(differences(found[1], expected[1]))
    train(three, data[:2])
    with pytest.raises(UsageError, match=r"backward mixed cannot rebuild its graphs; call drain_before_save\(\)"):
        three.state_shards()


def test_drained_runs_go_on_with_any_number_of_modules(tmp_path):
    data = batches(12, image=True, dtype=torch.float32)
    fdg, path = make(None, 3), None
    for k, modules in enumerate((3, 2, 4, 1)):
        if path is not None:
            again = make(None, modules)
            load(again, path)
            assert not list(differences(again.gather_state_dict(), fdg.gather_state_dict()))
            old = {
                shard.name: optimizer.state[shard.tensor] for optimizer, shards in fdg.optimizers for shard in shards
            }
            for optimizer, shards in again.optimizers:
                for shard in shards:
                    assert torch.equal(optimizer.state[shard.tensor]["momentum_buffer"],
                                       old[shard.name]["momentum_buffer"])  # fmt: skip
            assert again.lr == fdg.lr and again.batches == fdg.batches == 3 * k
            fdg = again
        reports = train(fdg, data[3 * k : 3 * k + 3])
        reports += [(report.batch, report.loss) for report in fdg.flush()]
        assert [batch for batch, _ in reports if batch is not None] == list(range(3 * k, 3 * k + 3))
        path = save(fdg, tmp_path, fdg.batches)
    assert fdg.lr == pytest.approx(0.1 * 0.09)


@pytest.mark.parametrize(("options", "text"), [
    ({"modules": 2}, "has work in flight and 3 modules, and this run 2 modules; go on with the same, or drain"),
    ({"backward": "recompute"}, "has work in flight and backward stash, and this run backward recompute"),
    ({"order": "forward_first"}, "has work in flight and order backward_first, and this run order forward_first"),
    ({"compensation": Compensation(accumulate=2)}, "has work in flight and accumulate 1, and this run accumulate 2"),
    ({"schedule": "ddg"}, "has work in flight and schedule fdg, and this run schedule ddg"),
])  # fmt: skip
def test_work_in_flight_of_other_settings(options, text, tmp_path):
    fdg = make(None, 3)
    train(fdg, batches(6, image=True, dtype=torch.float32))
    path = save(fdg, tmp_path, 6)
    other = make(None, options.pop("modules", 3), **options)
    with pytest.raises(CheckpointError, match=text):
        load(other, path)


def test_a_checkpoint_of_another_method():
    fdg = make(None, 3)
    with pytest.raises(CheckpointError, match="holds no clock of decoupled training"):
        fdg.load_state([], lambda name: torch.zeros(0))


def test_entries_have_the_names_of_the_format():
    fdg = FDG(dense(), modules=3, cuts=[1, 3], loss=F.cross_entropy, optimizer=sgd())
    for x, y in batches(6):
        fdg.step(x, y)
    names = {shard.name for shard in fdg.state_shards()}
    assert {"1/clock", "1/flights", "1/stash/2/header", "1/stash/5/payload", "1/weights/0/0.0.weight"} <= names
    assert {"2/message/activation/header", "1/message/gradient/payload", "3/labels/5", "3/digests"} <= names
    fdg.flush()
    drained = {f"{number}/{name}" for number in (1, 2, 3) for name in ("bounds", "clock")}
    assert {shard.name for shard in fdg.state_shards()} == drained
