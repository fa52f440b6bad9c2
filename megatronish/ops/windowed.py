"""Attention in a sliding window on the CPU, in C++: the time of a score is that of plain causal attention, or less.

A block of queries and the keys that it sees make products so small that torch's, one after the other, reach little of
what a core can do, and their scores go to memory and back several times. windowed.cpp has both in one loop.

Saved for the backward: q, k, v, the output and the logarithm of the sum of exponentials of each query. It computes the
probabilities again (Dao et al. 2022, arXiv:2205.14135, appendix B). bf16 is computed in fp32.

The references take all scores of the sequence. Where there is no C++, attention/block_sparse.py computes windows.
"""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from megatronish.ops.library import Operator, OperatorFamily, define
from megatronish.ops.native import native

_KINDS = {torch.float32: "float", torch.bfloat16: "bfloat16"}


class _Heads(ctypes.Structure):
    """The struct `Heads` of windowed.cpp."""

    _fields_ = (("data", ctypes.c_void_p), *((f"by_{dim}", ctypes.c_int64) for dim in ("place", "sample", "head")))

    @classmethod
    def of(cls, x: Tensor) -> "_Heads":
        """[S, B, n, H]."""
        assert x.stride(3) == 1 or x.shape[3] == 1, "channels of a head lie together"
        return cls(x.data_ptr(), *x.stride()[:3])


class _Window(ctypes.Structure):
    """The struct `Window` of windowed.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("samples", "heads", "kv_heads", "length", "size", "window")),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


def can_run_windowed(q: Tensor) -> bool:
    """Whether attention of these queries in a window runs in C++."""
    return q.device.type == "cpu" and q.dtype in _KINDS and native("windowed").library is not None


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    """[S, B, n, H], [S, B, kv, H], [S, B, kv, H] -> [S, B, n H]; a token sees `window` keys, itself included.

    n / kv query heads share a key/value head.
    """
    out, _ = OPS.windowed_attention(q, k, v, window)
    return out.flatten(2)


def _forward_on_cpu(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    if not can_run_windowed(q):
        return _forward_reference(q, k, v, window)
    out, lse = _fake_forward(q, k, v, window)
    _call("forward", (q, k, v, out), lse, window)
    return out, lse


def _backward_on_cpu(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not can_run_windowed(q):
        return _backward_reference(dout, q, k, v, out, lse, window)
    grads = _fake_backward(dout, q, k, v)
    _call("backward", (q, k, v, out, dout, *grads), lse, window)
    return grads


def _scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def _call(name: str, tensors: tuple[Tensor, ...], lse: Tensor, window: int) -> None:
    """With q, k and v first; lse is contiguous."""
    q, k, *_ = tensors
    tensors = tuple(each if each.stride(3) == 1 else each.contiguous() for each in tensors)
    (length, samples, heads, size), kv_heads = q.shape, k.shape[2]
    of = _Window(samples, heads, kv_heads, length, size, window, _scale(q), torch.get_num_threads())
    function = getattr(native("windowed").library, f"windowed_{name}_{_KINDS[q.dtype]}")
    function(ctypes.byref(of), (_Heads * len(tensors))(*map(_Heads.of, tensors)), ctypes.c_void_p(lse.data_ptr()))


def _probabilities(q: Tensor, k: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """[B, n, S, S] and the logarithm of the sum of exponentials [B, n, S]."""
    places = torch.arange(len(q), device=q.device)
    distance = places[:, None] - places
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("qbnh,kbnh->bnqk", q, keys).to(torch.promote_types(q.dtype, torch.float32)) * _scale(q)
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def _forward_reference(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    probabilities, lse = _probabilities(q, k, window)
    values = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    out = torch.einsum("bnqk,kbnh->qbnh", probabilities, values.to(probabilities.dtype))
    return out.contiguous().to(q.dtype), lse.float()


def _backward_reference(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, _lse: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    p, _ = _probabilities(q, k, window)
    shared, dtype = q.shape[2] // k.shape[2], p.dtype
    queries, douts, outs = (x.to(dtype) for x in (q, dout, out))
    keys, values = (x.to(dtype).repeat_interleave(shared, dim=2) for x in (k, v))
    means = (douts * outs).sum(-1).permute(1, 2, 0).unsqueeze(-1)
    ds = p * (torch.einsum("qbnh,kbnh->bnqk", douts, values) - means) * _scale(q)
    of_heads = (torch.einsum("bnqk,qbnh->kbnh", *pair) for pair in ((ds, queries), (p, douts)))
    dk, dv = (x.unflatten(2, (-1, shared)).sum(3) for x in of_heads)
    grads = (torch.einsum("bnqk,kbnh->qbnh", ds, keys), dk, dv)
    dq, dk, dv = (x.contiguous().to(q.dtype) for x in grads)
    return dq, dk, dv


def _fake_forward(q: Tensor, _k: Tensor, _v: Tensor, _window: int) -> tuple[Tensor, Tensor]:
    length, batch, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=torch.float32)


def _fake_backward(_dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.window = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse)


def _backward(ops: Any, ctx: Any, dout: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    return *ops.windowed_attention_backward(dout, *ctx.saved_tensors, ctx.window), None


FAMILY = OperatorFamily(
    "windowed attention",
    (
        Operator(
            "windowed_attention(Tensor q, Tensor k, Tensor v, int window) -> (Tensor, Tensor)",
            reference=_forward_reference,
            on_cpu=_forward_on_cpu,
            fake=_fake_forward,
            setup_context=_save,
            backward=_backward,
        ),
        Operator(
            "windowed_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int window)"
            " -> (Tensor, Tensor, Tensor)",
            reference=_backward_reference,
            on_cpu=_backward_on_cpu,
            fake=_fake_backward,
        ),
    ),
    why_not_on_cpu=lambda: native("windowed").reason,
)
OPS = define(FAMILY)
