"""Tests of the softmax kernels against fp64, at every length and with every kind of mask."""

import math
from typing import NamedTuple

import pytest
import torch
from kernel_runs import DTYPES, LENGTHS, ORDERS, PLACES, Kernels, assert_rounded, kernels, misaligned
from torch import Tensor

from megatronish.ops.softmax import causal_visibility

SCALE = 0.3  # is no number of 16 bits


class Case(NamedTuple):
    """Scores [B, n, q, k] and who sees what: `visible` None and `window_size` 0 is everybody everything."""

    scores: Tensor
    visible: Tensor | None = None
    causal: bool = False
    window_size: int | None = None

    def seen(self) -> Tensor:
        """Bool [B, n, q, k]."""
        if self.causal:
            queries, keys = self.scores.shape[-2:]
            seen = causal_visibility(queries, keys, self.window_size, self.scores.device)
        else:
            seen = torch.ones((), dtype=torch.bool) if self.visible is None else self.visible
        return seen.to(self.scores.device).expand(self.scores.shape)

    def exact(self, scale: float) -> Tensor:
        """The probabilities in fp64."""
        scaled = (self.scores.double() * scale).masked_fill(~self.seen(), -torch.inf)
        return scaled.softmax(-1).masked_fill((scaled == -torch.inf).all(-1, keepdim=True), 0.0)

    def forward(self, run: Kernels, scale: float) -> Tensor:
        """Output of the kernels' forward."""
        if self.causal:
            return run.ops.scaled_causal_softmax(self.scores, scale, self.window_size)
        return run.ops.scaled_masked_softmax(self.scores, self.visible, scale)

    def backward(self, run: Kernels, grad: Tensor, probabilities: Tensor, scale: float) -> Tensor:
        """Gradient of the kernels' backward."""
        if self.causal:
            return run.ops.scaled_causal_softmax_backward(grad, probabilities, scale, self.window_size)
        return run.ops.scaled_masked_softmax_backward(grad, probabilities, scale)


