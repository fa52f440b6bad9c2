"""Rotation of pairs of channels (RoPE), in fp32: each pair (a, b) becomes (a cos - b sin, b cos + a sin).

On CUDA it is one kernel, forward and backward, where Triton is installed. Elsewhere torch's operations run, with
their gradients.
"""

from typing import Any

import torch
from torch import Tensor

from megatronish.ops.library import KERNEL_DTYPES, Operator, OperatorFamily, define, has_kernels, like


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """[S, B, n, H], cos and sin fp32 [S, 1 or B, 1, pairs] -> [S, B, n, H]: the first 2 * pairs channels are rotated.

    A pair is channels 2 i and 2 i + 1 where `interleaved`, else i and i + pairs.
    """
    if x.is_cuda and x.dtype in KERNEL_DTYPES and HAS_KERNELS:
        out: Tensor = torch.ops.megatronish.rotate(x, cos, sin, interleaved, False)
        return out
    return _rotated(x, cos, sin, interleaved=interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    size = 2 * cos.shape[-1]
    rotated = x[..., :size].float()
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = rotated.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    rotated = rotated.to(x.dtype)
    return rotated if size == x.shape[-1] else torch.cat((rotated, x[..., size:]), dim=-1)


def _reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    return _rotated(x, cos, -sin if inverse else sin, interleaved=interleaved).contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 torch gives it by name
    _, cos, sin, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ops: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return ops.rotate(grad, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse), None, None, None, None


FAMILY = OperatorFamily(
    "rope",
    (
        Operator(
            "rotate(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool inverse) -> Tensor",
            reference=_reference,
            fake=like,
            setup_context=_save,
            backward=_backward,
            triton="rope.rotate",
        ),
    ),
    in_cuda=False,
)
define(FAMILY)
HAS_KERNELS = has_kernels(FAMILY)  # a constant, for torch.compile
