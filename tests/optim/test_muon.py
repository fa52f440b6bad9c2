"""Tests of Muon: the update is the nearest orthogonal matrix, of the whole matrix, however its momentum is cut."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.optim.masters import Masters
from megatronish.optim.muon import (
    COEFFICIENTS,
    SCALES,
    Matrix,
    MatrixDistribution,
    Muon,
    deal,
    matrices_of,
    orthogonalized,
)
from megatronish.optim.optimizer import Optimizer, optimizer_line
from megatronish.parallel.mesh import Axis, Domain, Mesh, dense_domain
from megatronish.parallel.sharding import Cut, Piece, Shard, Sharding, flat_pieces

CPU = torch.device("cpu")
MUON = OptimizerConfig(optimizer="muon", muon_nesterov=True, muon_extra_scale_factor=0.2)
ALONE = dense_domain(Axis("tp"))
SHARDINGS = {
    "embedding.tokens.weight": Sharding((9, 8), cuts=(Cut(0, "tp", (12,)),), role="embedding"),
    "layers.0.attention.qkv.weight": Sharding((16, 8), cuts=(Cut(0, "tp", (8, 4, 4)),)),
    "layers.0.attention.qkv.bias": Sharding((16,), cuts=(Cut(0, "tp", (8, 4, 4)),)),
    "layers.0.attention.projection.weight": Sharding((8, 8), cuts=(Cut(1, "tp"),)),
    "layers.0.mlp.up.weight": Sharding((24, 8), cuts=(Cut(0, "tp", (12, 12)),)),
    "layers.0.mlp.down.weight": Sharding((8, 12), cuts=(Cut(1, "tp"),)),
    "layers.0.mlp.whole.weight": Sharding((5, 7)),
    "final_norm.weight": Sharding((8,)),
}
QKV = "layers.0.attention.qkv.weight"


def values_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(sharding.shape, generator=generator) for name, sharding in SHARDINGS.items()}


# The iteration


@pytest.mark.parametrize(("shape", "worst"), [((64, 24), 0.04), ((128, 512), 0.04)])
def test_in_bf16_a_step_is_as_orthogonal_within_a_few_percent(shape: tuple[int, int], worst: float) -> None:
    """Singular values stay near 1, and the direction is that of fp32: what Jordan et al. rely on."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-4
    exact = orthogonalized(matrix, num_steps=5, kind="quintic")
    rounded = orthogonalized(matrix, num_steps=5, kind="quintic", precision="medium")
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    values = torch.linalg.svdvals(rounded.double())
    assert values.min() > 0.9 and values.max() < 1.1
    assert (rounded - exact).norm() / exact.norm() < worst


