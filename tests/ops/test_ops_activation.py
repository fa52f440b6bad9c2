"""Tests of the activation operators: opcheck, gradients and compilation, with the references and with the kernels."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_runs import NAMESPACE, kernels, needs_compiler
from torch import Tensor

from megatronish.ops import activation
from megatronish.ops.activation import bias_gelu, bias_swiglu

NAMESPACES = ("megatronish", pytest.param(NAMESPACE, marks=needs_compiler))
FORWARD = ("bias_gelu", "bias_swiglu")
NAMES = (*FORWARD, "bias_gelu_backward", "bias_swiglu_backward")


def arguments(name: str, dtype: torch.dtype = torch.float32) -> list[tuple[Any, ...]]:
    """Of an operator, several times."""
    generator = torch.Generator().manual_seed(0)
    x, turned = torch.randn(2, 3, 10, generator=generator).to(dtype), torch.randn(4, 6, generator=generator).to(dtype)
    inputs = (x.requires_grad_(), turned.t().requires_grad_())
    rest: list[tuple[bool, ...]] = [(False,), (True,)] if "gelu" in name else [()]
    found: list[tuple[Any, ...]] = []
    for given in inputs:
        bias = torch.randn(given.shape[-1], generator=generator).to(dtype).requires_grad_()
        for others in rest:
            found += [(given, None, *others), (given, bias, *others)]
    if not name.endswith("_backward"):
        return found
    size = 2 if "swiglu" in name else 1
    grads = [torch.randn(*g[0].shape[:-1], g[0].shape[-1] // size, generator=generator).to(dtype) for g in found]
    return [tuple(detached(x) for x in (grad, *given)) for grad, given in zip(grads, found, strict=True)]


def detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def operator(namespace: str, name: str) -> Any:
    ops = torch.ops.megatronish if namespace == "megatronish" else kernels("cpu").ops
    return getattr(ops, name).default


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_torch_finds_nothing_wrong_with_an_operator(namespace: str, name: str) -> None:
    for given in arguments(name)[1:3]:
        torch.library.opcheck(operator(namespace, name), given)


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_an_operator_compiles_without_a_break(namespace: str, name: str) -> None:
    torch._dynamo.reset()
    called = operator(namespace, name)
    compiled = torch.compile(lambda *given: called(*given) * 2, fullgraph=True, backend="aot_eager")
    for given in arguments(name)[-2:]:
        leaves = [x for x in given if isinstance(x, Tensor)]
        found = [
            torch.autograd.grad(run(*given).square().sum(), leaves)
            for run in (compiled, lambda *given: called(*given) * 2)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", FORWARD)
def test_the_gradients_of_the_references_are_those_of_differences(name: str) -> None:
    for given in arguments(name, torch.float64):
        assert torch.autograd.gradcheck(operator("megatronish", name), given)


@pytest.mark.parametrize("kind", ["none", "tanh", "swiglu"])
@pytest.mark.parametrize("biased", [False, True])
def test_the_references_are_torch_s_own_functions(kind: Any, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 3, 64, requires_grad=True)
    bias = torch.randn(64, requires_grad=True) if biased else None
    leaves = [leaf for leaf in (x, bias) if leaf is not None]
    results = []
    for fused in (False, True):
        monkeypatch.setattr(activation, "is_fused", lambda _, fused=fused: fused)
        y = bias_swiglu(x, bias) if kind == "swiglu" else bias_gelu(x, bias, approximate=kind)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_the_cpu_no_bit_changes(dtype: torch.dtype) -> None:
    x, bias = torch.randn(4, 6).to(dtype), torch.randn(6).to(dtype)
    gate, up = (x + bias).chunk(2, dim=-1)
    assert torch.equal(bias_swiglu(x, bias), F.silu(gate) * up)
    assert torch.equal(bias_gelu(x, None, approximate="tanh"), F.gelu(x, approximate="tanh"))


def test_on_cuda_a_function_is_fused_where_its_kernels_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors only say that they are on CUDA."""
    features = [torch.empty(0, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)]
    for built in (False, True):
        monkeypatch.setattr(activation, "HAS_KERNELS", built)
        assert not any(activation.is_fused(x) for x in features)
        with monkeypatch.context() as on_cuda:
            on_cuda.setattr(Tensor, "is_cuda", property(lambda _: True))
            assert [activation.is_fused(x) for x in features] == [built] * 3 + [False]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_references_and_kernels_agree(dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for name in NAMES:
        for given in arguments(name, dtype):
            found = [operator(namespace, name)(*given) for namespace in ("megatronish", NAMESPACE)]
            torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
