"""SparseMixer (Phi-3.5-MoE), and Llama 4, by every layout: what one process trains is what ranks train.

A Llama 4 has chunks of attention and a norm without a weight in layers with RoPE, queries that grow with their position
in the others, and experts whose weight multiplies their input. Mistakes that are planted in it are found.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from comparison import aspects_that_differ, assert_equal_to_serial, assert_same_training, serial, with_margin
from expert_cases import choices_of_experts, expert_problem, expert_spread
from pairwise import Chosen
from problem import Problem
from ranks import run_ranks
from sweeps import some_of
from test_experts_mutations import Patch, no_mistake, planted_train
from theorem_cases import adapted_problem_of, choices, name_of, problem_of, spread_of
from torch import Tensor

from megatronish.core.layout import Layout
from megatronish.layers.experts import Experts
from megatronish.model import attention
from megatronish.specs.attention import Temperature

MIXED: dict[str, Any] = {
    "moe_router_score_function": "sparsemixer",
    "moe_sparsemixer_eps": 0.2,  # of which a token's experts have some rivals and not all
    "moe_router_pre_softmax": False,
}
LAYERS: dict[str, Any] = {
    "no_rope_freq": "2",
    "rotary_interleaved": True,
    "attention_pattern": "fixed",
    "attention_block_size": 5,
    "attention_local_blocks": 1,
    "attention_global_blocks": 0,
    "window_attn_skip_freq": "2",
    "qk_l2_norm": True,
    "attn_temperature_scale": 0.7,
    "attn_temperature_floor": 3,
}
ONE: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_topk": 1,
    "moe_apply_probs_on_input": True,
    "moe_layer_freq": "2",
}
CASES: list[tuple[str, Layout, Chosen]] = [
    ("mixed", Layout(dp=2), {"ep": "most", "zero": 1}),
    ("mixed", Layout(dp=2), {"experts": "capacity", "ep": "most", "zero": 3, "recompute": "block"}),
    ("mixed", Layout(tp=2), {"ep": "most", "sequence_parallel": True, "recompute": "uniform"}),
    ("mixed", Layout(tp=2), {"etp": "tp", "sequence_parallel": False}),
    ("mixed", Layout(cp=2), {"ep": "most", "cp_comm_type": "p2p", "family": "gpt2"}),
    ("mixed", Layout(cp=2), {"cp_comm_type": "a2a", "num_microbatches": 3}),
    ("mixed", Layout(pp=2), {"schedule": "zb-h1", "num_microbatches": 3}),
    ("mixed", Layout(tp=2, pp=2), {"ep": "most", "sequence_parallel": True, "num_microbatches": 3}),
    ("one", Layout(dp=2), {"ep": "most", "zero": 2, "optimizer": "muon", "documents": False}),
    ("one", Layout(dp=2), {"experts": "capacity", "ep": "most", "zero": 3, "recompute": "uniform"}),
    ("one", Layout(tp=2), {"ep": "most", "sequence_parallel": True, "dropout": 0.1, "recompute": "selective"}),
    ("one", Layout(tp=2), {"etp": "tp", "sequence_parallel": False}),
    ("one", Layout(cp=2), {"ep": "most", "cp_comm_type": "p2p", "documents": False}),
    ("one", Layout(cp=2), {"cp_comm_type": "a2a", "attention_backend": "fused_softmax", "documents": True}),
    ("one", Layout(pp=2), {"schedule": "zb-v", "num_microbatches": 3}),
    ("one", Layout(tp=2, pp=2), {"etp": "tp", "schedule": "1f1b", "sequence_parallel": True, "num_microbatches": 3}),
]
DENSE: list[tuple[Layout, Chosen]] = [
    (Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "documents": True}),
    (Layout(tp=2, cp=2), {"sequence_parallel": True, "cp_comm_type": "p2p"}),
    (Layout(cp=2), {"cp_comm_type": "a2a", "dropout": 0.1}),
    (Layout(pp=2), {"schedule": "interleaved", "num_microbatches": 4, "recompute": "block"}),
    (Layout(dp=2), {"zero": 3, "recompute": "selective"}),
]
ADAPTED: list[tuple[Layout, Chosen]] = [
    (Layout(tp=2), {"sequence_parallel": True, "adapter": "lora"}),
]


def case_of(of_layout: dict[str, tuple[Any, ...]], layout: Layout, given: Chosen) -> Chosen:
    plain = {feature: values[0] for feature, values in of_layout.items()}
    optimizer = "adam" if layout.dp > 1 or layout.pp > 1 else "sgd"
    own = {"experts": "softmax", "etp": "one"} if "experts" in of_layout else {}
    return plain | {"family": "llama", "optimizer": optimizer, "zero": 0, "offload": "none"} | own | given


def ids_of(cases: list[tuple[Layout, Chosen]]) -> list[str]:
    return [name_of(layout, case_of(choices(layout), layout, given)) for layout, given in cases]


def problem_with_experts(kind: str, layout: Layout, chosen: Chosen) -> Problem:
    problem = expert_problem(layout, chosen)
    options = {**MIXED, "moe_router_norm_topk_prob": False}
    if kind == "one":
        width = problem.model.moe_ffn_hidden_size
        options = {**LAYERS, **ONE, "moe_router_pre_softmax": False, "moe_shared_expert_intermediate_size": width}
    return replace(problem, model=replace(problem.model, **options))


@pytest.mark.parametrize(
    ("kind", "layout", "given"),
    CASES,
    ids=[
        f"{kind}-{name_of(layout, case_of(choices_of_experts(layout), layout, given))}" for kind, layout, given in CASES
    ],
)
def test_a_layout_trains_the_same_experts_as_one_process(kind: str, layout: Layout, given: Chosen) -> None:
    chosen = case_of(choices_of_experts(layout), layout, given)
    assert_equal_to_serial(problem_with_experts(kind, layout, chosen), expert_spread(layout, chosen))


@pytest.mark.parametrize(("layout", "given"), DENSE, ids=ids_of(DENSE))
def test_a_layout_trains_the_layers_of_a_llama_4_as_one_process_does(layout: Layout, given: Chosen) -> None:
    chosen = case_of(choices(layout), layout, given)
    problem = problem_of(layout, chosen)
    assert_equal_to_serial(replace(problem, model=replace(problem.model, **LAYERS)), spread_of(layout, chosen))


@pytest.mark.parametrize(("layout", "given"), ADAPTED, ids=ids_of(ADAPTED))
def test_a_layout_trains_the_same_adapters_of_a_llama_4(layout: Layout, given: Chosen) -> None:
    chosen = case_of(choices(layout), layout, given)
    problem = adapted_problem_of(layout, chosen)
    assert_equal_to_serial(replace(problem, model=replace(problem.model, **LAYERS)), spread_of(layout, chosen))


# Planted mistakes


def places_for_positions(patch: Patch) -> None:
    """Queries grow with their place on the rank."""
    factors = attention._factors

    def planted(temperature: Temperature, positions: Tensor) -> Tensor:
        return factors(temperature, torch.arange(positions.shape[1]).expand_as(positions))

    patch.setattr(attention, "_factors", planted)


def weights_of_one_rank(patch: Patch) -> None:
    """The second rank of ep multiplies what its experts are given by something else."""
    forward = Experts.forward

    def planted(self: Experts, x: Tensor, weights: Tensor | None, route: Any) -> Tensor:
        return forward(self, x if self.parallel.ep.rank == 0 else 0.9 * x, weights, route)

    patch.setattr(Experts, "forward", planted)


@pytest.mark.parametrize(
    ("layout", "plant"),
    some_of(
        [(Layout(cp=2), places_for_positions), (Layout(dp=2), weights_of_one_rank)],
        [(Layout(cp=2), places_for_positions)],
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_mistake_is_found(layout: Layout, plant: Any) -> None:
    chosen = case_of(choices_of_experts(layout), layout, {"ep": "most"})
    problem = with_margin(problem_with_experts("one", layout, chosen))
    spread = expert_spread(layout, chosen)
    assert_same_training(run_ranks(2, planted_train, problem, spread, no_mistake), serial(problem))
    assert "gradients" in aspects_that_differ(run_ranks(2, planted_train, problem, spread, plant), serial(problem))
