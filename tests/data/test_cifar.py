"""CIFAR batches: what is read, standardisation, subsets, every refusal, and pickles that try to do something."""

from __future__ import annotations

import builtins
import copyreg
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lpnet.config import DataConfig
from lpnet.data.cifar import CIFAR10, CIFAR100, read10, read100, read_cifar
from lpnet.data.plain_pickle import read_dictionary
from lpnet.errors import DataError

NAMES = [b"airplane", b"automobile", b"bird", b"cat", b"deer", b"dog", b"frog", b"horse", b"ship", b"truck"]


def pixels(count, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def dump(path, record, protocol=2):
    path.write_bytes(pickle.dumps(record, protocol=protocol))


def write10(root, *, count=20, protocol=2):
    place = root / "cifar-10-batches-py"
    place.mkdir(parents=True)
    for k, name in enumerate([f"data_batch_{j}" for j in range(1, 6)] + ["test_batch"]):
        labels = [i % 10 for i in range(count)]
        dump(place / name, {b"data": pixels(count, k), b"labels": labels, b"batch_label": b"x"}, protocol)
    dump(place / "batches.meta", {b"label_names": NAMES, b"num_vis": 3072}, protocol)
    return place


def write100(root):
    place = root / "cifar-100-python"
    place.mkdir(parents=True)
    for name, count in (("train", 300), ("test", 200)):
        fine = [i % 100 for i in range(count)]
        record = {b"data": pixels(count), b"fine_labels": fine, b"coarse_labels": [i // 5 for i in fine]}
        dump(place / name, record)
    dump(
        place / "meta", {b"fine_label_names": [b"fine %d" % i for i in range(100)], b"coarse_label_names": [b"c"] * 20}
    )
    return place


def config(root, name="cifar10", **options) -> DataConfig:
    return DataConfig(name=name, root=str(root), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_small_files(tmp_path, dtype):
    write10(tmp_path)
    data = read10(config(tmp_path), 0, dtype)
    assert data.train.x.shape == (100, 3, 32, 32) and data.validation.x.shape == (20, 3, 32, 32)
    assert data.train.x.dtype == dtype and data.train.y.dtype == torch.int64 and data.train.x.is_contiguous()
    assert data.train.y.tolist() == [i % 10 for i in range(20)] * 5
    assert (data.classes, data.features, data.class_names[3]) == (10, 3072, "cat")
    train = np.concatenate([pixels(20, k) for k in range(5)]).reshape(-1, 3, 32, 32) / 255
    mean, deviation = train.mean((0, 2, 3), keepdims=True), train.std((0, 2, 3), keepdims=True)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2}[dtype]
    np.testing.assert_allclose(data.train.x.double(), (train - mean) / deviation, atol=tolerance)
    test = pixels(20, 5).reshape(-1, 3, 32, 32) / 255  # by the statistics of the training images
    np.testing.assert_allclose(data.validation.x.double(), (test - mean) / deviation, atol=tolerance)


def test_the_folder_itself_or_the_one_above(tmp_path):
    place = write10(tmp_path)
    first, second = (read10(config(root), 0, torch.float32) for root in (tmp_path, place))
    assert torch.equal(first.train.x, second.train.x)


def test_a_hundred_classes(tmp_path):
    write100(tmp_path)
    data = read100(config(tmp_path, "cifar100"), 0, torch.float32)
    assert len(data.train) == 300 and len(data.validation) == 200 and data.classes == 100
    assert data.train.y[:3].tolist() == [0, 1, 2] and data.class_names[99] == "fine 99"


def test_one_colour_has_no_deviation(tmp_path):
    place = write10(tmp_path)
    for path in place.glob("*batch*"):
        if path.name != "batches.meta":
            dump(path, {b"data": np.full((10, 3072), 7, np.uint8), b"labels": list(range(10))})
    assert (read10(config(tmp_path), 0, torch.float32).train.x == 0).all()


def test_subsets_are_stratified_and_seeded(tmp_path):
    write10(tmp_path)
    data = read10(config(tmp_path, train_samples=40, validation_samples=10), 0, torch.float32)
    assert data.train.y.bincount().tolist() == [4] * 10 and data.validation.y.bincount().tolist() == [1] * 10
    assert data.train.x.mean().abs() < 1e-5  # standardised by the samples in use
    again = read10(config(tmp_path, train_samples=40, validation_samples=10), 0, torch.float32)
    other = read10(config(tmp_path, train_samples=40, validation_samples=10), 1, torch.float32)
    assert torch.equal(data.train.x, again.train.x) and not torch.equal(data.train.x, other.train.x)
    with pytest.raises(DataError, match="data.validation_samples is 21, but there are 20 samples"):
        read10(config(tmp_path, validation_samples=21), 0, torch.float32)


def test_held_out_samples(tmp_path):
    place = write10(tmp_path)
    (place / "test_batch").unlink()  # left alone
    options = {"held_out": True, "validation_samples": 20, "dtype": torch.float64}
    data = read_cifar(tmp_path, CIFAR10, train_samples=50, **options)
    assert len(data.train) == 50 and data.validation.y.bincount().tolist() == [2] * 10
    whole = read_cifar(tmp_path, CIFAR10, **options)
    assert len(whole.train) == 80
    together = torch.cat([whole.train.x, whole.validation.x]).flatten(1)
    assert len(torch.unique(together, dim=0)) == 100  # no image is in both parts
    with pytest.raises(DataError, match="validation_samples is null, .* held out of its 100 training images"):
        read_cifar(tmp_path, CIFAR10, held_out=True)


@pytest.mark.parametrize("protocol", range(6))
def test_all_protocols(tmp_path, protocol):
    record = {
        "data": pixels(2),
        b"fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "scalar": np.int64(7),
        "flag": np.bool_(True),
        "list": [1, "two", b"three", b"", 4.5, None, True, (1, [2], {"a": 3})],
        "empty": np.zeros((0, 3), np.uint8),
    }
    dump(tmp_path / "file", record, protocol)
    read = read_dictionary(tmp_path / "file")
    for name in ("data", "fortran", "big", "empty"):
        expected = record[name] if name in record else record[name.encode()]
        assert np.array_equal(read[name], expected) and read[name].dtype == expected.dtype, name
    assert read["list"] == record["list"] and read["scalar"] == 7 and read["flag"] is True


def from_python_2(data: np.ndarray, labels: list[int]) -> bytes:
    """As the authors' files were written: text and bytes are the same there."""
    reconstruct = b"cnumpy.core.multiarray\n_reconstruct\nq\x02(cnumpy\nndarray\nq\x03(K\x00tq\x04U\x01bq\x05tR"
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    rows, columns = data.shape
    state = b"(K\x01(K" + bytes([rows]) + b"M" + struct.pack("<H", columns) + b"t" + dtype
    content = b"\x89T" + struct.pack("<I", data.nbytes) + data.tobytes() + b"tb"
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}q\x01(U\x04data" + reconstruct + state + content + b"U\x06labels" + listed + b"u."


def test_a_file_of_python_2(tmp_path):
    place = write10(tmp_path)
    expected = read10(config(tmp_path), 0, torch.float32)
    for k in range(5):
        content = from_python_2(pixels(20, k), [i % 10 for i in range(20)])
        assert pickle.loads(content, encoding="bytes")[b"labels"][1] == 1  # the ordinary reader agrees
        (place / f"data_batch_{k + 1}").write_bytes(content)
    read = read10(config(tmp_path), 0, torch.float32)
    assert torch.equal(read.train.x, expected.train.x) and torch.equal(read.train.y, expected.train.y)


class Evil:
    """Pickles to a call of anything."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR"
OBJECTS = pickle.dumps({"data": np.array([1, "a"], dtype=object)}, protocol=4)
RECORDS = pickle.dumps({"data": np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])}, protocol=4)
# a numpy type of objects dressed up as plain: the flags say that its bytes are no pointers
DRESSED = (
    b"(K\x01(K\x01tcnumpy\ndtype\n(X\x02\x00\x00\x00O8K\x00K\x01tR"
    b"(K\x03X\x01\x00\x00\x00|NNNK\x08K\x08K\x00tb\x89C\x08AAAAAAAAtb"
)


HARMFUL = [
    (pickle.dumps({"data": Evil(os.system, "touch CANARY")}), r"asks for posix\.system, which is neither imported"),
    (pickle.dumps({"data": Evil(builtins.eval, "open('CANARY', 'w')")}), r"asks for builtins\.eval,"),
    (pickle.dumps({"data": Evil(builtins.open, "CANARY", "w")}, protocol=0), r"asks for (_io|io)\.open"),
    (pickle.dumps({"data": Evil(np.load, "CANARY")}), r"asks for numpy\.load"),
    (pickle.dumps({"data": getattr}), r"asks for builtins\.getattr"),
    (pickle.dumps(Evil(os.system, "touch CANARY")), r"asks for posix\.system"),
    (b"cos\nsystem\n(S'touch CANARY'\ntR.", r"asks for os\.system"),
    (b"(S'touch CANARY'\nios\nsystem\n.", r"asks for os\.system"),
    (b"(cos\nsystem\nS'touch CANARY'\no.", r"asks for os\.system"),
    (b"c__builtin__\neval\n.", r"asks for __builtin__\.eval"),
    (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", r"asks for numpy\.ndarray\.tofile"),
    (b"cnumpy.core.multiarray\nfromfile\n(S'CANARY'\ntR.", r"asks for numpy\.core\.multiarray\.fromfile"),
    (b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x04\x00\x00\x00zlibtR.", "asks for the encoding 'zlib'"),
    (b"P12\n.", "refers to an object outside of the file"),
    (b"\x80\x02K\x0cQ.", "refers to an object outside of the file"),
    (b"\x80\x02\x82\xf1.", "asks for the registered name number 241"),
    (b"cnumpy\nndarray\n(K\x03tR.", r"calls numpy\.ndarray"),
    (b"cnumpy\ndtype\n}X\x01\x00\x00\x00aK\x01sb.", "tries to change a function"),
    (b"cnumpy.core.multiarray\n_reconstruct\n}X\x0c\x00\x00\x00__defaults__K\x01sb.", "tries to change a function"),
    (b"cnumpy\ndtype\n)\x81.", "damaged or truncated"),
    (OBJECTS, "array of type 'O8', which is no type of plain numbers"),
    (RECORDS, "array of type 'V12', which is no type of plain numbers"),
    (ARRAY + DRESSED + b".", "array of type 'O8', which is no type of plain numbers"),
    (ARRAY + b"(K\x01(K\x01tNtb.", "damaged or truncated"),
    (ARRAY + b"(K\x01(K\x01tN\x89C\x01atb.", "an array without a type of plain numbers"),
    (pickle.dumps([1, 2]), "holds a list; expected a dictionary"),
]


@pytest.mark.parametrize(("content", "message"), HARMFUL, ids=range(len(HARMFUL)))
def test_a_pickle_that_tries_something_is_refused(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    place = write10(tmp_path)
    (place / "data_batch_3").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read10(config(tmp_path), 0, torch.float32)
    assert "data_batch_3" in str(caught.value)
    assert not (tmp_path / "CANARY").exists() and not (place / "CANARY").exists()


def test_a_registered_name_is_refused_even_when_it_is_known(tmp_path):
    """The ordinary reader keeps such names in a cache that it asks before its own checks."""
    copyreg.add_extension("os", "system", 242)
    try:
        evil = b"\x80\x02\x82\xf2X\x0c\x00\x00\x00touch CANARY\x85R."
        assert pickle.loads(b"\x80\x02\x82\xf2.") is os.system
        (tmp_path / "file").write_bytes(evil)
        with pytest.raises(DataError, match="registered name number 242"):
            read_dictionary(tmp_path / "file")
    finally:
        copyreg.remove_extension("os", "system", 242)


MALFORMED = [
    (b"", "is damaged or truncated at or before byte 0 of 0"),
    (b"not a pickle at all", "is damaged or truncated at or before byte"),
    (pickle.dumps({b"data": pixels(20), b"labels": [0] * 20}, protocol=4)[:30_000], "byte 30,000 of 30,000"),
    (b"\x80\x02]r\xff\xff\xff\xff.", "holds a list"),  # an index of 2^32 in the memo costs nothing
    (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "damaged or truncated"),  # 2^63 bytes announced
    (ARRAY + b"(K\x01(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ftcnumpy\ndtype\n(C\x02u1K\x00K\x01tR\x89C\x01atb.",
     "shape \\(2147483647, 2147483647\\) and type uint8 has 1 bytes"),
    (ARRAY + b"(K\x01(J\xff\xff\xff\xfftcnumpy\ndtype\n(C\x02u1K\x00K\x01tR\x89C\x01atb.", "shape \\(-1,\\)"),
    (pickle.dumps({b"labels": [0]}), "has no entry 'data'; it holds labels"),
    (pickle.dumps({b"data": pixels(1)}), "has no entry 'labels'"),
    (pickle.dumps({b"data": [1], b"labels": [1]}), "'data' is list; expected an array uint8 \\(images, 3072\\)"),
    (pickle.dumps({b"data": pixels(1).astype(float), b"labels": [1]}), "'data' is float64 \\(1, 3072\\)"),
    (pickle.dumps({b"data": pixels(1)[:, :9], b"labels": [1]}), "'data' is uint8 \\(1, 9\\)"),
    (pickle.dumps({b"data": pixels(2), b"labels": [1]}), "holds 2 images, but 1 labels"),
    (pickle.dumps({b"data": pixels(2), b"labels": [1, 10]}), r"label 10 of image 1 is out of range 0\.\.9 \(1"),
    (pickle.dumps({b"data": pixels(2), b"labels": [1, -1]}), "label -1 of image 1 is out of range"),
    (pickle.dumps({b"data": pixels(2), b"labels": [1, 1.5]}), "'labels' is not a list of whole numbers"),
    (pickle.dumps({b"data": pixels(2), b"labels": b"ab"}), "'labels' is not a list of whole numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_files(tmp_path, content, message):
    place = write10(tmp_path)
    (place / "test_batch").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read10(config(tmp_path), 0, torch.float32)
    assert "test_batch" in str(caught.value)


def test_missing_files(tmp_path):
    place = write10(tmp_path)
    (place / "data_batch_4").unlink()
    with pytest.raises(DataError, match=r"data_batch_4 does not exist; .* \(fetch cifar10 gets it\)\. .* data_batch_5"):
        read10(config(tmp_path), 0, torch.float32)
    dump(place / "batches.meta", {b"label_names": NAMES[:9]})
    with pytest.raises(DataError, match="'label_names' is not a list of 10 names"):
        read10(config(tmp_path), 0, torch.float32)
    with pytest.raises(DataError, match="meta does not exist; .* of the python version of cifar100"):
        read100(config(tmp_path, "cifar100"), 0, torch.float32)
    with pytest.raises(DataError, match="elsewhere is not a folder; data.name cifar10 reads its files from there"):
        read10(config(tmp_path / "elsewhere"), 0, torch.float32)


WHOLE = pickle.dumps({b"data": np.arange(12, dtype=np.uint8).reshape(3, 4), b"labels": [1, 2, 3]}, protocol=2)


@settings(max_examples=400)
@given(data=st.data())
def test_mutated_files_are_read_or_refused(tmp_path_factory, data):
    content = bytearray(WHOLE)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp()
    (path / "file").write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        read = read_dictionary(path / "file")
    except DataError as error:
        assert str(path) in str(error)
    else:
        assert isinstance(read, dict)


def write_jpeg_copy(archive: Path, root: Path, train: int, test: int) -> None:
    """A small set in the standard layout from real images, `train` and `test` of every class."""
    image = pytest.importorskip("PIL.Image")
    place = root / "cifar-10-batches-py"
    place.mkdir()
    with zipfile.ZipFile(archive) as zipped:
        names = sorted(name for name in zipped.namelist() if name.endswith(".jpg"))
        for split, batches, count in (("train", CIFAR10.train, train), ("test", (CIFAR10.test,), test)):
            chosen = [
                (label, name)
                for label, word in enumerate(NAMES)
                for name in [n for n in names if n.startswith(f"{split}/{word.decode()}/")][:count]
            ]
            for k, batch in enumerate(batches):
                part = chosen[k :: len(batches)]
                decoded = [np.asarray(image.open(io.BytesIO(zipped.read(name))).convert("RGB")) for _, name in part]
                rows = np.stack([pixels.transpose(2, 0, 1).reshape(-1) for pixels in decoded])
                dump(place / batch, {b"data": rows, b"labels": [label for label, _ in part]}, 4)
    dump(place / "batches.meta", {b"label_names": NAMES})


def test_real_images(tmp_path, data_root):
    """CIFAR-10 (JPEG copy), 50 training and 20 test images of every class."""
    archive = data_root / "cifar10" / "cifar10-jpeg.zip"
    if not archive.is_file():
        pytest.skip(f"{archive} is not there")
    write_jpeg_copy(archive, tmp_path, 50, 20)
    data = read10(config(tmp_path), 0, torch.float32)
    assert data.train.y.bincount().tolist() == [50] * 10 and data.validation.y.bincount().tolist() == [20] * 10
    assert data.train.x.mean((0, 2, 3)).abs().max() < 1e-5 and (data.train.x.std((0, 2, 3)) - 1).abs().max() < 1e-3
    # neighbouring pixels of photographs are alike: rows, columns and channels are where they should be
    x = data.train.x
    for a, b in ((x[..., 1:], x[..., :-1]), (x[:, :, 1:], x[:, :, :-1]), (x[:, 1:], x[:, :-1])):
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1] > 0.85


def test_all_of_cifar10():
    """The whole set; LPNET_CIFAR10 names the folder above or of cifar-10-batches-py."""
    root = os.environ.get("LPNET_CIFAR10")
    if not root:
        pytest.skip("LPNET_CIFAR10 is not set")
    data = read_cifar(Path(root), CIFAR10, train_samples=2000)
    assert len(data.train) == 2000 and data.validation.x.shape == (10_000, 3, 32, 32)
    assert data.validation.y.bincount().tolist() == [1000] * 10
    assert data.class_names == tuple(name.decode() for name in NAMES)


def test_an_unreadable_file(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read \(.*\); check the file and its rights"):
        read_dictionary(tmp_path)


def test_layouts():
    assert CIFAR10.train == ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
    assert (CIFAR100.train, CIFAR100.labels, CIFAR100.classes) == (("train",), "fine_labels", 100)
