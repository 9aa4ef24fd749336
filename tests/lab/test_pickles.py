"""Pickles whose values, written out, are longer than any memory: refused before they are run."""

import io
import pickle
import zipfile

import numpy as np
import pytest
import torch

from trysquare.files import sha256
from trysquare.lab.checkpoint import packed, read_checkpoint, unpacked
from trysquare.lab.data.unpickle import read_pickled_dict
from trysquare.lab.pickles import refuse_bombs
from trysquare.lab.training.recipe import read_recipe


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


def nested(values):
    """Tuples in tuples, as a key of a dictionary."""
    return b"\x80\x02}N" + b"\x85" * values + b"K\x01s."


def calls(function, arguments=b")"):
    return b"\x80\x02}U\x01ac" + function + b"\n" + arguments + b"Rs."


# What Python and torch would do with these: fall over, take gigabytes, or take hours.
HOSTILE = {
    "a deep key": nested(300_000),
    "deep lists": b"\x80\x02}U\x01a" + b"]" * 200 + b"a" * 199 + b"s.",
    "a list in itself": b"\x80\x02}U\x01a]q\x00h\x00as.",
    "a dictionary in itself": b"\x80\x02}q\x00U\x01ah\x00s.",
    "a large buffer": calls(b"__builtin__\nbytearray", b"J\x00\x94\x35\x77\x85"),
    "another large buffer": calls(b"builtins\nbytearray", b"J\x00\x94\x35\x77\x85"),
    "a large tensor": calls(b"torch\nTensor", b"J\xff\xff\x00\x00J\xff\xff\x00\x00\x86"),
    "a large storage": calls(b"torch\nFloatStorage", b"J\x00\x94\x35\x77\x85"),
    "hexadecimal": calls(b"_codecs\nencode", b"c_codecs\nencode\nU\x01aU\x03hex\x86RU\x03hex\x86"),
    "a set": calls(b"__builtin__\nset", b"]\x85"),
    "a set of its own": b"\x80\x04}U\x01a\x8f(K\x01\x90s.",
    "a counter": calls(b"collections\nCounter", b"]\x85"),
    "a dictionary of arguments": calls(b"collections\nOrderedDict", b"}\x85"),
    "a new object": b"\x80\x02}U\x01accollections\nOrderedDict\n)\x81s.",
    "an old class": b"}U\x01a(icollections\nOrderedDict\ns.",
    "the state of a function": b"\x80\x02}U\x01ac_codecs\nencode\nN}U\x0c__defaults__)s\x86bs.",
    "the state of bytes": b"\x80\x02}U\x01ac_codecs\nencode\nX\x01\x00\x00\x00aX\x06\x00\x00\x00latin1\x86R}bs.",
    "an item of bytes": b"\x80\x02}U\x01ac_codecs\nencode\nX\x01\x00\x00\x00aX\x06\x00\x00\x00latin1\x86RK\x00K\x01ss.",
    "a call of a call": b"\x80\x02}U\x01accollections\nOrderedDict\n)R)Rs.",
    "a pair as a key": b"\x80\x02}K\x01K\x02\x86K\x03s.",
    "a fraction as a key": b"\x80\x02}G" + bytes(8) + b"K\x03s.",
    "a key of 65 bits": b"\x80\x02}\x8a\x0a" + b"\x7f" * 10 + b"K\x03s.",
    "a pair as a key of before": b"((K\x01K\x02tK\x03d.",
    "copies of a text": b"\x80\x02}(U\x01ac_codecs\nencode\nq\x00X\x00\x00\x01\x00" + b"a" * 65536
    + b"q\x01X\x06\x00\x00\x00latin1q\x02\x86q\x03R" + b"".join(
        b"J" + i.to_bytes(4, "little") + b"h\x00h\x03R" for i in range(20_000)
    ) + b"u.",
    "very many values": b"\x80\x02}U\x01a](" + b"]" * 2_000_001 + b"es.",
    "a name that is long": b"\x80\x02}U\x01ac" + b"a" * 100_000 + b"\nb\n)Rs.",
    "a name with an escape": b"\x80\x02}U\x01ac\x1b[31m\nb\n)Rs.",
}  # fmt: skip


def archive(program, **more):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, part in {"data.pkl": program, "version": b"3\n", **more}.items():
            file.writestr(f"archive/{name}", part)
    return buffer.getvalue()


@pytest.mark.parametrize("name", [*BOMBS, *HOSTILE])
def test_neither_reader_runs_them(name, tmp_path):
    program = {**BOMBS, **HOSTILE}[name]
    (tmp_path / "data_batch_1").write_bytes(program)
    (tmp_path / "checkpoint.pt").write_bytes(archive(program))
    for read, file in ((read_pickled_dict, "data_batch_1"), (unpacked, "checkpoint.pt")):
        with pytest.raises(ValueError, match=file) as caught:
            read(tmp_path / file)
        assert len(str(caught.value)) < 700
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("encoding", [b"a" * 100_000, b"hex"])
def test_encodings_are_not_quoted_whole(encoding, tmp_path):
    length = len(encoding).to_bytes(4, "little")
    program = b"\x80\x02}U\x01ac_codecs\nencode\nX\x01\x00\x00\x00aX" + length + encoding + b"\x86Rs."
    (tmp_path / "data_batch_1").write_bytes(program)
    with pytest.raises(ValueError, match="written as latin1") as caught:
        read_pickled_dict(tmp_path / "data_batch_1")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["data.PKL", "DATA.pkl", "data/0x", "constants.pkl", "code/a.py", "../data/0"])
