"""Rotation of pairs of channels (RoPE) in one launch: forward, and backward by the opposite angle.

A program has one token and some of its heads. It reads the channels of a head once, in the order of memory, and writes
them once, the ones that are not rotated included.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 8  # of a program


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    out,
    batch,
    heads,
    stride_s,
    stride_b,
    stride_n,
    cos_s,
    cos_b,
    pairs,
    size,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    here = x + s * stride_s + b * stride_b + head[:, None].to(tl.int64) * stride_n
    there = out + (token * heads + head[:, None]) * size
    is_head = head[:, None] < heads

    pair = tl.arange(0, PAIRS)
    c = tl.load(cos + s * cos_s + b * cos_b + pair, mask=pair < pairs, other=0.0)[None, :]
    d = tl.load(sin + s * cos_s + b * cos_b + pair, mask=pair < pairs, other=0.0)[None, :]
    if INVERSE:
        d = -d
    if INTERLEAVED:
        channel = tl.arange(0, 2 * PAIRS)[None, :]
        mask = is_head & (channel < 2 * pairs)
        both = tl.load(here + channel, mask=mask, other=0.0).to(tl.float32)
        e, f = tl.split(tl.reshape(both, (HEADS, PAIRS, 2)))
        turned = tl.reshape(tl.join(e * c - f * d, f * c + e * d), (HEADS, 2 * PAIRS))
        tl.store(there + channel, turned.to(out.dtype.element_ty), mask=mask)
    else:
        mask = is_head & (pair[None, :] < pairs)
        e = tl.load(here + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        f = tl.load(here + pairs + pair[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(there + pair[None, :], (e * c - f * d).to(out.dtype.element_ty), mask=mask)
        tl.store(there + pairs + pair[None, :], (f * c + e * d).to(out.dtype.element_ty), mask=mask)
    if REST > 0:
        channel = 2 * pairs + tl.arange(0, REST)[None, :]
        mask = is_head & (channel < size)
        tl.store(there + channel, tl.load(here + channel, mask=mask), mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """[S, B, n, H], cos and sin fp32 [S, 1 or B, 1, pairs] -> [S, B, n, H], contiguous."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    length, batch, heads, size = x.shape
    pairs = cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rest = size - 2 * pairs
    if out.numel():
        _rotate[(length * batch, triton.cdiv(heads, HEADS))](
            *(x, cos, sin, out, batch, heads, x.stride(0), x.stride(1), x.stride(2)),
            *(cos.stride(0), 0 if cos.shape[1] == 1 else cos.stride(1), pairs, size),
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            PAIRS=triton.next_power_of_2(pairs),
            REST=triton.next_power_of_2(rest) if rest else 0,
            HEADS=HEADS,
            num_warps=2,  # sixteen bytes a thread, where a head has 128 channels
            enable_fp_fusion=False,  # the bits of the reference, which rounds each product
        )
    return out
