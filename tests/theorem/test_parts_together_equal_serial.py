"""Parts of models that came one by one, together: what one process trains is what ranks train.

Multi-token prediction, latents on a ring, shared heads, LongRoPE, xIELU, layers of a Llama 4, and parts of layers
that are computed again. And compiled: a compiler takes seconds for each graph, so parts that do not exclude each other
are in the graphs of one model.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from comparison import assert_equal_to_serial
from expert_cases import choices_of_experts, expert_problem, expert_spread
from pairwise import Chosen
from problem import Problem, Spread
from sweeps import some_of
from test_latent_equal_serial import LATENT
from test_newer_experts_equal_serial import LAYERS, MIXED, ONE
from test_qk_clip_equal_serial import BELOW
from test_shared_heads_equal_serial import BY_HEAD
from test_variants_equal_serial import LONGROPE
from theorem_cases import ADAPTERS, adapted_problem_of, choices, problem_of, spread_of

from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import RecomputeConfig, RecomputeModule
from megatronish.core.layout import Layout

DENSE: tuple[RecomputeModule, ...] = ("core_attn", "layernorm", "mlp")
AHEAD: dict[str, Any] = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0}
TWICE = AHEAD | {"mtp_num_layers": 2}
LATENTS = LATENT | {"q_lora_rank": 7}
XIELU: dict[str, Any] = {"swiglu": False, "xielu": True}
AFTER_ROPE: dict[str, Any] = {"qk_layernorm": True, "qk_layernorm_after_rope": True}


class Together(NamedTuple):
    """A layout, what it is given, the model's further options, and the parts that are computed again."""

    layout: Layout
    given: Chosen
    model: dict[str, Any] | Callable[[ModelConfig], dict[str, Any]]
    again: tuple[RecomputeModule, ...] = ()
    experts: str | None = None


def mixed(model: ModelConfig) -> dict[str, Any]:
    frequency = f"[0]*1+[1]*{model.num_layers - 1}"
    return {"moe_shared_expert_gate": False, "moe_layer_freq": frequency, **AHEAD}


def llama4(model: ModelConfig) -> dict[str, Any]:
    shared = {"moe_router_pre_softmax": False, "moe_shared_expert_intermediate_size": model.moe_ffn_hidden_size}
    return {**LAYERS, **ONE, **AHEAD, **shared}


RING = {"cp_comm_type": "p2p"}
CASES = {
    "ahead, parts again": Together(
        Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "tied": True}, AHEAD, DENSE
    ),
    "two ahead, zb-v": Together(Layout(pp=2), {"schedule": "zb-v", "num_microbatches": 3}, TWICE, DENSE),
    "ahead, latents": Together(
        *(Layout(pp=2), {"schedule": "zb-h1", "num_microbatches": 3}, {**AHEAD, **LATENTS}),
        ("core_attn", "layernorm", "mla_up_proj", "mlp"),
    ),
    "ahead, latents on a ring": Together(
        *(Layout(cp=2), RING | {"documents": True}, {**TWICE, **LATENTS}), ("core_attn", "mla_up_proj", "layernorm")
    ),
    "latents on a ring, ZeRO-3": Together(Layout(cp=2), RING | {"zero": 3}, LATENTS, ("core_attn", "mla_up_proj")),
    "ahead, experts": Together(
        Layout(tp=2), {"sequence_parallel": True, "ep": "most"}, mixed, ("moe", "layernorm"), "sigmoid"
    ),
    "ahead, experts, zb-v": Together(
        *(Layout(pp=2), {"schedule": "zb-v", "num_microbatches": 3}, mixed),
        *(("moe_act", "layernorm", "shared_experts"), "sigmoid"),
    ),
    "ahead, shared heads": Together(
        *(Layout(tp=4), {"sequence_parallel": True, "dropout": 0.1}, {**AHEAD, "num_query_groups": 2, **AFTER_ROPE}),
        DENSE,
    ),
    "ahead, LongRoPE": Together(
        Layout(cp=2), RING | {"documents": True}, {**TWICE, **LONGROPE, "rope_original_max_positions": 8}
    ),
    "ahead, xIELU": Together(Layout(dp=2), {"zero": 3}, {**AHEAD, **XIELU}, ("mlp", "layernorm")),
    "adapters, ahead, xIELU": Together(
        Layout(tp=2), {"sequence_parallel": True, "adapter": "lora"}, {**XIELU, **AHEAD}, ("mlp", "layernorm")
    ),
    "shared heads, Llama 4": Together(
        *(Layout(tp=2, cp=2), RING | {"sequence_parallel": True}, {"num_query_groups": 1, **LAYERS, **AHEAD}), DENSE
    ),
    "ahead, Llama 4's experts": Together(
        *(Layout(pp=2), {"schedule": "zb-v", "num_microbatches": 3}, llama4), ("moe_act", "layernorm"), "softmax"
    ),
    "Llama 4's experts by DeepEP": Together(
        *(Layout(dp=2, tp=2), {"ep": "most", "dispatcher": "deepep", "sequence_parallel": True}),
        *(llama4, ("moe_act", "layernorm"), "softmax"),
    ),
    "IA3 of experts with a capacity, by DeepEP": Together(
        *(Layout(dp=2), {"ep": "most", "dispatcher": "deepep", "adapter": "ia3", "zero": 1}, {}),
        *(("moe_act",), "capacity"),
    ),
    "LoRA of experts with a capacity": Together(
        *(Layout(tp=2), {"ep": "most", "adapter": "lora", "sequence_parallel": True}, {}, ("moe",), "capacity")
    ),
    "experts ahead by DeepEP, zb-v": Together(
        *(Layout(dp=2, pp=2), {"schedule": "zb-v", "num_microbatches": 3, "ep": "most", "dispatcher": "deepep"}),
        *(mixed, ("moe", "shared_experts"), "sigmoid"),
    ),
    "ahead, SparseMixer": Together(
        *(Layout(dp=2), {"ep": "most", "zero": 3}),
        *({**MIXED, "moe_router_norm_topk_prob": False, **AHEAD}, ("moe_act", "layernorm"), "softmax"),
    ),
}


