"""Fused attention softmax: scaled masked and scaled causal softmax over the last dim.

    probabilities = softmax(scale * scores) over the keys that a query sees; 0 elsewhere, and where it sees none
    grad_scores   = scale * probabilities * (grad - sum(probabilities * grad))

Arithmetic is fp32, the scale too, forward and backward; outputs have the dtype of the scores. A row whose visible
scores are all -inf counts as one that sees nothing.
"""

from typing import Any

import torch
from torch import Tensor

from megatronish.ops.library import Operator, OperatorFamily, accumulation_dtype, define, like


def scaled_causal_softmax(scores: Tensor, *, scale: float, window_size: int | None = None) -> Tensor:
    """[..., q, k] -> [..., q, k]: a query sees its own key and those before it, at most `window_size` keys in all.

    The last query stands at the last key, so query i at key i + k - q: with more keys than queries, the first keys come
    before all queries; with fewer, the first queries see nothing.
    """
    return torch.ops.megatronish.scaled_causal_softmax(scores, scale, window_size)


def scaled_masked_softmax(scores: Tensor, visible: Tensor | None, *, scale: float) -> Tensor:
    """[B, n, q, k], bool [1 or B, 1 or n, 1 or q, k] -> [B, n, q, k]: a query sees the keys where `visible` is True.

    With `visible` None every query sees every key, and scores may have any shape. ValueError for other shapes.
    """
    return torch.ops.megatronish.scaled_masked_softmax(scores, visible, scale)


def causal_visibility(queries: int, keys: int, window_size: int | None, device: torch.device) -> Tensor:
    """Bool [q, k]: True where a query of `scaled_causal_softmax` sees a key."""
    distance = torch.arange(queries, device=device)[:, None] + (keys - queries) - torch.arange(keys, device=device)
    visible = distance >= 0
    return visible if window_size is None else visible & (distance < window_size)


def _check_visible(scores: Tensor, visible: Tensor | None) -> None:
    if visible is None:
        return
    batch, heads, queries, keys = scores.shape if scores.dim() == 4 else (-1,) * 4
    sizes = ((1, batch), (1, heads), (1, queries), (keys,))
    if visible.dim() != 4 or any(size not in allowed for size, allowed in zip(visible.shape, sizes, strict=True)):
        raise ValueError(
            f"visible is {tuple(visible.shape)} for scores {tuple(scores.shape)}: "
            "they must be [1 or B, 1 or n, 1 or q, k] and [B, n, q, k]"
        )


def _masked_reference(scores: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    _check_visible(scores, visible)
    return _softmax(scores, visible, scale)


def _masked_fake(scores: Tensor, visible: Tensor | None, *_: Any) -> Tensor:
    _check_visible(scores, visible)
    return like(scores)


def _softmax(scores: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    if scores.numel() == 0:
        return like(scores)
    scaled = scores.contiguous().to(accumulation_dtype(scores.dtype)) * scale
    if visible is not None:
        scaled = scaled.masked_fill(~visible, -torch.inf)
    sees_nothing = scaled.amax(-1, keepdim=True) == -torch.inf
    return scaled.softmax(-1).masked_fill(sees_nothing, 0.0).to(scores.dtype)


def _causal_reference(scores: Tensor, scale: float, window_size: int | None = None) -> Tensor:
    if window_size is not None and window_size < 1:
        raise ValueError(f"window_size={window_size} must be at least 1: a query sees its own key")
    queries, keys = scores.shape[-2:]
    return _softmax(scores, causal_visibility(queries, keys, window_size, scores.device), scale)


def _backward_reference(grad: Tensor, probabilities: Tensor, scale: float, *_: Any) -> Tensor:
    # Probabilities are 0 where a key is not visible, so the mask is not needed again.
    dtype = accumulation_dtype(grad.dtype)
    g, y = (x.contiguous().to(dtype) for x in (grad, probabilities))
    return (torch.ops.aten._softmax_backward_data(g, y, -1, dtype) * scale).to(grad.dtype)


def _save_of_causal(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    _, ctx.scale, ctx.window_size = inputs


def _save_of_masked(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    _, _, ctx.scale = inputs


def _causal_backward(ops: Any, ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (probabilities,) = ctx.saved_tensors
    return ops.scaled_causal_softmax_backward(grad, probabilities, ctx.scale, ctx.window_size), None, None


def _masked_backward(ops: Any, ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (probabilities,) = ctx.saved_tensors
    return ops.scaled_masked_softmax_backward(grad, probabilities, ctx.scale), None, None


FAMILY = OperatorFamily(
    "softmax",
    (
        Operator(
            "scaled_causal_softmax(Tensor scores, float scale, int? window_size=None) -> Tensor",
            reference=_causal_reference,
            setup_context=_save_of_causal,
            backward=_causal_backward,
        ),
        Operator(
            "scaled_causal_softmax_backward(Tensor grad, Tensor probabilities, float scale, int? window_size=None)"
            " -> Tensor",
            reference=_backward_reference,
        ),
        Operator(
            "scaled_masked_softmax(Tensor scores, Tensor? visible, float scale) -> Tensor",
            reference=_masked_reference,
            fake=_masked_fake,
            setup_context=_save_of_masked,
            backward=_masked_backward,
        ),
        Operator(
            "scaled_masked_softmax_backward(Tensor grad, Tensor probabilities, float scale) -> Tensor",
            reference=_backward_reference,
        ),
    ),
)
define(FAMILY)
