"""Norms, factors and caps of models since 2021 by every layout: what the theorem's deal has of it, with few ranks.

The families of the deal are changed, each in the parts that a family of Hugging Face has together.
"""

from dataclasses import replace
from typing import Any

import pytest
from comparison import assert_equal_to_serial
from pairwise import Chosen
from theorem_cases import adapted_problem_of, choices, name_of, problem_of, spread_of

from megatronish.core.layout import Layout

LONGROPE: dict[str, Any] = {
    "rope_scaling_type": "longrope",
    "rope_scaling_factor": 4.0,
    "rope_short_factor": (1.0, 1.5),
    "rope_long_factor": (1.2, 4.0),
    "rotary_base": 20.0,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 2": (
        "llama",
        {
            "norm_placement": "sandwich",
            "apply_layernorm_1p": True,
            "swiglu": False,
            "geglu": True,
            "embedding_multiplier": 3.0,
            "softmax_scale": 0.8,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma 3": (
        "llama",
        {
            "norm_placement": "sandwich",
            "apply_layernorm_1p": True,
            "qk_layernorm": True,
            "qk_layernorm_1p": True,
            "window_size": 5,
            "window_attn_skip_freq": "2",
            "rotary_base": 1e4,
            "window_rotary_base": 20.0,
            "rope_scaling_type": "linear",
            "rope_scaling_factor": 2.0,
        },
    ),
    "granite": (
        "llama",
        {"embedding_multiplier": 2.5, "residual_multiplier": 0.6, "softmax_scale": 0.9, "logits_multiplier": 0.7},
    ),
    "olmo 2": ("llama", {"norm_placement": "output", "qk_layernorm": True, "qk_layernorm_across_heads": True}),
    "olmo": ("llama", {"normalization": "LayerNorm", "norm_parameters": "none", "clip_qkv": 5.0}),
    "gpt-j": (
        "gpt2",
        {
            "norm_placement": "parallel",
            "disable_bias_linear": True,
            "add_mlp_bias": True,
            "add_output_bias": True,
            "position_offset": 2,
        },
    ),
    "gpt-neox": ("gpt2", {"norm_placement": "parallel_norms", "add_output_bias": True}),
    "cohere": (
        "qwen",
        {
            "norm_placement": "parallel",
            "normalization": "LayerNorm",
            "norm_parameters": "weight",
            "qk_layernorm_by_head": True,
            "logits_multiplier": 0.5,
        },
    ),
    "phi 3, long": ("llama", LONGROPE | {"rope_original_max_positions": 8, "window_size": 7}),
    "proportional": ("llama", {"rope_scaling_type": "proportional", "rotary_percent": 0.5}),
    "phi 3, short": ("llama", LONGROPE | {"rope_original_max_positions": 32}),
    "apertus": ("qwen", {"swiglu": False, "xielu": True, "rope_scaling_type": "llama3", "rotary_base": 50.0}),
    "hunyuan": ("qwen", {"qk_layernorm_after_rope": True}),
}
CASES: list[tuple[str, Layout, Chosen]] = [
    ("gemma 2", Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "documents": True}),
    ("gemma 2", Layout(pp=2), {"schedule": "zb-h1", "num_microbatches": 3, "recompute": "selective"}),
    ("gemma 2", Layout(cp=2), {"cp_comm_type": "a2a", "documents": True, "tied": False}),
    ("gemma 2", Layout(dp=2), {"zero": 3, "recompute": "uniform", "dropout": 0.1}),
    ("gemma 3", Layout(tp=2, cp=2), {"sequence_parallel": True, "cp_comm_type": "p2p", "documents": True}),
    ("gemma 3", Layout(pp=2), {"schedule": "zb-v", "num_microbatches": 3, "recompute": "block", "dropout": 0.1}),
    ("gemma 3", Layout(dp=2), {"zero": 3, "documents": True}),
    ("granite", Layout(tp=2, pp=2), {"schedule": "1f1b", "sequence_parallel": False, "dropout": 0.1}),
    ("granite", Layout(cp=2), {"cp_comm_type": "p2p", "documents": True}),
    ("olmo 2", Layout(tp=2), {"sequence_parallel": True, "recompute": "block", "dropout": 0.1}),
    ("olmo 2", Layout(dp=2, pp=2), {"zero": 2, "schedule": "1f1b", "tied": False}),
    ("olmo", Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1}),
    ("olmo", Layout(dp=2, pp=2), {"zero": 3, "schedule": "1f1b"}),
    ("gpt-j", Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "tied": False}),
    ("gpt-j", Layout(pp=2), {"schedule": "zb-v", "num_microbatches": 3, "zero": 1}),
    ("gpt-j", Layout(cp=2), {"cp_comm_type": "a2a", "documents": True}),
    ("gpt-neox", Layout(tp=2, pp=2), {"schedule": "interleaved", "sequence_parallel": True, "num_microbatches": 2}),
    ("gpt-neox", Layout(dp=2), {"zero": 1, "optimizer": "muon", "dropout": 0.1}),
    ("cohere", Layout(tp=2), {"sequence_parallel": True, "recompute": "uniform", "dropout": 0.1}),
    ("cohere", Layout(dp=2, tp=2), {"zero": 2, "sequence_parallel": False, "tied": False, "optimizer": "muon"}),
    ("cohere", Layout(cp=2, pp=2), {"cp_comm_type": "p2p", "schedule": "1f1b", "documents": True}),
    ("phi 3, long", Layout(cp=2), {"cp_comm_type": "p2p", "documents": True, "dropout": 0.1}),
    ("phi 3, long", Layout(cp=2, tp=2), {"cp_comm_type": "a2a", "sequence_parallel": True}),
    ("phi 3, long", Layout(pp=2), {"schedule": "zb-v", "num_microbatches": 3, "recompute": "selective"}),
    ("phi 3, short", Layout(cp=2), {"cp_comm_type": "p2p", "documents": True}),
    ("proportional", Layout(tp=2), {"sequence_parallel": True, "documents": True}),
    ("phi 3, short", Layout(dp=2), {"zero": 3, "recompute": "uniform"}),
    ("apertus", Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1}),
    ("apertus", Layout(tp=2), {"sequence_parallel": False, "optimizer": "muon", "recompute": "uniform"}),
    ("apertus", Layout(tp=2, pp=2), {"schedule": "zb-h1", "sequence_parallel": True, "num_microbatches": 3}),
    ("apertus", Layout(pp=2), {"schedule": "zb-v", "num_microbatches": 3, "recompute": "block"}),
    ("apertus", Layout(cp=2), {"cp_comm_type": "p2p", "documents": True}),
    ("apertus", Layout(dp=2), {"zero": 1, "dropout": 0.1}),
    ("apertus", Layout(dp=2), {"zero": 2}),
    ("apertus", Layout(dp=2, tp=2), {"zero": 3, "sequence_parallel": True, "recompute": "uniform"}),
    ("apertus", Layout(dp=3), {"zero": 3}),
    ("hunyuan", Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "recompute": "selective"}),
    ("hunyuan", Layout(cp=2), {"cp_comm_type": "p2p", "documents": True}),
    ("hunyuan", Layout(dp=2, pp=2), {"zero": 3, "schedule": "1f1b", "recompute": "block"}),
]
ADAPTED: list[tuple[str, Layout, Chosen]] = [
    ("gemma 2", Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "adapter": "lora"}),
    ("gpt-neox", Layout(tp=2), {"sequence_parallel": True, "adapter": "ia3"}),
    ("hunyuan", Layout(tp=2), {"sequence_parallel": True, "adapter": "ia3"}),
    ("apertus", Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "adapter": "lora"}),
    ("apertus", Layout(tp=2), {"sequence_parallel": False, "adapter": "qlora"}),
]