def values(*shape: int, dtype: torch.dtype, device: torch.device, spread: float = 3.0, seed: int = 0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (drawn * spread).to(device, dtype)


def some(*shape: int, device: torch.device) -> Tensor:
    """Half are True; the last row has none."""
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    drawn[..., -1, :] = False
    return drawn.to(device)


def cases(keys: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """All kinds of sight over a row length; fewer rows of the long ones."""
    samples, queries = (2, 33) if keys < 2000 else (1, 4)
    x = values(samples, 2, 3, keys, dtype=dtype, device=device)
    square = values(1, 2, min(keys, queries), keys, dtype=dtype, device=device)
    tall = values(1, 1, 5, min(keys, 3), dtype=dtype, device=device)
    return [
        Case(x),
        Case(x, some(samples, 1, 3, keys, device=device)),
        Case(x, some(1, 2, 1, keys, device=device)),
        Case(x, some(samples, 2, 3, keys, device=device)),
        Case(misaligned(x), some(1, 1, 3, keys, device=device)),
        Case(square, causal=True),
        Case(square, causal=True, window_size=1),
        Case(misaligned(x), causal=True, window_size=7),
        Case(x, causal=True, window_size=keys),
        Case(tall, causal=True),
    ]


def check(case: Case, run: Kernels, scale: float = SCALE) -> None:
    exact = case.exact(scale)
    probabilities = case.forward(run, scale)
    assert_rounded(probabilities, exact, slack=exact * 1e-5)  # e^-87 keeps five digits of fp32
    assert (probabilities[~case.seen()] == 0).all()

    grad = values(*case.scores.shape, dtype=case.scores.dtype, device=run.device, seed=2)
    check_gradient(case, run, grad, probabilities, scale)


def check_gradient(case: Case, run: Kernels, grad: Tensor, probabilities: Tensor, scale: float = SCALE) -> None:
    y, g = probabilities.double(), grad.double()
    exact_grad = scale * y * (g - (y * g).sum(-1, keepdim=True))
    slack = 1e-6 * abs(scale) * y * (g.abs() + (y * g).abs().sum(-1, keepdim=True))
    assert_rounded(case.backward(run, grad, probabilities, scale), exact_grad, slack=slack)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", LENGTHS)
def test_every_length_in_every_dtype_whoever_sees_what(keys: int, dtype: torch.dtype, where: str) -> None:
    run = kernels(where, order=ORDERS[(LENGTHS.index(keys) + DTYPES.index(dtype)) % 3], seed=keys)
    for case in cases(keys, dtype, run.device):
        check(case, run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_references_are_as_exact(dtype: torch.dtype) -> None:
    run = Kernels(torch.ops.megatronish, torch.device("cpu"))
    for case in cases(33, dtype, run.device):
        check(case, run)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("keys", [16385, 20001])
def test_a_row_that_no_block_holds_is_read_twice(keys: int, where: str) -> None:
    run = kernels(where, order="random")
    visible = some(1, 1, 2, keys, device=run.device)
    for dtype in (torch.float32, torch.bfloat16):
        x = values(1, 1, 2, keys, dtype=dtype, device=run.device)
        check(Case(x), run)
        check(Case(x, visible), run)
        check(Case(misaligned(x), causal=True, window_size=1000), run)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [32, 64, 512, 513, 16384])
def test_a_row_may_end_where_a_team_s_registers_do_wherever_it_begins(
    keys: int, dtype: torch.dtype, where: str
) -> None:
    run = kernels(where, order="random", seed=keys)
    x, grad = (values(1, 1, 2, keys, dtype=dtype, device=run.device, seed=seed) for seed in (0, 2))
    for case in (Case(x), Case(misaligned(x)), Case(x, causal=True, window_size=keys // 2)):
        check(case, run)
        y = case.forward(run, SCALE)
        check_gradient(case, run, misaligned(grad), y)
        check_gradient(case, run, grad, misaligned(y))
        check_gradient(case, run, misaligned(grad), misaligned(y))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("keys", [33, 1025])
def test_the_order_of_lanes_changes_nothing(keys: int, order: str) -> None:
    for case in cases(keys, torch.float32, torch.device("cpu")):
        first = case.forward(kernels("cpu"), SCALE)
        assert torch.equal(first, case.forward(kernels("cpu", order=order, seed=5), SCALE))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [31, 129, 1025, 16640])
def test_the_largest_scores_do_not_overflow(keys: int, dtype: torch.dtype, where: str) -> None:
    run = kernels(where)
    largest = torch.finfo(dtype).max
    x = values(1, 1, 2, keys, dtype=dtype, device=run.device, spread=1e4)
    x[..., 0, :2] = torch.tensor([largest, -largest])
    for scale in (1.0, 0.125, -1.0):
        check(Case(x), run, scale)
    x[..., 1, 0] = -torch.inf
    check(Case(x), run)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-46])
def test_a_scale_of_nothing_makes_all_keys_alike(scale: float, where: str) -> None:
    run = kernels(where)
    for keys in (9, 600, 17000):
        x = values(1, 1, 3, keys, dtype=torch.float32, device=run.device)
        for case in (
            Case(x),
            Case(misaligned(x)),
            Case(x, some(1, 1, 3, keys, device=run.device)),
            Case(x, causal=True),
        ):
            check(case, run, scale)


@pytest.mark.parametrize("where", PLACES)
def test_a_row_of_minus_infinity_sees_nothing_and_a_nan_stays_in_its_row(where: str) -> None:
    run = kernels(where)
    for keys in (9, 600, 17000):
        x = values(1, 1, 3, keys, dtype=torch.float32, device=run.device)
        x[..., 0, :], x[..., 1, -1] = -torch.inf, torch.nan
        found = Case(x).forward(run, 1.0)[0, 0]
        assert (found[0] == 0).all() and found[1].isnan().all()
        torch.testing.assert_close(found[2], x[0, 0, 2].softmax(-1))


@pytest.mark.parametrize("where", PLACES)
def test_a_causal_row_does_not_read_what_it_does_not_see(where: str) -> None:
    run = kernels(where)
    x = values(1, 1, 40, 40, dtype=torch.float16, device=run.device)
    hidden = ~causal_visibility(40, 40, 8, run.device)
    clean = Case(x, causal=True, window_size=8)
    dirty = clean._replace(scores=x.masked_fill(hidden, torch.nan))
    probabilities = clean.forward(run, SCALE)
    assert torch.equal(dirty.forward(run, SCALE), probabilities)
    grad = values(1, 1, 40, 40, dtype=torch.float16, device=run.device, seed=2)
    dirty_grad = grad.masked_fill(hidden, torch.nan)
    expected = clean.backward(run, grad, probabilities, SCALE)
    assert torch.equal(clean.backward(run, dirty_grad, probabilities, SCALE), expected)
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(clean._replace(scores=leaf).forward(run, SCALE), leaf, dirty_grad)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("byte", [2, 128, 255])
def test_any_byte_of_a_mask_but_zero_lets_see(byte: int, where: str) -> None:
    run = kernels(where)
    for dtype in (torch.float32, torch.float16):
        x = values(2, 2, 3, 45, dtype=dtype, device=run.device)  # rows of the mask begin anywhere
        visible = some(2, 1, 3, 45, device=run.device)
        bytes_of_it = (visible.to(torch.uint8) * byte).view(torch.bool)
        expected = Case(x, visible).forward(run, SCALE)
        assert torch.equal(Case(x, bytes_of_it).forward(run, SCALE), expected)


@pytest.mark.parametrize("where", PLACES)
def test_strides_do_not_matter(where: str) -> None:
    run = kernels(where)
    x = values(4, 2, 6, 5, dtype=torch.float32, device=run.device)
    visible = some(4, 1, 6, 5, device=run.device)
    turned, turned_visible = x.mT.contiguous().mT, visible.mT.contiguous().mT
    expected = Case(x, visible).forward(run, SCALE)
    assert torch.equal(Case(turned, turned_visible).forward(run, SCALE), expected)
    assert torch.equal(Case(turned, visible.expand(4, 2, 6, 5)).forward(run, SCALE), expected)
    grad = torch.ones((), device=run.device).expand(x.shape)
    assert torch.equal(
        Case(x).backward(run, grad, expected.mT.contiguous().mT, SCALE),
        Case(x).backward(run, grad.contiguous(), expected, SCALE),
    )


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 1, 0, 4), (2, 1, 3, 0)])
def test_nothing_is_a_size_too(shape: tuple[int, ...], where: str) -> None:
    run = kernels(where)
    x = torch.empty(shape, device=run.device)
    for case in (Case(x), Case(x, x > 0), Case(x, causal=True)):
        assert case.forward(run, SCALE).shape == shape
        assert case.backward(run, x, x, SCALE).shape == shape


