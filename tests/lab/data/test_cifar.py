import numpy as np
import pytest
import torch

from tests.lab.data import writers
from trysquare.lab.data import DATASETS, load

TRAIN = writers.CIFAR10_FILES[:5]


@pytest.fixture(autouse=True)
def _four_rows(monkeypatch):
    writers.expect_rows(monkeypatch, 4)


def expect(images, content, names):
    assert np.array_equal(images.images.numpy(), np.concatenate([content[name][0] for name in names]))
    assert images.labels.tolist() == np.concatenate([content[name][1] for name in names]).tolist()


@pytest.mark.parametrize("nesting", [".", "cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin"])
def test_cifar10_binary(tmp_path, nesting):
    content = writers.write_cifar10_binary(tmp_path / nesting)
    expect(load("cifar10", tmp_path), content, TRAIN)
    expect(load("cifar10", tmp_path, "test"), content, ["test_batch"])


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("nesting", [".", "cifar-10-batches-py"])
def test_cifar10_python(tmp_path, nesting, protocol):
    content = writers.write_cifar10_python(tmp_path / nesting, protocol=protocol)
    expect(load("cifar10", str(tmp_path)), content, TRAIN)
    expect(load("cifar10", str(tmp_path), "test"), content, ["test_batch"])


@pytest.mark.parametrize("python", [False, True])
def test_cifar100_has_fine_labels(tmp_path, python):
    content = writers.write_cifar100(tmp_path, python=python)
    expect(load("cifar100", tmp_path), content, ["train"])
    expect(load("cifar100", tmp_path, "test"), content, ["test"])


def test_classes_are_sorted_names():
    from trysquare.lab.data.cifar import CIFAR10, CIFAR100

    for cifar, count in [(CIFAR10, 10), (CIFAR100, 100)]:
        assert len(set(cifar.classes)) == count
        assert list(cifar.classes) == sorted(cifar.classes)
    assert DATASETS["cifar100"].classes == 100


def test_binary_is_preferred_to_pickles(tmp_path):
    writers.write_cifar10_python(tmp_path / "cifar-10-batches-py", n=3)
    content = writers.write_cifar10_binary(tmp_path / "cifar-10-batches-bin")
    expect(load("cifar10", tmp_path), content, TRAIN)


def test_missing(tmp_path):
    with pytest.raises(ValueError, match=r"data root .*nowhere is not a folder"):
        load("cifar10", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"expected data_batch_1.bin .* found none of them in .*cifar-10-batches-py"):
        load("cifar10", tmp_path)
    writers.write_cifar10_binary(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(ValueError, match=r"data_batch_3.bin: expected this file, found none"):
        load("cifar10", tmp_path)
    assert len(load("cifar10", tmp_path, "test")) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], "expected whole rows of 3073 bytes, found 12291 bytes, which is 3 rows and 3072 bytes"),
        (lambda b: b"", "found 0 bytes"),
        (lambda b: b + b[:5], "4 rows and 5 bytes"),
        (lambda b: b[:3073], "expected 4 images, found 1; get the file again"),
        (lambda b: b[:3073] + b"\x0a" + b[3074:], "expected labels from 0 to 9, found 10 for image 1"),
    ],
)
def test_damaged_binary(tmp_path, change, message):
    writers.write_cifar10_binary(tmp_path)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"data_batch_2.bin: .*{message}"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_files_that_are_cut_at_a_row_are_refused(tmp_path, monkeypatch, name, split):
    monkeypatch.undo()
    writers.write_cifar10_binary(tmp_path / "cifar10")
    writers.write_cifar100(tmp_path / "cifar100")
    first = {"cifar10": {"train": "data_batch_1", "test": "test_batch"}, "cifar100": {"train": "train", "test": "test"}}
    official = DATASETS[name].counts[split] // (5 if (name, split) == ("cifar10", "train") else 1)
    with pytest.raises(ValueError, match=f"{first[name][split]}.bin: expected {official} images, found 4"):
        load(name, tmp_path, split)


def test_a_cut_file_is_named_and_not_an_intact_one(tmp_path):
    writers.write_cifar10_binary(tmp_path)
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(path.read_bytes()[:3073])
    with pytest.raises(ValueError, match=r"data_batch_1.bin: expected 4 images, found 1"):
        load("cifar10", tmp_path)


def batch(n=4, **changes):
    images, labels = writers.random_images(0, n)
    return {b"data": images.reshape(n, -1), b"labels": labels.tolist()} | {k.encode(): v for k, v in changes.items()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "expected a pickled dictionary with names as keys, found list"),
        (
            batch(data=np.zeros((4, 100), np.uint8)),
            r"expected 'data' to be an array \(n, 3072\), found shape \(4, 100\)",
        ),
        (batch(data=None), "found NoneType"),
        (batch(data=np.zeros((4, 3072))), "unsigned bytes .* found 98304 of type 'f8'"),
        (batch(labels=None), r"expected 'labels' to be a list of numbers; keys found: \['data', 'labels'\]"),
        (batch(labels=[2**80] * 4), "it holds an integer of 81 bits"),
        (batch(labels=[1, 2]), "expected 4 labels, one an image, found 2"),
        (batch(labels=[1, 2, 3, -1]), "expected labels from 0 to 9, found -1 for image 3"),
    ],
)
def test_damaged_python(tmp_path, content, message):
    import pickle

    writers.write_cifar10_python(tmp_path)
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=f"test_batch: .*{message}"):
        load("cifar10", tmp_path, "test")


def test_batches_are_writable_copies(tmp_path):
    writers.write_cifar10_python(tmp_path)
    images = load("cifar10", tmp_path)
    images.images.zero_()
    assert images.images.dtype == torch.uint8
    assert images.images.sum() == 0
