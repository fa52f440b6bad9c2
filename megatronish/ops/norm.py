"""Fused normalisation: LayerNorm and RMSNorm over the last dim, of x or of x + residual.

    LayerNorm  n = (x - mean) / sqrt(variance + epsilon)      normalised = n * weight + bias
    RMSNorm    n = x / sqrt(mean square + epsilon)            normalised = n * weight

Statistics and arithmetic are fp32; outputs have the dtype of x, gradients of weight and bias that of the weight, which
is fp32 or that of x. With `one_plus` the weight is stored as w - 1, and 1 is added in fp32.

The operators run where their CUDA kernels do. Elsewhere torch's own functions run, with torch's gradients; with
`one_plus` they run in fp32, because a 16-bit 1 + w would be rounded.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.ops.library import (
    KERNEL_DTYPES,
    Operator,
    OperatorFamily,
    accumulation_dtype,
    define,
    has_kernels,
    like,
)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float, one_plus: bool = False) -> Tensor:
    """LayerNorm: [..., D], [D], [D] -> [..., D] (Ba et al. 2016, arXiv:1607.06450)."""
    if _is_fused(x, weight):
        normalised, *_ = torch.ops.megatronish.layer_norm(x, weight, bias, epsilon, one_plus)
        return normalised
    if one_plus:
        return F.layer_norm(_exact(x), weight.shape, _weight(weight, one_plus), _exact(bias), epsilon).to(x.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float, one_plus: bool = False) -> Tensor:
    """RMSNorm: [..., D], [D] -> [..., D] (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    if _is_fused(x, weight):
        normalised, *_ = torch.ops.megatronish.rms_norm(x, weight, epsilon, one_plus)
        return normalised
    if one_plus:
        return F.rms_norm(_exact(x), weight.shape, _weight(weight, one_plus), epsilon).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, epsilon)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *, epsilon: float, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    """[..., D], [..., D], [D], [D] -> the normalised sum and x + residual, both [..., D]."""
    if _is_fused(x, weight):
        normalised, total, *_ = torch.ops.megatronish.add_layer_norm(x, residual, weight, bias, epsilon, one_plus)
        return normalised, total
    total = x + residual
    return layer_norm(total, weight, bias, epsilon=epsilon, one_plus=one_plus), total


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, epsilon: float, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    """[..., D], [..., D], [D] -> the normalised sum and x + residual, both [..., D]."""
    if _is_fused(x, weight):
        normalised, total, *_ = torch.ops.megatronish.add_rms_norm(x, residual, weight, epsilon, one_plus)
        return normalised, total
    total = x + residual
    return rms_norm(total, weight, epsilon=epsilon, one_plus=one_plus), total


def _is_fused(x: Tensor, weight: Tensor) -> bool:
    known = x.dtype in KERNEL_DTYPES and weight.dtype in (x.dtype, torch.float32)
    return x.is_cuda and known and HAS_KERNELS


# References. x, grad and outputs are [..., D], weight and bias [D], statistics (mean, rstd) [..., 1] in fp32.


def _exact(x: Tensor) -> Tensor:
    return x.contiguous().to(accumulation_dtype(x.dtype))


def _weight(weight: Tensor, one_plus: bool) -> Tensor:
    return _exact(weight) + 1 if one_plus else _exact(weight)


def _layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, one_plus: bool
) -> tuple[Tensor, Tensor, Tensor]:
    normalised, mean, rstd = torch.native_layer_norm(
        _exact(x), weight.shape, _weight(weight, one_plus), _exact(bias), epsilon
    )
    return normalised.to(x.dtype), mean, rstd


def _add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float, one_plus: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = (x + residual).contiguous()
    normalised, mean, rstd = _layer_norm_reference(total, weight, bias, epsilon, one_plus)
    return normalised, total, mean, rstd


def _rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float, one_plus: bool) -> tuple[Tensor, Tensor]:
    values = _exact(x)
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (values * rstd * _weight(weight, one_plus)).to(x.dtype), rstd


def _add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, one_plus: bool
) -> tuple[Tensor, Tensor, Tensor]:
    total = (x + residual).contiguous()
    normalised, rstd = _rms_norm_reference(total, weight, epsilon, one_plus)
    return normalised, total, rstd


