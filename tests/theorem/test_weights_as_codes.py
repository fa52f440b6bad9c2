"""Theorem of qwZ: with weights as codes a layout computes with the same bits as one process, and learns the same.

Blocks of codes are those of a tensor's rows, so the codes of one process are those of any layout. What a model computes
with is compared bit by bit; what it learns, as in the theorem of all layouts, whose features are dealt here, too.
"""

from dataclasses import replace
from typing import Any

import pytest
from comparison import assert_same_training, run_layout, serial
from pairwise import Chosen, pairwise, possible_pairs
from problem import Problem, Spread
from theorem_cases import choices, name_of, problem_of, spread_of

from megatronish.core.layout import Layout

BLOCK = 8
SEED = 0
LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(dp=4),
    Layout(cp=2),
    Layout(dp=2, tp=2),
    Layout(dp=2, pp=2),
    Layout(dp=2, cp=2),
    Layout(dp=8),
    Layout(dp=4, tp=2),
    Layout(dp=4, pp=2),
    Layout(dp=2, tp=2, pp=2),
    Layout(dp=2, tp=2, cp=2),
    Layout(dp=2, cp=2, pp=2),
]
MEETING = ("zero", "overlap", "offload", "on_disk", "copies", "tied", "schedule", "kept")
"""Features of which every two that can meet do so; the others are dealt, too."""


def choices_of(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """What each feature may be in this layout; `kept`: neighbours keep what ZeRO-3 has gathered (hpZ)."""
    return choices(layout) | {"kept": (False, True) if layout.dp * layout.cp >= 4 else (False,)}


CHOICES = [choices_of(layout) for layout in LAYOUTS]


def of_meeting(pairs: set[frozenset[tuple[str, Any]]]) -> set[frozenset[tuple[str, Any]]]:
    """The pairs of two features that matter."""
    return {pair for pair in pairs if all(feature in MEETING for feature, _ in pair)}


DEALT = pairwise(CHOICES, seed=SEED, wanted=of_meeting(possible_pairs(CHOICES)))


def case_of(layout: Layout, chosen: Chosen) -> tuple[Problem, Spread]:
    """What is trained, with rows of whole blocks on every rank, and how it is spread."""
    problem, spread = problem_of(layout, chosen), spread_of(layout, chosen)
    heads = problem.model.num_attention_heads
    model = replace(problem.model, hidden_size=8 * heads, kv_channels=8, ffn_hidden_size=8 * heads)
    ranks = layout.dp * layout.cp // spread.copies
    keeps = chosen["kept"] and spread.zero == 3 and ranks >= 4
    return replace(problem, model=model, weight_block=BLOCK), replace(spread, secondary=2 if keeps else None)


@pytest.mark.parametrize(("layout", "chosen"), list(zip(LAYOUTS, DEALT, strict=True)), ids=map(name_of, LAYOUTS, DEALT))
def test_a_layout_learns_the_same_with_weights_as_codes(layout: Layout, chosen: Chosen) -> None:
    problem, spread = case_of(layout, chosen)
    assert_same_training(run_layout(problem, spread), serial(problem))
