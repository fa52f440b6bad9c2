"""Tests of the norm operators: opcheck, gradients and compilation, and the references against torch's own norms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_runs import NAMESPACE, kernels, needs_compiler
from torch import Tensor

from megatronish.layers.norm import Norm
from megatronish.ops import norm
from megatronish.parallel.mesh import Axis, dense_domain
from megatronish.parallel.sharding import collect_shardings, initialize

NAMESPACES = ("megatronish", pytest.param(NAMESPACE, marks=needs_compiler))
FORWARDS = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")
NAMES = (*FORWARDS, "layer_norm_backward", "rms_norm_backward")
SIZE = 7


def drawn(number: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Four of [2, 3, SIZE] and two of [SIZE]."""
    generator = torch.Generator().manual_seed(number)
    rows, columns = (
        [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]
        for shape, count in (((2, 3, SIZE), 4), ((SIZE,), 2))
    )
    return rows, columns


def arguments(name: str, dtype: torch.dtype = torch.float32) -> list[tuple[Any, ...]]:
    """Of an operator, twice."""
    (x, residual, grad, grad_sum), parameters = drawn(0, dtype)
    parameters = parameters[: 2 if "layer" in name else 1]
    if name.endswith("_backward"):
        _, *statistics = operator("megatronish", name.removesuffix("_backward"))(x, *parameters, 1e-5, False)
        turned = [y.transpose(0, 1) for y in (grad, grad_sum, x)]
        return [
            (grad, None, x, parameters[0], *statistics, False),
            (*turned, parameters[0], *(y.transpose(0, 1) for y in statistics), True),
        ]
    rows = [x, residual] if name.startswith("add_") else [x]
    leaves = [y.requires_grad_() for y in (*rows, *parameters)]
    turned = [y.detach().transpose(0, 1).requires_grad_() for y in rows]
    return [(*leaves, 1e-5, False), (*turned, *parameters, 1e-2, True)]


def operator(namespace: str, name: str) -> Callable[..., tuple[Tensor, ...]]:
    ops = torch.ops.megatronish if namespace == "megatronish" else kernels("cpu").ops
    return getattr(ops, name).default


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_torch_finds_nothing_wrong_with_an_operator(namespace: str, name: str) -> None:
    for given in arguments(name)[1 if namespace == NAMESPACE else 0 :]:
        torch.library.opcheck(operator(namespace, name), given)


@pytest.mark.parametrize("name", NAMES)
def test_of_16_bits_a_fake_is_fp32_where_the_operator_is(name: str) -> None:
    for given in arguments(name, torch.bfloat16):
        mixed = (x.float() if isinstance(x, Tensor) and x.dim() == 1 else x for x in given)
        for each in (given, tuple(mixed)):
            torch.library.opcheck(operator("megatronish", name), each, test_utils="test_faketensor")


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_an_operator_compiles_without_a_break(namespace: str, name: str) -> None:
    torch._dynamo.reset()
    called = operator(namespace, name)
    outputs = 2 if name.startswith("add_") else 1

    def run(*given: Any) -> Tensor:
        return sum(y.square().sum() for y in called(*given)[:outputs])

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    _, given = arguments(name)
    leaves = [x for x in given if isinstance(x, Tensor)]
    plain, ours = (torch.autograd.grad(each(*given), leaves) for each in (run, compiled))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("name", FORWARDS)
def test_the_gradients_of_the_references_are_those_of_differences(name: str) -> None:
    outputs = 2 if name.startswith("add_") else 1
    for given in arguments(name, torch.float64):
        leaves = tuple(x for x in given if isinstance(x, Tensor))

        def run(*leaves: Tensor, others: tuple[Any, ...] = given[len(leaves) :]) -> tuple[Tensor, ...]:
            return operator("megatronish", name)(*leaves, *others)[:outputs]

        assert torch.autograd.gradcheck(run, leaves)


def of_torch(name: str, *given: Any) -> tuple[Tensor, ...]:
    """The same as an operator, by torch's own functions."""
    *tensors, epsilon, one_plus = given
    adds, is_layer_norm = name.startswith("add_"), "layer" in name
    rows, (weight, *bias) = tensors[: 2 if adds else 1], tensors[2 if adds else 1 :]
    total = sum(rows[1:], rows[0])
    run = F.layer_norm if is_layer_norm else F.rms_norm
    if one_plus:  # in fp32 at least
        dtype = torch.promote_types(total.dtype, torch.float32)
        wide, weight, *bias = (x.to(dtype) for x in (total, weight, *bias))
        normalised = run(wide, weight.shape, weight + 1, *bias, eps=epsilon).to(total.dtype)
    else:
        normalised = run(total, weight.shape, weight, *bias, eps=epsilon)
    return (normalised, total) if adds else (normalised,)


