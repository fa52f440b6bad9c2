"""Theorem of DiLoCo: islands of any layout are as many runs of one process, and the outer step computed by hand.

Layouts of two to eight ranks in two to four islands, with features that a seeded pairwise array has dealt: losses (the
mean over all tokens) and gradient norms (the mean over islands) of steps of SGD, Adam or Muon, the parameters of each
island between two outer steps and an evaluation of the outer ones then, outer parameters and momentum at the end.
The interval does not divide the number of steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from comparison import BF16_LOSS, assert_close, assert_near, whole
from island_runs import INTERVAL, IslandRecord, serial_islands, train_islands
from pairwise import Chosen, covered_pairs, possible_pairs
from problem import Problem, Spread
from ranks import run_ranks
from sweeps import further, some_of
from theorem_cases import ADAPTERS, adapted_problem_of, choices, deal, name_of, problem_of, spread_of

from megatronish.config.sections.model import ModelConfig
from megatronish.core.layout import Layout
from megatronish.data.loader import BatchShare
from megatronish.launch.place import Place
from megatronish.optim.outer import OuterOptimizer

LAYOUTS = [
    Layout(dp=2),
    Layout(dp=3),
    Layout(dp=4),
    Layout(dp=4),
    Layout(dp=6),
    Layout(dp=2, tp=2),
    Layout(dp=2, pp=2),
    Layout(dp=2, cp=2),
    Layout(dp=4, tp=2),
    Layout(dp=4, pp=2),
    Layout(dp=4, pp=2),
    Layout(dp=3, pp=2),
    Layout(dp=2, cp=2, tp=2),
    Layout(dp=2, cp=2, pp=2),
    Layout(dp=2, tp=2, pp=2),
]
SEED = 49
MEETING = ("zero", "offload", "on_disk", "optimizer", "trained", "tied", "decoupled", "sequence_parallel")
"""Features of which every two that can meet do so; the others are dealt, too."""


def choices_of(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """What each feature may be in this layout: data ranks in islands, of one data rank or of several."""
    islands = {2: (2,), 3: (3,), 4: (2, 4), 6: (2, 3)}[layout.dp]
    of_layout = choices(layout) | {"copies": islands, "trained": ("model", *ADAPTERS)}
    of_layout["num_microbatches"] = (1, 2)
    of_layout["family"] = tuple(family for family in of_layout["family"] if family != "t5")  # it has cases of its own
    return of_layout


CHOICES = [choices_of(layout) for layout in LAYOUTS]


def of_meeting(pairs: set[frozenset[tuple[str, Any]]]) -> set[frozenset[tuple[str, Any]]]:
    """The pairs of two features that matter."""
    return {pair for pair in pairs if all(feature in MEETING for feature, _ in pair)}


DEALT = deal(LAYOUTS, CHOICES, seed=SEED, wanted=of_meeting(possible_pairs(CHOICES)))


def case_of(layout: Layout, chosen: Chosen) -> tuple[Problem, Spread]:
    adapted = chosen | {"adapter": chosen["trained"]}
    problem = problem_of(layout, chosen) if chosen["trained"] == "model" else adapted_problem_of(layout, adapted)
    return problem, replace(spread_of(layout, chosen), copies=chosen["copies"], outer_interval=INTERVAL)


ROUNDING = 4 * 2**-24
"""Of a move, which is the difference of two parameters in fp32: relative to these."""

NOISE = 1e-7
"""Of gradients, most of which are below 1e-2."""

by_hand = cache(serial_islands)


def assert_same_islands(ranks: Sequence[IslandRecord], reference: IslandRecord) -> None:
    for rank in ranks:
        assert_near("losses", rank.losses, reference.losses)
        assert_near("gradient norms", rank.grad_norms, reference.grad_norms)
        assert_near("evaluation", [rank.evaluation], [reference.evaluation])
    for number, parts in reference.islands.items():
        found, expected = whole([rank.islands[number] for rank in ranks if number in rank.islands]), whole([parts])
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_close(
                f"{name} of island {number}", found[name], tensor, more=NOISE * reference.amplified.get(name, 0)
            )
    outer = whole([reference.outer])
    for kind in ("outer", "momentum"):
        found, expected = whole([getattr(rank, kind) for rank in ranks]), whole([getattr(reference, kind)])
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            rounded = ROUNDING * outer[name].abs().max().item() if kind == "momentum" else 0.0
            more = rounded + NOISE * reference.amplified.get(name, 0.0)
            assert_close(f"{kind} of {name}", found[name], tensor, more=more)


CASES = list(zip(LAYOUTS, DEALT, strict=True))
FEW = [case for number, case in enumerate(CASES) if number in (1, 3, 5, 6, 8, 12, 13)]
"""Layouts with each axis, and with each stage of ZeRO; `pytest --all-layouts` takes the others, too."""


@pytest.mark.parametrize(("layout", "chosen"), some_of(CASES, FEW), ids=[name_of(*case) for case in CASES])
def test_islands_of_a_layout_are_as_many_runs_of_one_process(layout: Layout, chosen: Chosen) -> None:
    problem, spread = case_of(layout, chosen)
    assert_same_islands(run_ranks(layout.world_size, train_islands, problem, spread), by_hand(problem, spread.copies))


def test_features_that_can_meet_do_so() -> None:
    possible, met = of_meeting(possible_pairs(CHOICES)), of_meeting(covered_pairs(DEALT))
    assert len(possible & met) > 0.8 * len(possible)
    assert {item for chosen in DEALT for item in chosen.items()} >= {item for pair in possible for item in pair}
    few = [chosen for _, chosen in FEW]
    assert {chosen["zero"] for chosen in few} == {0, 1, 2, 3}
    assert {chosen["optimizer"] for chosen in few} == {"sgd", "adam", "muon"}
    assert {chosen["trained"] for chosen in few} == {"model", *ADAPTERS}


PLAIN = {feature: values[0] for feature, values in choices_of(Layout(dp=2)).items()} | {"micro_batch_size": 2}
EXPERTS_SPREAD = [
    Spread(Layout(dp=4, tp=2), 1, ep=2, etp=1, zero=1, sequence_parallel=True, copies=2, outer_interval=INTERVAL),
    Spread(Layout(dp=2, pp=2), 1, zero=3, copies=2, outer_interval=INTERVAL),
]


@pytest.mark.parametrize("spread", some_of(EXPERTS_SPREAD, EXPERTS_SPREAD[:1]), ids=["dp4_tp2_ep2", "dp2_pp2"])
def test_islands_with_experts_are_as_many_runs_of_one_process(spread: Spread) -> None:
    model = ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_experts=4,
        moe_ffn_hidden_size=12,
        init_method_std=0.2,
        make_vocab_size_divisible_by=4,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.01,
        moe_z_loss_coeff=0.001,
    )
    problem = Problem(model, seq_length=16, global_batch_size=8, optimizer="sgd")
    ranks = run_ranks(spread.layout.world_size, train_islands, problem, spread)
    assert_same_islands(ranks, by_hand(problem, 2))


@pytest.mark.parametrize("layout", [Layout(dp=2), further(Layout(dp=4, tp=2)), further(Layout(dp=2, cp=2))], ids=str)
def test_each_island_clips_by_its_own_logits(layout: Layout) -> None:
    chosen = {feature: values[0] for feature, values in choices_of(layout).items()}
    problem, spread = case_of(layout, chosen | {"family": "llama", "trained": "model", "micro_batch_size": 1})
    problem = replace(problem, largest_logit=0.02)  # below those of every head, so that all are clipped
    ranks = run_ranks(layout.world_size, train_islands, problem, spread)
    assert_same_islands(ranks, by_hand(problem, spread.copies))


T5: list[tuple[Layout, Chosen]] = [
    (Layout(dp=2, pp=2), {"schedule": "zb-h1", "zero": 1, "documents": True, "dropout": 0.1}),
    (Layout(dp=4, tp=2), {"zero": 3, "sequence_parallel": True, "documents": True, "tied": False}),
    (Layout(dp=2, cp=2), {"zero": 2, "cp_comm_type": "a2a", "trained": "lora"}),
]


@pytest.mark.parametrize(("layout", "given"), some_of(T5, T5[1:2]), ids=[str(layout) for layout, _ in T5])
def test_islands_of_a_t5_are_as_many_runs_of_one_process(layout: Layout, given: Chosen) -> None:
    plain = {feature: values[0] for feature, values in choices_of(layout).items()}
    chosen = plain | {"family": "t5", "eod_mask_loss": False, "trained": "model", "micro_batch_size": 2} | given
    problem, spread = case_of(layout, chosen)
    assert problem.model.has_encoder
    assert_same_islands(run_ranks(layout.world_size, train_islands, problem, spread), by_hand(problem, spread.copies))


@pytest.mark.parametrize(
    "spread", [further(Spread(Layout(dp=8), 1, zero=3, copies=2, secondary=2, outer_interval=INTERVAL))], ids=["dp8"]
)
def test_islands_whose_neighbours_keep_what_is_gathered_are_as_many_runs(spread: Spread) -> None:
    problem = problem_of(Layout(dp=8), PLAIN | {"micro_batch_size": 1})
    assert_same_islands(run_ranks(8, train_islands, problem, spread), by_hand(problem, 2))


def test_in_bf16_islands_are_as_near_as_runs_of_one_process() -> None:
    problem = replace(problem_of(Layout(dp=4), PLAIN | {"tied": True}), bf16=True)
    spread = Spread(Layout(dp=4), 1, zero=1, copies=2, outer_interval=INTERVAL)
    reference = by_hand(problem, 2)
    for rank in run_ranks(4, train_islands, problem, spread):
        assert rank.losses == pytest.approx(reference.losses, rel=BF16_LOSS)
        assert rank.evaluation == pytest.approx(reference.evaluation, rel=BF16_LOSS)


# Mistakes


def islands_that_take_turns(patch: pytest.MonkeyPatch) -> None:
    """Samples are dealt to islands in turn, and not in rows: another micro-batch size would be other samples."""
    deal = BatchShare.sample_ids

    def planted(self: BatchShare, **numbers: int) -> list[range]:
        share = BatchShare(self.dp_rank + self.dp_size * self.island, self.dp_size * self.num_islands, 1)
        return deal(share, **numbers)

    patch.setattr(BatchShare, "sample_ids", planted)


def momentum_that_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Every outer step begins without momentum."""
    step = OuterOptimizer.step

    def planted(self: OuterOptimizer) -> None:
        for both in self.state.values():
            both.momentum.zero_()
        step(self)

    patch.setattr(OuterOptimizer, "step", planted)


