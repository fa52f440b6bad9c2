"""T5 by every layout: what the theorem's deal has of it, at layouts that share few ranks."""

import pytest
from comparison import assert_equal_to_serial
from pairwise import Chosen
from theorem_cases import choices, name_of, problem_of, spread_of

from megatronish.core.layout import Layout

CASES: list[tuple[Layout, Chosen]] = [
    (Layout(dp=2), {"zero": 1, "dropout": 0.1, "documents": True}),
    (Layout(tp=2), {"sequence_parallel": False, "dropout": 0.1}),
    (Layout(pp=2), {"schedule": "1f1b", "documents": True, "num_microbatches": 3}),
    (Layout(tp=2), {"sequence_parallel": True, "documents": True, "tied": False}),
    (Layout(cp=2), {"documents": True, "dropout": 0.1, "cp_comm_type": "a2a"}),
    (Layout(pp=2), {"schedule": "zb-h1", "documents": True, "num_microbatches": 3, "zero": 1}),
    (Layout(dp=2), {"zero": 3, "documents": True, "recompute": "uniform"}),
    (Layout(dp=2, pp=2), {"zero": 2, "recompute": "block", "tied": False, "schedule": "1f1b"}),
    (Layout(pp=3), {"schedule": "interleaved", "num_microbatches": 3, "recompute": "selective"}),
    (Layout(tp=2, pp=2), {"schedule": "zb-v", "sequence_parallel": True, "zero": 1, "dropout": 0.1}),
]


def case_of(layout: Layout, given: Chosen) -> Chosen:
    plain = {feature: values[0] for feature, values in choices(layout).items()}
    optimizer = "adam" if layout.dp > 1 or layout.pp > 1 else "sgd"
    return (
        plain | {"family": "t5", "optimizer": optimizer, "eod_mask_loss": False, "zero": 0, "offload": "none"} | given
    )


@pytest.mark.parametrize(("layout", "given"), CASES, ids=[name_of(a, case_of(a, b)) for a, b in CASES])
def test_a_layout_trains_the_same_t5_as_one_process(layout: Layout, given: Chosen) -> None:
    chosen = case_of(layout, given)
    assert_equal_to_serial(problem_of(layout, chosen), spread_of(layout, chosen))
