"""Tests of the norm kernels against fp64, at every size, with residuals and with every kind of weight."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from kernel_runs import DTYPES, LENGTHS, ORDERS, PLACES, Kernels, assert_rounded, kernels, misaligned
from torch import Tensor

EPSILON = 1e-5
LONG = 20001  # no block holds such a row, or sums its columns


class Case(NamedTuple):
    """x [..., D], weight [D] and bias [D]: without one it is an RMS norm. `grad_sum` is that of the returned sum."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    grad_sum: Tensor | None = None
    one_plus: bool = False


class Found(NamedTuple):
    """What a forward gives. `sum` without a residual is x."""

    normalised: Tensor
    sum: Tensor
    mean: Tensor | None
    rstd: Tensor


class Gradients(NamedTuple):
    """What a backward gives."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


def forward(case: Case, run: Kernels) -> Found:
    name = ("" if case.residual is None else "add_") + ("rms_norm" if case.bias is None else "layer_norm")
    tensors = [x for x in (case.x, case.residual, case.weight, case.bias) if x is not None]
    normalised, *others, rstd = getattr(run.ops, name)(*tensors, EPSILON, case.one_plus)
    total = case.x if case.residual is None else others.pop(0)
    return Found(normalised, total, others.pop() if others else None, rstd)


def backward(case: Case, run: Kernels, found: Found, grad: Tensor) -> Gradients:
    given = (grad, case.grad_sum, found.sum, case.weight)
    if found.mean is None:
        return Gradients(*run.ops.rms_norm_backward(*given, found.rstd, case.one_plus), None)
    return Gradients(*run.ops.layer_norm_backward(*given, found.mean, found.rstd, case.one_plus))


def check(case: Case, run: Kernels, grad: Tensor | None = None) -> None:
    found = forward(case, run)
    if case.residual is not None:
        assert torch.equal(found.sum, case.x + case.residual)
    x, weight = found.sum.double(), case.weight.double() + case.one_plus
    mean = x.mean(-1, keepdim=True) if case.bias is not None else torch.zeros_like(x[..., :1])
    rstd = ((x - mean).square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    bias = torch.zeros_like(weight) if case.bias is None else case.bias.double()
    rounding_of_mean = 1e-6 * x.abs().mean(-1, keepdim=True) if case.bias is not None else 0.0
    if found.mean is not None:
        assert ((found.mean - mean).abs() <= rounding_of_mean).all()
    torch.testing.assert_close(found.rstd.double(), rstd, rtol=2e-6, atol=0.0)
    slack = 2e-6 * ((x - mean) * rstd * weight).abs() + 1e-6 * bias.abs() + rounding_of_mean * rstd * weight.abs()
    assert_rounded(found.normalised, (x - mean) * rstd * weight + bias, slack=slack)

    grad = drawn(case.x.shape, case.x, seed=9) if grad is None else grad
    gradients = backward(case, run, found, grad)
    g, rstd = grad.double(), found.rstd.double()
    n = (x - (0.0 if found.mean is None else found.mean.double())) * rstd
    h = g * weight
    along, across = (h * n).mean(-1, keepdim=True), h.mean(-1, keepdim=True)
    through = rstd * (h - along * n - (0.0 if case.bias is None else across))
    exact = through if case.grad_sum is None else through + case.grad_sum.double()
    slack = 2e-6 * rstd * (h.abs() + (h * n).abs().mean(-1, keepdim=True) * n.abs() + h.abs().mean(-1, keepdim=True))
    assert_rounded(gradients.x, exact, slack=slack + 1e-6 * exact.abs())
    check_sums(gradients.weight, g * n, case.weight)
    if case.bias is not None:
        assert gradients.bias is not None
        check_sums(gradients.bias, g, case.bias)


def check_sums(found: Tensor, terms: Tensor, parameter: Tensor) -> None:
    """Parameter gradients, summed over all rows, against fp64."""
    assert found.dtype == parameter.dtype
    terms = terms.reshape(-1, parameter.numel())
    assert_rounded(found, terms.sum(0), slack=2e-6 * terms.abs().sum(0))


def drawn(shape: tuple[int, ...] | torch.Size, like: Tensor, *, seed: int, mean: float = 0.0) -> Tensor:
    """Of the dtype and device of another tensor."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean
    return values.to(like.device, like.dtype)


