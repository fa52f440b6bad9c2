"""Products with weights in NF4: their numbers, and that nothing dequantised is kept between forward and backward."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatronish.layers.linear import ALONE, ColumnParallelLinear, linear
from megatronish.layers.nf4 import NF4Form
from megatronish.layers.quantised import QuantisedExperts, QuantisedProduct
from megatronish.model.quantised import quantise_base
from megatronish.ops.grouped_mm import Groups
from megatronish.ops.nf4 import BLOCK, NF4, dequantise, dequantise_scales, quantise, quantise_scales
from megatronish.parallel.mesh import Axis
from megatronish.parallel.sharding import Sharding

SECTIONS, WIDTH = {"q": 96, "k": 32, "v": 32}, 128
FORM = NF4Form((96, 32, 32), WIDTH)


def layer_of(form: NF4Form = FORM) -> tuple[ColumnParallelLinear, Tensor]:
    """A quantised layer, and its dequantised weight."""
    torch.manual_seed(0)
    layer = ColumnParallelLinear(WIDTH, 160, tp=ALONE, bias=True, init_std=0.02, sections=SECTIONS)
    whole = torch.randn(160, WIDTH)
    quantise_base(layer, partial(NF4Form, double=form.double))
    product = layer.product
    assert isinstance(product, QuantisedProduct) and layer.bias is not None
    layer.weight.data, scales = form.pack(whole)
    if product.scales is not None:
        product.scales.data = scales
    nn.init.normal_(layer.bias)
    return layer, product.matrix(layer.weight, torch.float32)


def test_blocks_are_rounded_to_the_nearest_value() -> None:
    whole = torch.tensor([[-2.0, 2.0, 0.0, 1.0] * 16, [0.0] * 64])
    codes, absmax = quantise(whole)
    assert absmax.tolist() == [[2.0], [0.0]]
    assert codes[0, 0, :2].tolist() == [0 << 4 | 15, 7 << 4 | 12]  # 1 / 2 lies between 0.44 and 0.56
    assert set(codes[1].flatten().tolist()) == {7 << 4 | 7}
    back = torch.empty_like(whole)
    dequantise(codes, absmax, back)
    assert back[0, :4].tolist() == [-2.0, 2.0, 0.0, 2 * NF4[12].item()] and not back[1].any()


def test_scales_in_8_bits_are_near_and_exact_where_all_are_equal() -> None:
    absmax = torch.rand(1000) + 1.0
    codes, scales, offset = quantise_scales(absmax)
    assert scales.shape == (4,)
    found = dequantise_scales(codes, scales.repeat_interleave(256)[:1000], offset)
    assert (found - absmax).abs().max() < 0.01
    equal = quantise_scales(torch.full((300,), 3.0))
    assert dequantise_scales(equal.codes, equal.scales[0], equal.offset).tolist() == [3.0] * 300


def test_each_section_is_quantised_as_if_it_were_alone() -> None:
    whole = torch.cat([torch.randn(rows, WIDTH) * 10**n for n, rows in enumerate(FORM.sections)])
    stored, scales = FORM.pack(whole)
    first = 0
    for rows, part in zip(FORM.sections, whole.split(FORM.sections), strict=True):
        alone, of_alone = NF4Form((rows,), WIDTH).pack(part)
        assert torch.equal(stored[first : first + rows], alone)
        assert of_alone.numpy().tobytes() in scales.numpy().tobytes()
        first += rows


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_with_the_dequantised_weight(double: bool, dtype: torch.dtype) -> None:
    layer, weight = layer_of(NF4Form(FORM.sections, WIDTH, double))
    weight, bias = weight.to(dtype), layer.bias.to(dtype) if layer.bias is not None else None
    x = torch.randn(5, 2, WIDTH, dtype=dtype, requires_grad=True)
    y = linear(x, layer.weight, bias, product=layer.product, tp=ALONE)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(y, expected)
    assert torch.equal(dx, torch.autograd.grad(expected, x, dy)[0])


def test_nothing_dequantised_is_kept_and_the_backward_reads_the_codes_again() -> None:
    layer, _ = layer_of()
    assert layer.bias is not None
    layer.bias.requires_grad_(False)
    kept: list[tuple[torch.dtype, int]] = []

    def pack(tensor: Tensor) -> Any:
        kept.append((tensor.dtype, tensor.numel()))
        return tensor

    x = torch.randn(3, 1, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    assert kept == [(torch.uint8, 160 * WIDTH // BLOCK * 33)]
    # Other codes in the same memory, as ZeRO-3 gathers them: what was dequantised before must not be used again.
    product = layer.product
    assert isinstance(product, QuantisedProduct)
    other, _ = FORM.pack(torch.randn(160, WIDTH))
    layer.weight.data.copy_(other)
    (dx,) = torch.autograd.grad(y.sum(), x)
    # As many rows as the backward has: which kernel a machine takes for one row, and its rounding, may differ.
    assert torch.equal(dx[:, 0], torch.ones(3, 160) @ product.matrix(layer.weight, torch.float32))


def test_a_part_of_a_weight_reads_the_scales_of_its_place_in_the_whole() -> None:
    """The scale of 256 blocks ends within the rows of a rank: 96 rows of 2 blocks are less than one."""
    form = NF4Form((512, 512), 192)
    stored, scales = form.pack(torch.randn(1024, 192) * torch.linspace(1, 9, 1024).unsqueeze(1))
    dense = Sharding((1024, 192))

    def read(rows: Axis, columns: Axis, part: Tensor) -> Tensor:
        held = QuantisedProduct(form, dense, rows=rows, columns=columns, num_local=None)
        assert held.scales is not None
        held.scales.data = scales
        return held.matrix(part, torch.float32)

    alone = Axis("alone")
    whole = read(alone, alone, stored)
    for rank in range(2):
        mine = torch.cat([stored[256 * rank :][:256], stored[512 + 256 * rank :][:256]])
        expected = torch.cat([whole[256 * rank :][:256], whole[512 + 256 * rank :][:256]])
        assert torch.equal(read(Axis("tp", 2, rank), alone, mine), expected)
    for rank in range(3):
        mine = stored[:, 33 * rank : 33 * (rank + 1)]
        assert torch.equal(read(alone, Axis("tp", 3, rank), mine), whole[:, 64 * rank : 64 * (rank + 1)])


def test_experts_are_quantised_one_by_one_and_those_without_rows_are_not_read() -> None:
    form = NF4Form((64, 64), WIDTH)
    whole = torch.randn(3, 2, 64, WIDTH)
    held = QuantisedExperts(form, Sharding(tuple(whole.shape)), rows=ALONE.axis, columns=ALONE.axis, num_local=3)
    pairs = [form.pack(expert.flatten(0, 1)) for expert in whole]
    stored = torch.stack([stored.unflatten(0, (2, 64)) for stored, _ in pairs])
    assert held.scales is not None
    held.scales.data = torch.stack([scales for _, scales in pairs])
    groups = Groups.of((2, 0, 3), torch.device("cpu"))
    product, x = held.of(groups, stored.shape), torch.randn(5, WIDTH)
    y, dy = product.forward(x, stored, None), torch.randn(5, 128)
    dx = product.input_gradient(dy, stored)
    for expert, rows in groups.slices():
        matrix = held.matrix(stored[expert].flatten(0, 1), torch.float32, expert)
        assert torch.equal(y[rows], x[rows] @ matrix.t()) and torch.equal(dx[rows], dy[rows] @ matrix)
