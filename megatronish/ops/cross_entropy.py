"""Fused cross entropy over one vocabulary shard: statistics of the logits, and their gradient.

    maximum  = max over the true columns of the logits; -inf where there are none
    total    = sum of exp(logits - maximum) over them
    target   = the label's logit; 0 where the label is another rank's
    gradient = exp(logits - maximum) * factor - grad * (column is the label); 0 in columns of padding

The first three are one number a token, from which the tp ranks compute the loss together (layers/vocabulary.py).
Statistics and arithmetic are fp32. Shapes: T tokens, C columns (this rank's shard of the vocabulary, with padding).

The logits are the largest tensor of a step, so only one tensor of their size exists. The kernels read the logits once
for the statistics, and once more for the gradient, which overwrites them. The references materialise the exponentials:
fp32 logits are overwritten by their exponentials, and these by the gradient. In 16 bits that would round them, so
the exponentials of 16-bit logits are computed in fp32 for a few tokens at a time, once for the sums and once more for
the gradient.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.ops.library import Operator, OperatorFamily, accumulation_dtype, define
from megatronish.specs.chunk_sizes import chunk_sizes


class Statistics(NamedTuple):
    """Maximum, sum of exponentials and label logit of each token: [T] each, fp32."""

    maximum: Tensor
    total: Tensor
    target: Tensor


def cross_entropy_statistics(logits: Tensor, labels: Tensor, *, first: int, num_true: int) -> Statistics:
    """Contiguous [T, C] logits, int64 [T] labels -> `Statistics`. The columns are the tokens from `first` on.

    The first `num_true` columns count, the rest is padding. The logits may be overwritten: afterwards only
    `cross_entropy_gradient_` may read them.
    """
    return Statistics(*torch.ops.megatronish.cross_entropy_statistics(logits, labels, first, num_true))


def cross_entropy_gradient_(
    logits: Tensor, labels: Tensor, maximum: Tensor, factor: Tensor, grad: Tensor, *, first: int, num_true: int
) -> None:
    """Overwrite the logits that `cross_entropy_statistics` was given by their gradient [T, C].

    `maximum`, `factor` and `grad` are fp32 [T]; the module docstring has the formula.
    """
    torch.ops.megatronish.cross_entropy_gradient_(logits, labels, maximum, factor, grad, first, num_true)


def _statistics_reference(logits: Tensor, labels: Tensor, first: int, num_true: int) -> Statistics:
    logits[:, num_true:] = -torch.inf
    columns, elsewhere = _columns(labels, first, num_true)
    maximum = logits.amax(-1).to(accumulation_dtype(logits.dtype))
    target = logits.gather(-1, columns).squeeze(-1).to(maximum.dtype).masked_fill_(elsewhere, 0.0)
    total = torch.empty_like(maximum)
    for tokens, exponentials in _exponentials(logits, maximum):
        total[tokens] = exponentials.sum(-1)
    return Statistics(maximum, total, target)


def _gradient_reference(
    logits: Tensor, labels: Tensor, maximum: Tensor, factor: Tensor, grad: Tensor, first: int, num_true: int
) -> None:
    columns, elsewhere = _columns(labels, first, num_true)
    factor, at_target = factor.unsqueeze(-1), -grad.masked_fill(elsewhere, 0.0).unsqueeze(-1)
    if logits.dtype == maximum.dtype:
        logits.mul_(factor).scatter_add_(-1, columns, at_target)
        return
    for tokens, exponentials in _exponentials(logits, maximum):
        gradient = exponentials.mul_(factor[tokens]).scatter_add_(-1, columns[tokens], at_target[tokens])
        logits[tokens] = gradient


def _columns(labels: Tensor, first: int, num_true: int) -> tuple[Tensor, Tensor]:
    """[T] labels -> [T, 1] their columns, and [T] True where a label is another rank's (its column is then 0)."""
    columns = labels - first
    elsewhere = (columns < 0) | (columns >= num_true)
    return columns.masked_fill(elsewhere, 0).unsqueeze(-1), elsewhere


def _exponentials(logits: Tensor, maximum: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """[T, C], [T] -> (a slice of the tokens, their exp(logit - maximum) in fp32 [tokens, C]), slice by slice.

    The slices of 16-bit logits share one buffer: each is valid until the next is asked for. fp32 logits are
    overwritten by their exponentials, all in one slice.
    """
    # A shard that is all padding has a maximum of -inf: -inf - 0 is -inf, whereas -inf - -inf would be NaN.
    maximum = maximum.masked_fill(maximum == -torch.inf, 0.0).unsqueeze(-1)
    if logits.dtype == maximum.dtype:
        yield slice(None), logits.sub_(maximum).exp_()
        return
    num_tokens, num_columns = logits.shape
    size = max(1, chunk_sizes(logits.device.type).logits // num_columns)
    chunk = torch.empty(min(size, num_tokens), num_columns, dtype=maximum.dtype, device=logits.device)
    for start in range(0, num_tokens, size):
        tokens = slice(start, min(start + size, num_tokens))
        exponentials = chunk[: tokens.stop - start].copy_(logits[tokens])
        yield tokens, exponentials.sub_(maximum[tokens]).exp_()


def _statistics_fake(logits: Tensor, *_: Any) -> Statistics:
    dtype = accumulation_dtype(logits.dtype)
    return Statistics(*(logits.new_empty(logits.shape[0], dtype=dtype) for _ in range(3)))


FAMILY = OperatorFamily(
    "cross_entropy",
    (
        Operator(
            "cross_entropy_statistics(Tensor(a!) logits, Tensor labels, int first, int num_true)"
            " -> (Tensor maximum, Tensor total, Tensor target)",
            reference=_statistics_reference,
            fake=_statistics_fake,
            triton="cross_entropy.statistics",
        ),
        Operator(
            "cross_entropy_gradient_(Tensor(a!) logits, Tensor labels, Tensor maximum, Tensor factor, Tensor grad,"
            " int first, int num_true) -> ()",
            reference=_gradient_reference,
            fake=lambda *_: None,
            triton="cross_entropy.gradient_",
        ),
    ),
)
define(FAMILY)
