"""Pickles of strangers: what they stand for is found out without running them, and they call functions of ours alone.

A pickle is a program. It may call whatever it can name, and it may name a value of before again (by its memo), so that
a few bytes can stand for a value that, written out, no memory holds: forty tuples, each of which holds the one before
twice. Whoever hashes, compares, copies or prints it goes through all of that.

``read_pickle`` reads one, ``read_archive`` what ``torch.save`` wrote.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trysquare.naming import shown

# A value may name others again, so that it is longer written out than in the file: by this much.
_REPETITION, _SMALL = 8, 10_000
# Larger integers are no labels, sizes or settings. They are slow to print, and many of them can have one hash.
_LARGEST_INTEGER = 64
# Recursive functions, of which many are written in C, end the process somewhere above 10,000.
_DEEPEST = 100
# An empty list is a byte in the file and a hundred in memory.
_MOST_OPERATIONS = 2_000_000

_PUT = frozenset(["PUT", "BINPUT", "LONG_BINPUT"])
_GET = frozenset(["GET", "BINGET", "LONG_BINGET"])
_MEMO = _PUT | _GET
# What each operation puts on the stack. Operations that are not here or below are written by no pickler of plain data.
_KINDS = {
    operation: kind
    for kind, operations in {
        "tuple": "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3",
        "list": "EMPTY_LIST LIST",
        "dict": "EMPTY_DICT DICT",
        "text": "STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
        "BINBYTES SHORT_BINBYTES BINBYTES8",
        "bytearray": "BYTEARRAY8",
        "integer": "INT LONG BININT BININT1 BININT2 LONG1 LONG4 NEWTRUE NEWFALSE NONE",
        "float": "FLOAT BINFLOAT",
        "name": "GLOBAL STACK_GLOBAL",
        "made": "REDUCE",
        "storage": "BINPERSID",
    }.items()
    for operation in operations.split()
}
# What changes the value below its arguments on the stack, which stays there, and the kind that this value has.
_CHANGES = {"APPEND": "list", "APPENDS": "list", "SETITEM": "dict", "SETITEMS": "dict", "BUILD": "made"}
_NO_VALUE = frozenset(["PROTO", "FRAME", "STOP", "POP_MARK"])
# Of what is made, these have a state that follows. (So has a tensor of torch, which it may resize.)
_HAVE_STATE = frozenset(["OrderedDict", "_reconstruct", "dtype"])
_ORDERED_DICT, ENCODE = ("collections", "OrderedDict"), ("_codecs", "encode")


@dataclass(eq=False, slots=True)
class _Value:
    """A value on the stack.

    Attributes:
        kind: one of ``_KINDS``.
        content: of a short text; of a name and of what is made, module and name.
        size: how many values it is, written out.
        length: letters and bytes in it, written out.
        depth: of its nesting.
        used: whether it is a part of another one already.
    """

    kind: str
    content: object = None
    size: int = 1
    length: int = 0
    depth: int = 1
    used: bool = False

    def take(self, parts: list[_Value]) -> None:
        """Make the values parts of this one."""
        self.size += sum(part.size for part in parts)
        self.length += sum(part.length for part in parts)
        self.depth = max([self.depth, *(part.depth + 1 for part in parts)])
        for part in parts:
            part.used = True


def encode(text: str, encoding: str) -> bytes:
    """Stand-in of ``_codecs.encode``, by which Python 3 writes bytes into old pickles."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError(f"expected bytes written as latin1, found {shown(encoding)}")
    return text.encode("latin1")


