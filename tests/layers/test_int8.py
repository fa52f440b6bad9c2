"""Weights in int8 with scales of rows: their numbers, and the parts of a rank."""

import torch
from torch import Tensor, nn

from megatronish.layers.int8 import Int8Form
from megatronish.layers.linear import ALONE, ColumnParallelLinear
from megatronish.layers.quantised import QuantisedExperts, QuantisedProduct
from megatronish.model.quantised import quantise_base
from megatronish.ops.grouped_mm import Groups
from megatronish.parallel.mesh import Axis
from megatronish.parallel.sharding import Sharding

FORM = Int8Form((96, 32, 32), 128)


def read(form: Int8Form, scales: Tensor, part: Tensor, rows: Axis = ALONE.axis, columns: Axis = ALONE.axis) -> Tensor:
    """This part of the whole weight, dequantised by a rank at this place."""
    shape = (sum(form.sections), form.in_features)
    held = QuantisedProduct(form, Sharding(shape), rows=rows, columns=columns, num_local=None)
    assert held.scales is not None
    held.scales.data = scales
    return held.matrix(part, torch.float32)


def test_elements_are_rounded_to_127_parts_of_the_largest_of_their_row() -> None:
    form = Int8Form((3,), 4)
    stored, scales = form.pack(torch.tensor([[-2.0, 2.0, 0.01, 1.0], [0.0] * 4, [1e-3, -5e-4, 0.0, 2e-6]]))
    assert stored.view(torch.int8).tolist() == [[-127, 127, 1, 64], [0] * 4, [127, -64, 0, 0]]  # 63.5 -> even
    assert torch.equal(scales.view(torch.float32), torch.tensor([2.0, 0.0, 1e-3]))
    assert read(form, scales, stored)[1].tolist() == [0.0] * 4


def test_no_element_is_off_by_more_than_half_a_step() -> None:
    whole = torch.randn(160, 128) * torch.linspace(0.01, 9, 160).unsqueeze(1)
    stored, scales = FORM.pack(whole)
    step = whole.abs().amax(1, keepdim=True) / 127
    assert ((read(FORM, scales, stored) - whole).abs() <= 0.5001 * step).all()


def test_a_part_of_a_weight_reads_the_scales_of_its_rows_in_each_section() -> None:
    form = Int8Form((512, 256), 192)
    stored, scales = form.pack(torch.randn(768, 192) * torch.linspace(1, 9, 768).unsqueeze(1))
    whole = read(form, scales, stored)
    for rank in range(2):
        mine = [torch.cat([each[256 * rank :][:256], each[512 + 128 * rank :][:128]]) for each in (stored, whole)]
        assert torch.equal(read(form, scales, mine[0], rows=Axis("tp", 2, rank)), mine[1])
    for rank in range(3):
        columns = slice(64 * rank, 64 * (rank + 1))
        found = read(form, scales, stored[:, columns], columns=Axis("tp", 3, rank))
        assert torch.equal(found, whole[:, columns])


def test_the_product_is_that_with_the_dequantised_weight_in_half_precision_too() -> None:
    torch.manual_seed(0)
    layer = ColumnParallelLinear(128, 160, tp=ALONE, bias=True, init_std=0.02, sections={"q": 96, "k": 32, "v": 32})
    quantise_base(layer, Int8Form)
    product = layer.product
    assert isinstance(product, QuantisedProduct) and product.scales is not None and layer.bias is not None
    layer.weight.data, product.scales.data = FORM.pack(torch.randn(160, 128))
    nn.init.normal_(layer.bias)
    layer.bias.requires_grad_(False)
    weight = product.matrix(layer.weight, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        layer.bias.data = layer.bias.to(dtype)
        x = torch.randn(5, 2, 128, dtype=dtype, requires_grad=True)
        expected = nn.functional.linear(x, weight.to(dtype), layer.bias)
        y, dy = layer(x), torch.randn_like(expected)
        assert torch.equal(y, expected)
        assert torch.equal(*(torch.autograd.grad(each, x, dy)[0] for each in (y, expected)))


def test_each_expert_has_scales_of_its_own() -> None:
    form, whole = Int8Form((64, 64), 128), torch.randn(3, 2, 64, 128)
    held = QuantisedExperts(form, Sharding(tuple(whole.shape)), rows=ALONE.axis, columns=ALONE.axis, num_local=3)
    pairs = [form.pack(expert.flatten(0, 1) * 10**number) for number, expert in enumerate(whole)]
    stored = torch.stack([stored.unflatten(0, (2, 64)) for stored, _ in pairs])
    assert held.scales is not None
    held.scales.data = torch.stack([scales for _, scales in pairs])
    groups = Groups.of((2, 0, 3), torch.device("cpu"))
    product, x = held.of(groups, stored.shape), torch.randn(5, 128)
    y = product.forward(x, stored, None)
    for expert, rows in groups.slices():
        matrix = held.matrix(stored[expert].flatten(0, 1), torch.float32, expert)
        assert torch.equal(y[rows], x[rows] @ matrix.t())
        assert (matrix - whole[expert].flatten(0, 1) * 10**expert).abs().max() < 0.02 * 10**expert