def test_archives_hold_what_torch_writes(name, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(archive(b"\x80\x02}.", **{name: b"\x80\x02}."}))
    with pytest.raises(ValueError, match=r"checkpoint\.pt is not .* nothing that torch.save writes"):
        unpacked(tmp_path / "checkpoint.pt")
    (tmp_path / "checkpoint.pt").write_bytes(archive(b"\x80\x02}."))
    assert unpacked(tmp_path / "checkpoint.pt") == {}


def a_tensor(size, stride, count=4, name=b"FloatStorage"):
    """A pickle with a tensor of a storage of so many numbers, of the shape and strides that are claimed."""

    def numbers(values):
        return b"(" + b"".join(b"\x8a\x08" + value.to_bytes(8, "little", signed=True) for value in values) + b"t"

    storage = b"(X\x07\x00\x00\x00storagectorch\n" + name + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK%ctQ" % count
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + numbers(size) + numbers(stride)
    return b"\x80\x02}X\x01\x00\x00\x00a" + tensor + b"\x89ccollections\nOrderedDict\n)RtRs."


def test_tensors_show_what_the_file_holds(tmp_path):
    path = tmp_path / "checkpoint.pt"
    numbers = torch.arange(4.0)
    path.write_bytes(archive(a_tensor([2, 2], [1, 2]), **{"data/0": numbers.numpy().tobytes()}))
    assert unpacked(path)["a"].tolist() == [[0, 2], [1, 3]]
    for program in (
        a_tensor([10**9], [1]),
        a_tensor([2**62, 4], [1, 1]),
        a_tensor([1], [-1]),
        a_tensor([2, 2], [2, 2]),
        a_tensor([2, 2], [2]),
        a_tensor([4], [1], count=200),
        a_tensor([4], [1], name=b"DoubleStorage"),
        a_tensor([1] * 100, [1] * 100),
    ):
        path.write_bytes(archive(program, **{"data/0": numbers.numpy().tobytes()}))
        with pytest.raises(ValueError, match=r"checkpoint\.pt"):
            unpacked(path)


def test_tensors_that_share_what_they_show(tmp_path):
    numbers = torch.zeros(10**5)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(packed({"a": [numbers.view(-1) for _ in range(5)]}))
    assert len(unpacked(path)["a"]) == 5
    path.write_bytes(packed({"a": [numbers.view(-1) for _ in range(50)]}))
    with pytest.raises(ValueError, match="by sharing them"):
        unpacked(path)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_read_as_torch_reads_them(dtype, tmp_path):
    whole = (10 * torch.randn(6, 4, dtype=torch.float64)).to(dtype)
    content = {
        "whole": whole, "part": whole[1:3, ::2], "turned": whole.T, "none": whole[:0], "one": whole[0, 0],
        "parameter": torch.nn.Parameter(whole, whole.is_floating_point()), "bytes": b"a\xff", "size": whole.shape,
    }  # fmt: skip
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(packed(content))
    found = unpacked(path)
    assert found.keys() == content.keys()
    for name, value in content.items():
        assert type(found[name]) is (torch.Tensor if isinstance(value, torch.Tensor) else type(value))
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value)
            assert found[name].stride() == value.stride()
            assert found[name].dtype == dtype
        else:
            assert found[name] == value
    path.write_bytes(packed(found))  # and can be written again
    assert torch.equal(unpacked(path)["turned"], whole.T)


def test_state_of_every_optimizer_is_read(tmp_path):
    path = tmp_path / "checkpoint.pt"
    for name in ("SGD", "AdamW", "Adagrad", "RMSprop", "LBFGS"):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)

        def loss(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            value = model(torch.eye(2)).square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        path.write_bytes(packed({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
        found = unpacked(path)
        optimizer.load_state_dict(found["optimizer"])
        model.load_state_dict(found["model"])


@pytest.mark.parametrize("name", ["data_batch_1", "checkpoint.pt", "model.safetensors", "recipe.yaml"])
def test_sparse_files_are_not_read(name, tmp_path):
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(2**40)
    readers = {
        "data_batch_1": read_pickled_dict, "checkpoint.pt": unpacked, "model.safetensors": read_checkpoint,
        "recipe.yaml": read_recipe,
    }  # fmt: skip
    for read in (readers[name], sha256):
        with pytest.raises(ValueError, match=rf"{name} has {2**40} bytes"):
            read(path)


@pytest.mark.parametrize("content", [torch.zeros(10**6, 2), [("a", 1)], "ab", 3, ()])
def test_a_checkpoint_is_a_dictionary(content, tmp_path):
    """The rows of a tensor would be pairs too."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    (tmp_path / "checkpoint.pt").write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="it holds a"):
        unpacked(tmp_path / "checkpoint.pt")


@pytest.mark.parametrize("function", [b"numpy\ndtype", b"torch\nSize"])
def test_calls_with_many_values_are_few(function):
    names = [tuple(function.decode().split("\n"))]
    program = b"(" + b"N" * 50_000 + b"tq\x000](" + (b"c" + function + b"\nh\x00\x85R") * 1000 + b"e."
    with pytest.raises(pickle.UnpicklingError, match="by naming some again"):
        refuse_bombs(program, names)
    refuse_bombs(program[:50_005] + b"](c" + function + b"\nh\x00\x85Re.", names)
