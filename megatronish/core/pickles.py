"""Look at a pickle of a stranger before it is read: what it makes must be small, whatever the pickle's own size.

An unpickler that resolves no foreign name runs no code, and still a pickle of a hundred bytes can end the process. A
tuple of (x, x), and that of two of these, has 2^60 values after sixty steps, and the hash of it, which a dict or a set
asks for, looks at each of them. A tuple of 100,000 tuples inside of each other overflows the stack when it is hashed.
And the memo may be given four billion entries.

`refuse_bombs` reads the instructions without doing them, and keeps the weight of each value in the way of the
unpickler's own stack: the number of values that a hash of it may visit, each level of nesting counted an eighth more,
so that one limit is that of their number and of their depth.
"""

import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

UNIT: Final = 8
"""Weight of a value without others in it."""
HEAVIEST = 2**28
"""Weight of a tuple; with one tuple inside of another it is reached in some 120 levels."""

_KEEPING = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD", "LIST", "DICT"}
"""Instructions that leave the first of what they take, or a new container. What a list holds has no weight: a list has
no hash, and functions that a reader allows take texts and numbers alone out of one (`exactly`, `plain_values`)."""


_HASHING = {"SETITEM", "SETITEMS", "ADDITEMS", "DICT", "FROZENSET"}


class PickleBombError(ValueError):
    """ValueError: a pickle would take more memory, time or stack than any file of tensors."""


class _Instruction(NamedTuple):
    """Instruction of a pickle: its argument's bytes, and what it does to the stack."""

    does: Literal["push", "put", "get", "memoize", "mark", "dup", "pop", "make", "keep", "nothing", "stop"]
    length: int
    """Bytes of the argument; -1: up to the end of the line, -2: up to the end of the next one."""
    size_of_length: int
    """Bytes in which the length of the rest stands, 0 if none."""
    takes: int
    """Values from the stack, after those above its last mark if it takes these."""
    takes_mark: bool
    hashes: bool
    """Whether keys, or elements of a set, are among what it takes."""


def _instruction(opcode: Any) -> _Instruction:
    name, before, size = opcode.name, opcode.stack_before, 0 if opcode.arg is None else opcode.arg.n
    size_of_length = {-2: 1, -3: 4, -4: 4, -5: 8}.get(size, 0)
    length = 0 if size_of_length else size if size >= 0 else -2 if opcode.arg.name == "stringnl_noescape_pair" else -1
    does: Any = {"DUP": "dup", "MARK": "mark", "STOP": "stop", "MEMOIZE": "memoize"}.get(name)
    if does is None:
        does = "put" if name.endswith("PUT") else "get" if name.endswith("GET") else None
    if does is None and opcode.stack_after:
        does = "push" if not before else "keep" if name in _KEEPING else "make"
    has_mark = pickletools.markobject in before
    takes = before.index(pickletools.markobject) if has_mark else len(before)
    does = does or ("pop" if before else "nothing")
    return _Instruction(does, length, size_of_length, takes, has_mark, name in _HASHING)


_TABLE: Final[list[_Instruction | None]] = [None] * 256
for _opcode in pickletools.opcodes:
    _TABLE[ord(_opcode.code)] = _instruction(_opcode)
_MEMOIZE = ord(pickle.MEMOIZE)


def refuse_bombs(data: bytes) -> None:
    """Raise PickleBombError for a pickle that should not be read, and ValueError for bytes that are none."""
    table, stack = _TABLE, list[int]()  # weights
    marks = list[int]()  # heights of the stack
    memo = dict[int, int]()
    at, end = 0, len(data)
    # A tuple keeps no hash: as the key of a thousand entries it is visited a thousand times.
    hashed, most_hashed = 0, 64 * end + 2**24
    while at < end:
        if (instruction := table[data[at]]) is None:
            raise ValueError(f"byte {at} is no instruction of a pickle")
        does, length, size_of_length, takes, takes_mark, hashes = instruction
        # 1. The argument is data[start:at].
        start = at + 1
        at = start + length if length >= 0 and not size_of_length else _end_of_argument(data, start, instruction)
        # 2. The stack, or what is left of one that has too little on it: the unpickler will say so.
        if does == "push":
            stack.append(UNIT)
        elif does == "pop" and not takes_mark and marks and marks[-1] == len(stack):
            marks.pop()
        elif does in ("make", "keep", "pop"):
            height = max(((marks.pop() if marks else 0) if takes_mark else len(stack)) - takes, 0)
            weight = UNIT
            if hashes:
                hashed += sum(stack[height:])
                if hashed > most_hashed:
                    raise PickleBombError("its keys are tuples with more values than any file of tensors has")
            if does == "make":
                weight += sum(stack[height:])
                weight += weight >> 3
                if weight > HEAVIEST:
                    raise PickleBombError("it has tuples inside of tuples, more or deeper than any file of tensors")
            elif takes and height < len(stack):
                weight = stack[height]
            del stack[height:]
            if does != "pop":
                stack.append(weight)
        elif does == "mark":
            marks.append(len(stack))
        elif does in ("get", "put"):
            key = int(data[start:at]) if length < 0 else int.from_bytes(data[start:at], "little")
            if does == "get":
                stack.append(memo.get(key, UNIT))
            elif 0 <= key <= at:
                memo[key] = stack[-1] if stack else UNIT
            else:  # the unpickler makes room for all entries before this one
                raise PickleBombError(f"it numbers a value as {key} in its first {at} bytes")
        elif does == "dup":
            stack.append(stack[-1] if stack else UNIT)
        elif does == "memoize":
            memo[len(memo)] = stack[-1] if stack else UNIT
        elif does == "stop":
            return
        while at < end and data[at] == _MEMOIZE:  # it follows most values
            memo[len(memo)] = stack[-1] if stack else UNIT
            at += 1
    raise ValueError("it is cut short")


class Sealed:
    """Object that a pickle can make, or call, and not change."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise ValueError("it changes an object that has no state to be changed")


@dataclass(frozen=True)
class SealedCall(Sealed):
    """Function that a pickle may call. By itself a function is an object whose attributes a pickle can change."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def exactly(kind: type[Any]) -> SealedCall:
    """Function of a value of this class that returns it; ValueError for any other. A list has a text without bounds."""

    def same(value: Any = kind()) -> Any:  # noqa: B008  # an empty one, as the class itself makes it
        if type(value) is not kind:
            raise ValueError(f"it makes a {kind.__name__} of a {type(value).__name__}")
        return value

    return SealedCall(same)


def plain_values(values: Any = ()) -> list[Any]:
    """Elements of a list or a tuple that are texts and numbers; ValueError for others, whose hashes have no bounds."""
    if not isinstance(values, list | tuple) or not all(type(each) in (str, bytes, int, float, bool) for each in values):
        raise ValueError("it makes a set of what is neither a text nor a number")
    return list(values)


def shape_of(numbers: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """What torch.Size makes, without a way from a list to a tuple; ValueError for what is no tuple."""
    if type(numbers) is not tuple:
        raise ValueError("a shape is no tuple")
    return numbers


def _end_of_argument(data: bytes, start: int, instruction: _Instruction) -> int:
    """Offset after an argument that says its own length, or that ends with a line."""
    if instruction.size_of_length:
        begin = start + instruction.size_of_length
        return begin + int.from_bytes(data[start:begin], "little")
    return _end_of_line(data, start, lines=-instruction.length)


def _end_of_line(data: bytes, start: int, *, lines: int) -> int:
    """Offset after so many lines."""
    for _ in range(lines):
        start = data.find(b"\n", start) + 1
        if start == 0:
            raise ValueError("it is cut short")
    return start
