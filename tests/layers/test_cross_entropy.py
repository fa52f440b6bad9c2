"""Tests of the token loss against log-softmax in float64, and of its memory. (Over tp: test_parallel_equals_serial.)"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.layers.vocabulary import vocab_parallel_cross_entropy
from megatronish.ops import cross_entropy
from megatronish.parallel.mesh import Axis, Mesh
from megatronish.specs.chunk_sizes import CPU

S, B, V, PADDED = 5, 3, 300, 384
SIXTEEN_BITS = [torch.bfloat16, torch.float16]


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


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_logits_of_16_bits_lose_nothing_but_the_rounding_of_their_gradient(dtype: torch.dtype) -> None:
    logits, labels, weights = make_logits(scale=3.0, dtype=dtype), make_labels(), torch.ones(S, B)
    losses, gradient = losses_and_gradient(logits, labels, weights)
    expected_losses, expected_gradient = expected_in_float64(logits, labels, weights)
    assert losses.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=torch.finfo(dtype).eps / 2, atol=1e-6)


# Less than a token, tokens that do not divide their number, and more than all.
@pytest.mark.parametrize("chunk", [1, PADDED, 4 * PADDED, 100 * PADDED])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
def test_chunks_change_no_bit(chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, weights = make_logits(scale=3.0, dtype=dtype), make_labels(), torch.rand(S, B)
    expected = losses_and_gradient(logits, labels, weights)
    monkeypatch.setattr(cross_entropy, "chunk_sizes", lambda _: CPU._replace(logits=chunk))
    for found, whole in zip(losses_and_gradient(logits, labels, weights), expected, strict=True):
        assert torch.equal(found, whole)


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


def test_gradients_have_no_gradient_and_it_is_said() -> None:
    logits = torch.randn(3, 2, 7, requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits * 1.0, torch.zeros(3, 2, dtype=torch.int64), vocab_size=7, tp=Axis("tp"))
    (grad,) = torch.autograd.grad(loss.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


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


# Memory


def peak_bytes(run: Callable[[], object], trace: Path) -> int:
    """The most that a run holds above what was held before it, from torch's record of its allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    profiled.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    held = [event["args"]["Total Allocated"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(held) - (held[0] - min(events, key=lambda event: event["ts"])["args"]["Bytes"])


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN_BITS])
def test_beside_the_logits_stands_a_chunk_and_no_more(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of 2 MiB (fp32: 4 MiB), whose exponentials in fp32 would be 4 MiB more."""
    num_tokens, vocab_size, chunk = 512, 2048, 2**14
    monkeypatch.setattr(cross_entropy, "chunk_sizes", lambda _: CPU._replace(logits=chunk))
    leaf = torch.randn(num_tokens, 1, vocab_size).to(dtype).requires_grad_()
    logits = leaf.view_as(leaf)
    gradients: list[Tensor] = []
    logits.register_hook(gradients.append)
    labels = torch.randint(vocab_size, (num_tokens, 1))
    own = logits.data_ptr()

    def forward_and_backward() -> None:
        vocab_parallel_cross_entropy(logits, labels, vocab_size=vocab_size, tp=Axis("tp")).sum().backward()

    peak = peak_bytes(forward_and_backward, tmp_path / "trace.json")
    numbers_a_token = 48 * num_tokens
    assert 0 < peak <= (0 if dtype == torch.float32 else 4 * chunk) + numbers_a_token
    assert gradients[0].data_ptr() == own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_waits_for_its_weight_gradient_is_not_touched_by_later_ones(dtype: torch.dtype) -> None:
    gradients: list[Tensor] = []
    losses = []
    for seed in range(3):
        logits = make_logits(scale=seed + 1.0, dtype=dtype).requires_grad_() * 1
        logits.register_hook(gradients.append)
        losses.append(vocab_parallel_cross_entropy(logits, make_labels(), vocab_size=V, tp=Axis("tp")).sum())
        del logits
    seen = []
    for loss in losses:
        loss.backward()
        seen.append(gradients[-1].clone())
    assert all(torch.equal(kept, first) for kept, first in zip(gradients, seen, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_used_up_are_not_used_twice(dtype: torch.dtype) -> None:
    logits = make_logits(dtype=dtype).requires_grad_() * 1
    loss = vocab_parallel_cross_entropy(logits, make_labels(), vocab_size=V, tp=Axis("tp")).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computed_again_for_the_backward_the_loss_is_the_same(dtype: torch.dtype) -> None:
    labels, weights = make_labels(), torch.rand(S, B)
    expected_losses, expected_gradient = losses_and_gradient(make_logits(dtype=dtype), labels, weights)
    leaf = make_logits(dtype=dtype).requires_grad_()

    def loss_of(x: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(x * 1, labels, vocab_size=V, tp=Axis("tp"))

    losses = checkpoint(loss_of, leaf, use_reentrant=False)
    (losses * weights).sum().backward()
    assert torch.equal(losses, expected_losses)
    assert leaf.grad is not None and torch.equal(leaf.grad, expected_gradient)


# Over ranks


def loss_on_ranks(place: Place) -> tuple[Tensor, Tensor]:
    """This rank's part of the logits."""
    mesh = Mesh.start(Layout(tp=3), rank=place.rank, init_method=place.rendezvous)
    mine = make_logits(scale=3.0, dtype=torch.bfloat16).split(PADDED // 3, dim=-1)[mesh.tp.rank]
    leaf = mine.clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(leaf * 1, make_labels() % 200, vocab_size=200, tp=mesh.tp)
    (losses * torch.linspace(0.5, 1.5, S * B).view(S, B)).sum().backward()
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


def test_a_rank_of_padding_alone_takes_part_with_nothing() -> None:
    """Of three ranks with 128 rows each, 200 rows are true."""
    results = run_ranks(3, loss_on_ranks)
    logits = make_logits(scale=3.0, dtype=torch.bfloat16)[..., :200].double().requires_grad_()
    losses = F.cross_entropy(logits.flatten(0, 1), (make_labels() % 200).flatten(), reduction="none").view(S, B)
    (losses * torch.linspace(0.5, 1.5, S * B).view(S, B)).sum().backward()
    assert logits.grad is not None
    for found, _ in results:
        torch.testing.assert_close(found.double(), losses.detach(), rtol=1e-6, atol=1e-6)
    gradient = torch.cat([found for _, found in results], dim=-1)
    torch.testing.assert_close(gradient[..., :200].double(), logits.grad, rtol=2**-7, atol=1e-6)
    assert not gradient[..., 200:].any()
