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
import torch.nn.functional as F
from torch import Tensor

from megatronish.ops.library import Operator, OperatorFamily, define
from megatronish.ops.native import native

PANEL = 16
"""Keys that lie next to each other, and what sizes are multiples of: zeros fill them up."""


class _Window(ctypes.Structure):
    """The struct `Window` of windowed.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kv_heads", "shared", "length", "size", "window")),
        ("threads", ctypes.c_int32),
    )


def can_run_windowed(q: Tensor) -> bool:
    """Whether attention of these queries in a window runs in C++."""
    has_precision = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16)
    return has_precision and native("windowed").library is not None


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
    """[S, B, n, H], [S, B, kv, H], [S, B, kv, H] -> [S, B, n H]; a token sees `window` keys, itself included.

    n / kv query heads share a key/value head.
    """
    out, _ = OPS.windowed_attention(q, k, v, window)
    return out.flatten(2)


def _forward_on_cpu(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    if not can_run_windowed(q):
        return _forward_reference(q, k, v, window)
    queries, keys, values = _by_heads(q * _scale(q)), _by_heads(k), _by_heads(v)
    out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:-1])
    _call("windowed_forward", _window_of(q, k, window), (queries, _panels(keys), values, out, lse))
    return _by_tokens(out, q), lse[..., : len(q)].contiguous()


def _backward_on_cpu(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not can_run_windowed(q):
        return _backward_reference(dout, q, k, v, out, lse, window)
    queries, keys, values, douts = _by_heads(q * _scale(q)), _by_heads(k), _by_heads(v), _by_heads(dout)
    filled = douts.shape[2] - len(q)
    means, lse = (F.pad(x, (0, filled)).contiguous() for x in (_means(dout, out), lse))
    dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    given = (queries, _panels(keys), _panels(values), keys, douts, lse, means)
    _call("windowed_backward", _window_of(q, k, window), (*given, dq, dk, dv))
    return _by_tokens(dq.mul_(_scale(q)), q), _by_tokens(dk, k), _by_tokens(dv, v)


def _scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1])


def _means(dout: Tensor, out: Tensor) -> Tensor:
    """fp32 [B, n, S]: of the gradients of each row of probabilities, weighted by them."""
    return (dout.float() * out.float()).sum(-1).permute(1, 2, 0)


def _by_heads(x: Tensor) -> Tensor:
    """[S, B, n, H] -> fp32 [B, n, S, H], S and H filled up to multiples of PANEL."""
    x = x.permute(1, 2, 0, 3).float()
    return F.pad(x, (0, -x.shape[3] % PANEL, 0, -x.shape[2] % PANEL)).contiguous()


def _panels(x: Tensor) -> Tensor:
    """[B, kv, S, H] -> [B, kv, S / PANEL, H, PANEL]."""
    return x.unflatten(2, (-1, PANEL)).mT.contiguous()


def _by_tokens(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_by_heads`, contiguous, in the precision of `like` [S, B, n, H]."""
    return x[:, :, : like.shape[0], : like.shape[3]].permute(2, 0, 1, 3).contiguous().to(like.dtype)


def _window_of(q: Tensor, k: Tensor, window: int) -> _Window:
    length, size = (count + -count % PANEL for count in (q.shape[0], q.shape[3]))
    num_kv_heads = k.shape[1] * k.shape[2]
    return _Window(num_kv_heads, q.shape[2] // k.shape[2], length, size, window, torch.get_num_threads())


def _call(name: str, window: _Window, tensors: tuple[Tensor, ...]) -> None:
    function = getattr(native("windowed").library, name)
    function(ctypes.byref(window), *(ctypes.c_void_p(each.data_ptr()) for each in tensors))


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
