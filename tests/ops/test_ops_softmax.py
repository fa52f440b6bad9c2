"""Tests of the softmax operators: opcheck, gradients and compilation, with the references and with the kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_runs import NAMESPACE, kernels, needs_compiler
from torch import Tensor

from megatronish.attention.mask import AttentionMask
from megatronish.ops.softmax import causal_visibility, scaled_causal_softmax, scaled_masked_softmax

NAMESPACES = ("megatronish", pytest.param(NAMESPACE, marks=needs_compiler))
NAMES = (
    "scaled_causal_softmax",
    "scaled_causal_softmax_backward",
    "scaled_masked_softmax",
    "scaled_masked_softmax_backward",
)


def arguments(name: str, dtype: torch.dtype = torch.float32) -> list[tuple[Any, ...]]:
    """Of an operator, several times."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 3, 5, 7, generator=generator).to(dtype) for _ in range(2))
    visible = torch.rand(2, 1, 5, 7, generator=generator) < 0.5
    visible[:, :, 2] = False
    if name.endswith("_backward"):
        if "causal" not in name:
            return [(x, y.softmax(-1), 0.3), (x.mT, y.mT.softmax(-1), 0.3)]
        seen = (causal_visibility(5, 7, 3, y.device), causal_visibility(7, 5, None, y.device))
        return [(x, y.softmax(-1) * seen[0], 0.3, 3), (x.mT, y.mT.softmax(-1) * seen[1], 0.3, None)]
    x, turned = x.requires_grad_(), x.detach().mT.requires_grad_()
    if "causal" in name:
        return [(x, 0.3, None), (x, -2.0, 3), (turned, 0.3, 100)]
    return [(x, None, 0.3), (x, visible, 0.3), (turned, visible.mT, 0.3)]


def operator(namespace: str, name: str) -> Callable[..., Tensor]:
    ops = torch.ops.megatronish if namespace == "megatronish" else kernels("cpu").ops
    return getattr(ops, name).default


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_torch_finds_nothing_wrong_with_an_operator(namespace: str, name: str) -> None:
    for given in arguments(name)[:2]:
        torch.library.opcheck(operator(namespace, name), given)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_backward")])
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_an_operator_compiles_without_a_break(namespace: str, name: str) -> None:
    torch._dynamo.reset()
    called = operator(namespace, name)
    compiled = torch.compile(lambda *given: called(*given) * 2, fullgraph=True, backend="aot_eager")
    for given in arguments(name):
        scores = given[0]
        grads = []
        for run in (compiled, lambda *given: called(*given) * 2):
            out = run(*given)
            grads.append(torch.autograd.grad(out.square().sum(), scores)[0])
        assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_backward")])
def test_the_gradients_of_the_references_are_those_of_differences(name: str) -> None:
    for scores, *others in arguments(name, torch.float64):
        called = operator("megatronish", name)
        assert torch.autograd.gradcheck(lambda x, called=called, others=others: called(x, *others), (scores,))


def test_the_references_are_torch_s_own_softmax() -> None:
    x = torch.randn(2, 3, 5, 7)
    visible = torch.rand(1, 3, 5, 7) < 0.8
    expected = (x * 0.3).masked_fill(~visible, -torch.inf).softmax(-1)
    assert torch.equal(scaled_masked_softmax(x, visible, scale=0.3), expected)
    assert torch.equal(scaled_masked_softmax(x, None, scale=0.3), (x * 0.3).softmax(-1))
    square = torch.randn(3, 7, 7)
    expected = square.masked_fill(torch.ones(7, 7).triu(1) > 0, -torch.inf).softmax(-1)
    assert torch.equal(scaled_causal_softmax(square, scale=1.0), expected)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 7), (3, 7), (6, 7)])
@pytest.mark.parametrize("window", [None, 1, 4, 7])
def test_causal_is_what_attention_calls_causal(queries: int, keys: int, window: int | None) -> None:
    positions = torch.arange(keys)
    expected = AttentionMask(keys, window_size=window).dense(positions[keys - queries :], positions)[0, 0]
    assert torch.equal(causal_visibility(queries, keys, window, torch.device("cpu")), expected)


def test_queries_before_the_first_key_see_nothing() -> None:
    found = scaled_causal_softmax(torch.randn(5, 3), scale=1.0)
    assert (found[:2] == 0).all() and found[2].tolist() == [1, 0, 0]


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="window_size=0 must be at least 1"):
        scaled_causal_softmax(torch.randn(5, 3), scale=1.0, window_size=0)


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 5, 1), (2, 2, 5, 7), (3, 1, 5, 7)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_mask_of_another_shape_is_refused_where_no_kernel_does(shape: tuple[int, ...], device: str) -> None:
    scores, visible = torch.zeros(2, 3, 5, 7, device=device), torch.ones(shape, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match=r"visible is .* they must be \[1 or B, 1 or n, 1 or q, k\]"):
        scaled_masked_softmax(scores, visible, scale=1.0)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_references_and_kernels_agree(dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for name in NAMES:
        for given in arguments(name, dtype):
            found = [operator(namespace, name)(*given) for namespace in ("megatronish", NAMESPACE)]
            torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance * 0.01)