def cases(size: int, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """All kinds of norm, and so many rows that a block goes through several; fewer of the long ones."""
    many = 300 if size <= 128 else 100 if size <= 512 else 35 if size < 4000 else 5
    half, single = torch.empty(0, dtype=dtype, device=device), torch.empty(0, device=device)
    x = drawn((3, 1, size), half, seed=1, mean=0.5)
    wide = drawn((many, size), half, seed=2, mean=-2.0)
    weight, bias = drawn((size,), single, seed=3), drawn((size,), single, seed=4)
    residual, grad_sum = drawn((many, size), half, seed=5), drawn((many, size), half, seed=6)
    return [
        Case(wide, weight, bias, residual, grad_sum),
        Case(wide, weight.to(dtype), residual=residual, grad_sum=grad_sum, one_plus=True),
        Case(x, weight.to(dtype), bias.to(dtype), one_plus=True),
        Case(misaligned(x), misaligned(weight)),
        Case(x[0], weight.to(dtype), bias.to(dtype), misaligned(x[1]), misaligned(x[2])),
    ]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", LENGTHS)
def test_every_size_in_every_dtype_with_every_kind_of_weight(size: int, dtype: torch.dtype, where: str) -> None:
    run = kernels(where, order=ORDERS[(LENGTHS.index(size) + DTYPES.index(dtype)) % 3], seed=size)
    for case in cases(size, dtype, run.device):
        check(case, run)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("size", [128, 512, 513, 520, 4096, 8192, 8200, 12288, 12296, 16384, 16392, LONG, 65536])
def test_a_row_may_end_where_a_team_s_registers_do(size: int, where: str) -> None:
    run = kernels(where, order="random", seed=size)
    dtype = torch.bfloat16 if size % 8 == 0 else torch.float32
    for case in cases(size, dtype, run.device)[0 if size <= 12296 else 2 :]:
        check(case, run)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_references_are_as_exact(dtype: torch.dtype) -> None:
    run = Kernels(torch.ops.megatronish, torch.device("cpu"))
    for case in cases(33, dtype, run.device):
        check(case, run)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("multiprocessors", [4, 9])
def test_several_blocks_may_go_down_the_same_columns(multiprocessors: int, where: str) -> None:
    run = kernels(where, multiprocessors=multiprocessors)
    for case in cases(12296, torch.bfloat16, run.device)[:3]:
        check(case, run)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("size", [40, 600, 8200, 12296])
def test_each_tensor_may_begin_anywhere(size: int, where: str) -> None:
    run = kernels(where)
    case = cases(size, torch.bfloat16, run.device)[0]
    for name, x in case._asdict().items():
        if isinstance(x, Tensor):
            check(case._replace(**{name: misaligned(x)}), run)
    check(case, run, misaligned(drawn(case.x.shape, case.x, seed=9)))


@pytest.mark.parametrize("order", ORDERS[1:])
@pytest.mark.parametrize("size", [33, 300, 1025, LONG])
def test_the_order_of_lanes_changes_no_bit(size: int, order: str) -> None:
    for case in cases(size, torch.float32, torch.device("cpu"))[1:3]:
        grad = drawn(case.x.shape, case.x, seed=9)
        results = []
        for run in (kernels("cpu"), kernels("cpu", order=order, seed=5)):
            found = forward(case, run)
            results.append((*found, *backward(case, run, found, grad)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True) if a is not None)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("size", [129, 4097, LONG])
def test_a_mean_far_from_zero_leaves_the_variance_alone(size: int, where: str) -> None:
    run = kernels(where)
    like = torch.empty(0, device=run.device)
    x, weight = drawn((3, size), like, seed=1, mean=1e4), torch.ones(size, device=run.device)
    found = forward(Case(x, weight, torch.zeros_like(weight)), run)
    exact = F.layer_norm(x.double(), (size,), eps=EPSILON)
    # fp32 has steps of 1e-3 at 1e4; mean(x^2) - mean(x)^2 would be off by 10.
    torch.testing.assert_close(found.normalised.double(), exact, rtol=1e-5, atol=3e-3)
    variance = x.double().var(-1, correction=0, keepdim=True)
    torch.testing.assert_close(found.rstd.double(), (variance + EPSILON).rsqrt(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 1.3e4), (torch.bfloat16, 1e15), (torch.float32, 1e15)])
