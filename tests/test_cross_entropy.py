"""The loss of a token against log-softmax in float64, on one process. (Shared by several ranks: in the theorem.)"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.layers.cross_entropy import vocab_parallel_cross_entropy
from megatronish.mesh.groups import Axis

S, B, V, PADDED = 5, 3, 300, 384


def make_logits(*, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(S, B, PADDED, generator=generator) * scale).to(dtype)


def make_labels() -> Tensor:
    return torch.randint(V, (S, B), generator=torch.Generator().manual_seed(1))


def losses_and_gradient(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Ours, with the gradient of the weighted sum."""
    leaf = logits.clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(leaf * 1, labels, vocab_size=V, tp=Axis("tp"))
    (losses * weights).sum().backward()
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


def expected_in_float64(logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.double().requires_grad_()
    losses = F.cross_entropy(leaf[..., :V].flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    (losses * weights).sum().backward()
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0, 1e4])
def test_losses_and_gradients_are_those_of_float64(scale: float) -> None:
    logits, labels = make_logits(scale=scale), make_labels()
    weights = torch.rand(S, B, generator=torch.Generator().manual_seed(2))
    losses, gradient = losses_and_gradient(logits, labels, weights)
    expected_losses, expected_gradient = expected_in_float64(logits, labels, weights)
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-6)


def test_bf16_logits_lose_nothing_but_the_rounding_of_their_gradient() -> None:
    logits, labels, weights = make_logits(scale=3.0, dtype=torch.bfloat16), make_labels(), torch.ones(S, B)
    losses, gradient = losses_and_gradient(logits, labels, weights)
    expected_losses, expected_gradient = expected_in_float64(logits, labels, weights)
    assert losses.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("padding", [0.0, 1e4, torch.inf, torch.nan])
def test_padding_takes_no_part_whatever_it_holds(padding: float) -> None:
    logits, labels, weights = make_logits(), make_labels(), torch.ones(S, B)
    expected_losses, expected_gradient = losses_and_gradient(logits, labels, weights)
    logits[..., V:] = padding
    losses, gradient = losses_and_gradient(logits, labels, weights)
    assert torch.equal(losses, expected_losses)
    assert torch.equal(gradient[..., :V], expected_gradient[..., :V])
    assert not gradient[..., V:].any()


def test_a_token_that_does_not_count_has_no_gradient() -> None:
    weights = torch.ones(S, B)
    weights[1, 2] = 0.0
    _, gradient = losses_and_gradient(make_logits(), make_labels(), weights)
    assert not gradient[1, 2].any()
    assert gradient[1, 1].any()


def test_a_target_of_no_probability_has_a_finite_loss() -> None:
    logits = torch.zeros(1, 1, V)
    logits[..., 0] = 5000.0
    losses = vocab_parallel_cross_entropy(logits, torch.tensor([[1]]), vocab_size=V, tp=Axis("tp"))
    assert losses.item() == 5000.0


def test_a_broken_logit_is_not_hidden() -> None:
    logits = make_logits()
    logits[0, 0, 7] = torch.nan
    losses = vocab_parallel_cross_entropy(logits, make_labels(), vocab_size=V, tp=Axis("tp"))
    assert losses[0, 0].isnan()
    assert losses[1:].isfinite().all()
