"""Fewer key/value heads than ranks of tp, which share them, by every layout; and each mistake of it is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from comparison import aspects_that_differ, assert_equal_to_serial, assert_same_training, serial
from pairwise import Chosen
from problem import Problem, Spread
from ranks import run_ranks
from test_experts_mutations import Patch, no_mistake, planted_train
from theorem_cases import adapted_problem_of, choices, name_of, problem_of, spread_of
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.core.layout import Layout
from megatronish.layers.norm import Norm
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis
from megatronish.parallel.sharding import Sharding

BY_HEAD: dict[str, Any] = {"qk_layernorm": True, "normalization": "LayerNorm", "qk_layernorm_by_head": True}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("gpt2", {"group_query_attention": True, "clip_qkv": 0.4}),
    "alibi": ("bloom", {"group_query_attention": True}),
    "sinks": ("gpt_oss", {}),
    "t5": ("t5", {"group_query_attention": True}),
    "qk-norm": ("llama", {"qk_layernorm": True}),
    "all heads": ("llama", {"qk_layernorm": True, "qk_layernorm_across_heads": True}),
    "by head": ("llama", BY_HEAD),
}
# The variant, the number of key/value heads, the layout and what is not usual.
CASES: list[tuple[str, int, Layout, Chosen]] = [
    ("llama", 1, Layout(tp=2), {"sequence_parallel": False, "tied": True, "documents": True}),
    ("llama", 2, Layout(tp=4), {"sequence_parallel": True, "dropout": 0.1, "optimizer": "muon"}),
    ("llama", 1, Layout(tp=4), {"sequence_parallel": True, "recompute": "selective"}),
    ("biases", 1, Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "recompute": "uniform"}),
    ("qk-norm", 2, Layout(tp=4), {"sequence_parallel": False, "recompute": "block"}),
    ("all heads", 1, Layout(tp=2), {"sequence_parallel": True, "attention_backend": "fused_softmax"}),
    ("by head", 2, Layout(tp=4), {"sequence_parallel": True, "dropout": 0.1, "optimizer": "muon"}),
    ("alibi", 2, Layout(tp=4), {"sequence_parallel": False, "tied": True}),
    ("sinks", 1, Layout(tp=2), {"sequence_parallel": True, "sight": "window"}),
    ("t5", 1, Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1}),
    ("t5", 1, Layout(tp=2, cp=2), {"sequence_parallel": False, "cp_comm_type": "a2a"}),
    ("llama", 1, Layout(tp=2, cp=2), {"sequence_parallel": True, "cp_comm_type": "p2p", "documents": True}),
    ("llama", 1, Layout(tp=2, cp=2), {"sequence_parallel": False, "cp_comm_type": "a2a", "dropout": 0.1}),
    ("llama", 1, Layout(tp=2, pp=2), {"schedule": "zb-h1", "sequence_parallel": True, "num_microbatches": 3}),
    ("by head", 1, Layout(tp=2, pp=2), {"schedule": "zb-v", "sequence_parallel": False, "num_microbatches": 3}),
    ("qk-norm", 1, Layout(dp=2, tp=2), {"zero": 1, "sequence_parallel": False, "optimizer": "muon"}),
    ("by head", 1, Layout(dp=2, tp=2), {"zero": 2, "sequence_parallel": True, "recompute": "uniform"}),
    ("by head", 1, Layout(dp=2, tp=2), {"zero": 3, "sequence_parallel": False, "optimizer": "adam"}),
]
ADAPTED: list[tuple[str, int, Layout, Chosen]] = [
    ("llama", 1, Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "adapter": "lora"}),
    ("llama", 2, Layout(tp=4), {"sequence_parallel": False, "adapter": "ia3"}),
    ("by head", 1, Layout(tp=2), {"sequence_parallel": True, "adapter": "qlora"}),
    ("biases", 1, Layout(tp=2), {"sequence_parallel": False, "adapter": "int8"}),
]


def case_of(variant: str, layout: Layout, given: Chosen) -> Chosen:
    plain = {feature: values[0] for feature, values in choices(layout).items()}
    usual = {"family": VARIANTS[variant][0], "eod_mask_loss": False, "zero": 0, "offload": "none", "tied": False}
    return plain | usual | {"optimizer": "adam" if layout.dp * layout.pp > 1 else "sgd"} | given


def ids(cases: list[tuple[str, int, Layout, Chosen]]) -> list[str]:
    return [f"{name}-{heads}-{name_of(layout, case_of(name, layout, given))}" for name, heads, layout, given in cases]


def sharing(problem: Problem, variant: str, heads: int) -> Problem:
    """The same with so many key/value heads."""
    return replace(problem, model=replace(problem.model, **VARIANTS[variant][1], num_query_groups=heads))


@pytest.mark.parametrize(("variant", "heads", "layout", "given"), CASES, ids=ids(CASES))
def test_ranks_that_share_heads_train_what_one_process_does(
    variant: str, heads: int, layout: Layout, given: Chosen
) -> None:
    chosen = case_of(variant, layout, given)
    assert_equal_to_serial(sharing(problem_of(layout, chosen), variant, heads), spread_of(layout, chosen))


@pytest.mark.parametrize(("variant", "heads", "layout", "given"), ADAPTED, ids=ids(ADAPTED))
def test_ranks_that_share_heads_train_the_same_adapters(
    variant: str, heads: int, layout: Layout, given: Chosen
) -> None:
    chosen = case_of(variant, layout, given)
    assert_equal_to_serial(sharing(adapted_problem_of(layout, chosen), variant, heads), spread_of(layout, chosen))


# Mistakes

PROBLEM = Problem(
    ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        qk_layernorm=True,
        disable_bias_linear=True,
        position_embedding_type="rope",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        make_vocab_size_divisible_by=4,
    ),
    seq_length=16,
    global_batch_size=2,
)
SPREAD = Spread(Layout(tp=4), 1, sequence_parallel=True)


def gradient_not_summed(patch: Patch) -> None:
    """Each rank keeps the gradient that its own queries give its part of a head."""
    gather = comm.gather_from_neighbours

    def planted(x: Tensor, axis: Axis, number: int) -> Tensor:
        parts = list(gather(x.detach(), axis, number).chunk(number))
        parts[axis.rank % number] = x
        return torch.cat(parts)

    patch.setattr(comm, "gather_from_neighbours", planted)


def wrong_head(patch: Patch) -> None:
    """Queries meet a key/value head that lies on ranks as far apart as there are heads."""
    exchange = comm.all_to_all_rows

    def planted(x: Tensor, axis: Axis, number: int) -> Tensor:
        apart = axis.size // number
        rows = [len(x) if rank % apart == axis.rank % apart else 0 for rank in range(axis.size)]
        return exchange(x.expand(number, *x.shape).flatten(0, 1), axis, sent=rows, received=rows)

    patch.setattr(comm, "gather_from_neighbours", planted)


def parts_in_another_order(patch: Patch) -> None:
    """The features of a head stand in another order, in keys and values alike; RoPE and norms see it."""
    gather = comm.gather_from_neighbours
    patch.setattr(
        comm,
        "gather_from_neighbours",
        lambda x, axis, number: torch.cat(gather(x, axis, number).chunk(number)[::-1]),
    )


def norm_not_summed(patch: Patch) -> None:
    """Each rank keeps the gradient that its own queries give the norm of a head that others share."""
    shardings = Norm.shardings

    def planted(self: Norm) -> dict[str, Sharding]:
        stated = shardings(self)
        if self.size != PROBLEM.model.head_size:
            return stated
        return {name: replace(sharding, partial_over=frozenset()) for name, sharding in stated.items()}

    patch.setattr(Norm, "shardings", planted)


def counted_twice(patch: Patch) -> None:
    """What the ranks that share a head give its gradient counts twice."""
    gather = comm.gather_from_neighbours

    def planted(x: Tensor, axis: Axis, number: int) -> Tensor:
        gathered = gather(x, axis, number)
        return 2 * gathered - gathered.detach()

    patch.setattr(comm, "gather_from_neighbours", planted)


MUTATIONS = [
    (gradient_not_summed, {"gradients", "norm"}),
    (wrong_head, {"metrics", "gradients"}),
    (parts_in_another_order, {"metrics", "gradients"}),
    (norm_not_summed, {"gradients"}),
    (counted_twice, {"gradients", "norm"}),
]


def test_without_a_mistake_nothing_is_found() -> None:
    assert_same_training(run_ranks(4, planted_train, PROBLEM, SPREAD, no_mistake), serial(PROBLEM))


@pytest.mark.parametrize(("plant", "shown_by"), MUTATIONS, ids=[plant.__name__ for plant, _ in MUTATIONS])
def test_a_mistake_with_shared_heads_is_found(plant: Callable[[Patch], None], shown_by: set[str]) -> None:
    differing = aspects_that_differ(run_ranks(4, planted_train, PROBLEM, SPREAD, plant), serial(PROBLEM))
    assert shown_by <= differing, differing
