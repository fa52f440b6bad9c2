"""Rows of experts from tokens, and sums over the rows of a token, as kernels for CUDA (layers/dispatch.py).

    spread   row i = x[order[i] // K]
    collect  y[t]  = sum over k of weights[t, k] * rows[inverse[t K + k]]

`order` [N] has the choice of each row (token t's k-th is t K + k), `inverse` [T K] the row of each choice: N or more of
one that has none, which counts as a row of zeros. A row may be no choice's; its gradient means nothing.
"""

from typing import Any

import torch
from torch import Tensor

from megatronish.ops.library import KERNEL_DTYPES, Operator, OperatorFamily, accumulation_dtype, define, has_kernels


def is_fused(x: Tensor) -> bool:
    """Whether the operators of these rows run as kernels."""
    return x.is_cuda and x.dtype in KERNEL_DTYPES and HAS_KERNELS


def spread(x: Tensor, order: Tensor, inverse: Tensor, num_choices: int) -> Tensor:
    """[T, D], [N], [T K] -> [N, D]."""
    return torch.ops.megatronish.spread(x, order, inverse, num_choices)


def collect(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """[N, D], [T, K], [N], [T K] -> [T, D]."""
    return torch.ops.megatronish.collect(rows, weights, order, inverse, weights.shape[1])


def _spread_reference(x: Tensor, order: Tensor, _inverse: Tensor, num_choices: int) -> Tensor:
    return x.index_select(0, order // num_choices)


def _collect_reference(
    rows: Tensor, weights: Tensor | None, _order: Tensor, inverse: Tensor, num_choices: int
) -> Tensor:
    values = _rows_of_choices(rows, inverse).to(accumulation_dtype(rows.dtype))
    values = values.view(-1, num_choices, rows.shape[1])
    return (values if weights is None else values * weights.unsqueeze(-1).to(values.dtype)).sum(1).to(rows.dtype)


def _collect_backward_reference(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    dy = grad.index_select(0, order // weights.shape[1]).to(accumulation_dtype(grad.dtype))
    of_weights = _rows_of_choices((rows * dy).sum(-1, keepdim=True), inverse).to(weights.dtype)
    of_rows = dy * weights.flatten().index_select(0, order).unsqueeze(-1)
    return of_rows.to(rows.dtype), of_weights.view_as(weights)


def _rows_of_choices(rows: Tensor, inverse: Tensor) -> Tensor:
    """[N, D], [T K] -> [T K, D]: the row of each choice, zeros where it has none."""
    row_of_zeros = rows.new_zeros(1, rows.shape[1])
    return torch.cat([rows, row_of_zeros]).index_select(0, inverse.clamp(max=rows.shape[0]))


def _save_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 torch gives it by name
    _, order, inverse, ctx.num_choices = inputs
    ctx.save_for_backward(order, inverse)


def _spread_backward(ops: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return ops.collect(grad, None, *ctx.saved_tensors, ctx.num_choices), None, None, None


def _save_collect(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 torch gives it by name
    ctx.save_for_backward(*inputs[:4])


def _collect_backward(ops: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *ops.collect_backward(grad, *ctx.saved_tensors), None, None, None


FAMILY = OperatorFamily(
    "permutation",
    (
        Operator(
            "spread(Tensor x, Tensor order, Tensor inverse, int num_choices) -> Tensor",
            reference=_spread_reference,
            fake=lambda x, order, _inverse, _num_choices: x.new_empty(order.shape[0], x.shape[1]),
            setup_context=_save_spread,
            backward=_spread_backward,
            triton="permutation.spread",
        ),
        Operator(
            "collect(Tensor rows, Tensor? weights, Tensor order, Tensor inverse, int num_choices) -> Tensor",
            reference=_collect_reference,
            fake=lambda rows, _weights, _order, inverse, num_choices: rows.new_empty(
                inverse.shape[0] // num_choices, rows.shape[1]
            ),
            setup_context=_save_collect,
            backward=_collect_backward,
            triton="permutation.collect",
        ),
        Operator(
            "collect_backward(Tensor grad, Tensor rows, Tensor weights, Tensor order, Tensor inverse)"
            " -> (Tensor grad_rows, Tensor grad_weights)",
            reference=_collect_backward_reference,
            fake=lambda _grad, rows, weights, *_: (rows.new_empty(rows.shape), weights.new_empty(weights.shape)),
            triton="permutation.collect_backward",
        ),
    ),
    in_cuda=False,
)
define(FAMILY)
HAS_KERNELS = has_kernels(FAMILY)  # a constant, for torch.compile
