"""Calls of dropout.cpp: tensors become pointers and sizes, in the structs that its functions take."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatronish.ops.native import native

_NAMES = {torch.float32: "dropout_add_float", torch.bfloat16: "dropout_add_bfloat16"}


class _Hidden(ctypes.Structure):
    """The struct `Hidden` of dropout.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "samples", "positions")),
        *((name, ctypes.c_int64) for name in ("num_positions", "num_samples", "columns")),
        ("threshold", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class _Tile(ctypes.Structure):
    """The struct `Tile` of dropout.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "samples", "documents", "slopes")),
        *((name, ctypes.c_int64) for name in ("num_samples", "heads", "num_queries", "num_keys")),
        *(
            (name, ctypes.c_int64)
            for name in ("first_head", "first_query", "first_key", "window", "seq_length", "causal")
        ),
        ("scale", ctypes.c_float),
        ("threshold", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


def why_not() -> str | None:
    """The reason why dropout does not run in C++, None where it does."""
    return native().reason


def can_add(x: Tensor, residual: Tensor | None) -> bool:
    """Whether `dropout_add` of these runs in C++."""
    return x.dtype in _NAMES and (residual is None or residual.dtype == x.dtype) and native().library is not None


def can_softmax(scores: Tensor) -> bool:
    """Whether the softmax of these scores runs in C++."""
    return scores.dtype == torch.float32 and native().library is not None


def dropout_add(
    x: Tensor, residual: Tensor | None, names: tuple[Tensor, Tensor, Tensor], threshold: int, factor: float
) -> Tensor:
    """[s, B, D] of x and residual -> [s, B, D]; `names` are the keys, samples and positions of the hashes."""
    assert residual is None or residual.shape == x.shape, "the sum has the shape of both"
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    keys, samples, positions = (each.contiguous() for each in names)
    assert (*positions.shape, *samples.shape, x.shape[-1]) == x.shape, "a row for each position of each sample"
    out = torch.empty_like(x)
    where = _Hidden(*_pointers(keys, samples, positions), *x.shape, threshold, factor, torch.get_num_threads())
    _call(_NAMES[x.dtype], where, (x, residual, out))
    return out


def softmax_dropout(
    scores: Tensor, others: tuple[Tensor, ...], place: Sequence[Any], threshold: int, factor: float
) -> None:
    """Forward with `others` (lse), backward with (grads, lse, means); `place` as in the operators' schemas."""
    keys, samples, documents, slopes, *firsts, window_size, causal, scale = place
    tensors = [None if each is None else each.contiguous() for each in (keys, samples, documents, slopes)]
    assert all(each.is_contiguous() for each in (scores, *others)), "tiles are contiguous"
    sight = (2**62 if window_size is None else window_size, 0 if documents is None else documents.shape[1], causal)
    ending = (scale, threshold, factor, torch.get_num_threads())
    where = _Tile(*_pointers(*tensors), *scores.shape, *firsts, *sight, *ending)
    _call("softmax_dropout" if len(others) == 1 else "softmax_dropout_backward", where, (scores, *others))


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if each is None else each.data_ptr() for each in tensors]


def _call(name: str, where: ctypes.Structure, tensors: Sequence[Tensor | None]) -> None:
    function = getattr(native().library, name)
    function(ctypes.byref(where), *map(ctypes.c_void_p, _pointers(*tensors)))
