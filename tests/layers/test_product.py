"""Tests of the matrix product as a seam: a product from outside the package, wherever a layer multiplies.

`Rounded` rounds operands to bf16 and sums in fp64, in which sums of such products are exact: no order of summation, so
no layout, can flip a rounding, and a reference written by hand holds to 1e-12.
"""

from typing import NamedTuple

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from megatronish.config.sections.model import ModelConfig
from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.layers.linear import (
    ColumnParallelLinear,
    LinearLayer,
    RowParallelLinear,
    linear,
    set_products,
    split_backward,
)
from megatronish.layers.product import DENSE, DenseProduct, Product
from megatronish.layers.weight_gradients import WeightGradients
from megatronish.model.gpt import GPT
from megatronish.ops.gradient_sum import GradientSum
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, Mesh, TensorParallel, dense_domain
from megatronish.parallel.sharding import Piece, collect_shardings, initialize

S, B, D, F = 6, 2, 4, 8
NUM_STEPS, NUM_MICROBATCHES, LEARNING_RATE = 3, 2, 0.1


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


class Rounded(Product):
    """A product of operands in bf16. It counts its calls."""

    def __init__(self) -> None:
        self.calls = {"forward": 0, "input_gradient": 0, "weight_gradient": 0}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.calls["forward"] += 1
        y = rounded(x) @ rounded(weight).t()
        return y if bias is None else y + bias

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        self.calls["input_gradient"] += 1
        return rounded(dy) @ rounded(weight)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor | None:
        self.calls["weight_gradient"] += 1
        return rounded(dy).flatten(0, -2).t() @ rounded(x).flatten(0, -2)


class Frozen(Rounded):
    """The same, of a weight that learns nothing."""

    def weight_gradient(self, dy: Tensor, x: Tensor) -> None:
        self.calls["weight_gradient"] += 1


class Net(nn.Module):
    """A column-parallel layer, tanh, a row-parallel layer."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(D, F, tp=tp, bias=True, init_std=0.5)
        self.down = RowParallelLinear(F, D, tp=tp, bias=True, init_std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Case(NamedTuple):
    """`frozen`: the row-parallel layer's weight learns nothing; "product" or "parameter" says so."""

    sequence: bool = False
    deferred: bool = False
    frozen: str | None = None


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return list(torch.randn(NUM_STEPS * NUM_MICROBATCHES, S, B, D, generator=generator, dtype=torch.float64))


def reference(weights: dict[str, Tensor], xs: list[Tensor], *, frozen: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Parameters after a step on loss = sum(y^2) / 2, whole, and the last input's gradient: backward by hand."""
    up, up_bias, down, down_bias = (weights[f"{name}.{kind}"] for name in ("up", "down") for kind in ("weight", "bias"))
    sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for x in xs:
        a = (rounded(x) @ rounded(up).t() + up_bias).tanh()
        dy = rounded(a) @ rounded(down).t() + down_bias
        dh = rounded(dy) @ rounded(down) * (1 - a * a)
        dx = rounded(dh) @ rounded(up)
        sums["down.bias"] += dy.sum((0, 1))
        sums["up.bias"] += dh.sum((0, 1))
        sums["up.weight"] += torch.einsum("sbo,sbi->oi", rounded(dh), rounded(x))
        if not frozen:
            sums["down.weight"] += torch.einsum("sbo,sbi->oi", rounded(dy), rounded(a))
    return {name: weight - LEARNING_RATE * sums[name] for name, weight in weights.items()}, dx


def local(whole: Tensor, pieces: list[Piece]) -> Tensor:
    """What a rank holds of a whole tensor that is cut into equal parts along one dim."""
    (piece,) = pieces
    return Piece((), piece.global_offset, piece.sizes).view(whole)


def train_and_compare(axis: Axis, case: Case) -> None:
    """Three steps of SGD, each held against the reference."""
    tp = TensorParallel(axis, case.sequence)
    net = Net(tp)
    shardings = collect_shardings(net)
    whole_net = Net(TensorParallel())
    initialize(whole_net, collect_shardings(whole_net), seed=1, domains=dense_domain(Axis("tp")))
    weights = {name: parameter.detach().double() for name, parameter in whole_net.named_parameters()}
    net = net.double()
    pieces = {name: list(sharding.pieces({"tp": axis})) for name, sharding in shardings.items()}
    parameters = dict(net.named_parameters())
    for name, parameter in parameters.items():
        parameter.data.copy_(local(weights[name], pieces[name]))
    products: dict[str, Rounded] = {
        "up": Rounded(),
        "down": Frozen() if case.frozen == "product" else Rounded(),
    }
    set_products(net, lambda name, _: products[name])
    net.down.weight.requires_grad_(case.frozen != "parameter")

    sums = {parameter: torch.zeros_like(parameter) for name, parameter in parameters.items() if "weight" in name}
    queue = WeightGradients(lambda weight: GradientSum(sums[weight]))
    split_backward(net, queue if case.deferred else None)
    batches = inputs()
    for _ in range(NUM_STEPS):
        xs, batches = batches[:NUM_MICROBATCHES], batches[NUM_MICROBATCHES:]
        weights, dx = reference(weights, xs, frozen=case.frozen is not None)
        for micro_batch, x in enumerate(xs):
            mine = comm.piece_of(x, tp.sequence_axis).clone().requires_grad_()
            queue.fill(chunk=0, micro_batch=micro_batch)
            y = net(mine)
            y.backward(y.detach())
        for micro_batch in range(NUM_MICROBATCHES):
            queue.compute(chunk=0, micro_batch=micro_batch)
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, comm.piece_of(dx, tp.sequence_axis), rtol=1e-12, atol=1e-12)
        for name, parameter in parameters.items():
            gradient = parameter.grad
            if case.deferred and parameter in sums:
                assert gradient is None
                gradient = sums[parameter]
            if gradient is not None:
                if shardings[name].partial_over:
                    comm.all_reduce(gradient, axis)
                parameter.data.sub_(gradient, alpha=LEARNING_RATE)
                gradient.zero_()
            torch.testing.assert_close(
                parameter.detach(), local(weights[name], pieces[name]), rtol=1e-12, atol=1e-12, msg=name
            )
    count = NUM_STEPS * NUM_MICROBATCHES
    assert products["up"].calls == dict.fromkeys(products["up"].calls, count)
    learnt = 0 if case.frozen == "parameter" else count
    assert products["down"].calls == {"forward": count, "input_gradient": count, "weight_gradient": learnt}


