"""Parts of layers that are computed again (--recompute-modules), by layouts: ranks train what one process trains.

The one process computes nothing again.
"""

from dataclasses import replace

import pytest
import torch
from comparison import assert_equal_to_serial, whole
from expert_cases import choices_of_experts, expert_problem, expert_spread
from pairwise import Chosen
from problem import Problem, Spread
from test_latent_equal_serial import LATENT
from theorem import train
from theorem_cases import adapted_problem_of, choices, name_of, problem_of, spread_of

from megatronish.config.sections.training import RecomputeConfig, RecomputeModule
from megatronish.core.layout import Layout
from megatronish.launch.place import Place

DENSE: tuple[RecomputeModule, ...] = ("core_attn", "layernorm", "mlp")
CASES: list[tuple[tuple[RecomputeModule, ...], Layout, Chosen]] = [
    (DENSE, Layout(tp=2), {"family": "gpt2", "sequence_parallel": True, "dropout": 0.1}),
    (DENSE, Layout(tp=2), {"family": "llama", "sequence_parallel": False}),
    (DENSE, Layout(pp=2), {"family": "llama", "schedule": "zb-h1", "num_microbatches": 3}),
    (DENSE, Layout(pp=2), {"family": "gpt2", "schedule": "interleaved", "dropout": 0.1, "num_microbatches": 4}),
    (DENSE, Layout(dp=2), {"family": "qwen", "zero": 3}),
    (DENSE, Layout(tp=2, cp=2), {"family": "llama", "sequence_parallel": True, "cp_comm_type": "p2p"}),
    (("mlp",), Layout(tp=2), {"family": "bert", "sequence_parallel": True, "dropout": 0.1, "optimizer": "adam"}),
    (DENSE, Layout(tp=2), {"family": "t5", "sequence_parallel": True, "dropout": 0.1}),
    (("layernorm", "mla_up_proj"), Layout(tp=2), {"family": "latent", "sequence_parallel": True}),
    (("core_attn", "mla_up_proj", "mlp"), Layout(pp=2), {"family": "latent", "schedule": "zb-v", "dropout": 0.1}),
    (("mla_up_proj",), Layout(cp=2), {"family": "latent", "cp_comm_type": "p2p"}),
]
ADAPTED: list[tuple[tuple[RecomputeModule, ...], Layout, Chosen]] = [
    (DENSE, Layout(tp=2), {"family": "llama", "sequence_parallel": True, "adapter": "lora", "dropout": 0.1}),
    (DENSE, Layout(tp=2), {"family": "llama", "sequence_parallel": False, "adapter": "ia3"}),
]
EXPERTS: list[tuple[tuple[RecomputeModule, ...], Layout, Chosen]] = [
    (("moe_act", "layernorm", "shared_experts"), Layout(dp=2), {"ep": "most", "zero": 1}),
    (("moe_act", "layernorm", "shared_experts"), Layout(tp=2), {"ep": "most", "sequence_parallel": True}),
    (("moe", "layernorm"), Layout(tp=2), {"ep": "one", "sequence_parallel": True}),
    (("moe", "core_attn"), Layout(tp=2), {"ep": "most", "sequence_parallel": False}),
    (("moe", "mlp"), Layout(pp=2), {"schedule": "zb-h1", "num_microbatches": 3}),
]


def case_of(layout: Layout, given: Chosen) -> Chosen:
    plain = {feature: values[0] for feature, values in choices(layout).items()}
    fixed = {"optimizer": "sgd", "eod_mask_loss": False, "zero": 0, "offload": "none", "tied": False}
    return plain | fixed | given | ({"family": "llama"} if given["family"] == "latent" else {})


def latent(problem: Problem, given: Chosen) -> Problem:
    return (
        replace(problem, model=replace(problem.model, **LATENT, q_lora_rank=7))
        if given["family"] == "latent"
        else problem
    )


def ids(cases: list[tuple[tuple[RecomputeModule, ...], Layout, Chosen]]) -> list[str]:
    return [f"{'_'.join(parts)}-{name_of(layout, case_of(layout, given))}" for parts, layout, given in cases]


def again(parts: tuple[RecomputeModule, ...]) -> RecomputeConfig:
    return RecomputeConfig("selective", recompute_modules=parts)


@pytest.mark.parametrize(("parts", "layout", "given"), CASES, ids=ids(CASES))
def test_parts_that_are_computed_again_train_as_one_process_does(
    parts: tuple[RecomputeModule, ...], layout: Layout, given: Chosen
) -> None:
    chosen = case_of(layout, given)
    spread = replace(spread_of(layout, chosen), recompute=again(parts))
    assert_equal_to_serial(latent(problem_of(layout, chosen), given), spread)


@pytest.mark.parametrize(("parts", "layout", "given"), ADAPTED, ids=ids(ADAPTED))
def test_parts_with_adapters_train_as_one_process_does(
    parts: tuple[RecomputeModule, ...], layout: Layout, given: Chosen
) -> None:
    chosen = case_of(layout, given)
    spread = replace(spread_of(layout, chosen), recompute=again(parts))
    assert_equal_to_serial(adapted_problem_of(layout, chosen), spread)


@pytest.mark.parametrize(
    ("parts", "layout", "given"),
    EXPERTS,
    ids=[f"{'_'.join(parts)}-{number}" for number, (parts, *_) in enumerate(EXPERTS)],
)
def test_parts_with_experts_train_as_one_process_does(
    parts: tuple[RecomputeModule, ...], layout: Layout, given: Chosen
) -> None:
    plain = {feature: values[0] for feature, values in choices_of_experts(layout).items()}
    chosen = case_of(layout, plain | {"family": "llama", "experts": "sigmoid", "etp": "one"} | given)
    problem = expert_problem(layout, chosen)
    others = {"moe_shared_expert_gate": False, "moe_layer_freq": f"[0]*1+[1]*{problem.model.num_layers - 1}"}
    spread = replace(expert_spread(layout, chosen), recompute=again(parts))
    assert_equal_to_serial(replace(problem, model=replace(problem.model, **others)), spread)


@pytest.mark.parametrize("parts", [("moe",), ("core_attn",)], ids="".join)
def test_parts_that_are_computed_again_give_the_same_bits(parts: tuple[RecomputeModule, ...]) -> None:
    """Also where other layers read a part's input, and where gradients have strides of their own: no norm before."""
    plain = {feature: values[0] for feature, values in choices_of_experts(Layout()).items()}
    problem = expert_problem(Layout(), case_of(Layout(), plain | {"family": "qwen", "experts": "softmax"}))
    unlike = {"norm_placement": "output", "qk_layernorm": True, "qk_layernorm_across_heads": True}
    problem = replace(problem, model=replace(problem.model, **unlike, no_rope_freq="2"), global_batch_size=4)
    kept = Spread(Layout(), micro_batch_size=2)
    one, other = (train(Place(), problem, spread) for spread in (kept, replace(kept, recompute=again(parts))))
    assert (one.metrics, one.grad_norms, one.params_norm) == (other.metrics, other.grad_norms, other.params_norm)
    gradients, same = whole([one.gradient_parts]), whole([other.gradient_parts])
    assert [name for name, gradient in gradients.items() if not torch.equal(gradient, same[name])] == []