def islands_that_keep_their_own(patch: pytest.MonkeyPatch) -> None:
    """An outer step after which the islands do not start from the outer parameters."""
    step = OuterOptimizer.step

    def planted(self: OuterOptimizer) -> None:
        kept = {name: master.clone() for name, master in self.masters.items()}
        step(self)
        for name, master in self.masters.items():
            master.copy_(kept[name])

    patch.setattr(OuterOptimizer, "step", planted)


def no_step_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """The last steps of a run are in no outer step, where the interval does not divide its length."""
    patch.setattr(OuterOptimizer, "is_due", lambda self, step, **_: step % self.settings.interval == 0)


MISTAKES: list[Callable[[pytest.MonkeyPatch], None]] = [
    islands_that_take_turns,
    momentum_that_is_forgotten,
    islands_that_keep_their_own,
    no_step_at_the_end,
]


def planted_train(place: Place, problem: Problem, spread: Spread, mistake: int) -> IslandRecord:
    with pytest.MonkeyPatch.context() as patch:
        MISTAKES[mistake](patch)
        return train_islands(place, problem, spread, checks=False)


@pytest.mark.parametrize("mistake", range(len(MISTAKES)), ids=[each.__name__ for each in MISTAKES])
def test_a_mistake_is_found(mistake: int) -> None:
    problem, spread = problem_of(Layout(dp=2), PLAIN), Spread(Layout(dp=2), 2, copies=2, outer_interval=INTERVAL)
    ranks = run_ranks(2, planted_train, problem, spread, mistake)
    with pytest.raises(AssertionError):
        assert_same_islands(ranks, by_hand(problem, 2))