def read_pickle(
    program: bytes,
    stand_ins: Mapping[tuple[str, str], object],
    storage: Callable[[object], object] | None = None,
) -> object:
    """Return the value of a pickle that holds plain data, and what it makes by the names that it may use.

    Args:
        program: the pickle.
        stand_ins: by module and name, what a pickle gets that asks for it. Must not take much more memory than its
            arguments, whatever they are.
        storage: what gives the value of a persistent id; without it a pickle must have none.

    Raises:
        pickle.UnpicklingError: as ``refuse_bombs``.
        Exception: of any kind, if it is damaged.
    """
    refuse_bombs(program, stand_ins)

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            return stand_ins[module, name]

        def persistent_load(self, pid: object) -> object:
            if storage is None:
                raise pickle.UnpicklingError("it refers to something outside of itself")
            return storage(pid)

    return Reader(io.BytesIO(program), encoding="bytes").load()


def refuse_bombs(program: bytes, names: Collection[tuple[str, str]] = ()) -> None:
    """Refuse a pickle that stands for more than its length explains, or is more than plain data.

    Follows what its operations do to the stack and to the memo. Lengths of strings are checked by whoever reads it,
    who finds the file at its end.

    Args:
        program: the pickle.
        names: modules and names that it may use, and call.

    Raises:
        pickle.UnpicklingError: if a value is much longer written out than in the file, or nested very deep; if it
            changes a value that is a part of another one (whose size would not be known any more), or one that is no
            list, no dictionary and not made by a call; if its memo has places that it does not fill; if it holds an
            integer of more than 64 bits, a set, or a key that is neither text nor an integer (others can be chosen
            such that they have one hash); if it uses another name, or an operation that plain data does not need.
        Exception: of any kind, if it is damaged.
    """
    most = _REPETITION * len(program) + _SMALL
    stack: list[_Value | None] = []  # None is a mark
    memo: dict[int, _Value] = {}
    copied = 0  # values, letters and bytes that calls have been given, of which each may make a copy
    for count, (operation, argument, _) in enumerate(pickletools.genops(program)):
        name = operation.name
        if count > _MOST_OPERATIONS:
            raise pickle.UnpicklingError(f"it has more than {_MOST_OPERATIONS} operations")
        if isinstance(argument, int) and argument.bit_length() > _LARGEST_INTEGER:
            raise pickle.UnpicklingError(f"it holds an integer of {argument.bit_length()} bits")
        place = argument if isinstance(argument, int) else len(memo)
        if name in _MEMO and not 0 <= place <= count:
            raise pickle.UnpicklingError(f"operation {count} asks for place {place} of a memo that has {count} at most")
        if name in _GET:
            stack.append(memo[place])
        elif name in _PUT or name == "MEMOIZE":
            memo[place] = _top(stack)
        elif name == "MARK":
            stack.append(None)
        elif name == "POP":
            stack.pop()
        elif name in _NO_VALUE:
            _taken(stack, operation)
        else:
            taken = _taken(stack, operation)
            if name in _CHANGES:
                value = taken.pop(0)
                _require_open(value, _CHANGES[name], taken)
            elif name in _KINDS:
                value = _made(_KINDS[name], argument, taken, names)
            else:
                raise pickle.UnpicklingError(f"it has the operation {name}, which plain data does not need")
            if name in ("SETITEM", "SETITEMS", "DICT"):
                _require_keys(taken[::2])
            value.take(taken)
            if name in ("REDUCE", "BUILD", "BINPERSID"):
                copied += sum(part.size + part.length for part in taken)
            if max(value.size, copied) > most:
                raise pickle.UnpicklingError(
                    f"it stands for more than {most} values, by naming some again, in {len(program)} bytes"
                )
            if value.depth > _DEEPEST:
                raise pickle.UnpicklingError(f"its values are nested more than {_DEEPEST} deep")
            stack.append(value)


def _require_open(value: _Value, kind: str, parts: list[_Value]) -> None:
    """Refuse to change a value that is a part of another one, or of itself, or not of the kind that is filled so."""
    if value.used or value in parts:
        raise pickle.UnpicklingError("it changes a value that is a part of another one already")
    made_by = value.content if value.kind == "made" else None
    fits = value.kind == kind or (kind == "dict" and made_by == _ORDERED_DICT)
    if not fits or (kind == "made" and isinstance(made_by, tuple) and made_by[-1] not in _HAVE_STATE):
        raise pickle.UnpicklingError("it gives items or a state to a value that has none")


