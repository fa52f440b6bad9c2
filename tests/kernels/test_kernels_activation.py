"""Tests of the activation kernels against fp64, at every width, with and without a bias."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from kernel_runs import DTYPES, LENGTHS, ORDERS, PLACES, Kernels, assert_rounded, kernels, misaligned
from torch import Tensor

NAMES = ("gelu", "tanh_gelu", "swiglu")


class Case(NamedTuple):
    """x [T, F] (SwiGLU: [T, 2 F]), its bias and the gradient of the output."""

    name: str
    x: Tensor
    bias: Tensor | None
    grad: Tensor

    def forward(self, run: Kernels) -> Tensor:
        """Output of the kernels' forward."""
        if self.name == "swiglu":
            return run.ops.bias_swiglu(self.x, self.bias)
        return run.ops.bias_gelu(self.x, self.bias, self.name == "tanh_gelu")

    def backward(self, run: Kernels) -> tuple[Tensor, Tensor]:
        """By the kernels: of x, and of the bias."""
        if self.name == "swiglu":
            return run.ops.bias_swiglu_backward(self.grad, self.x, self.bias)
        return run.ops.bias_gelu_backward(self.grad, self.x, self.bias, self.name == "tanh_gelu")

    def biased(self) -> Tensor:
        """The sum x + bias in fp64."""
        return self.x.double() if self.bias is None else self.x.double() + self.bias.double()

    def exact(self, biased: Tensor) -> Tensor:
        """The activation of x + bias in fp64."""
        if self.name == "swiglu":
            gate, up = biased.chunk(2, dim=-1)
            return F.silu(gate) * up
        return F.gelu(biased, approximate="tanh" if self.name == "tanh_gelu" else "none")


def make(
    name: str,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rows: int = 3,
    biased: bool = True,
    spread: float = 2.0,
) -> Case:
    generator = torch.Generator().manual_seed(width)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * spread).to(device, dtype)

    inputs = width * (2 if name == "swiglu" else 1)
    grad = torch.randn(rows, width, generator=generator).to(device, dtype)
    return Case(name, draw(rows, inputs), draw(inputs) if biased else None, grad)


def check(case: Case, run: Kernels) -> None:
    x = case.biased().requires_grad_()
    exact = case.exact(x)
    grad = case.grad.double()
    (exact_grad,) = torch.autograd.grad(exact, x, grad)
    exact_grad = exact_grad.nan_to_num(0.0)  # torch's tanh form: 0 * inf, far from zero
    # Of fp32 arithmetic: of x + bias, and of a function whose slopes are about 1.
    given = case.x.double().abs() + (0.0 if case.bias is None else case.bias.double().abs())
    if case.name == "swiglu":
        gate, up = x.detach().abs().chunk(2, dim=-1)
        given_gate, given_up = given.chunk(2, dim=-1)
        slack = 2e-6 * (given_gate * up + gate * given_up) + 1e-7
        grad_slack = torch.cat((2e-6 * grad.abs() * (up + given_up), 2e-6 * grad.abs() * (1 + given_gate)), dim=-1)
    else:
        slack = 2e-7 * given
        grad_slack = 2e-6 * grad.abs() * (1 + (given - x.detach().abs()).abs())
    assert_rounded(case.forward(run), exact.detach(), slack=slack)
    grad_x, grad_bias = case.backward(run)
    assert_rounded(grad_x, exact_grad, slack=grad_slack)
    if case.bias is None:
        assert grad_bias.shape == (0,)
    else:
        assert_rounded(grad_bias, exact_grad.sum(0), slack=(grad_slack + 1e-6 * exact_grad.abs()).sum(0))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", LENGTHS)
def test_every_width_in_every_dtype_with_and_without_a_bias(width: int, dtype: torch.dtype, where: str) -> None:
    run = kernels(where, order=ORDERS[(LENGTHS.index(width) + DTYPES.index(dtype)) % 3], seed=width)
    for name in NAMES:
        for biased in (False, True):
            case = make(name, width, dtype, run.device, biased=biased)
            check(case, run)
            check(case._replace(x=misaligned(case.x)), run)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 64, 65, 300])
def test_the_gradient_of_the_bias_is_summed_over_any_number_of_rows(rows: int, dtype: torch.dtype, where: str) -> None:
    run = kernels(where, order=ORDERS[rows % 3], seed=rows)
    for name in NAMES:
        for width in (8, 33):
            check(make(name, width, dtype, run.device, rows=rows), run)