def _layer_norm_backward_reference(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, one_plus: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # 1. Recompute the normalised row n [..., D] from the saved statistics.
    n = (_exact(x) - mean) * rstd
    # 2. The gradient of n, then of x: mean and variance depend on x, which subtracts the parts along 1 and along n.
    h = _exact(grad) * _weight(weight, one_plus)
    grad_x = (h - (h * n).mean(-1, keepdim=True) * n - h.mean(-1, keepdim=True)) * rstd
    # 3. The residual sum is an output too: its own gradient is added. Parameter gradients [D] are summed over all rows.
    return _with(grad_sum, grad_x).to(x.dtype), _over_rows(_exact(grad) * n, weight), _over_rows(_exact(grad), weight)


def _rms_norm_backward_reference(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, one_plus: bool
) -> tuple[Tensor, Tensor]:
    # As for LayerNorm, without a mean: only the part along n is subtracted.
    n = _exact(x) * rstd
    h = _exact(grad) * _weight(weight, one_plus)
    grad_x = (h - (h * n).mean(-1, keepdim=True) * n) * rstd
    return _with(grad_sum, grad_x).to(x.dtype), _over_rows(_exact(grad) * n, weight)


def _with(grad_sum: Tensor | None, grad: Tensor) -> Tensor:
    return grad if grad_sum is None else grad + grad_sum


def _over_rows(x: Tensor, weight: Tensor) -> Tensor:
    return x.reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)


def _statistics(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], *, adds: bool) -> None:
    # What was normalised is saved: output[1] = x + residual [..., D] where the operator adds, else the input x.
    x, weight = (output[1], inputs[2]) if adds else (inputs[0], inputs[1])
    statistics = output[2:] if adds else output[1:]
    ctx.one_plus = inputs[-1]
    ctx.save_for_backward(x, weight, *statistics)
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(False)  # an unused output has the gradient None, not a tensor of zeros


def _backward(
    ops: Any, ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_: None, name: str, adds: bool
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs; `grad_sum` is that of x + residual, and always None where nothing is added.

    Outputs are (normalised, [x + residual,] *statistics); statistics are not differentiable, so their gradients are
    None.
    """
    x, weight, *statistics = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(x)
    # One backward operator [..., D] -> grad_x [..., D], grad_weight [D] (and grad_bias [D] of a LayerNorm).
    grad_x, *of_parameters = getattr(ops, name)(grad, grad_sum, x, weight, *statistics, ctx.one_plus)
    # x and residual have the same gradient; epsilon and one_plus have none.
    return *([grad_x, grad_x] if adds else [grad_x]), *of_parameters, None, None


def _forward(schema: str, *, reference: Any, fake: Any, backward: str, adds: bool = False) -> Operator:
    return Operator(
        schema,
        reference=reference,
        fake=fake,
        triton=f"norm.{schema.partition('(')[0]}",
        setup_context=partial(_save, adds=adds),
        backward=partial(_backward, name=backward, adds=adds),
    )


FAMILY = OperatorFamily(
    "norm",
    (
        _forward(
            "layer_norm(Tensor x, Tensor weight, Tensor bias, float epsilon, bool one_plus)"
            " -> (Tensor normalised, Tensor mean, Tensor rstd)",
            reference=_layer_norm_reference,
            fake=lambda x, *_: (like(x), _statistics(x), _statistics(x)),
            backward="layer_norm_backward",
        ),
        _forward(
            "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float epsilon, bool one_plus)"
            " -> (Tensor normalised, Tensor sum, Tensor mean, Tensor rstd)",
            reference=_add_layer_norm_reference,
            fake=lambda x, *_: (like(x), like(x), _statistics(x), _statistics(x)),
            backward="layer_norm_backward",
            adds=True,
        ),
        Operator(
            "layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor weight, Tensor mean, Tensor rstd,"
            " bool one_plus) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
            reference=_layer_norm_backward_reference,
            fake=lambda _grad, _grad_sum, x, weight, *_: (like(x), like(weight), like(weight)),
            triton="norm.layer_norm_backward",
        ),
        _forward(
            "rms_norm(Tensor x, Tensor weight, float epsilon, bool one_plus) -> (Tensor normalised, Tensor rstd)",
            reference=_rms_norm_reference,
            fake=lambda x, *_: (like(x), _statistics(x)),
            backward="rms_norm_backward",
        ),
        _forward(
            "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon, bool one_plus)"
            " -> (Tensor normalised, Tensor sum, Tensor rstd)",
            reference=_add_rms_norm_reference,
            fake=lambda x, *_: (like(x), like(x), _statistics(x)),
            backward="rms_norm_backward",
            adds=True,
        ),
        Operator(
            "rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor weight, Tensor rstd, bool one_plus)"
            " -> (Tensor grad_x, Tensor grad_weight)",
            reference=_rms_norm_backward_reference,
            fake=lambda _grad, _grad_sum, x, weight, *_: (like(x), like(weight)),
            triton="norm.rms_norm_backward",
        ),
    ),
)
define(FAMILY)
HAS_KERNELS = has_kernels(FAMILY)  # a constant, for torch.compile