def test_tf32_is_for_cuda_alone_and_leaves_the_setting_as_it_was() -> None:
    matrix = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    before = torch.get_float32_matmul_precision()
    found = orthogonalized(matrix, num_steps=5, kind="simple", precision="high")
    assert torch.equal(found, orthogonalized(matrix, num_steps=5, kind="simple"))
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (7, 7)])
@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("num_steps", [1, 5, 7])
def test_the_iteration_is_that_of_float64(shape: tuple[int, int], kind: str, num_steps: int) -> None:
    """Written out once more by its definition: polynomials of the singular values."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, sigma, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    sigma = sigma / matrix.double().norm()
    for step in range(num_steps):
        a, b, c = COEFFICIENTS[kind][min(step, len(COEFFICIENTS[kind]) - 1)]
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    torch.testing.assert_close(
        orthogonalized(matrix, num_steps=num_steps, kind=kind).double(), u @ sigma.diag() @ vt, rtol=0, atol=2e-5
    )


@pytest.mark.parametrize(("kind", "low", "high"), [("quintic", 0.95, 1.05), ("simple", 0.65, 1.2)])
def test_a_step_is_nearly_the_nearest_orthogonal_matrix(kind: str, low: float, high: float) -> None:
    matrix = torch.randn(64, 24, generator=torch.Generator().manual_seed(0))
    step = orthogonalized(matrix * 1e-5, num_steps=5, kind=kind).double()
    u, _, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    singular_values = torch.linalg.svdvals(step)
    assert singular_values.min() > low and singular_values.max() < high
    assert (step - u @ vt).norm() / (u @ vt).norm() < max(1 - low, high - 1)


def test_no_gradient_is_no_step() -> None:
    assert not orthogonalized(torch.zeros(4, 3), num_steps=5, kind="quintic").any()


def test_rounding_grows_no_more_than_500_times_even_without_full_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(32, 2, generator=generator) @ torch.randn(2, 48, generator=generator)
    noise = torch.randn(32, 48, generator=generator)
    noise *= 1e-6 * matrix.norm() / noise.norm()
    steps = [orthogonalized(each, num_steps=5, kind="quintic") for each in (matrix, matrix + noise)]
    assert (steps[1] - steps[0]).norm() < 500 * 1e-6


# A step


def muon_of(values: dict[str, Tensor], gradients: dict[str, Tensor], config: OptimizerConfig = MUON) -> Optimizer:
    """The optimizer of one process, which holds everything."""
    tp = Axis("tp")
    shards = {name: Shard(values[name], tuple(SHARDINGS[name].pieces({"tp": tp}))) for name in values}
    return optimizer_of(shards, gradients, ALONE, config)


def optimizer_of(
    shards: dict[str, Shard],
    gradients: dict[str, Tensor],
    domains: dict[str, Domain],
    config: OptimizerConfig = MUON,
) -> Optimizer:
    return Optimizer(shards, gradients, SHARDINGS, domains, config, device=CPU)


def test_steps_are_those_of_torchs_muon() -> None:
    """Which orthogonalises in bf16: 2^-8 of a step, and grown."""
    name, shape = "layers.0.attention.projection.weight", (8, 8)
    ours, theirs = (torch.ones(shape) for _ in range(2))
    gradient = torch.zeros(shape)
    config = replace(MUON, muon_coefficient_type="simple")
    optimizer = muon_of({name: ours}, {name: gradient}, config)
    parameter = torch.nn.Parameter(theirs)
    reference = torch.optim.Muon([parameter], lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        gradient.copy_(torch.randn(shape, generator=generator))
        parameter.grad = gradient.clone()
        optimizer.step(learning_rate=0.1, weight_decay=0.3)
        reference.step()
    moved = (parameter.detach() - 1).norm()
    assert (ours - parameter.detach()).norm() < 0.02 * moved


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_momentum_that_is_given_is_that_of_matrices_and_the_beta1_of_the_rest(nesterov: bool) -> None:
    found = []
    for configured, given in ((0.3, None), (0.9, 0.3)):
        values, gradients = values_of(0), values_of(1)
        config = replace(MUON, muon_momentum=configured, adam_beta1=configured, muon_nesterov=nesterov)
        muon = muon_of(values, gradients, config)
        for seed in (1, 2, 3):  # three steps: the first one of Adam is the same for every beta1
            for name, value in values_of(seed).items():
                gradients[name].copy_(value)
            muon.step(learning_rate=0.1, weight_decay=0.1, momentum=given)
        found.append(values)
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=0, atol=0)


def test_a_step_of_muon_has_the_products_that_the_config_says() -> None:
    stepped = []
    for precision in ("highest", "medium"):
        values, gradients = values_of(0), values_of(1)
        config = replace(MUON, muon_fp32_matmul_prec=precision)  # type: ignore[arg-type]
        muon_of(values, gradients, config).step(learning_rate=0.1, weight_decay=0.0)
        stepped.append(values[QKV])
    assert not torch.equal(*stepped)
    torch.testing.assert_close(*stepped, rtol=0, atol=0.1 * 0.05)


@pytest.mark.parametrize("mode", SCALES)
def test_every_fused_section_is_a_matrix_with_a_scale_of_its_own(mode: str) -> None:
    values, gradients = values_of(0), values_of(1)
    before = {name: each.clone() for name, each in values.items()}
    config = replace(MUON, muon_scale_mode=mode, muon_nesterov=False)
    muon_of(values, gradients, config).step(learning_rate=0.5, weight_decay=0.1)
    start = 0
    for rows in (8, 4, 4):
        part = slice(start, start + rows)
        step = orthogonalized(gradients[QKV][part], num_steps=5, kind="quintic")
        expected = before[QKV][part] * (1 - 0.5 * 0.1) - 0.5 * 0.2 * SCALES[mode](rows, 8) * step
        torch.testing.assert_close(values[QKV][part], expected)
        start += rows


def test_what_is_no_matrix_of_a_layer_is_adams() -> None:
    values, gradients = values_of(0), values_of(1)
    muon, adam = (
        muon_of({name: each.clone() for name, each in values.items()}, gradients, config)
        for config in (MUON, OptimizerConfig())
    )
    for optimizer in (muon, adam):
        optimizer.step(learning_rate=0.1, weight_decay=0.1)
    of_adam = {name for name, tensors in muon.state.items() if set(tensors) == {"exp_avg", "exp_avg_sq"}}
    assert of_adam == {"embedding.tokens.weight", "layers.0.attention.qkv.bias", "final_norm.weight"}
    assert all(set(muon.state[name]) == {"momentum_buffer"} for name in values if name not in of_adam)
    for name in values:
        assert torch.equal(muon.masters[name], adam.masters[name]) == (name in of_adam)
    assert optimizer_line(MUON, CPU) == (
        "Muon for the matrices of layers, else torch's fused AdamW (masters are on the CPU)"
    )


def test_a_state_put_back_goes_on_as_if_never_stopped() -> None:
    values, gradients = values_of(0), values_of(1)
    optimizer = muon_of(values, gradients)
    for _ in range(2):
        optimizer.step(learning_rate=0.1, weight_decay=0.1)
    copies = {name: each.clone() for name, each in values.items()}
    resumed = muon_of(copies, gradients)
    for name, tensors in optimizer.state.items():
        for state, tensor in tensors.items():
            resumed.state[name][state].copy_(tensor)
    resumed.num_steps = optimizer.num_steps
    for each in (optimizer, resumed):
        each.step(learning_rate=0.1, weight_decay=0.1)
    assert all(torch.equal(values[name], copies[name]) for name in values)


# Dealing


def test_matrices_of_one_size_are_dealt_at_once_and_rounds_are_bounded() -> None:
    sizes = [("s", (2, 3)), ("l", (4, 5))]
    small, large = ([Matrix(f"{kind}{i}", (0, 0), shape) for i in range(5)] for kind, shape in sizes)
    rounds = list(deal([*small, *large], num_ranks=4, most=120))
    assert [slot.matrix.name for each in rounds for slot in each.slots] == [
        *("l0", "l1", "l2", "l3", "l4", "s0", "s1", "s2", "s3", "s4")
    ]
    assert [each.width for each in rounds] == [20, 26]
    assert [(slot.owner, slot.start) for slot in rounds[1].slots] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 20), (1, 20)]
    assert [each.width for each in deal(small, num_ranks=4, most=1)] == [6, 6]  # a row at least
    assert list(deal([], num_ranks=4)) == []


def test_the_sections_of_a_parameter_are_its_matrices() -> None:
    assert [
        (each.offset, each.shape) for each in matrices_of("w", Sharding((16, 8), cuts=(Cut(0, "tp", (8, 4, 4)),)))
    ] == [
        ((0, 0), (8, 8)),
        ((8, 0), (4, 8)),
        ((12, 0), (4, 8)),
    ]
    assert [each.shape for each in matrices_of("w", Sharding((16, 8), cuts=(Cut(1, "tp"),)))] == [(16, 8)]


def test_a_piece_in_two_matrices_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="reaches into two matrices"):
        Matrix("w", (8, 0), (4, 8)).part_of(Piece((10, 0), (0, 0), (4, 8)))


# Many ranks


def cut(values: dict[str, Tensor], tp: Axis, shard_axis: Axis, rows: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a rank holds, flat: any run of elements as Zero has it, or whole rows as `fully_shard` has them."""
    held, pieces = {}, {}
    for name, sharding in SHARDINGS.items():
        whole = list(sharding.pieces({"tp": tp}))
        shape = list(sharding.shape)
        for dim, _, sections in sharding.cuts:
            shape[dim] = sum(sections or (shape[dim],)) // tp.size
        local = torch.zeros(shape)
        for piece in whole:
            place = tuple(slice(o, o + n) for o, n in zip(piece.global_offset, piece.sizes, strict=True))
            piece.view(local).copy_(values[name][place])
        unit = local[0].numel() if rows else 1
        share = -(-local.numel() // unit // shard_axis.size) * unit
        start = min(shard_axis.rank * share, local.numel())
        stop = min(start + share, local.numel())
        if start < stop:
            held[name] = local.view(-1)[start:stop].clone()
            pieces[name] = flat_pieces(whole, shape, start, stop)
    return held, pieces


def train(place: Place, layout: Layout, copies: int, rows: bool) -> dict[str, list[tuple[Any, Tensor]]]:
    mesh = Mesh.start(layout, rank=place.rank, init_method=place.rendezvous, zero_stage=1, copies=copies)
    shard = mesh.domains["dense"].shard
    masters, pieces = cut(values_of(0), mesh.tp, shard, rows)
    gradients = {name: torch.zeros_like(each) for name, each in masters.items()}
    shards = {name: Shard(each, pieces[name]) for name, each in masters.items()}
    optimizer = optimizer_of(shards, gradients, mesh.domains)
    for step in range(3):
        found, _ = cut(values_of(10 + step), mesh.tp, shard, rows)
        for name, each in found.items():
            gradients[name].copy_(each)
        optimizer.step(learning_rate=0.1, weight_decay=0.1)
    return {name: [(piece, piece.view(each)) for piece in pieces[name]] for name, each in masters.items()}


def test_a_matrix_cut_by_tp_and_by_zero_steps_as_a_whole() -> None:
    expected, gradients = values_of(0), {name: torch.zeros(each.shape) for name, each in SHARDINGS.items()}
    optimizer = muon_of(expected, gradients)
    for step in range(3):
        for name, each in values_of(10 + step).items():
            gradients[name].copy_(each)
        optimizer.step(learning_rate=0.1, weight_decay=0.1)
    for layout, copies, rows in [
        (Layout(tp=2, dp=2), 1, False),
        (Layout(tp=2, dp=2), 2, False),
        (Layout(dp=4), 2, True),
        (Layout(dp=3), 1, True),
    ]:
        seen = {name: torch.zeros(each.shape) for name, each in SHARDINGS.items()}
        for held in run_ranks(layout.world_size, train, layout, copies, rows):
            for name, parts in held.items():
                for piece, values in parts:
                    place = tuple(slice(o, o + n) for o, n in zip(piece.global_offset, piece.sizes, strict=True))
                    torch.testing.assert_close(values, expected[name][place], rtol=0, atol=1e-6)
                    seen[name][place] = 1
        assert all(bool(each.all()) for each in seen.values())


def test_each_matrix_is_computed_by_one_rank_alone() -> None:
    """Of three that share and two that hold copies."""
    matrices = {name: each for name, each in SHARDINGS.items() if name == QKV}
    owned = []
    for shared, copied in [(i, j) for i in range(3) for j in range(2)]:
        shard, replicate = Axis("shard", 3, shared), Axis("replicate", 2, copied)
        domain = Domain(shard=shard, replicate=replicate, model={"tp": Axis("tp")})
        dealt = MatrixDistribution(Masters({}, {}, matrices, {"dense": domain}, CPU), domain)
        (round_,) = dealt.rounds
        owned += [tuple(each.shape) for each in dealt.owned(round_, torch.zeros(1, round_.width))]
    assert sorted(owned) == [(4, 8), (4, 8), (8, 8)]


def test_of_what_tp_does_not_cut_one_copy_is_summed() -> None:
    matrices = {"cut": Sharding((4, 6), cuts=(Cut(1, "tp"),)), "whole": Sharding((4, 3))}
    for rank in range(2):
        domains = dense_domain(Axis("tp", 2, rank))
        dealt = MatrixDistribution(Masters({}, {}, matrices, domains, CPU), domains["dense"])
        contributes = {slot.matrix.name: dealt.contributes(slot) for round_ in dealt.rounds for slot in round_.slots}
        assert contributes == {"cut": True, "whole": rank == 0}


def test_a_rank_that_keeps_nothing_computes_and_steps_nothing() -> None:
    optimizer = optimizer_of({}, {}, ALONE)
    optimizer.step(learning_rate=0.1, weight_decay=0.1)
    assert isinstance(optimizer.updates["usual"], Muon)
    assert (optimizer.num_steps, optimizer.state) == (1, {})