def _made(kind: str, argument: object, parts: list[_Value], names: Collection[tuple[str, str]]) -> _Value:
    """Return a new value, still without its parts."""
    if kind == "text":
        assert isinstance(argument, str | bytes)
        return _Value(kind, argument if len(argument) < 200 else None, length=len(argument))
    if kind == "bytearray":
        assert isinstance(argument, bytearray)
        return _Value(kind, length=len(argument))
    if kind == "name":
        # One operation has "module name" as its argument, the other takes both from the stack.
        wanted = tuple(str(argument).split(" ", 1)) if argument else tuple(part.content for part in parts)
        if wanted not in names:
            described = shown(".".join(map(str, wanted)))
            raise pickle.UnpicklingError(f"it names {described}, which such a file does not need; nothing was run")
        return _Value(kind, wanted)
    if kind == "made":
        function, arguments = parts
        if function.kind != "name" or arguments.kind != "tuple":
            raise pickle.UnpicklingError("it calls something else than a name, or without a tuple of arguments")
        return _Value(kind, function.content)
    return _Value(kind)


def _require_keys(keys: list[_Value]) -> None:
    for key in keys:
        if key.kind not in ("text", "integer") and not (key.kind == "made" and key.content == ENCODE):
            raise pickle.UnpicklingError(f"expected names as keys of a dictionary, or integers, found a {key.kind}")


def _top(stack: list[_Value | None]) -> _Value:
    top = stack[-1]
    if top is None:
        raise pickle.UnpicklingError("it keeps a mark, which is no value")
    return top


def _taken(stack: list[_Value | None], operation: pickletools.OpcodeInfo) -> list[_Value]:
    """Take the arguments of an operation from the stack, those after a mark included; in order, without the mark."""
    before, after_mark = operation.stack_before, []
    count = len(before)
    if pickletools.markobject in before:
        count = before.index(pickletools.markobject)
        while (part := stack.pop()) is not None:
            after_mark.append(part)
    if count > len(stack):
        raise pickle.UnpicklingError("it takes more from its stack than is there")
    first = [stack.pop() for _ in range(count)]
    if any(part is None for part in first):
        raise pickle.UnpicklingError("it takes a mark for a value")
    return [part for part in reversed([*after_mark, *first]) if part is not None]


# Files of ``torch.save``. ``torch.load(weights_only=True)`` runs no code of a stranger, but it calls functions that
# take any amount of memory (``bytearray``, ``torch.Tensor``), and a tensor may be larger than what the file holds of
# it. Here a file may hold plain data and dense tensors, and a tensor shows numbers that are in the file.
_MEMBER = re.compile(
    r"[^/]+/(data\.pkl|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id|data/[0-9]+)",
    re.ASCII,
)
_DTYPES = {
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "ComplexFloatStorage"): torch.complex64,
    ("torch", "ComplexDoubleStorage"): torch.complex128,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "ShortStorage"): torch.int16,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "BoolStorage"): torch.bool,
}
# Tensors may share memory, as tied weights do, so that they show more numbers than the file has: by this much.
_SHARING = 8
_LONGEST_AXIS, _MOST_AXES = 2**40, 32


