"""Cross entropy over a vocabulary shard: statistics in one pass over the logits, then gradients in their place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 4096  # at once


@triton.jit
def _statistics(logits, labels, maximum, total, target, first, num_true, num_columns, COLUMNS: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * num_columns
    largest = tl.full((), float("-inf"), tl.float32)
    exponentials = tl.full((), 0.0, tl.float32)
    has_nan = tl.full((), 0, tl.int32)
    for start in range(0, num_true, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = tl.load(row + column, mask=column < num_true, other=float("-inf")).to(tl.float32)
        has_nan |= tl.max((x != x).to(tl.int32), axis=0)
        grown = tl.maximum(largest, tl.max(x, axis=0))
        # A row of -inf alone: -inf - 0 is -inf, whereas -inf - -inf would be NaN.
        base = tl.where(grown == float("-inf"), 0.0, grown)
        exponentials = exponentials * tl.exp(largest - base) + tl.sum(tl.exp(x - base), axis=0)
        largest = grown
    largest = tl.where(has_nan != 0, float("nan"), largest)  # a maximum leaves NaN out; torch's does not
    column = tl.load(labels + token) - first
    is_here = (column >= 0) & (column < num_true)
    tl.store(maximum + token, largest)
    tl.store(total + token, exponentials)
    tl.store(target + token, tl.load(row + column, mask=is_here, other=0.0).to(tl.float32))


@triton.jit
def _gradient(logits, labels, maximum, factor, grad, first, num_true, num_columns, COLUMNS: tl.constexpr) -> None:
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * num_columns
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_true = column < num_true
    x = tl.load(row + column, mask=is_true, other=float("-inf")).to(tl.float32)
    base = tl.load(maximum + token)
    base = tl.where(base == float("-inf"), 0.0, base)
    label = tl.load(labels + token) - first
    gradient = tl.exp(x - base) * tl.load(factor + token)
    gradient -= tl.where(column == label, tl.load(grad + token), 0.0)
    gradient = tl.where(is_true, gradient, 0.0)
    tl.store(row + column, gradient.to(logits.dtype.element_ty), mask=column < num_columns)


def statistics(logits: Tensor, labels: Tensor, first: int, num_true: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T, C], int64 [T] -> maximum, sum of exponentials and label's logit, fp32 [T] each."""
    logits, labels = logits.contiguous(), labels.contiguous()
    num_tokens, num_columns = logits.shape
    outputs = [torch.empty(num_tokens, dtype=torch.float32, device=logits.device) for _ in range(3)]
    if num_tokens:
        _statistics[(num_tokens,)](
            *(logits, labels, *outputs, first, num_true, num_columns),
            COLUMNS=COLUMNS,
            num_warps=8,
            enable_fp_fusion=True,
        )
    maximum, total, target = outputs
    return maximum, total, target


def gradient_(
    logits: Tensor, labels: Tensor, maximum: Tensor, factor: Tensor, grad: Tensor, first: int, num_true: int
) -> None:
    """Overwrite the logits by their gradient; see ops/cross_entropy.py."""
    assert logits.is_contiguous(), "they are overwritten where they are"
    num_tokens, num_columns = logits.shape
    if logits.numel():
        _gradient[(num_tokens, triton.cdiv(num_columns, COLUMNS))](
            *(logits, labels.contiguous(), *(each.contiguous() for each in (maximum, factor, grad))),
            *(first, num_true, num_columns),
            COLUMNS=COLUMNS,
            num_warps=8,
            enable_fp_fusion=True,
        )
