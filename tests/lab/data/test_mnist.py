import gzip

import numpy as np
import pytest

from tests.lab.data import writers
from trysquare.lab.data import load


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "nesting"),
    [
        ("mnist", "."), ("mnist", "mnist"), ("mnist", "MNIST/raw"),
        ("fashion-mnist", "."), ("fashion-mnist", "fashion-mnist"), ("fashion-mnist", "FashionMNIST/raw"),
    ],
)  # fmt: skip
def test_idx(tmp_path, name, nesting, packed):
    content = writers.write_mnist(tmp_path / nesting, packed=packed)
    for split, prefix in [("train", "train"), ("test", "t10k")]:
        images, (pixels, labels) = load(name, tmp_path, split), content[prefix]
        assert np.array_equal(images.images.numpy(), pixels[:, None])
        assert images.labels.tolist() == labels.tolist()
        assert len(images.classes) == 10


def test_dots_in_names(tmp_path):
    writers.write_mnist(tmp_path, packed=False, pattern="{}-{}.idx{}-ubyte")
    assert len(load("mnist", tmp_path)) == 5


def test_mnist_and_fashion_beside_each_other(tmp_path):
    writers.write_mnist(tmp_path / "mnist", n=3)
    writers.write_mnist(tmp_path / "fashion-mnist", n=4)
    assert (len(load("mnist", tmp_path)), len(load("fashion-mnist", tmp_path))) == (3, 4)


def test_missing(tmp_path):
    with pytest.raises(ValueError, match=r"mnist: expected train-images-idx3-ubyte .* found none of them"):
        load("mnist", tmp_path)
    writers.write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte: expected this file, found none"):
        load("mnist", tmp_path, "test")


PIXELS, LABELS = writers.random_images(0, 5, (28, 28))


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("images-idx3", writers.idx(PIXELS)[:-1], "expected 3936 bytes for 5 items, found only 3935"),
        ("images-idx3", writers.idx(PIXELS) + b"x", "found more"),
        ("images-idx3", writers.idx(PIXELS[:, :, :27]), r"expected items of shape \(28, 28\), found \(28, 27\)"),
        ("images-idx3", writers.idx(PIXELS).replace(b"\0\0\0\5", b"\xff\xff\xff\xff", 1), "for 4294967295 items"),
        ("images-idx3", b"\0\0\x0d\3" + writers.idx(PIXELS)[4:], "starts with 00 00 08 03, found 00 00 0d 03"),
        ("images-idx3", b"", "expected an idx file"),
        ("images-idx3", gzip.compress(writers.idx(PIXELS))[:-100], "expected a whole gzip file"),
        ("images-idx3", gzip.compress(writers.idx(PIXELS))[:2] + b"junk", "expected a whole gzip file"),
        ("labels-idx1", writers.idx(LABELS.astype(np.uint8)[:4]), "expected 5 labels as in train-images.*, found 4"),
        ("labels-idx1", writers.idx(np.array([0, 1, 2, 3, 11], np.uint8)), "from 0 to 9, found 11 for image 4"),
    ],
)  # fmt: skip
def test_damaged(tmp_path, kind, content, message):
    writers.write_mnist(tmp_path, packed=False)
    (tmp_path / f"train-{kind}-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match=f"train-{kind}-ubyte: .*{message}"):
        load("mnist", tmp_path)


def test_flipped_bit_in_gzip_is_seen(tmp_path):
    writers.write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="expected a whole gzip file"):
        load("mnist", tmp_path)