@pytest.mark.parametrize("where", PLACES)
def test_gradients_flow_through_the_kernels(where: str) -> None:
    run = kernels(where)
    for case in cases(33, torch.float32, run.device):
        x = case.scores.clone().requires_grad_()
        weights = torch.linspace(-1, 1, x.numel(), device=run.device).view(x.shape)
        (case._replace(scores=x).forward(run, SCALE) * weights).sum().backward()
        y = x.detach().double().requires_grad_()
        (case._replace(scores=y).exact(SCALE) * weights).sum().backward()
        torch.testing.assert_close(x.grad.double(), y.grad.nan_to_num(0.0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("where", PLACES)
def test_what_no_kernel_can_do_is_said(where: str) -> None:
    run = kernels(where)
    x = torch.zeros(2, 2, 3, 4, device=run.device)
    with pytest.raises(RuntimeError, match="take float32, float16 and bfloat16 alone"):
        Case(x.double()).forward(run, SCALE)
    with pytest.raises(RuntimeError, match=r"visible must be \[1 or B, 1 or n, 1 or q, k\]"):
        Case(x, torch.ones(2, 2, 3, 1, device=run.device, dtype=torch.bool)).forward(run, SCALE)
    with pytest.raises(RuntimeError, match="visible must be bool"):
        Case(x, torch.ones(2, 2, 3, 4, device=run.device)).forward(run, SCALE)
    with pytest.raises(RuntimeError, match="window_size must be at least 1"):
        Case(x, causal=True, window_size=0).forward(run, SCALE)
    with pytest.raises(RuntimeError, match=r"more than 2\^31 - 1 queries or keys"):
        Case(torch.empty(0, 1, 1, 2**31, device=run.device)).forward(run, SCALE)
    with pytest.raises(RuntimeError, match="grad must be like probabilities"):
        Case(x).backward(run, x.half(), x, SCALE)


@pytest.mark.gpu
def test_indices_beyond_2_to_the_31() -> None:
    run = kernels("cuda")
    keys, queries = 16384, 2**17 + 4  # 4.3 GB each of scores, probabilities and their gradients
    x = torch.zeros(1, 1, queries, keys, device=run.device, dtype=torch.bfloat16)
    x[..., -3:, :] = values(1, 1, 3, keys, dtype=torch.bfloat16, device=run.device)
    probabilities = Case(x).forward(run, SCALE)
    found, last = probabilities[..., -4:, :], Case(x[..., -4:, :])
    exact = last.exact(SCALE)
    assert_rounded(found, exact, slack=exact * 4e-6)
    assert math.isclose(found[..., 0, :].double().sum().item(), 1.0, rel_tol=1e-2)
    grad = torch.zeros_like(x)
    grad[..., -4:, :] = values(1, 1, 4, keys, dtype=torch.bfloat16, device=run.device, seed=2)
    gradient = Case(x).backward(run, grad, probabilities, SCALE)[..., -4:, :]
    assert torch.equal(gradient, last.backward(run, grad[..., -4:, :], found, SCALE))
    visible = torch.zeros(1, 1, queries, keys, device=run.device, dtype=torch.bool)
    visible[..., -4:, :] = some(1, 1, 4, keys, device=run.device)
    masked = Case(x, visible).forward(run, SCALE)[..., -4:, :]
    assert torch.equal(masked, last._replace(visible=visible[..., -4:, :]).forward(run, SCALE))
