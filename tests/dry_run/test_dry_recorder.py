"""Tests of the recorder of a dry run: devices that a GPU refuses, FLOPs that are counted, and those that are not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from megatronish.dry_run.rank import matrices_by_one_piece
from megatronish.dry_run.recorder import StepCounts, StepRecorder, formula_of, is_product, refuse_mixed_devices
from megatronish.layers.nf4 import CODES, NF4Form
from megatronish.layers.quantised import QuantisedWeight
from megatronish.ops.nf4 import BLOCK
from megatronish.parallel.mesh import Axis
from megatronish.parallel.sharding import Sharding

aten = torch.ops.aten


def counts_of(work: Callable[[], Any]) -> StepCounts:
    recorder = StepRecorder("cpu", number=1, references={})
    with FakeTensorMode(allow_non_fake_inputs=True), recorder.watching():
        work()
    return recorder.parts["build"]


def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A vector and a number on a GPU, and the same on the CPU."""
    with FakeTensorMode():
        return (
            torch.empty(4, device="cuda"),
            torch.empty((), device="cuda"),
            torch.empty(4),
            torch.empty((), dtype=torch.int64),
        )


def test_a_number_of_the_cpu_is_taken_where_torch_takes_one() -> None:
    there, number_there, here, number = tensors()
    for func, args in (
        (aten.add.Tensor, (there, number)),
        (aten.mul_.Tensor, (there, number)),
        (aten.where.self, (there > 0, there, number)),
        (aten.masked_fill_.Tensor, (there, there > 0, number)),
        (aten._foreach_mul_.Tensor, ([there, there], number)),
        (aten.index_put_.default, (there, [number_there], number)),
        (aten.index.Tensor, (there, [here.long()])),
        (aten.copy_.default, (there, here)),
        (aten.stack.default, ([there, there],)),
    ):
        refuse_mixed_devices(func, args, {})


def test_tensors_of_two_devices_are_refused_elsewhere_without_dimensions_too() -> None:
    there, number_there, here, number = tensors()
    for func, args in (
        (aten.stack.default, ([number_there, number],)),
        (aten.cat.default, ([there, here],)),
        (aten.add_.Tensor, (number, number_there)),
        (aten.add.Tensor, (there, here)),
        (aten.where.self, (here > 0, there, there)),
        (aten.index_put_.default, (there, [number_there], here)),
        (aten.index_select.default, (there, 0, number)),
        (aten._foreach_add_.List, ([there, number_there], [there, number])),
        (aten._foreach_norm.Scalar, ([number_there, number],)),
        (aten.dot.default, (there, here)),
        (aten._fused_adamw_.default, ([there], [there], [there], [there], [], [number])),
    ):
        with pytest.raises(RuntimeError, match="of tensors on several devices, which a GPU refuses"):
            refuse_mixed_devices(func, args, {})


def test_grouped_products_have_the_flops_of_their_loop() -> None:
    rows, experts, n, k = 24, 3, 16, 32
    x, dy = torch.empty(rows, k), torch.empty(rows, n)
    weight, ends = torch.empty(experts, k, n), torch.tensor([8, 8, 24], dtype=torch.int32)
    of_loop = 2 * rows * k * n
    grouped = formula_of(aten._grouped_mm)
    assert grouped is not None
    assert grouped(x, weight, ends, out_val=None) == of_loop
    assert grouped(dy, weight.transpose(1, 2), ends, out_val=None) == of_loop
    assert grouped(x.t(), dy, ends, out_val=None) == of_loop
    assert grouped(weight, dy.t()[:, :rows], ends, out_val=None) == 2 * k * n * rows
    assert grouped(weight.transpose(1, 2), weight, out_val=None) == experts * 2 * k * n * n


def test_products_in_place_count_and_a_product_without_a_formula_is_told() -> None:
    def work() -> None:
        total, a, b = torch.zeros(4, 6), torch.zeros(4, 5), torch.zeros(5, 6)
        total.addmm_(a, b)
        torch.mv(a, b[:, 0])
        (a + 1).softmax(-1)

    counts = counts_of(work)
    with FlopCounterMode(display=False) as counter:
        torch.addmm(torch.zeros(4, 6), torch.zeros(4, 5), torch.zeros(5, 6))
    assert counts.flops == {"addmm_": counter.get_total_flops()} and counts.uncounted == {"mv": 1}


def test_what_is_a_product_is_known_by_its_name() -> None:
    products = (
        "mm addmm_ bmm baddbmm _scaled_mm _int_mm _weight_int4pack_mm _scaled_grouped_mm mv addmv dot vdot linear"
    )
    products += (
        " mkldnn_linear convolution conv2d matmul _scaled_dot_product_flash_attention _efficient_attention_forward"
    )
    others = "add mul softmax _softmax embedding common_device commit linalg_vector_norm linspace cumsum index_add norm"
    others += " native_dropout comm_out sum mean stack"
    assert [name for name in products.split() if not is_product(name)] == []
    assert [name for name in others.split() if is_product(name)] == []


@pytest.mark.parametrize("double", [False, True])
def test_a_matrix_in_nf4_takes_few_operators_and_the_memory_of_all(double: bool) -> None:
    """2 sections of 2,560 x 4,096: ten pieces each, of which one runs."""
    form = NF4Form((2560, 2560), 4096, double=double)
    rows, axis = sum(form.sections), Axis("tp")
    found = {}
    for name in ("all", "one"):
        recorder = StepRecorder("cpu", number=1, references={})
        with FakeTensorMode(allow_non_fake_inputs=True), recorder.watching():
            weight = QuantisedWeight(form, Sharding((rows, 4096)), rows=axis, columns=axis, num_local=None)
            stored = torch.empty(rows, form.blocks * form.block_bytes, dtype=torch.uint8)
            with matrices_by_one_piece() if name == "one" else torch.no_grad():
                assert weight.matrix(stored, torch.bfloat16).shape == (rows, 4096)
        found[name] = recorder.ledger.peak, recorder.parts["build"].operators
    assert form.block_bytes > CODES and form.blocks == 4096 // BLOCK
    assert found["one"][0] == pytest.approx(found["all"][0], rel=1e-3)
    assert found["one"][1] < 50 and found["all"][1] > 15 * found["one"][1]
