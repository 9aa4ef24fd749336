"""How much a pickle stands for, found out without running it.

A pickle may name a value of before again (by its memo), so that a few bytes can stand for a value that, written out,
no memory holds: forty tuples, each of which holds the one before twice. Whoever hashes, compares, copies or prints it
goes through all of that.
"""

from __future__ import annotations

import pickle
import pickletools
from dataclasses import dataclass

# A value may name others again, so that it is longer written out than in the file: by this much.
_REPETITION, _SMALL = 8, 10_000
# Integers of more bits are no labels, sizes or settings, and slow to hash and to print.
_LARGEST_INTEGER = 256
_PUT = frozenset(["PUT", "BINPUT", "LONG_BINPUT"])
_GET = frozenset(["GET", "BINGET", "LONG_BINGET"])
# What changes the value below its arguments on the stack, which stays there.
_FILL = frozenset(["APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"])


@dataclass(eq=False)
class _Value:
    """A value on the stack: how many it is, written out, and whether it is a part of another one already."""

    size: int = 1
    used: bool = False


def refuse_bombs(program: bytes) -> None:
    """Refuse a pickle that stands for more than its length explains.

    Follows what its operations do to the stack and to the memo. Lengths of strings are checked by whoever reads it,
    who finds the file at its end.

    Raises:
        pickle.UnpicklingError: if a value is much longer written out than in the file, it changes a value that is a
            part of another one (whose size would not be known any more), its memo has places that it does not fill,
            or it holds an integer of more than 256 bits.
        Exception: of any kind, if it is damaged.
    """
    most = _REPETITION * len(program) + _SMALL
    stack: list[_Value | None] = []  # None is a mark
    memo: dict[int, _Value] = {}
    for count, (operation, argument, _) in enumerate(pickletools.genops(program)):
        name = operation.name
        if name == "DUP":
            raise pickle.UnpicklingError("it repeats what is on its stack, which no pickler writes")
        if isinstance(argument, int) and argument.bit_length() > _LARGEST_INTEGER:
            raise pickle.UnpicklingError(f"it holds an integer of {argument.bit_length()} bits")
        if name in _PUT | _GET and (not isinstance(argument, int) or argument > count):
            raise pickle.UnpicklingError(
                f"operation {count} asks for place {argument} of a memo that has {count} at most"
            )
        place = argument if isinstance(argument, int) else len(memo)
        if name in _GET:
            stack.append(memo[place])
        elif name in _PUT or name == "MEMOIZE":
            memo[place] = _top(stack)
        elif name == "MARK":
            stack.append(None)
        elif name == "POP":
            stack.pop()
        else:
            taken = _taken(stack, operation)
            if name in _FILL:
                target = taken.pop(0)
                if target.used:
                    raise pickle.UnpicklingError("it changes a value that is a part of another one already")
            else:
                target = _Value()
            target.size += sum(part.size for part in taken)
            for part in taken:
                part.used = True
            if target.size > most:
                raise pickle.UnpicklingError(
                    f"it stands for more than {most} values, by naming some again, in {len(program)} bytes"
                )
            stack.extend([target] * len(operation.stack_after))


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
