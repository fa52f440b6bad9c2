"""LayerNorm and RMSNorm, with or without a residual sum: a program has a row, and the row is read once.

Backward: a program takes every PARTS-th row and sums the gradients of the parameters over its rows; a second kernel
adds the partial sums in the order of the programs. So the bits do not depend on the device or on who ends first. Of
long rows, whose sums do not fit in registers with the row, a kernel of its own sums columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_COLUMNS = 16384  # of a row that is held in registers
MOST_SUMMED = 8192  # of a row that is held together with its sums
SUMMED_AT_ONCE = 1024  # columns of a longer one
PARTS = 256


@triton.jit
def _forward(
    x,
    residual,
    weight,
    bias,
    out,
    total,
    means,
    rstds,
    columns,
    epsilon,
    ADDS: tl.constexpr,
    CENTRES: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    mask = column < columns
    place = row * columns + column
    values = tl.load(x + place, mask=mask, other=0.0)
    if ADDS:
        values = values.to(tl.float32) + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        values = values.to(total.dtype.element_ty)  # what is normalised is the sum as it is kept
        tl.store(total + place, values, mask=mask)
    values = values.to(tl.float32)
    if CENTRES:
        mean = tl.sum(values, axis=0) / columns
        tl.store(means + row, mean)
        values = tl.where(mask, values - mean, 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=0) / columns + epsilon)
    tl.store(rstds + row, rstd)
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if ONE_PLUS:
        scale += 1.0
    normalised = values * rstd * scale
    if CENTRES:
        normalised += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, normalised.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad,
    grad_sum,
    x,
    weight,
    means,
    rstds,
    grad_x,
    weight_parts,
    bias_parts,
    rows,
    columns,
    parts,
    ADDS: tl.constexpr,
    CENTRES: tl.constexpr,
    ONE_PLUS: tl.constexpr,
    SUMS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    part = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    mask = column < columns
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if ONE_PLUS:
        scale = tl.where(mask, scale + 1.0, 0.0)
    of_weight = tl.zeros((COLUMNS,), tl.float32)
    of_bias = tl.zeros((COLUMNS,), tl.float32)
    for row in range(part, rows, parts):
        place = tl.cast(row, tl.int64) * columns + column
        n = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row)
        if CENTRES:
            n = tl.where(mask, n - tl.load(means + row), 0.0)
            if SUMS:
                of_bias += g
        n = n * rstd
        if SUMS:
            of_weight += g * n
        h = g * scale
        along = h - tl.sum(h * n, axis=0) / columns * n
        if CENTRES:
            along -= tl.sum(h, axis=0) / columns
        along = along * rstd
        if ADDS:
            along += tl.load(grad_sum + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + place, along.to(grad_x.dtype.element_ty), mask=mask)
    if SUMS:
        place = part.to(tl.int64) * columns + column
        tl.store(weight_parts + place, of_weight, mask=mask)
        if CENTRES:
            tl.store(bias_parts + place, of_bias, mask=mask)


@triton.jit
def _sum_columns(
    grad,
    x,
    means,
    rstds,
    weight_parts,
    bias_parts,
    rows,
    columns,
    parts,
    CENTRES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    part = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    of_weight = tl.zeros((COLUMNS,), tl.float32)
    of_bias = tl.zeros((COLUMNS,), tl.float32)
    for row in range(part, rows, parts):
        place = tl.cast(row, tl.int64) * columns + column
        n = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        if CENTRES:
            n = n - tl.load(means + row)
            of_bias += g
        of_weight += g * (n * tl.load(rstds + row))
    place = part.to(tl.int64) * columns + column
    tl.store(weight_parts + place, of_weight, mask=mask)
    if CENTRES:
        tl.store(bias_parts + place, of_bias, mask=mask)


@triton.jit
def _add_parts(parts, out, num_parts, columns, COLUMNS: tl.constexpr) -> None:
    which = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    sums = tl.zeros((COLUMNS,), tl.float32)
    for part in range(num_parts):
        sums += tl.load(parts + (which * num_parts + part).to(tl.int64) * columns + column, mask=mask, other=0.0)
    tl.store(out + which * columns + column, sums.to(out.dtype.element_ty), mask=mask)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, one_plus: bool) -> tuple[Tensor, ...]:
    """Normalised rows, with their means and reciprocal deviations."""
    return _normalised(x, None, weight, bias, epsilon, one_plus)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float, one_plus: bool
) -> tuple[Tensor, ...]:
    """Normalised sums, the sums, and their means and reciprocal deviations."""
    return _normalised(x, residual, weight, bias, epsilon, one_plus)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, one_plus: bool) -> tuple[Tensor, ...]:
    """Normalised rows, with their reciprocal roots of mean squares."""
    return _normalised(x, None, weight, None, epsilon, one_plus)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, one_plus: bool) -> tuple[Tensor, ...]:
    """Normalised sums, the sums, and their reciprocal roots of mean squares."""
    return _normalised(x, residual, weight, None, epsilon, one_plus)


def layer_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, one_plus: bool
) -> tuple[Tensor, ...]:
    """Gradients of x, weight and bias."""
    return _gradients(grad, grad_sum, x, weight, mean, rstd, one_plus)


def rms_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, one_plus: bool
) -> tuple[Tensor, ...]:
    """Gradients of x and weight."""
    return _gradients(grad, grad_sum, x, weight, None, rstd, one_plus)


def _warps(columns: int) -> int:
    """Warps of a row: sixteen elements a thread, as far as there are threads."""
    return min(max(triton.next_power_of_2(columns) // 512, 1), 16)


def _normalised(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, one_plus: bool
) -> tuple[Tensor, ...]:
    columns = x.shape[-1]
    if columns > MOST_COLUMNS:
        return NotImplemented
    x = x.contiguous()
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    mean = rstd if bias is None else torch.empty_like(rstd)
    if x.numel():
        _forward[(x.numel() // columns,)](
            *(x, x if residual is None else residual.contiguous(), weight.contiguous()),
            *(weight if bias is None else bias.contiguous(), out, total, mean, rstd, columns, epsilon),
            ADDS=residual is not None,
            CENTRES=bias is not None,
            ONE_PLUS=one_plus,
            COLUMNS=triton.next_power_of_2(columns),
            num_warps=_warps(columns),
            enable_fp_fusion=True,
        )
    return (out, *([] if residual is None else [total]), *([] if bias is None else [mean]), rstd)


def _gradients(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    one_plus: bool,
) -> tuple[Tensor, ...]:
    columns = x.shape[-1]
    if columns > MOST_COLUMNS:
        return NotImplemented
    x, grad = x.contiguous(), grad.contiguous()
    rows = x.numel() // columns
    num_parts, num_sums = max(1, min(PARTS, rows)), 1 if mean is None else 2
    parts = torch.empty(num_sums, num_parts, columns, dtype=torch.float32, device=x.device)
    sums = torch.empty(num_sums, columns, dtype=weight.dtype, device=x.device)
    grad_x = torch.empty_like(x)
    means, is_short = rstd if mean is None else mean, columns <= MOST_SUMMED
    programs = num_parts if is_short else rows
    _backward[(max(1, programs),)](
        *(grad, x if grad_sum is None else grad_sum.contiguous(), x, weight.contiguous()),
        *(means, rstd, grad_x, parts[0], parts[-1], rows, columns, programs),
        ADDS=grad_sum is not None,
        CENTRES=mean is not None,
        ONE_PLUS=one_plus,
        SUMS=is_short,
        COLUMNS=triton.next_power_of_2(columns),
        num_warps=_warps(columns),
        enable_fp_fusion=True,
    )
    if not is_short:
        _sum_columns[(num_parts, triton.cdiv(columns, SUMMED_AT_ONCE))](
            *(grad, x, means, rstd, parts[0], parts[-1], rows, columns, num_parts),
            CENTRES=mean is not None,
            COLUMNS=SUMMED_AT_ONCE,
            enable_fp_fusion=True,
        )
    block = min(triton.next_power_of_2(columns), 128)
    _add_parts[(triton.cdiv(columns, block), num_sums)](
        parts, sums, num_parts, columns, COLUMNS=block, enable_fp_fusion=True
    )
    return (grad_x, *sums.unbind())
