"""Bits of models with experts: what must be equal in every bit, and what must not move routers at all."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import comparison
import pytest
import torch
from comparison import serial, with_margin
from expert_cases import EXPERTS
from problem import Problem, Spread
from ranks import run_ranks
from sweeps import some_of
from theorem import Record, Samples, build, states_of, train
from theorem_cases import RECOMPUTE

from megatronish.config.sections.model import ModelConfig
from megatronish.core.layout import Layout
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.launch.place import Place
from megatronish.optim.loss_scale import DynamicLossScale
from megatronish.parallel.mesh import Mesh

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_experts": 8,
    "moe_ffn_hidden_size": 12,
    "init_method_std": 0.2,
    "make_vocab_size_divisible_by": 4,
}
BIASED = EXPERTS["sigmoid"] | {"moe_router_num_groups": 2, "moe_shared_expert_intermediate_size": 8}
LIMITED = EXPERTS["capacity"]


def problem_of(options: dict[str, Any]) -> Problem:
    """Four layers with experts, dropout at its default."""
    return Problem(ModelConfig(**SIZES, **options), seq_length=12, global_batch_size=4)


def assert_equal_bits(one: Record, other: Record) -> None:
    assert one.metrics == other.metrics
    assert one.grad_norms == other.grad_norms and one.evaluation == other.evaluation
    for kind in ("initial_parts", "gradient_parts", "trained_parts"):
        for name, helds in getattr(one, kind).items():
            for mine, theirs in zip(helds, getattr(other, kind)[name], strict=True):
                assert torch.equal(mine.values, theirs.values), f"{kind} of {name}"
    assert all(map(torch.equal, one.routed.tokens, other.routed.tokens))
    assert all(torch.equal(state, other.routed.states[name]) for name, state in one.routed.states.items())


SPREADS = {
    "tp2": Spread(Layout(tp=2), 2, ep=2, etp=1, sequence_parallel=True),
    "dp2-cp2-zero3": Spread(Layout(dp=2, cp=2), 1, ep=2, zero=3),
    "dp2-tp2-pp2": Spread(Layout(dp=2, tp=2, pp=2), 1, ep=2, etp=2, schedule="zb-v"),
}


OPTIONS = {"bias": BIASED, "capacity": LIMITED}


@cache
def first_run(options: str, spread: str) -> list[Record]:
    """What the ranks of a layout saw, for several tests to compare with."""
    return run_ranks(SPREADS[spread].layout.world_size, train, problem_of(OPTIONS[options]), SPREADS[spread])


@pytest.mark.parametrize(
    ("options", "spread"),
    some_of([("bias", "dp2-tp2-pp2"), ("capacity", "dp2-cp2-zero3")], [("capacity", "dp2-cp2-zero3")]),
)
def test_the_same_layout_gives_the_same_bits_twice(options: str, spread: str) -> None:
    again = run_ranks(SPREADS[spread].layout.world_size, train, problem_of(OPTIONS[options]), SPREADS[spread])
    for mine, theirs in zip(first_run(options, spread), again, strict=True):
        assert_equal_bits(mine, theirs)


@pytest.mark.parametrize(
    ("options", "spread", "methods"),
    [
        ("bias", "tp2", ("selective",)),
        pytest.param("capacity", "tp2", ("uniform",), marks=pytest.mark.sweep),
        pytest.param("bias", "tp2", ("uniform", "block"), marks=pytest.mark.sweep),
        pytest.param("capacity", "tp2", ("selective", "block"), marks=pytest.mark.sweep),
        pytest.param("bias", "dp2-tp2-pp2", ("uniform",), marks=pytest.mark.sweep),
        ("capacity", "dp2-cp2-zero3", ("block",)),
    ],
)
def test_recomputation_changes_no_bit(options: str, spread: str, methods: Sequence[str]) -> None:
    """It replays choices, and counts no token again."""
    size, problem = SPREADS[spread].layout.world_size, problem_of(OPTIONS[options])
    for method in methods:
        again = run_ranks(size, train, problem, replace(SPREADS[spread], recompute=RECOMPUTE[method]))
        for one, other in zip(first_run(options, spread), again, strict=True):
            assert_equal_bits(one, other)


def states_by_event(place: Place, spread: Spread) -> dict[str, dict[str, torch.Tensor]]:
    """States of routers at the start, and after an evaluation, a step that overflows in fp16, and one that does not."""
    problem = replace(problem_of(BIASED), fp16=True, optimizer="sgd")
    mesh = Mesh.of(spread.parallel, place, has_experts=True)
    engine = build(mesh, problem, spread)
    batches = micro_batches(
        Samples(problem.seq_length),
        consumed_samples=0,
        global_batch_size=4,
        share=BatchShare(mesh.dp.rank, mesh.dp.size, spread.micro_batch_size),
        collate=Collator(0),
    )
    seen = {"start": states_of(engine)}
    engine.evaluate(batches)
    seen["evaluation"] = states_of(engine)
    for scale, event in ((2.0**40, "overflow"), (1.0, "step")):
        engine.rule = engine.rule._replace(
            loss_scale=DynamicLossScale(initial=scale, minimum=1.0, window=1000, hysteresis=1)
        )
        result = engine.step(batches, num_steps_done=0, learning_rate=0.1, weight_decay=0.0)
        assert result.skipped == (event == "overflow") and result.expert_load is not None
        # Four layers of 48 tokens with two choices each: an evaluation or an overflow leaves nothing to be counted.
        assert result.expert_load.tokens.sum() == 4 * 48 * 2
        seen[event] = states_of(engine)
    return seen


def test_evaluation_and_overflow_move_no_bias() -> None:
    for seen in run_ranks(2, states_by_event, Spread(Layout(dp=2), 1, ep=2)):
        for event in ("evaluation", "overflow"):
            assert all(torch.equal(state, seen["start"][name]) for name, state in seen[event].items())
        assert seen["step"] and any(not torch.equal(state, seen["start"][name]) for name, state in seen["step"].items())


def test_a_seed_with_a_margin_is_found_or_another_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serial(with_margin(problem_of(BIASED))).routed.margin >= comparison.SMALLEST_MARGIN
    monkeypatch.setattr(comparison, "SMALLEST_MARGIN", 1.0)
    monkeypatch.setattr(comparison, "NUM_SEEDS", 2)
    with pytest.raises(AssertionError, match=r"seeds 7 to 8 have choices within 1e.00, .*; name another seed"):
        with_margin(problem_of(BIASED))
