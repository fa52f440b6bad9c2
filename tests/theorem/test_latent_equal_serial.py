"""Multi-head latent attention by every layout: what one process trains is what ranks train."""

from dataclasses import replace
from typing import Any

import pytest
from comparison import assert_equal_to_serial
from expert_cases import choices_of_experts, expert_problem, expert_spread
from pairwise import Chosen
from problem import Problem
from theorem_cases import adapted_problem_of, choices, name_of, problem_of, spread_of

from megatronish.core.layout import Layout

LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "group_query_attention": False,
    "num_query_groups": None,
    "kv_lora_rank": 6,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 5,
    "qk_layernorm": True,
    "disable_bias_linear": True,
    "add_attention_bias": False,
    "add_mlp_bias": False,
}
STRETCHED: dict[str, Any] = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_original_max_positions": 8,
    "rope_mscale": 0.7,
    "rope_mscale_all_dim": 1.5,
    "rotary_interleaved": True,
}
WIDE: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_head_dim": 60,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 64,
    "kv_channels": None,
}
CASES: list[tuple[str, Layout, Chosen]] = [
    ("q", Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "documents": True}),
    ("q", Layout(tp=2), {"sequence_parallel": False}),
    ("direct", Layout(tp=2), {"sequence_parallel": True, "recompute": "selective"}),
    ("q", Layout(tp=2), {"sequence_parallel": True, "optimizer": "muon", "recompute": "block"}),
    ("q", Layout(pp=2), {"schedule": "1f1b", "dropout": 0.1, "num_microbatches": 3}),
    ("q", Layout(pp=2), {"schedule": "zb-h1", "num_microbatches": 3}),
    ("q", Layout(pp=2), {"schedule": "zb-v", "num_microbatches": 3, "recompute": "uniform"}),
    ("direct", Layout(pp=2), {"schedule": "interleaved", "num_microbatches": 4}),
    ("q", Layout(cp=2), {"cp_comm_type": "p2p", "documents": True, "dropout": 0.1}),
    ("q", Layout(cp=2), {"cp_comm_type": "a2a", "dropout": 0.1, "attention_backend": "fused_softmax"}),
    ("q", Layout(dp=2), {"zero": 1, "optimizer": "muon", "attention_backend": "fused_softmax"}),
    ("q", Layout(dp=2), {"zero": 2, "recompute": "uniform", "dropout": 0.1}),
    ("direct", Layout(dp=2), {"zero": 3, "optimizer": "adam", "documents": True}),
    ("q", Layout(tp=2, cp=2), {"sequence_parallel": True, "cp_comm_type": "p2p", "sight": "window"}),
    ("q", Layout(tp=2, pp=2), {"schedule": "zb-h1", "sequence_parallel": True, "num_microbatches": 3}),
    ("stretched", Layout(tp=2), {"sequence_parallel": False, "attention_backend": "fused_softmax"}),
]
ADAPTED: list[tuple[str, Layout, Chosen]] = [
    ("q", Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "adapter": "lora"}),
    ("direct", Layout(tp=2), {"sequence_parallel": False, "adapter": "lora"}),
    ("q", Layout(tp=2), {"sequence_parallel": True, "adapter": "ia3"}),
    ("q", Layout(tp=2), {"sequence_parallel": True, "adapter": "qlora"}),
]


def case_of(layout: Layout, given: Chosen) -> Chosen:
    plain = {feature: values[0] for feature, values in choices(layout).items()}
    optimizer = "adam" if layout.dp > 1 or layout.pp > 1 else "sgd"
    return (
        plain
        | {
            "family": "llama",
            "optimizer": optimizer,
            "eod_mask_loss": False,
            "zero": 0,
            "offload": "none",
            "tied": False,
        }
        | given
    )


def ids(cases: list[tuple[str, Layout, Chosen]]) -> list[str]:
    return [f"{queries}-{name_of(layout, case_of(layout, given))}" for queries, layout, given in cases]


@pytest.mark.parametrize(("queries", "layout", "given"), CASES, ids=ids(CASES))
def test_a_layout_trains_latent_attention_as_one_process_does(queries: str, layout: Layout, given: Chosen) -> None:
    chosen = case_of(layout, given)
    assert_equal_to_serial(latent(problem_of(layout, chosen), queries), spread_of(layout, chosen))


@pytest.mark.parametrize(
    ("queries", "layout", "given"),
    ADAPTED,
    ids=ids(ADAPTED),
)
def test_a_layout_trains_the_same_adapters_of_latent_attention(queries: str, layout: Layout, given: Chosen) -> None:
    chosen = case_of(layout, given)
    problem = latent(adapted_problem_of(layout, chosen), queries)
    if problem.adapter.quantize_base is not None:  # whole blocks of 64 inputs on every rank
        problem = replace(problem, model=replace(problem.model, **WIDE))
    if problem.adapter.adapter_type == "ia3":
        problem = replace(problem, adapter=replace(problem.adapter, adapter_targets=("q", "kv_up", "o", "down")))
    assert_equal_to_serial(problem, spread_of(layout, chosen))


def latent(problem: Problem, queries: str) -> Problem:
    """The same with latent attention, with a latent of the queries or without, or with a stretched RoPE."""
    model = replace(problem.model, **LATENT, q_lora_rank=None if queries == "direct" else 7)
    if queries == "stretched":
        model = replace(model, **STRETCHED)
    return replace(problem, model=model)


def test_compiled_layers_train_what_one_eager_process_trains() -> None:
    """Without tp the whole of latent attention but its core is in a graph."""
    layout = Layout(dp=2)
    chosen = case_of(layout, {"zero": 1, "dropout": 0.1, "documents": False})
    spread = replace(spread_of(layout, chosen), compile="aot_eager")
    assert_equal_to_serial(latent(problem_of(layout, chosen), "q"), spread)


EXPERTS: list[tuple[Layout, Chosen]] = [
    (Layout(dp=2), {"ep": "most", "zero": 1}),
    (Layout(tp=2, pp=2), {"ep": "most", "sequence_parallel": True, "schedule": "1f1b", "num_microbatches": 3}),
]
CHOICES: dict[str, dict[str, Any]] = {
    "v3": {},
    "v2": {
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": False,
        "moe_router_scores_per_group": 1,
    },
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("layout", "given"), EXPERTS, ids=["dp2", "tp2_pp2"])
def test_a_layout_trains_a_model_as_deepseeks_is(layout: Layout, given: Chosen, choice: str) -> None:
    """Latent attention, scores in groups, shared experts, and first layers that are dense."""
    plain = {feature: values[0] for feature, values in choices_of_experts(layout).items()}
    chosen = case_of(layout, plain | {"experts": "sigmoid", "etp": "one"} | given)
    problem = latent(expert_problem(layout, chosen), "q")
    layers = problem.model.num_layers
    others = {"moe_shared_expert_gate": False, "moe_layer_freq": f"[0]*1+[1]*{layers - 1}", **CHOICES[choice]}
    model = replace(problem.model, **others)
    assert_equal_to_serial(replace(problem, model=model), expert_spread(layout, chosen))
