"""Multi-token prediction by every layout: what one process trains is what ranks train, each depth's loss included.

In two steps: an evaluation has the main loss alone, so what an update made of these layers shows in the next step.
"""

from dataclasses import replace
from typing import Any

import pytest
from comparison import assert_equal_to_serial, assert_near_in_half_precision, serial
from expert_cases import choices_of_experts, expert_problem, expert_spread
from pairwise import Chosen
from problem import Problem
from test_latent_equal_serial import LATENT, case_of
from theorem_cases import adapted_problem_of, name_of, problem_of, spread_of

from megatronish.core.layout import Layout

CASES: list[tuple[int, Layout, Chosen]] = [
    (1, Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "tied": True}),
    (2, Layout(tp=2), {"sequence_parallel": False, "documents": True, "recompute": "uniform"}),
    (1, Layout(pp=2), {"schedule": "1f1b", "dropout": 0.1, "num_microbatches": 3}),
    (1, Layout(pp=2), {"schedule": "1f1b", "tied": True, "num_microbatches": 3, "family": "gpt_oss"}),
    (2, Layout(pp=2), {"schedule": "zb-h1", "tied": True, "num_microbatches": 3}),
    (1, Layout(pp=2), {"schedule": "zb-v", "num_microbatches": 3, "recompute": "uniform", "tied": True}),
    (1, Layout(pp=2), {"schedule": "interleaved", "num_microbatches": 4, "split": "auto"}),
    (2, Layout(cp=2), {"cp_comm_type": "p2p", "documents": True, "dropout": 0.1}),
    (1, Layout(cp=2), {"cp_comm_type": "a2a", "eod_mask_loss": True, "tied": True}),
    (1, Layout(dp=2), {"zero": 1, "optimizer": "muon", "documents": True}),
    (2, Layout(dp=2), {"zero": 2, "recompute": "selective", "tied": True}),
    (2, Layout(dp=2), {"zero": 3, "optimizer": "adam", "recompute": "uniform"}),
    (1, Layout(tp=2, pp=2), {"schedule": "zb-h1", "sequence_parallel": True, "num_microbatches": 3}),
    (1, Layout(tp=2, cp=2), {"sequence_parallel": True, "cp_comm_type": "p2p", "sight": "window", "tied": True}),
    (2, Layout(dp=2, pp=2), {"zero": 3, "schedule": "1f1b", "num_microbatches": 3, "tied": True}),
    (1, Layout(pp=2, cp=2), {"schedule": "zb-v", "cp_comm_type": "p2p", "documents": True, "num_microbatches": 3}),
]
ADAPTED: list[tuple[Layout, Chosen]] = [
    (Layout(tp=2), {"sequence_parallel": True, "dropout": 0.1, "adapter": "lora"}),
    (Layout(pp=2), {"schedule": "1f1b", "num_microbatches": 3, "adapter": "qlora"}),
]
EXPERTS: list[tuple[Layout, Chosen]] = [
    (Layout(dp=2), {"ep": "most", "zero": 1}),
    (Layout(tp=2, pp=2), {"ep": "most", "sequence_parallel": True, "schedule": "1f1b", "num_microbatches": 3}),
]


def ids(cases: list[tuple[int, Layout, Chosen]]) -> list[str]:
    return [f"depth{depths}-{name_of(layout, case_of(layout, given))}" for depths, layout, given in cases]


def with_depths(problem: Problem, depths: int, **more: Any) -> Problem:
    """The same with layers of multi-token prediction, whose losses weigh as much as the main one's."""
    model = replace(problem.model, mtp_num_layers=depths, mtp_loss_scaling_factor=1.0, **more)
    return replace(problem, model=model)


@pytest.mark.parametrize(("depths", "layout", "given"), CASES, ids=ids(CASES))
def test_a_layout_trains_further_predictions_as_one_process_does(depths: int, layout: Layout, given: Chosen) -> None:
    chosen = case_of(layout, given)
    problem = with_depths(problem_of(layout, chosen), depths)
    assert_equal_to_serial(problem, spread_of(layout, chosen))
    losses = {name for metrics in serial(problem).metrics for name in metrics}
    assert losses == {"loss", *(f"mtp_{depth}_loss" for depth in range(1, depths + 1))}


@pytest.mark.parametrize(("layout", "given"), ADAPTED, ids=["lora", "qlora"])
def test_a_layout_trains_the_same_adapters_in_layers_of_further_predictions(layout: Layout, given: Chosen) -> None:
    chosen = case_of(layout, given)
    assert_equal_to_serial(with_depths(adapted_problem_of(layout, chosen), 1), spread_of(layout, chosen))


@pytest.mark.parametrize(("layout", "given"), EXPERTS, ids=["dp2", "tp2_pp2"])
def test_a_layout_trains_a_model_as_deepseek_v3_is(layout: Layout, given: Chosen) -> None:
    """Latent attention, a first layer that is dense, and experts in the others, that of further predictions too."""
    plain = {feature: values[0] for feature, values in choices_of_experts(layout).items()}
    chosen = case_of(layout, plain | {"experts": "sigmoid", "etp": "one"} | given)
    problem = expert_problem(layout, chosen)
    dense = f"[0]*1+[1]*{problem.model.num_layers - 1}"
    problem = with_depths(problem, 1, **LATENT, q_lora_rank=7, moe_shared_expert_gate=False, moe_layer_freq=dense)
    assert_equal_to_serial(problem, expert_spread(layout, chosen))
    assert any(name.startswith(f"{problem.model.num_layers}/") for name in serial(problem).routed.states)


def test_further_predictions_in_bf16_are_as_near_to_fp32_as_those_of_one_process() -> None:
    layout = Layout(tp=2, pp=2)
    chosen = case_of(layout, {"sequence_parallel": True, "schedule": "1f1b", "num_microbatches": 3, "tied": True})
    problem = with_depths(problem_of(layout, chosen), 1)
    assert_near_in_half_precision(problem, spread_of(layout, chosen), bf16=True)