def read_archive(content: bytes) -> object:
    """Return what ``torch.save`` wrote: plain data and dense tensors, which come to the processor.

    Raises:
        ValueError: if it claims more memory than its length. ``torch.save`` compresses nothing, so whatever is
            compressed, overlaps or stands for much more than it is long was made to do so.
        Exception: of any kind, if it is damaged or holds something else.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.infolist()
        _require_plain(members, len(content))
        folder = members[0].filename.partition("/")[0]
        return _Archive(archive, folder, len(content)).read()


def _require_plain(members: list[zipfile.ZipInfo], size: int) -> None:
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{shown(member.filename)} in it is compressed, which torch.save never does")
        if not _MEMBER.fullmatch(member.filename):
            raise ValueError(f"{shown(member.filename)} in it is nothing that torch.save writes for tensors")
    claimed = sum(member.file_size for member in members)
    if claimed > size or len({member.filename.lower() for member in members}) < len(members):
        raise ValueError(f"its parts claim {claimed} bytes, some of them twice, and it has {size}")
    if len({member.filename.partition("/")[0] for member in members}) != 1:
        raise ValueError("its parts are not in one folder")


class _OrderedDict(dict[str, object]):
    """Stand-in of the type of state dictionaries."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        """Versions of the modules, which nothing here depends on."""

    def __reduce__(self) -> tuple[object, ...]:
        return OrderedDict, (), None, None, iter(self.items())


class _Archive:
    """An archive that is being read: its storages, and how many bytes all tensors show until now."""

    def __init__(self, archive: zipfile.ZipFile, folder: str, size: int) -> None:
        self.archive, self.folder, self.most = archive, folder, _SHARING * size
        self.storages: dict[str, Tensor] = {}
        self.shown = 0

    def read(self) -> object:
        order = f"{self.folder}/byteorder"
        if order in self.archive.namelist() and self.archive.read(order) != b"little":
            raise ValueError("its numbers are not little-endian")
        stand_ins = {
            **_DTYPES,
            _ORDERED_DICT: _OrderedDict,
            ENCODE: encode,
            ("torch", "Size"): torch.Size,
            ("torch._utils", "_rebuild_tensor_v2"): self.tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        return read_pickle(self.archive.read(f"{self.folder}/data.pkl"), stand_ins, self.storage)

    def storage(self, identity: Any) -> Tensor:
        """Return all numbers of a storage, in one axis."""
        kind, dtype, key, _, count = identity
        if kind not in ("storage", b"storage") or not isinstance(dtype, torch.dtype) or type(key) is not str:
            raise ValueError(f"expected the type and name of a storage, found {shown(identity)}")
        if key not in self.storages:
            part = bytearray(self.archive.read(f"{self.folder}/data/{key}"))
            self.storages[key] = torch.frombuffer(part, dtype=dtype) if part else torch.empty(0, dtype=dtype)
        flat = self.storages[key]
        if flat.dtype != dtype or len(flat) != count:
            raise ValueError(f"storage {shown(key)} has {len(flat)} of {flat.dtype}, not {shown(count)} of {dtype}")
        return flat

    def tensor(
        self,
        flat: Tensor,
        offset: int,
        size: Sequence[int],
        stride: Sequence[int],
        _grad: object = False,
        _hooks: object = None,
        more: object = None,
    ) -> Tensor:
        """Stand-in of ``torch._utils._rebuild_tensor_v2``."""
        axes = (offset, *size, *stride)
        if not all(type(number) is int and 0 <= number < _LONGEST_AXIS for number in axes):
            raise ValueError(f"a tensor has the shape {shown(size)} and strides {shown(stride)}")
        if not isinstance(flat, Tensor) or len(size) > _MOST_AXES or more:
            raise ValueError("it holds a tensor that is not dense")
        bytes_shown = math.prod(size) * flat.element_size()
        held = flat.untyped_storage().nbytes()
        if bytes_shown > held:
            raise ValueError(f"a tensor of shape {shown(tuple(size))} repeats the {held} bytes that it has")
        self.shown += bytes_shown
        if self.shown > self.most:
            raise ValueError(f"its tensors show more than {self.most} bytes, by sharing them")
        return flat.as_strided(size, stride, offset)


def _parameter(data: Tensor, *_: object) -> Tensor:
    if not isinstance(data, Tensor):
        raise ValueError(f"expected a tensor as the data of a parameter, found {type(data).__name__}")
    return data