def test_large_and_small_numbers_neither_overflow_nor_vanish(dtype: torch.dtype, scale: float, where: str) -> None:
    run = kernels(where)
    for size in (31, 1025, 16640):
        for factor in (scale, 1 / scale):
            weight, bias = (drawn((size,), torch.empty(0, device=run.device), seed=seed) for seed in (3, 4))
            x = (drawn((3, size), weight, seed=1).clamp(-4.9, 4.9) * factor).to(dtype)
            check(Case(x, weight, bias), run)
            check(Case(x, weight.to(dtype)), run)


@pytest.mark.parametrize("where", PLACES)
def test_rows_of_one_value_and_rows_with_a_nan(where: str) -> None:
    run = kernels(where)
    for size in (9, 600, 17000):
        x = drawn((3, size), torch.empty(0, device=run.device), seed=1)
        x[0], x[1, -1] = 3.0, torch.nan
        weight, bias = drawn((2, size), x, seed=2)
        found = forward(Case(x, weight, bias), run).normalised
        assert torch.equal(found[0], bias) and found[1].isnan().all()
        torch.testing.assert_close(found[2], F.layer_norm(x[2], (size,), weight, bias, EPSILON))


def spread_out(x: Tensor) -> Tensor:
    """The same values, every other element of memory."""
    return torch.stack((x, x), -1)[..., 0]


@pytest.mark.parametrize("where", PLACES)
def test_strides_do_not_matter(where: str) -> None:
    run = kernels(where)
    for case in cases(33, torch.float16, run.device):
        tensors = {name: x for name, x in case._asdict().items() if isinstance(x, Tensor)}
        spread = case._replace(**{name: spread_out(x) for name, x in tensors.items()})
        grad = torch.ones((), device=run.device, dtype=torch.float16).expand(case.x.shape)
        found, again = forward(case, run), forward(spread, run)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True) if a is not None)
        again = Found(*(None if y is None else spread_out(y) for y in again))
        results = [backward(case, run, found, grad.contiguous()), backward(spread, run, again, grad)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True) if a is not None)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("size", [7, 300, 600, LONG])
def test_of_no_rows_the_gradients_are_zero(size: int, where: str) -> None:
    run = kernels(where)
    for case in cases(size, torch.bfloat16, run.device):
        x = case.x[:0]
        empty = case._replace(x=x, residual=None if case.residual is None else x, grad_sum=None)
        found = forward(empty, run)
        gradients = backward(empty, run, found, x)
        assert found.normalised.shape == found.sum.shape == gradients.x.shape == x.shape
        assert found.rstd.shape == (*x.shape[:-1], 1)
        assert all((y == 0).all() for y in gradients[1:] if y is not None)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("uses", ["both", "normalised", "sum"])
