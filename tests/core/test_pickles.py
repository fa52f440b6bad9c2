"""Tests of the look at foreign pickles: what would fill memory, stack or time is refused before it is read."""

import io
import os
import pickle
import struct
import time
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch

from megatronish.core.pickles import (
    HEAVIEST,
    PickleBombError,
    SealedCall,
    exactly,
    plain_values,
    refuse_bombs,
    shape_of,
)
from megatronish.formats.torch_file.unpickler import unpickle

DOUBLED = b"q\x01h\x01\x86" * 60
BOMBS = {
    "tuples as a key": b"\x80\x02})" + DOUBLED + b"K\x01s.",
    "tuples in a set": b"\x80\x04\x8f()" + DOUBLED + b"\x90.",
    "tuples in a frozen set": b"\x80\x04()" + DOUBLED + b"\x91.",
    "tuples by marks": b"\x80\x02}" + b"((" + b"tq\x01(h\x01h\x01" * 60 + b"tK\x01s.",
    "tuples by copies": b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s.",
    "tuples in digits": b"})" + b"p1\ng1\n\x86" * 60 + b"K\x01s.",
    "numbered twice": b"\x80\x04})"
    + b"".join(b"\x94\x94\x94h" + bytes([3 * n + 2]) + b"\x86" for n in range(60))
    + b"K\x01s.",
    "a mark taken back": b"\x80\x02})" + b"q\x01h\x01\x86(0" * 60 + b"K\x01s.",
    "an empty state": b"\x80\x02})" + b"q\x01h\x01\x86Nb" * 60 + b"K\x01s.",
    "no items": b"\x80\x02})" + b"q\x01h\x01\x86(e" * 60 + b"K\x01s.",
    "a deep key": b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.",
    "a deep tuple": b"\x80\x02)" + b"\x85" * 300_000 + b".",
    "a far memo": b"\x80\x02]r\xff\xff\xff\x3f.",
    "a farther memo": b"\x80\x02]r\xff\xff\xff\xff.",
    "a memo in digits": b"]p4000000000\n.",
    "a memo below zero": b"]p-1\n.",
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_pickle_that_would_end_the_process_is_refused_before_it_is_read(what: str) -> None:
    before = time.process_time()
    with pytest.raises(PickleBombError):
        refuse_bombs(BOMBS[what])
    assert time.process_time() - before < 2.0


@pytest.mark.parametrize(
    "way",
    [
        b"ctorch\nSize\nq\x03]h\x02ah\x02a\x85R",
        b"ctorch\nSize\nq\x03]h\x02ah\x02a\x85\x81",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_parameter\nN]h\x02aNtR",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch\nSize\nN]]h\x02aaNtR",
    ],
)
def test_no_function_takes_a_tuple_out_of_a_list(way: bytes) -> None:
    """A list has no weight, so what would make tuples of lists could hide one that is heavy."""
    with pytest.raises(Exception, match=r"a shape is no tuple|not made by torch|not a type|NEWOBJ"):
        unpickle(b"\x80\x02}X\x01\0\0\0aq\x02" + way + b"K\x01s.")


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"\x80\x02]", b"\xff", b"I1", b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"a.", b"cos\nsystem"],
)
def test_what_is_no_pickle_is_no_bomb(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"cut short|no instruction"):
        refuse_bombs(data)


@pytest.mark.long
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_any_content_of_a_checkpoint_is_let_through(protocol: int) -> None:
    shared = (1, "a", 2.0)
    deep: list[object] = []
    for _ in range(30):
        deep = [deep, {"a": deep, ("b", 3): (4,)}]
    content = OrderedDict((f"layers.{number}", [shared, {number, frozenset({number})}]) for number in range(5000))
    refuse_bombs(
        pickle.dumps([content, deep, list(range(100_000)), os.stat_result(range(10)), b"a", 2**90, None], protocol)
    )
    stream = io.BytesIO()
    torch.save({"model": torch.nn.Linear(3, 3).state_dict(), "step": 3}, stream, pickle_protocol=max(protocol, 2))


def test_the_heaviest_that_is_let_through_is_soon_hashed() -> None:
    value: tuple[object, ...] = ()
    while True:
        value = (value, value)
        try:
            refuse_bombs(pickle.dumps(value, 4))
        except PickleBombError:
            break
    before = time.process_time()
    hash(value)
    assert time.process_time() - before < 5.0
    assert HEAVIEST < 2**30


def test_a_mark_that_is_taken_back_shifts_no_number_of_the_memo() -> None:
    twice = b"".join(b"h" + bytes([number]) + b"h" + bytes([number]) + b"\x86\x94" for number in range(100))
    with pytest.raises(PickleBombError):
        refuse_bombs(b"\x80\x04K\x01(0\x94" + twice + b".")


def test_a_heavy_key_is_counted_each_time() -> None:
    heavy: object = 1
    for _ in range(16):
        heavy = (heavy, heavy)
    made = pickle.dumps(heavy, 4)[:-1]  # the last of its tuples has the number 15
    with pytest.raises(PickleBombError, match="keys"):
        refuse_bombs(made + b"}(" + b"h\x0fK\x01" * 2000 + b"u.")


@pytest.mark.parametrize("make", [exactly(str), exactly(int), plain_values])
def test_no_function_takes_lists_out_of_lists(make: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="it makes a"):
        make([[1], [1]])


def test_a_pickle_cannot_change_a_function_that_it_calls() -> None:
    with pytest.raises(ValueError, match="no state"):
        SealedCall(shape_of).__setstate__((None, {"__name__": "other"}))
