"""Tests of grouped products: torch's operator where it can be called, and a loop over groups elsewhere, agree."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatronish.ops import gradient_sum
from megatronish.ops import grouped_mm as ops
from megatronish.ops.gradient_sum import GradientSum
from megatronish.ops.grouped_mm import Groups

SIZES = (5, 0, 17, 1, 0, 41)


def operands(dtype: torch.dtype, device: str, *, in_size: int, out_size: int) -> tuple[Tensor, Tensor, Tensor, Groups]:
    """Rows [N, in], weights [E, out, in], gradients of the output [N, out], and the groups."""
    made = torch.Generator().manual_seed(5)
    shapes = ((sum(SIZES), in_size), (len(SIZES), out_size, in_size), (sum(SIZES), out_size))
    x, weight, dy = (torch.randn(shape, generator=made).to(device, dtype) for shape in shapes)
    return x, weight, dy, Groups.of(SIZES, x.device)


def by_group(x: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    """Output, input gradient and weight gradient in fp64, group by group."""
    x, weight, dy = x.double().cpu(), weight.double().cpu(), dy.double().cpu()
    parts = list(zip(x.split(SIZES), weight, dy.split(SIZES), strict=True))
    return [
        torch.cat([rows @ w.t() for rows, w, _ in parts]),
        torch.cat([g @ w for _, w, g in parts]),
        torch.stack([g.t() @ rows for rows, _, g in parts]),
    ]


def assert_products(x: Tensor, weight: Tensor, dy: Tensor, groups: Groups, *, tolerance: float) -> None:
    found = [
        ops.grouped_mm(x, weight, groups),
        ops.grouped_input_gradient(dy, weight, groups),
        ops.grouped_weight_gradient(dy, x, groups),
    ]
    for each, expected in zip(found, by_group(x, weight, dy), strict=True):
        assert each.shape == expected.shape and each.dtype == x.dtype
        error = (each.double().cpu() - expected).abs().max() / expected.abs().max()
        assert error <= tolerance, float(error)
    assert not found[2][1].any() and not found[2][4].any(), "a group without rows has a gradient of zero"


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float64, 1e-14)]
)
@pytest.mark.parametrize(("in_size", "out_size"), [(16, 24), (15, 6)])
def test_products_are_those_of_each_group(dtype: torch.dtype, tolerance: float, in_size: int, out_size: int) -> None:
    x, weight, dy, groups = operands(dtype, "cpu", in_size=in_size, out_size=out_size)
    assert_products(x, weight, dy, groups, tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_is_left_alone_where_an_operand_begins_between_multiples_of_16_bytes(dtype: torch.dtype) -> None:
    x, weight, dy, groups = operands(dtype, "cpu", in_size=16, out_size=24)
    assert ops._fits(x, weight)
    flat = torch.empty(weight.numel() + 1, dtype=dtype)
    moved = flat[1:].view_as(weight).copy_(weight)  # as in a bucket of several parameters
    assert not ops._fits(x, moved) and not ops._fits(x[:, :15], weight[..., :15].contiguous())
    assert_products(x, moved, dy, groups, tolerance=1e-6 if dtype == torch.float32 else 1e-2)


def test_a_group_without_rows_has_no_gradient_where_torch_leaves_old_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's kernel does on sm_100."""
    real = torch.nn.functional.grouped_mm

    def leaving(*given: Tensor, offs: Tensor) -> Tensor:
        y = real(*given, offs=offs)
        if y.dim() == 3:
            y[[1, 4]] = torch.nan
        return y

    x, weight, dy, groups = operands(torch.bfloat16, "cpu", in_size=16, out_size=24)
    monkeypatch.setattr(ops.F, "grouped_mm", leaving)
    assert_products(x, weight, dy, groups, tolerance=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_large_matrices_are_summed_unrounded_where_a_gemm_can(dtype: torch.dtype) -> None:
    """As a GPU adds them, by products of copies in fp32; not where the host would wait for the sizes."""
    x, weight, dy, groups = operands(dtype, "cpu", in_size=16, out_size=24)
    expected = by_group(x, weight, dy)[2]
    unknown = Groups(groups.ends)
    with (
        patch.object(gradient_sum, "sums_unrounded", lambda *_: True),
        patch.object(ops, "sums_unrounded", lambda *_: True),
    ):
        for number, is_large, of in ((1, True, groups), (2, False, groups), (3, True, unknown)):
            total = torch.full(weight.shape, torch.nan)
            for is_new in (True, False):
                ops.add_grouped_weight_gradient(GradientSum(total, is_new), dy, x, of, is_large=is_large)
            error = float((total.double() / 2 - expected).abs().max() / expected.abs().max())
            assert error <= (1e-6 if number == 1 else 1e-2)
            rounded = (total / 2).to(dtype).float()
            assert torch.equal(rounded, total / 2) == (number > 1), "what is rounded is a number of 16 bits"
            assert not total[1].any(), "a group without rows"
    assert not unknown.has_sizes


@pytest.mark.gpu
@pytest.mark.parametrize(("in_size", "out_size"), [(64, 128), (512, 64), (20, 12)])
def test_products_on_a_gpu_are_those_of_each_group(in_size: int, out_size: int) -> None:
    """bf16, by torch's operator where sizes are multiples of 8, by the loop at 20 and 12."""
    x, weight, dy, groups = operands(torch.bfloat16, "cuda", in_size=in_size, out_size=out_size)
    assert groups.ends.dtype == torch.int32 and groups.ends.device == x.device
    assert_products(x, weight, dy, groups, tolerance=1e-2)
