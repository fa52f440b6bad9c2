"""SparseMixer, which chooses experts of a Phi-3.5-MoE, by every layout: what one process trains is what ranks train."""

from dataclasses import replace

import pytest
from comparison import assert_equal_to_serial
from expert_cases import choices_of_experts, expert_problem, expert_spread
from pairwise import Chosen
from problem import Problem
from theorem_cases import name_of

from megatronish.core.layout import Layout

CASES: list[tuple[Layout, Chosen]] = [
    (Layout(dp=2), {"ep": "most", "zero": 1}),
    (Layout(dp=2), {"experts": "capacity", "ep": "most", "zero": 3, "recompute": "block", "documents": True}),
    (Layout(tp=2), {"ep": "most", "sequence_parallel": True, "recompute": "uniform"}),
    (Layout(tp=2), {"etp": "tp", "sequence_parallel": False}),
    (Layout(cp=2), {"ep": "most", "cp_comm_type": "p2p", "family": "gpt2"}),
    (Layout(cp=2), {"cp_comm_type": "a2a", "num_microbatches": 3}),
    (Layout(pp=2), {"schedule": "zb-h1", "num_microbatches": 3}),
    (Layout(tp=2, pp=2), {"ep": "most", "sequence_parallel": True, "schedule": "1f1b", "num_microbatches": 3}),
]


def case_of(layout: Layout, given: Chosen) -> Chosen:
    plain = {feature: values[0] for feature, values in choices_of_experts(layout).items()}
    optimizer = "adam" if layout.dp > 1 or layout.pp > 1 else "sgd"
    return plain | {"family": "llama", "optimizer": optimizer, "experts": "softmax", "etp": "one"} | given


def mixed(problem: Problem) -> Problem:
    """The same with SparseMixer, of which a token's experts have some rivals and not all."""
    options = {"moe_router_pre_softmax": False, "moe_router_norm_topk_prob": False}
    model = replace(problem.model, moe_router_score_function="sparsemixer", moe_sparsemixer_eps=0.2, **options)
    return replace(problem, model=model)


@pytest.mark.parametrize(
    ("layout", "given"), CASES, ids=[name_of(layout, case_of(layout, given)) for layout, given in CASES]
)
def test_a_layout_trains_what_one_process_trains(layout: Layout, given: Chosen) -> None:
    chosen = case_of(layout, given)
    assert_equal_to_serial(mixed(expert_problem(layout, chosen)), expert_spread(layout, chosen))
