"""Theorem of hpZ: where neighbours keep what ZeRO-3 has gathered, a layout computes the bits that it computes without.

Layouts of at least four ranks that share a parameter, with features that a seeded pairwise array has dealt: a model or
adapters of it, in fp32 or bf16. In fp32 they are compared with one process, too.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from comparison import assert_same_training, run_layout, serial, with_margin
from expert_cases import EXPERTS
from pairwise import Chosen, covered_pairs, one_of_each, possible_pairs
from problem import Problem, Spread
from ranks import run_ranks
from sweeps import some_of
from theorem import Record, train
from theorem_cases import ADAPTERS, adapted_problem_of, choices, cost_of, deal, name_of, problem_of, spread_of
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

from megatronish.config.sections.model import ModelConfig
from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.parallel.data_parallel.units import Keeping, KeptGroup

LAYOUTS = [
    Layout(dp=4),
    Layout(cp=4),
    Layout(dp=2, cp=2),
    Layout(dp=6),
    Layout(dp=3, cp=2),
    Layout(dp=8),
    Layout(dp=2, cp=4),
    Layout(dp=4, tp=2),
    Layout(dp=2, cp=2, tp=2),
    Layout(dp=4, pp=2),
    Layout(dp=4, pp=2),
    Layout(dp=4, pp=2),
    Layout(dp=2, cp=2, pp=2),
    Layout(cp=4, pp=2),
]
SEED = 0
MEETING = ("recompute", "schedule", "offload", "copies", "trained", "bf16", "larger")
"""Features of which every two that can meet do so; the others are dealt, too."""


def choices_of(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """What each feature may be in this layout: that of ZeRO-3, shared by at least four ranks."""
    ranks = layout.dp * layout.cp
    of_layout = choices(layout) | {
        "zero": (3,),
        "copies": (1, 2) if ranks == 8 else (1,),
        "trained": ("model", *(kind for kind in ADAPTERS if kind != "int8")),  # bytes and scales, as those of NF4
        "bf16": (False, True),
        "larger": (False, True),
    }
    if layout.pp > 1:
        of_layout["schedule"] = ("1f1b", "gpipe", "interleaved")
    return of_layout


CHOICES = [choices_of(layout) for layout in LAYOUTS]


def of_meeting(pairs: set[frozenset[tuple[str, Any]]]) -> set[frozenset[tuple[str, Any]]]:
    """The pairs of two features that matter."""
    return {pair for pair in pairs if all(feature in MEETING for feature, _ in pair)}


DEALT = deal(LAYOUTS, CHOICES, seed=SEED, wanted=of_meeting(possible_pairs(CHOICES)))


def case_of(layout: Layout, chosen: Chosen) -> tuple[Problem, Spread]:
    """What is trained, and how it is spread without neighbours that keep anything."""
    adapted = chosen | {"adapter": chosen["trained"]}
    problem = problem_of(layout, chosen) if chosen["trained"] == "model" else adapted_problem_of(layout, adapted)
    return replace(problem, bf16=chosen["bf16"]), spread_of(layout, chosen)


def neighbours_of(spread: Spread, chosen: Chosen) -> int:
    """The least or the largest number that the ranks which share a parameter can be cut into."""
    ranks = spread.layout.dp * spread.layout.cp // spread.copies
    sizes = [size for size in range(2, ranks) if ranks % size == 0]
    return sizes[-1] if chosen["larger"] else sizes[0]


def assert_equal_bits(ranks: list[Record], others: list[Record]) -> None:
    for one, other in zip(ranks, others, strict=True):
        assert one.metrics == other.metrics
        assert one.grad_norms == other.grad_norms
        assert (one.evaluation, one.params_norm) == (other.evaluation, other.params_norm)
        for kind in ("initial_parts", "gradient_parts", "trained_parts"):
            mine, theirs = getattr(one, kind), getattr(other, kind)
            assert mine.keys() == theirs.keys()
            for name, helds in mine.items():
                for held, expected in zip(helds, theirs[name], strict=True):
                    assert held.offset == expected.offset
                    assert torch.equal(held.values, expected.values), f"{kind} of {name}"


CASES = list(zip(LAYOUTS, DEALT, strict=True))
SPREADS = [case_of(*case)[1] for case in CASES]
MET = [
    {feature: chosen[feature] for feature in ("recompute", "schedule", "trained", "bf16")}
    | {"offload": each.offload, "on_disk": each.on_disk, "copies": each.copies}
    | {"neighbours": neighbours_of(each, chosen), "has_many": chosen["num_microbatches"] > 1}
    for each, chosen in zip(SPREADS, DEALT, strict=True)
]
"""What the cases have in effect."""
FEW = [CASES[number] for number in one_of_each(MET, [cost_of(*case) for case in CASES])]
"""Cheap cases with every value of the features that meet; `pytest --all-layouts` takes all."""


@pytest.mark.parametrize(("layout", "chosen"), some_of(CASES, FEW), ids=map(name_of, LAYOUTS, DEALT))
def test_a_layout_computes_the_same_bits(layout: Layout, chosen: Chosen) -> None:
    problem, spread = case_of(layout, chosen)
    kept = replace(spread, secondary=neighbours_of(spread, chosen))
    if not problem.bf16:
        problem = with_margin(problem)
    ranks = run_layout(problem, kept)
    assert_equal_bits(ranks, run_layout(problem, spread))
    if not problem.bf16:
        assert_same_training(ranks, serial(problem))


def test_features_that_can_meet_do_so() -> None:
    possible, met = of_meeting(possible_pairs(CHOICES)), of_meeting(covered_pairs(DEALT))
    assert len(possible & met) > 0.8 * len(possible)
    assert {item for chosen in DEALT for item in chosen.items()} >= {item for pair in possible for item in pair}


EXPERTS_SPREAD = [
    (Spread(Layout(dp=4, tp=2), 1, ep=2, etp=1, zero=3, sequence_parallel=True), 2),
    (Spread(Layout(dp=2, cp=2, pp=2), 1, ep=1, etp=1, zero=3), 2),
    (Spread(Layout(dp=8), 1, ep=2, zero=3), 4),
]


@pytest.mark.parametrize(
    ("spread", "secondary"), some_of(EXPERTS_SPREAD, EXPERTS_SPREAD[:1]), ids=["dp4_tp2", "dp2_cp2_pp2", "dp8"]
)
def test_a_layout_with_experts_computes_the_same_bits(spread: Spread, secondary: int) -> None:
    model = ModelConfig(
        num_layers=2 * spread.layout.pp,
        hidden_size=16,
        num_attention_heads=4,
        num_experts=8,
        moe_ffn_hidden_size=12,
        init_method_std=0.2,
        make_vocab_size_divisible_by=4,
        moe_router_num_groups=2,
        moe_shared_expert_intermediate_size=8,
        **EXPERTS["sigmoid"],
    )
    problem = Problem(model, seq_length=16, global_batch_size=2 * spread.layout.dp)
    ranks = run_layout(problem, replace(spread, secondary=secondary))
    assert_equal_bits(ranks, run_layout(problem, spread))


# Mistakes


def kept_beyond_the_step(patch: pytest.MonkeyPatch) -> None:
    """The parts are there in the next step still, and are of the parameters before the update."""
    patch.setattr(Keeping, "__bool__", lambda _self: True)


def part_of_another(patch: pytest.MonkeyPatch) -> None:
    """A rank keeps the part that its neighbour should."""
    keep = KeptGroup._to_sharded_post_forward

    def planted(self: KeptGroup) -> None:
        info = self.post_forward_mesh_info  # which its parameters share
        assert isinstance(info, HSDPMeshInfo)
        info.shard_mesh_rank = 1 - info.shard_mesh_rank
        keep(self)
        info.shard_mesh_rank = 1 - info.shard_mesh_rank

    patch.setattr(KeptGroup, "_to_sharded_post_forward", planted)


MISTAKES: list[Callable[[pytest.MonkeyPatch], None]] = [kept_beyond_the_step, part_of_another]


def planted_train(place: Place, problem: Problem, spread: Spread, mistake: int) -> Record:
    with pytest.MonkeyPatch.context() as patch:
        MISTAKES[mistake](patch)
        return train(place, problem, spread)


@pytest.mark.parametrize("mistake", range(len(MISTAKES)), ids=[each.__name__ for each in MISTAKES])
def test_a_mistake_is_found(mistake: int) -> None:
    layout = Layout(dp=4)
    plain = {feature: values[0] for feature, values in CHOICES[0].items()}
    problem, spread = problem_of(layout, plain), spread_of(layout, plain)
    ranks = run_ranks(4, planted_train, problem, replace(spread, secondary=2), mistake)
    with pytest.raises(AssertionError):
        assert_same_training(ranks, serial(problem))
