"""Tests of the tiles of ring attention: two tiles merged are attention over both."""

import math

import pytest
import torch
from torch import Tensor

from megatronish.attention import tile
from megatronish.attention.dropout_attention import dropped_tile
from megatronish.attention.mask import AttentionMask
from megatronish.attention.operations import EFFICIENT, FLASH, Operation, TileMask
from megatronish.ops.dropout import ProbabilityDropout


def tensors_of(
    *, queries: int, keys: int, kv_heads: int, size: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout with the strides that a ring gives them, 12 query heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, 2, 12, size), *[(keys, 2, kv_heads, size)] * 2, (queries, 2, 12, size))
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, generator=generator).to(device, dtype).permute(1, 2, 0, 3) for shape in shapes
    )


def mask_of(queries: int, keys: int) -> Tensor:
    """Some of the keys, and for some of the queries none."""
    mask = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, :, 3:6] = False
    return mask


def merged_by_definition(
    q: Tensor, halves: list[tuple[Tensor, Tensor]], visible: Tensor, dout: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """float64: the output of all keys together and the gradients of q, of all keys and of all values."""
    k, v = (torch.cat(parts, dim=2).double().requires_grad_() for parts in zip(*halves, strict=True))
    q = q.double().requires_grad_()
    many_k, many_v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ many_k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -torch.inf)
    out = scores.softmax(-1) @ many_v
    return out.detach(), list(torch.autograd.grad(out, (q, k, v), dout.double()))


def check_two_tiles(
    *, device: str, dtype: torch.dtype, kv_heads: int, size: int, masked: bool, explicit: bool, rtol: float
) -> None:
    """A causal square, then keys that with a mask some queries do not see at all: merged as a ring merges them."""
    near, far = 33, 45
    keys = torch.zeros(2, dtype=torch.int32, device=device)
    nothing = ProbabilityDropout(keys, torch.arange(2, device=device), 0.0)
    q, k, v, dout = tensors_of(queries=near, keys=near, kv_heads=kv_heads, size=size, dtype=dtype, device=device)
    _, far_k, far_v, _ = tensors_of(queries=1, keys=far, kv_heads=kv_heads, size=size, dtype=dtype, device=device)
    square = torch.ones(2, 1, near, near, dtype=torch.bool).tril().to(device)
    rest = (mask_of(near, far) if masked else torch.ones(2, 1, near, far, dtype=torch.bool)).to(device)
    if explicit:
        mask, places = AttentionMask(far + near, window_size=20 if masked else None), torch.arange(far + near)
        dense = mask.dense(places[far:], places).expand(2, -1, -1, -1).to(device)
        square, rest = dense[..., far:], dense[..., :far]
        whole = dropped_tile(nothing, mask, first_head=0, device=q.device)
        tile_masks = [TileMask(dropped=whole._replace(first_query=far, first_key=first)) for first in (far, 0)]
    else:
        tile_masks = [TileMask(causal=True), TileMask(dense=rest if masked else None)]
    tiles = [(k, v, tile_masks[0]), (far_k, far_v, tile_masks[1])]

    outs, lses = zip(*(tile.forward(q, *kv, tile_mask=tile_mask) for *kv, tile_mask in tiles), strict=True)
    lse = torch.logaddexp(*lses)
    out = sum((part * (own - lse).exp().unsqueeze(-1) for part, own in zip(outs, lses, strict=True)), torch.zeros(()))
    found = [tile.backward(dout, q, out.to(dtype), lse, *kv, tile_mask=tile_mask) for *kv, tile_mask in tiles]
    dq, dk, dv = (
        found[0].q.double() + found[1].q,
        torch.cat((found[0].k, found[1].k), dim=2),
        torch.cat((found[0].v, found[1].v), dim=2),
    )
    exact_out, exact = merged_by_definition(q, [(k, v), (far_k, far_v)], torch.cat((square, rest), dim=-1), dout)
    for actual, expected in zip((out, dq, dk, dv), (exact_out, *exact), strict=True):
        assert (actual.double() - expected).norm() <= rtol * expected.norm()


PROBLEMS = [(kv_heads, size, masked) for kv_heads in (12, 3, 1) for size in (16, 10) for masked in (False, True)]


@pytest.mark.parametrize(("kv_heads", "size", "masked"), PROBLEMS)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 3e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("explicit", [False, True])
def test_two_tiles_merged_are_attention_over_both(
    explicit: bool, dtype: torch.dtype, rtol: float, kv_heads: int, size: int, masked: bool
) -> None:
    check_two_tiles(
        device="cpu", dtype=dtype, kv_heads=kv_heads, size=size, masked=masked, explicit=explicit, rtol=rtol
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("explicit", [False, True])
def test_two_tiles_merged_are_attention_over_both_on_a_gpu(explicit: bool, dtype: torch.dtype, rtol: float) -> None:
    for kv_heads, size, masked in [*PROBLEMS, (3, 128, False), (3, 264, False)]:
        check_two_tiles(
            device="cuda", dtype=dtype, kv_heads=kv_heads, size=size, masked=masked, explicit=explicit, rtol=rtol
        )


@pytest.mark.parametrize(
    ("operation", "dtype", "masked"),
    [
        (FLASH, torch.bfloat16, False),
        (EFFICIENT, torch.float32, False),
        (EFFICIENT, torch.bfloat16, True),
        (EFFICIENT, torch.bfloat16, "alibi"),
    ],
    ids=["flash", "efficient", "efficient, masked", "efficient, alibi"],
)
@pytest.mark.parametrize(("kv_heads", "size"), [(12, 16), (3, 10)])
def test_the_operations_of_a_gpu_accept_their_arguments(
    operation: Operation, dtype: torch.dtype, masked: bool | str, kv_heads: int, size: int
) -> None:
    """On tensors without data: names, order, optional arguments and shapes. What they compute takes a GPU to see."""
    q, k, v, dout = tensors_of(queries=33, keys=45, kv_heads=kv_heads, size=size, dtype=dtype, device="meta")
    alibi = torch.empty(1, 12, 33, 45, device="meta") if masked == "alibi" else None
    seen = TileMask(dense=mask_of(33, 45).to("meta") if masked else None, alibi=alibi)
    out, lse = operation.forward(q, k, v, seen)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    grads = operation.backward(dout, q, k, v, out, lse.contiguous(), seen)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