@pytest.mark.parametrize("name", FORWARDS)
def test_the_references_are_torch_s_own_norms(name: str) -> None:
    for given in arguments(name):
        leaves = [x for x in given if isinstance(x, Tensor)]
        expected, found = of_torch(name, *given), operator("megatronish", name)(*given)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=False))
        gradients = [
            torch.autograd.grad(sum(y.square().sum() for y in outputs[: len(expected)]), leaves)
            for outputs in (expected, found)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_the_cpu_a_layer_is_torch_s_own_to_the_bit_gradients_too(
    kind: str, one_plus: bool, dtype: torch.dtype
) -> None:
    layer = Norm(SIZE, kind=kind, epsilon=1e-3, partial=False, one_plus=one_plus).to(dtype)
    (x, residual, grad, _), parameters = drawn(1, dtype)
    for parameter, values in zip(layer.parameters(), parameters, strict=False):
        parameter.data.copy_(values)
    leaves = [x.requires_grad_(), residual.requires_grad_(), *layer.parameters()]
    normalised, total = layer.of_sum(x, residual)
    assert torch.equal(total, x + residual) and torch.equal(layer(total), normalised)
    name = "add_layer_norm" if kind == "LayerNorm" else "add_rms_norm"
    expected = of_torch(name, *leaves, 1e-3, one_plus)
    assert torch.equal(normalised, expected[0])
    gradients = [torch.autograd.grad(ys, leaves, (grad, grad)) for ys in ((normalised, total), expected)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_layer_begins_with_a_weight_of_one_however_it_is_stored(kind: str) -> None:
    (x, *_), _ = drawn(0)
    found = []
    for one_plus in (False, True):
        layer = Norm(SIZE, kind=kind, epsilon=1e-3, partial=False, one_plus=one_plus)
        initialize(layer, collect_shardings(layer), seed=1, domains=dense_domain(Axis("tp")))
        found.append(layer(x))
    weight, bias = torch.ones(SIZE), torch.zeros(SIZE)
    normalised = (
        F.layer_norm(x, (SIZE,), weight, bias, 1e-3) if kind == "LayerNorm" else F.rms_norm(x, (SIZE,), weight, 1e-3)
    )
    assert torch.equal(found[0], normalised) and torch.equal(found[1], normalised)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_what_is_added_to_one_may_be_less_than_16_bits_add(kind: str) -> None:
    layer = Norm(4, kind=kind, epsilon=1e-5, partial=False, one_plus=True).bfloat16()
    for parameter in layer.parameters():
        parameter.data.zero_()
    x = torch.randn(4000, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = layer(x).double().abs().sum().item()
    layer.weight.data.fill_(0.003)  # 1.003 is no number of bfloat16
    assert layer(x).double().abs().sum().item() / before == pytest.approx(1.003, abs=5e-4)


def test_on_cuda_a_norm_goes_the_way_of_the_kernels_where_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors only say that they are on CUDA, so nothing but the way is seen."""
    monkeypatch.setattr(norm, "HAS_KERNELS", True)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))
    (x, residual, _, _), (weight, bias) = drawn(0)
    taken = []
    for name in FORWARDS:
        monkeypatch.setattr(torch.ops.megatronish, name, lambda *given, name=name: taken.append((name, given)) or given)
    for one_plus in (False, True):
        taken.clear()
        how = {"epsilon": 0.25, "one_plus": one_plus}
        assert norm.layer_norm(x, weight, bias, **how) is x
        assert norm.rms_norm(x, weight, **how) is x
        assert norm.add_layer_norm(x, residual, weight, bias, **how) == (x, residual)
        assert norm.add_rms_norm(x, residual, weight, **how) == (x, residual)
        assert taken == [
            ("layer_norm", (x, weight, bias, 0.25, one_plus)),
            ("rms_norm", (x, weight, 0.25, one_plus)),
            ("add_layer_norm", (x, residual, weight, bias, 0.25, one_plus)),
            ("add_rms_norm", (x, residual, weight, 0.25, one_plus)),
        ]
    norm.rms_norm(x.double(), weight.double(), epsilon=1e-5)
    assert not norm._is_fused(x.half(), weight.bfloat16())
    monkeypatch.setattr(norm, "HAS_KERNELS", False)
    norm.rms_norm(x, weight, epsilon=1e-5)
    assert len(taken) == 4


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_references_and_kernels_agree(dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for name in NAMES:
        for given in arguments(name, dtype):
            found = [operator(namespace, name)(*given) for namespace in ("megatronish", NAMESPACE)]
            torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
