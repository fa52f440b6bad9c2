"""Tokens to rows of experts and back, each way in one launch, forward and backward.

A program has a row and a part of its channels. Sums run over a token's choices in the order it chose: no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_COLUMNS = 2048  # of a program
GRADIENT_COLUMNS = 4096  # at once, of a program that has a whole row


@triton.jit
def _spread(x, order, out, num_choices, columns, COLUMNS: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    token = tl.load(order + row) // num_choices
    tl.store(out + row * columns + column, tl.load(x + token * columns + column, mask=mask), mask=mask)


@triton.jit
def _collect(
    rows, weights, inverse, out, num_rows, columns, CHOICES: tl.constexpr, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(CHOICES):
        row = tl.load(inverse + token * CHOICES + choice)
        # Rows of dropped choices are not there.
        limit = tl.where(row < num_rows, columns, 0)
        value = tl.load(rows + row * columns + column, mask=column < limit, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + token * CHOICES + choice).to(tl.float32)
        total += value
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gradient(
    grad, rows, weights, inverse, of_rows, of_weights, num_choices, columns, num_rows, COLUMNS: tl.constexpr
) -> None:
    choice = tl.program_id(0).to(tl.int64)
    row = tl.load(inverse + choice)
    limit = tl.where(row < num_rows, columns, 0)  # a dropped choice has no row, and a gradient of zero
    token = choice // num_choices
    weight = tl.load(weights + choice).to(tl.float32)
    product = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = column < limit
        dy = tl.load(grad + token * columns + column, mask=mask, other=0.0).to(tl.float32)
        product += dy * tl.load(rows + row * columns + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(of_rows + row * columns + column, (dy * weight).to(of_rows.dtype.element_ty), mask=mask)
    tl.store(of_weights + choice, tl.sum(product, axis=0).to(of_weights.dtype.element_ty))


def _block(columns: int, most: int) -> int:
    return min(triton.next_power_of_2(columns), most)


def spread(x: Tensor, order: Tensor, _inverse: Tensor, num_choices: int) -> Tensor:
    """[T, D], [N] -> [N, D]: row i is that of token order[i] // K."""
    x, order, columns, num_rows = x.contiguous(), order.contiguous(), x.shape[1], order.shape[0]
    out, block = x.new_empty(num_rows, columns), _block(columns, MOST_COLUMNS)
    if out.numel():
        _spread[(num_rows, triton.cdiv(columns, block))](
            x, order, out, num_choices, columns, COLUMNS=block, enable_fp_fusion=True
        )
    return out


def collect(rows: Tensor, weights: Tensor | None, _order: Tensor, inverse: Tensor, num_choices: int) -> Tensor:
    """[N, D], [T, K], [T K] -> [T, D]: sums over the choices of each token, weighted where there are weights."""
    rows, inverse, (num_rows, columns) = rows.contiguous(), inverse.contiguous(), rows.shape
    num_tokens = inverse.numel() // num_choices
    out, block = rows.new_empty(num_tokens, columns), _block(columns, MOST_COLUMNS)
    if out.numel():
        _collect[(num_tokens, triton.cdiv(columns, block))](
            *(rows, rows if weights is None else weights.contiguous(), inverse, out, num_rows, columns),
            CHOICES=num_choices,
            WEIGHTED=weights is not None,
            COLUMNS=block,
            enable_fp_fusion=True,
        )
    return out


def collect_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, _order: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """[T, D], [N, D], [T, K], [T K] -> gradients of the rows, those of choices alone, and of the weights."""
    grad, rows, weights, inverse = (each.contiguous() for each in (grad, rows, weights, inverse))
    num_rows, columns = rows.shape
    of_rows, of_weights = torch.empty_like(rows), torch.empty_like(weights)
    if inverse.numel():
        _gradient[(inverse.numel(),)](
            *(grad, rows, weights, inverse, of_rows, of_weights, weights.shape[1], columns, num_rows),
            COLUMNS=_block(columns, GRADIENT_COLUMNS),
            enable_fp_fusion=True,
        )
    return of_rows, of_weights
