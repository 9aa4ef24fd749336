"""A pickle that names anything but arrays is refused before it runs."""

import os
import pickle

import numpy as np
import pytest

from tests.lab.data import writers
from trysquare.lab.data import load
from trysquare.lab.data.unpickle import read_pickled_dict


class Runs:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_malicious_pickle_is_not_run(tmp_path, protocol):
    writers.write_cifar10_python(tmp_path)
    mark = tmp_path / "mark"
    evil = {b"data": Runs(os.system, f"touch {mark}"), b"labels": []}
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(evil, protocol=protocol))
    with pytest.raises(ValueError, match=r"data_batch_1: .*it names '(posix|nt).system', .*nothing was run"):
        load("cifar10", tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("function", [eval, getattr, np.load, np.fromfile, pickle.loads, __import__])
def test_other_functions_are_refused(tmp_path, function):
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps({"data": Runs(function, "1")}))
    with pytest.raises(ValueError, match="which such a file does not need"):
        read_pickled_dict(path)


@pytest.mark.parametrize("size", [0, 1, 10, 100, 1000])
def test_truncated(tmp_path, size):
    writers.write_cifar10_python(tmp_path)
    path = tmp_path / "data_batch_1"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="data_batch_1: expected a pickle of arrays and lists"):
        load("cifar10", tmp_path)


def test_random_damage_raises_only_value_errors(tmp_path, monkeypatch):
    writers.expect_rows(monkeypatch, 1)
    writers.write_cifar10_python(tmp_path, n=1)
    path = tmp_path / "test_batch"
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    header = len(whole) - 3072
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[rng.integers(0, header)] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            load("cifar10", tmp_path, "test")
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017 - not every damage is seen


def test_other_encodings_are_refused(tmp_path):
    import _codecs

    path = tmp_path / "file"
    path.write_bytes(pickle.dumps({"data": Runs(_codecs.encode, "x", "rot13")}))
    with pytest.raises(ValueError, match="written as latin1, found 'rot13'"):
        read_pickled_dict(path)


def test_column_major_arrays(tmp_path):
    path, array = tmp_path / "file", np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    for protocol in (2, 5):
        path.write_bytes(pickle.dumps({"data": array}, protocol=protocol))
        assert np.array_equal(read_pickled_dict(path)["data"], array)
