"""Fused activations: GELU, exact or by its tanh approximation, and SwiGLU, each of x + bias.

    GELU      y = x * P(X <= x), X normal; by tanh y = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2
    SwiGLU    y = gate * sigmoid(gate) * up

The forward kernel adds the bias as it reads x. The backward kernel writes the gradient of x and sums the gradient of
the bias in the same pass, so no gradient is read twice. Only x and the bias are saved for backward; everything else is
recomputed. Arithmetic is fp32.

The operators run where their CUDA kernels do. Elsewhere torch's own functions run, with torch's gradients: what a
training run on the CPU computes does not depend on this file.
"""

from typing import Any, Literal

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

aten = torch.ops.aten


def bias_gelu(x: Tensor, bias: Tensor | None, *, approximate: Literal["none", "tanh"]) -> Tensor:
    """[..., F], [F] -> [..., F] (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    if is_fused(x):
        return torch.ops.megatronish.bias_gelu(x, bias, approximate == "tanh")
    return F.gelu(x if bias is None else x + bias, approximate=approximate)


def bias_swiglu(x: Tensor, bias: Tensor | None) -> Tensor:
    """[..., 2 F], gate before up, [2 F] -> [..., F] (Shazeer 2020, arXiv:2002.05202)."""
    if is_fused(x):
        return torch.ops.megatronish.bias_swiglu(x, bias)
    gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def is_fused(x: Tensor) -> bool:
    """Whether the activations of x run as CUDA kernels."""
    return x.is_cuda and x.dtype in KERNEL_DTYPES and HAS_KERNELS


# References: F is the MLP width; grad has the shape of the output, grad_x that of x.


def _gelu_reference(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    return F.gelu(_biased(x, bias), approximate="tanh" if tanh else "none").to(x.dtype)


def _gelu_backward_reference(grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    grad_x = aten.gelu_backward(_exact(grad), _biased(x, bias), approximate="tanh" if tanh else "none")
    return _gradients(grad_x, x, bias)


def _swiglu_reference(x: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = _biased(x, bias).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def _swiglu_backward_reference(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    gate, up = _biased(x, bias).chunk(2, dim=-1)
    grad = _exact(grad)
    return _gradients(torch.cat((aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=-1), x, bias)


def _exact(x: Tensor) -> Tensor:
    return x.contiguous().to(accumulation_dtype(x.dtype))


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return _exact(x) if bias is None else _exact(x) + bias


def _gradients(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the bias, in the dtype of x; the gradient of an absent bias has no elements."""
    return grad.to(x.dtype), x.new_empty(0) if bias is None else grad.sum_to_size(bias.shape).to(x.dtype)


def _half(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _fake_gradients(_grad: Tensor, x: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return like(x), x.new_empty(0) if bias is None else like(bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 torch gives it by name
    x, bias, *ctx.others = inputs
    ctx.save_for_backward(x, bias)


def _gelu_backward(ops: Any, ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    grad_x, grad_bias = ops.bias_gelu_backward(grad, x, bias, *ctx.others)
    return grad_x, None if bias is None else grad_bias, None


def _swiglu_backward(ops: Any, ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias = ctx.saved_tensors
    grad_x, grad_bias = ops.bias_swiglu_backward(grad, x, bias)
    return grad_x, None if bias is None else grad_bias


FAMILY = OperatorFamily(
    "activation",
    (
        Operator(
            "bias_gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor",
            reference=_gelu_reference,
            setup_context=_save,
            backward=_gelu_backward,
        ),
        Operator(
            "bias_gelu_backward(Tensor grad, Tensor x, Tensor? bias, bool tanh) -> (Tensor grad_x, Tensor grad_bias)",
            reference=_gelu_backward_reference,
            fake=_fake_gradients,
        ),
        Operator(
            "bias_swiglu(Tensor x, Tensor? bias) -> Tensor",
            reference=_swiglu_reference,
            fake=_half,
            setup_context=_save,
            backward=_swiglu_backward,
        ),
        Operator(
            "bias_swiglu_backward(Tensor grad, Tensor x, Tensor? bias) -> (Tensor grad_x, Tensor grad_bias)",
            reference=_swiglu_backward_reference,
            fake=_fake_gradients,
        ),
    ),
)
define(FAMILY)
HAS_KERNELS = has_kernels(FAMILY)  # a constant, for torch.compile