def case_of(variant: str, layout: Layout, given: Chosen) -> Chosen:
    plain = {feature: values[0] for feature, values in choices(layout).items()}
    family = VARIANTS[variant][0]
    optimizer = "adam" if layout.dp > 1 or layout.pp > 1 else "sgd"
    return (
        plain | {"family": family, "optimizer": optimizer, "eod_mask_loss": False, "zero": 0, "offload": "none"} | given
    )


def ids(cases: list[tuple[str, Layout, Chosen]]) -> list[str]:
    return [f"{name}-{name_of(layout, case_of(name, layout, given))}" for name, layout, given in cases]


@pytest.mark.parametrize(("variant", "layout", "given"), CASES, ids=ids(CASES))
def test_a_layout_trains_the_same_variant_as_one_process(variant: str, layout: Layout, given: Chosen) -> None:
    chosen = case_of(variant, layout, given)
    problem = problem_of(layout, chosen)
    problem = replace(problem, model=replace(problem.model, **VARIANTS[variant][1]))
    assert_equal_to_serial(problem, spread_of(layout, chosen))


@pytest.mark.parametrize(("variant", "layout", "given"), ADAPTED, ids=ids(ADAPTED))
def test_a_layout_trains_the_same_adapters_of_a_variant(variant: str, layout: Layout, given: Chosen) -> None:
    chosen = case_of(variant, layout, given)
    problem = adapted_problem_of(layout, chosen)
    problem = replace(problem, model=replace(problem.model, **VARIANTS[variant][1]))
    assert_equal_to_serial(problem, spread_of(layout, chosen))