def test_gradients_flow_through_the_kernels_into_both_addends(uses: str, where: str) -> None:
    run = kernels(where)
    for case in cases(33, torch.float32, run.device)[:2]:
        x, residual, weight, *bias = leaves = [
            y.clone().requires_grad_() for y in (case.x, case.residual, case.weight, case.bias) if y is not None
        ]
        name = "add_layer_norm" if bias else "add_rms_norm"
        normalised, total, *statistics = getattr(run.ops, name)(*leaves, EPSILON, case.one_plus)
        assert not any(y.requires_grad for y in statistics)
        total_64 = x.double() + residual.double()
        weight_64 = weight.double() + case.one_plus
        norm = F.layer_norm if bias else F.rms_norm
        normalised_64 = norm(total_64, weight.shape, weight_64, *(y.double() for y in bias), eps=EPSILON)
        slopes = torch.linspace(-1, 1, x.numel(), device=run.device).view(x.shape)

        def loss(normalised: Tensor, total: Tensor, slopes: Tensor = slopes) -> Tensor:
            terms = {"normalised": (normalised * slopes).sum(), "sum": total.square().sum()}
            return sum(terms.values()) if uses == "both" else terms[uses]

        found = torch.autograd.grad(loss(normalised, total), leaves, allow_unused=True, materialize_grads=True)
        exact = torch.autograd.grad(loss(normalised_64, total_64), leaves, allow_unused=True, materialize_grads=True)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", PLACES)
def test_what_no_kernel_can_do_is_said(where: str) -> None:
    run = kernels(where)
    x, weight = torch.zeros(2, 4, device=run.device), torch.ones(4, device=run.device)
    for case, why in (
        (Case(x.double(), weight), "take float32, float16 and bfloat16 alone"),
        (Case(x, weight[:3]), r"weight must be \[size\], that of the last dim of x"),
        (Case(x, weight.half()), "weight must have the dtype of x, or float32"),
        (Case(x, weight, weight.half()), "bias must be like weight"),
        (Case(x, weight, weight, x[:1]), "residual must be like x"),
        (Case(x[:, :0], weight[:0]), r"a norm is over 1 to 2\^30 columns"),
        (Case(x.new_empty(0, 2**30 + 1), weight[:1].expand(2**30 + 1)), r"a norm is over 1 to 2\^30 columns"),
    ):
        with pytest.raises(RuntimeError, match=why):
            forward(case, run)
    found = forward(Case(x, weight), run)
    with pytest.raises(RuntimeError, match="grad must be like x"):
        backward(Case(x, weight), run, found, x.half())
    with pytest.raises(RuntimeError, match="grad_sum must be like x"):
        backward(Case(x, weight, grad_sum=x[:1]), run, found, x)
    with pytest.raises(RuntimeError, match=r"mean and rstd must be \[..., 1\], float32"):
        backward(Case(x, weight), run, found._replace(rstd=found.rstd[:1]), x)


@pytest.mark.gpu
def test_a_tensor_that_is_elsewhere_is_refused() -> None:
    run = kernels("cuda")
    x, weight = torch.zeros(2, 8, device=run.device), torch.ones(8)
    with pytest.raises(RuntimeError, match=r"weight must be on cuda:0, where the first tensor of the operator is"):
        run.ops.rms_norm(x, weight, EPSILON, False)


@pytest.mark.gpu
def test_indices_beyond_2_to_the_31() -> None:
    run = kernels("cuda")
    size, rows = 4096, 2**19 + 3  # 4.3 GB each of x, normalised, grad and grad_x
    x = torch.zeros(rows, size, device=run.device, dtype=torch.bfloat16)
    x[-3:] = drawn((3, size), x, seed=1)
    case = Case(x, drawn((size,), x, seed=2), drawn((size,), x, seed=3))
    found = forward(case, run)
    last = case._replace(x=x[-3:].clone())
    expected = forward(last, run)
    assert torch.equal(found.normalised[-3:], expected.normalised)
    grad = torch.zeros_like(x)
    grad[-3:] = drawn((3, size), x, seed=4)
    gradients = backward(case, run, found, grad)
    expected_gradients = backward(last, run, expected, grad[-3:])
    assert torch.equal(gradients.x[-3:], expected_gradients.x)
    torch.testing.assert_close(gradients.weight, expected_gradients.weight)