def case_of(case: Together) -> tuple[Problem, Spread]:
    of_layout = choices(case.layout) if case.experts is None else choices_of_experts(case.layout)
    plain = {feature: values[0] for feature, values in of_layout.items()}
    optimizer = "adam" if case.layout.dp * case.layout.pp > 1 else "sgd"
    fixed: Chosen = {"family": "llama", "optimizer": optimizer, "eod_mask_loss": False, "zero": 0, "offload": "none"}
    chosen = plain | fixed | {"tied": False, "experts": case.experts, "etp": "one"} | case.given
    if case.experts is not None:
        problem, spread = expert_problem(case.layout, chosen), expert_spread(case.layout, chosen)
        if "adapter" in case.given:
            problem = replace(problem, adapter=ADAPTERS[chosen["adapter"]])
    else:
        make = adapted_problem_of if "adapter" in case.given else problem_of
        problem, spread = make(case.layout, chosen), spread_of(case.layout, chosen)
    more = case.model(problem.model) if callable(case.model) else case.model
    if case.again:
        spread = replace(spread, recompute=RecomputeConfig("selective", recompute_modules=case.again))
    return replace(problem, model=replace(problem.model, **more)), spread


@pytest.mark.parametrize("name", CASES)
def test_a_layout_trains_parts_together_as_one_process_does(name: str) -> None:
    assert_equal_to_serial(*case_of(CASES[name]))


USUAL = {"documents": False, "zero": 1}
COMPILED = {
    # In a graph the compiler chooses what it keeps; a tp of two leaves the products between graphs.
    "shared heads, a norm by head, by pieces, parts again": Together(
        Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1}, {"num_query_groups": 1, **BY_HEAD}, DENSE
    ),
    "two ahead, a norm after RoPE": Together(Layout(), USUAL | {"dropout": 0.1, "family": "qwen"}, TWICE | AFTER_ROPE),
    "Llama 4, shared experts meanwhile": Together(
        *(Layout(dp=2), USUAL | {"ep": "most"}),
        lambda model: llama4(model) | {"mtp_num_layers": None},
        experts="softmax",
    ),
    "Llama 4 by DeepEP, shared experts meanwhile": Together(
        *(Layout(dp=2), USUAL | {"ep": "most", "dispatcher": "deepep"}),
        lambda model: llama4(model) | {"mtp_num_layers": None},
        experts="softmax",
    ),
    "QK-clip, LongRoPE, xIELU, biases": Together(
        *(Layout(), USUAL | {"dropout": 0.1, "sight": "window"}),
        {**LONGROPE, "rope_original_max_positions": 8, **XIELU, "add_qkv_bias": True},
    ),
}


@pytest.mark.parametrize("name", some_of(COMPILED, COMPILED.keys() - {"Llama 4, shared experts meanwhile"}))
def test_compiled_parts_train_what_one_eager_process_trains(name: str) -> None:
    problem, spread = case_of(COMPILED[name])
    problem = replace(problem, largest_logit=BELOW if "QK-clip" in name else None)
    # Two steps: a number of the first that a graph has kept is wrong in the second.
    assert_equal_to_serial(problem, replace(spread, by_pieces="by pieces" in name, compile="aot_eager"))
