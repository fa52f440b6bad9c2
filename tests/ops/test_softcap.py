"""Tests of the soft cap: its values, and its backward against torch's and against differences."""

import pytest
import torch

from megatronish.ops.softcap import soft_capped

CAPS = [0.5, 2.0, 30.0]


def values() -> torch.Tensor:
    return torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("cap", CAPS)
def test_a_cap_bounds_and_keeps_small_values(cap: float) -> None:
    x = values()
    y = soft_capped(x, cap)
    assert bool((y.abs() < cap).all())
    torch.testing.assert_close(y, cap * torch.tanh(x / cap))
    small = torch.full((1,), cap * 1e-4, dtype=torch.float64)
    torch.testing.assert_close(soft_capped(small, cap), small)


@pytest.mark.parametrize("cap", CAPS)
def test_its_gradient_is_that_of_differences(cap: float) -> None:
    assert torch.autograd.gradcheck(lambda x: soft_capped(x, cap), (values().requires_grad_(),))


def test_what_overwrites_the_capped_values_changes_no_gradient() -> None:
    """As the cross-entropy does with logits."""
    x = values().requires_grad_()
    y = soft_capped(x, 2.0)
    y.detach().fill_(7.0)
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, 1 - torch.tanh(x / 2.0).square())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    x = values().to(dtype).requires_grad_()
    y = soft_capped(x, 2.0)
    y.sum().backward()
    assert y.dtype == dtype and x.grad is not None and x.grad.dtype == dtype