@pytest.mark.parametrize("where", PLACES)
def test_the_gradient_of_the_bias_may_have_more_parts_than_a_block_adds_at_once(where: str) -> None:
    run = kernels(where)
    check(make("gelu", 8, torch.float32, run.device, rows=64 * 129 + 1), run)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_each_tensor_may_begin_anywhere(name: str, where: str) -> None:
    run = kernels(where)
    case = make(name, 264, torch.bfloat16, run.device)
    assert case.bias is not None
    for given in (case._replace(bias=misaligned(case.bias)), case._replace(grad=misaligned(case.grad))):
        check(given, run)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_of_16_bits_the_references_are_as_exact(dtype: torch.dtype) -> None:
    run = Kernels(torch.ops.megatronish, torch.device("cpu"))
    for name in NAMES:
        for biased in (False, True):
            check(make(name, 33, dtype, run.device, rows=65, biased=biased), run)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_lanes_changes_nothing(name: str, order: str) -> None:
    case = make(name, 264, torch.bfloat16, torch.device("cpu"), rows=150)
    found = [(case.forward(run), *case.backward(run)) for run in (kernels("cpu"), kernels("cpu", order=order, seed=5))]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_largest_features_do_not_overflow(name: str, dtype: torch.dtype, where: str) -> None:
    run = kernels(where)
    largest = torch.finfo(dtype).max
    extremes = torch.tensor([largest, -largest, 1e4, -1e4, 90.0, -90.0, 20.0, -20.0, 6.0, -6.0, 0.0, -0.0])
    case = make(name, 12, dtype, run.device, rows=2, biased=False)
    for x in (case.x, case.grad):
        x.clamp_(-0.5, 0.5)  # so that nothing is too large in itself
    for first in range(0, case.x.shape[-1], 12):
        x = case.x.clone()
        x[0, first : first + 12] = extremes
        check(case._replace(x=x), run)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_broken_feature_is_not_hidden(name: str, where: str) -> None:
    run = kernels(where)
    case = make(name, 5, torch.float32, run.device)
    case.x[1, 2] = math.nan
    y, (grad_x, grad_bias) = case.forward(run), case.backward(run)
    assert y.isnan().nonzero().tolist() == [[1, 2]]
    assert grad_x[1, 2].isnan() and grad_bias[2].isnan()
    assert not grad_x[0].isnan().any() and not grad_bias[:2].isnan().any()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_strides_do_not_matter_and_there_may_be_nothing(name: str, where: str) -> None:
    run = kernels(where)
    case = make(name, 24, torch.float32, run.device)
    turned = case._replace(x=case.x.t().contiguous().t(), grad=case.grad.t().contiguous().t())
    expanded = case._replace(bias=torch.ones((), device=run.device).expand(case.x.shape[-1]))
    assert torch.equal(turned.forward(run), case.forward(run))
    assert all(torch.equal(a, b) for a, b in zip(turned.backward(run), case.backward(run), strict=True))
    check(expanded, run)
    for rows, width in ((0, 24), (3, 0), (0, 0)):
        nothing = make(name, width, torch.float32, run.device, rows=rows)
        assert nothing.forward(run).shape == (rows, width)
        grad_x, grad_bias = nothing.backward(run)
        assert grad_x.shape == nothing.x.shape
        assert grad_bias.shape == nothing.x.shape[-1:] and (grad_bias == 0).all()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_flow_through_the_kernels(name: str, where: str) -> None:
    run = kernels(where)
    case = make(name, 10, torch.float32, run.device)
    assert case.bias is not None
    x, bias = case.x.view(3, 1, -1).requires_grad_(), case.bias.clone().requires_grad_()
    y = case._replace(x=x, bias=bias).forward(run)
    found = torch.autograd.grad(y, (x, bias), case.grad.view_as(y))
    expected = case._replace(x=case.x.detach()).backward(run)
    assert torch.equal(found[0].view_as(expected[0]), expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("where", PLACES)
def test_what_no_kernel_can_do_is_said(where: str) -> None:
    run = kernels(where)
    x = torch.zeros(2, 6, device=run.device)
    with pytest.raises(RuntimeError, match="take float32, float16 and bfloat16 alone"):
        run.ops.bias_gelu(x.double(), None, False)
    with pytest.raises(RuntimeError, match=r"bias must be \[features\], like x"):
        run.ops.bias_gelu(x, x[0, :5], False)
    with pytest.raises(RuntimeError, match=r"bias must be \[features\], like x"):
        run.ops.bias_swiglu(x, x[0].half())
    with pytest.raises(RuntimeError, match=r"more than 2\^31 - 1 features"):
        run.ops.bias_gelu(x.new_empty(0, 2**31), None, False)
    with pytest.raises(RuntimeError, match="SwiGLU takes an even number of features"):
        run.ops.bias_swiglu(x[:, :5], None)
    with pytest.raises(RuntimeError, match="grad must be like the output"):
        run.ops.bias_swiglu_backward(x, x, None)
    with pytest.raises(RuntimeError, match="grad must be like the output"):
        run.ops.bias_gelu_backward(x[:1], x, None, False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_indices_beyond_2_to_the_31(name: str) -> None:
    run = kernels("cuda")
    case = make(name, 8192, torch.bfloat16, run.device)
    times = 2**31 // case.x.numel() + 2
    long = case._replace(x=case.x.repeat(times, 1), grad=case.grad.repeat(times, 1), bias=None)
    short = case._replace(bias=None)
    assert torch.equal(long.forward(run)[-3:], short.forward(run))
    assert torch.equal(long.backward(run)[0][-3:], short.backward(run)[0])