CASES = [
    Case(sequence, deferred, frozen)
    for sequence in (False, True)
    for deferred in (False, True)
    for frozen in (None, "product", "parameter")
]


def on_rank(place: Place) -> None:
    mesh = Mesh.start(Layout(tp=2), rank=place.rank, init_method=place.rendezvous)
    for case in CASES:
        train_and_compare(mesh.tp, case)


@pytest.mark.parametrize("case", CASES[: len(CASES) // 2], ids=str)
def test_another_product_takes_effect_on_one_rank(case: Case) -> None:
    train_and_compare(Axis("tp"), case)


def test_it_does_so_over_tp_with_and_without_a_cut_sequence() -> None:
    run_ranks(2, on_rank)


@pytest.mark.parametrize("tied", [True, False])
def test_every_product_of_a_model_is_exchanged_the_output_layers_too(tied: bool) -> None:
    config = ModelConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, untie_embeddings_and_output_weights=not tied
    )
    model = GPT(config, vocab_size=12, num_positions=4)
    products: dict[str, Rounded] = {}

    def choose(name: str, layer: LinearLayer) -> Product:
        assert layer.product is DENSE
        return products.setdefault(name, Rounded())

    set_products(model, choose)
    sublayers = ("attention.qkv", "attention.out", "mlp.fc1", "mlp.fc2")
    assert list(products) == [*(f"layers.{n}.{name}" for n in (0, 1) for name in sublayers), "head"]
    assert ("head.weight" in dict(model.named_parameters())) == (not tied)
    initialize(model, collect_shardings(model), seed=1, domains=dense_domain(Axis("tp")))
    model.logits(torch.ones(4, 1, 8)).sum().backward()
    assert products["head"].calls == {"forward": 1, "input_gradient": 1, "weight_gradient": 1}
    assert products["layers.0.mlp.fc1"].calls["forward"] == 0


def test_a_frozen_weight_keeps_no_input_for_the_backward() -> None:
    weight, x = nn.Parameter(torch.ones(3, 4)), torch.ones(5, 4, requires_grad=True)
    kept: list[Tensor] = []
    for learns in (True, False):
        weight.requires_grad_(learns)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
            y = linear(x, weight, None, product=DenseProduct(), tp=TensorParallel())
        assert [tuple(each.shape) for each in kept] == ([(5, 4), (3, 4)] if learns else [(3, 4)])
        y.sum().backward()
        assert (weight.grad is not None) == learns
        weight.grad = None


def test_a_dense_product_is_autograds_own_to_the_bit() -> None:
    """With its own function, which overlap and deferral need, as without."""
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((5, 2, 4), (3, 4), (3,)))
    found = []
    for product in (DENSE, DenseProduct()):
        y = linear(x, weight, bias, product=product, tp=TensorParallel())  # type: ignore[arg-type]
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, weight, bias))))
    assert found[0][0].grad_fn.name() != found[1][0].grad_fn.name()  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
