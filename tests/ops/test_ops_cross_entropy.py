"""Tests of the cross entropy operators: opcheck, gradients and compilation, with references and kernels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_runs import NAMESPACE, kernels, needs_compiler
from torch import Tensor

from megatronish.layers import vocabulary as layer
from megatronish.layers.vocabulary import vocab_parallel_cross_entropy
from megatronish.ops.cross_entropy import cross_entropy_gradient_, cross_entropy_statistics
from megatronish.parallel.mesh import Axis

NAMESPACES = ("megatronish", pytest.param(NAMESPACE, marks=needs_compiler))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PLACE = (20, 11)  # first, num_true


def arguments(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits [4, 13] and labels, one of which is elsewhere."""
    logits = torch.randn(4, 13, generator=torch.Generator().manual_seed(0)).to(dtype)
    return logits, torch.tensor([20, 30, 3, 25])


def operators(namespace: str) -> Any:
    return torch.ops.megatronish if namespace == "megatronish" else kernels("cpu").ops


def numbers() -> list[Tensor]:
    """Factor and grad [4]."""
    return [torch.linspace(0.1, 0.3, 4), torch.linspace(0.0, 1.0, 4)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_torch_finds_nothing_wrong_with_an_operator(namespace: str, dtype: torch.dtype) -> None:
    ops, (logits, labels) = operators(namespace), arguments(dtype)
    torch.library.opcheck(ops.cross_entropy_statistics.default, (logits, labels, *PLACE))
    maximum, _, _ = ops.cross_entropy_statistics(logits, labels, *PLACE)
    torch.library.opcheck(ops.cross_entropy_gradient_.default, (logits, labels, maximum, *numbers(), *PLACE))


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_operators_compile_without_a_break(namespace: str) -> None:
    torch._dynamo.reset()
    ops = operators(namespace)

    def run(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        logits = logits * 2
        maximum, total, target = ops.cross_entropy_statistics(logits, labels, *PLACE)
        ops.cross_entropy_gradient_(logits, labels, maximum, *numbers(), *PLACE)
        return maximum, total, target, logits

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(*arguments()), run(*arguments()), strict=True):
        assert torch.equal(found, expected)


def test_the_gradient_of_the_references_is_that_of_differences() -> None:
    """gradcheck would ask one graph twice, and logits that are used up have one backward."""
    logits, labels = arguments(torch.float64)
    weights = numbers()[1].double()

    def loss(x: Tensor) -> Tensor:
        losses = vocab_parallel_cross_entropy(x * 1, labels % 11, vocab_size=11, tp=Axis("tp"))
        return (losses * weights).sum()

    leaf = logits.clone().requires_grad_()
    loss(leaf).backward()
    steps = torch.eye(logits.numel(), dtype=torch.float64).view(-1, *logits.shape) * 1e-5
    differences = torch.stack([(loss(logits + step) - loss(logits - step)) / 2e-5 for step in steps])
    torch.testing.assert_close(leaf.grad, differences.view_as(logits), rtol=1e-6, atol=1e-9)


def test_the_references_are_torch_s_own_cross_entropy() -> None:
    logits, labels = arguments()
    leaf = logits[:, :11].clone().requires_grad_()
    expected = F.cross_entropy(leaf, labels % 11, reduction="none")
    (expected * numbers()[1]).sum().backward()
    maximum, total, target = cross_entropy_statistics(logits, labels % 11, first=0, num_true=11)
    torch.testing.assert_close(total.log() - (target - maximum), expected)
    factor, grad = numbers()[1] / total, numbers()[1]
    cross_entropy_gradient_(logits, labels % 11, maximum, factor, grad, first=0, num_true=11)
    assert leaf.grad is not None
    torch.testing.assert_close(logits[:, :11], leaf.grad)
    assert (logits[:, 11:] == 0).all()


@needs_compiler
@pytest.mark.parametrize("num_true", [0, 1, 11, 13])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_references_and_kernels_agree(dtype: torch.dtype, num_true: int) -> None:
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    found = []
    for ops in (operators("megatronish"), operators(NAMESPACE)):
        logits, labels = arguments(dtype)
        statistics = ops.cross_entropy_statistics(logits, labels, 20, num_true)
        ops.cross_entropy_gradient_(logits, labels, statistics[0], *numbers(), 20, num_true)
        found.append((*statistics, logits))
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance * 0.01)


def by_names(operator: Callable[..., Any]) -> Callable[..., Any]:
    """As ops/cross_entropy.py calls it."""
    return lambda *tensors, first, num_true: operator(*tensors, first, num_true)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_loss_is_the_same_by_the_kernels_where_logits_and_labels_have_strides(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    logits, labels = arguments(dtype)
    found = []
    for ops in (operators("megatronish"), operators(NAMESPACE)):
        for name in ("cross_entropy_statistics", "cross_entropy_gradient_"):
            monkeypatch.setattr(layer, name, by_names(getattr(ops, name)))
        leaf = torch.cat((logits, logits), dim=-1).requires_grad_()
        strided = (labels % 11).repeat_interleave(2)[::2]
        losses = vocab_parallel_cross_entropy((leaf * 1)[:, :13], strided, vocab_size=11, tp=Axis("tp"))
        (losses * numbers()[1]).sum().backward(retain_graph=True)
        found.append((losses.detach(), leaf.grad))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # the logits are used up
            losses.sum().backward()
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance * 0.01)
