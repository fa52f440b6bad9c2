"""Theorem for models with experts: every layout trains the same model as one process.

Features of dense models meet four kinds of experts and every grid (ep, etp) over the ranks of a stage, as a seeded
pairwise array deals them. Besides what is compared of dense models, the balancing losses are near, and the choices of
each expert and the states of routers are equal. Seeds for which a choice of the serial run hangs on rounding are left
out. A few of the layouts run under the check of support/happens_before.py, all with `pytest --check-races`.
`pytest --all-layouts` takes the product of experts, grids, schedules, cp and ZeRO in every layout.
"""

import pytest
from comparison import assert_equal_to_serial, assert_near_in_half_precision
from expert_cases import (
    EXPERT_CASES,
    EXPERT_CHOICES,
    EXPERT_DEALT,
    OWN,
    all_expert_cases,
    choices_of_experts,
    expert_problem,
    expert_spread,
    of_experts,
)
from pairwise import Chosen, covered_pairs, one_of_each, possible_pairs
from sweeps import some_of
from theorem_cases import cost_of, name_of

from megatronish.core.layout import Layout


def name_of_experts(layout: Layout, chosen: Chosen) -> str:
    spread = expert_spread(layout, chosen)
    by = "-deep_ep" if spread.parallel.wants_deep_ep else ""
    return f"{chosen['experts']}-ep{spread.ep}_etp{spread.etp}{by}-{name_of(layout, chosen)}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chosen" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-layouts")
        cases = all_expert_cases() if everything else list(zip(EXPERT_CASES, EXPERT_DEALT, strict=True))
        every = everything or metafunc.config.getoption("--check-races")
        own = [{feature: chosen[feature] for feature in OWN} for _, chosen in cases]
        checked = range(len(cases)) if every else one_of_each(own, [cost_of(*case) for case in cases])
        metafunc.parametrize(
            ("layout", "chosen", "is_checked"),
            [(*case, number in checked) for number, case in enumerate(cases)],
            ids=[name_of_experts(*case) for case in cases],
        )


def test_a_layout_trains_the_same_experts_as_one_process(layout: Layout, chosen: Chosen, is_checked: bool) -> None:
    assert_equal_to_serial(expert_problem(layout, chosen), expert_spread(layout, chosen), is_checked=is_checked)


def test_experts_meet_every_feature_in_some_layout() -> None:
    assert of_experts(possible_pairs(EXPERT_CHOICES)) - covered_pairs(EXPERT_DEALT) == set()


HALF = [
    (Layout(dp=2, tp=2), {"experts": "softmax", "family": "llama", "ep": "most", "etp": "one"}, "bf16"),
    (
        Layout(cp=2, tp=2),
        {"experts": "sigmoid", "family": "qwen", "sight": "window", "ep": "fewest", "etp": "tp"},
        "bf16",
    ),
    (Layout(dp=2, pp=2), {"experts": "capacity", "family": "gpt2", "ep": "most", "etp": "one"}, "bf16"),
    (Layout(dp=2, tp=2), {"experts": "sigmoid", "family": "llama", "ep": "most", "etp": "tp"}, "fp16"),
    (
        Layout(dp=2, tp=2),
        {"experts": "sigmoid", "family": "llama", "ep": "most", "etp": "one", "dispatcher": "deepep"},
        "bf16",
    ),
]


@pytest.mark.parametrize(("layout", "main", "precision"), some_of(HALF, [HALF[0], HALF[3], HALF[4]]))
def test_in_half_precision_a_layout_of_experts_is_as_near_to_fp32_as_one_process_is(
    layout: Layout, main: Chosen, precision: str
) -> None:
    plain = {feature: values[0] for feature, values in choices_of_experts(layout).items()}
    chosen = plain | {"num_microbatches": 3} | main
    assert_near_in_half_precision(expert_problem(layout, chosen), expert_spread(layout, chosen), **{precision: True})
