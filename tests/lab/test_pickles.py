"""Pickles whose values, written out, are longer than any memory: refused before they are run."""

import pickle

import numpy as np
import pytest
import torch

from trysquare.lab.checkpoint import packed, unpacked
from trysquare.lab.data.unpickle import read_pickled_dict
from trysquare.lab.pickles import refuse_bombs


def shared(make, depth=40):
    """Values that hold the one before twice, by the memo: ``make`` makes one of the two that are on the stack."""
    program = b"N\x85q\x00"
    for i in range(depth):
        program += b"(" + 2 * (b"h" + bytes([i])) + make + b"q" + bytes([i + 1])
    return program


BOMBS = {
    "tuples of two": b"\x80\x02}N\x85q\x00" + b"".join(b"h%c\x86q%c" % (i, i + 1) for i in range(40)) + b"K\x01s.",
    "tuples": b"\x80\x02}" + shared(b"t") + b"K\x01s.",
    "lists": b"\x80\x02}K\x01" + shared(b"l") + b"s.",
    "dictionaries": b"\x80\x02}K\x01" + b"}q\x00" + b"".join(
        b"}(K\x01h%cK\x02h%cuq%c" % (i, i, i + 1) for i in range(40)
    ) + b"s.",
    "frozen sets": b"\x80\x04}N\x85q\x00" + b"".join(
        b"(h%ch%c\x85\x91q%c" % (i, i, i + 1) for i in range(40)
    ) + b"K\x01s.",
    "sets": b"\x80\x04\x8f(" + shared(b"t") + b"\x90.",
    "lists that are filled later": b"\x80\x02"
    + b"".join(b"]q%c0" % i for i in range(40))
    + b"".join(b"h%c(h%ch%ce0" % (i + 1, i, i) for i in reversed(range(39)))
    + b"h\x00N\x61" + b"0}K\x01h\x27s.",
    "a long integer": b"\x80\x02}\x8b" + (1000).to_bytes(4, "little") + b"\x7f" * 1000 + b"K\x01s.",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once(name, tmp_path):
    path = tmp_path / "data_batch_1"
    path.write_bytes(BOMBS[name])
    with pytest.raises(ValueError, match="data_batch_1") as caught:
        read_pickled_dict(path)
    assert isinstance(caught.value.__cause__, pickle.UnpicklingError), caught.value.__cause__
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_arrays_are_not(tmp_path, protocol):
    pair, array = (1, 2), np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = {
        b"data": array, b"more": array.copy(), b"same": array, b"labels": list(range(3000)), b"names": [b"a", "b"] * 9,
        b"pairs": [pair, pair, (pair, pair)], b"nothing": (), b"none": None,
    }  # fmt: skip
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    found = read_pickled_dict(path)
    assert np.array_equal(found["data"], array)
    assert np.array_equal(found["same"], array)
    assert found["labels"] == content[b"labels"]
    assert found["pairs"] == content[b"pairs"]


def test_what_python_2_wrote(tmp_path):
    """The operations of the official CIFAR-10 files, with one image of two pixels."""
    program = (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03U\x06labelsq\x04]q\x05(K\x06K\x09e"
        b"U\x04dataq\x06"
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09(K\x01K\x01K\x02\x86"
        b"cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"U\x02\x05\x06tbU\x09filenamesq\x0c]q\x0d(U\x05a.pngq\x0eU\x05b.pngq\x0feu."
    )
    path = tmp_path / "data_batch_1"
    path.write_bytes(program)
    found = read_pickled_dict(path)
    assert found["labels"] == [6, 9]
    assert found["data"].tolist() == [[5, 6]]


def test_what_torch_writes_is_no_bomb(tmp_path):
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(50)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    pair = (1, 2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pairs": [pair, pair, {"a": (pair,)}]}
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(packed(state))
    assert unpacked(path)["pairs"] == state["pairs"]


def test_values_are_counted_as_they_are_written_out():
    refuse_bombs(pickle.dumps([list(range(1000))] * 7))
    with pytest.raises(pickle.UnpicklingError, match="by naming some again"):
        refuse_bombs(pickle.dumps([[list(range(1000))] * 100] * 100))
