"""Tests of learning rate, weight decay and batch size over a run, against values worked out by hand."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.training import TrainingConfig, parse_batch_sizes
from megatronish.optim.schedules import (
    BatchSizeSchedule,
    LearningRateSchedule,
    RampUp,
    StepWise,
    batch_sizes_of,
    build_learning_rate_schedule,
)


def schedule_of(
    *, train_iters: int | None = 100, train_samples: int | None = None, **optimizer: Any
) -> LearningRateSchedule:
    """100 steps of 8 samples, lr from 1.0 to 0.2 unless told otherwise."""
    config = replace(OptimizerConfig(lr=1.0, min_lr=0.2), **optimizer)
    training = TrainingConfig(train_iters=train_iters, train_samples=train_samples)
    return build_learning_rate_schedule(config, training, global_batch_size=8)


def rate(schedule: LearningRateSchedule, step: int) -> float:
    """Learning rate of the 1-based step, as a run without ramp-up asks for it."""
    return schedule.learning_rate((step - 1) * 8)


def test_the_first_step_of_a_warm_up_uses_its_initial_rate() -> None:
    assert rate(schedule_of(lr_warmup_iters=10), 1) == 0.0
    assert rate(schedule_of(lr_warmup_iters=10, lr_warmup_init=0.1), 1) == pytest.approx(0.1)
    assert rate(schedule_of(lr_warmup_iters=0), 1) == 1.0


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    schedule = schedule_of(lr_warmup_iters=10, lr_warmup_init=0.1)
    assert [rate(schedule, step) for step in (1, 6, 11)] == pytest.approx([0.1, 0.55, 1.0])


@pytest.mark.parametrize(
    ("style", "quarter", "half", "end"),
    [
        ("constant", 1.0, 1.0, 1.0),
        ("linear", 0.2 + 0.8 * 0.75, 0.6, 0.2),
        ("cosine", 0.2 + 0.8 * 0.8535533905932737, 0.6, 0.2),
        ("inverse-square-root", (20 / 40) ** 0.5, (20 / 60) ** 0.5, (20 / 100) ** 0.5),
    ],
)
def test_each_style_decays_as_its_formula_says(style: str, quarter: float, half: float, end: float) -> None:
    schedule = schedule_of(lr_warmup_iters=20, lr_decay_style=style)
    assert [rate(schedule, step) for step in (41, 61, 101)] == pytest.approx([quarter, half, end])
    assert rate(schedule, 10_000) == (1.0 if style == "constant" else 0.2)


def test_embedding_and_head_follow_the_same_shape_between_rates_of_their_own() -> None:
    shape: dict[str, Any] = {"lr_warmup_iters": 20, "lr_decay_style": "cosine", "lr_warmup_init": 0.1}
    schedule = schedule_of(**shape, decoupled_lr=3.0, decoupled_min_lr=0.5).decoupled
    alone = schedule_of(**shape | {"lr": 3.0, "min_lr": 0.5})
    assert schedule is not None and schedule.decoupled is None
    for step in (1, 6, 21, 41, 61, 101, 500):
        assert rate(schedule, step) == rate(alone, step)
    assert rate(schedule, 101) == pytest.approx(0.5)
    with_min_lr = schedule_of(**shape, decoupled_lr=3.0).decoupled
    assert with_min_lr is not None and rate(with_min_lr, 101) == pytest.approx(0.2)
    assert schedule_of(**shape).decoupled is None


def test_inverse_square_root_never_falls_below_the_minimum() -> None:
    schedule = schedule_of(lr_warmup_iters=1, lr_decay_style="inverse-square-root")
    assert rate(schedule, 2) == 1.0
    assert rate(schedule, 90) == 0.2


@pytest.mark.parametrize(
    ("style", "half"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_holds_the_peak_and_then_decays(style: str, half: float) -> None:
    schedule = schedule_of(
        lr_warmup_iters=10, lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=20
    )  # fmt: skip
    assert [rate(schedule, step) for step in (11, 50, 81)] == [1.0, 1.0, 1.0]
    assert rate(schedule, 91) == pytest.approx(0.2 + 0.8 * half)
    assert rate(schedule, 101) == pytest.approx(0.2)


def test_the_rate_never_leaves_its_bounds() -> None:
    styles = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
    for style, warmup in product(styles, (0, 1, 33)):
        schedule = schedule_of(lr_decay_style=style, lr_warmup_iters=warmup, lr_wsd_decay_iters=30)
        rates = [schedule.learning_rate(consumed) for consumed in range(1000)]
        assert max(rates) == 1.0
        assert min(rates[warmup * 8 :]) >= 0.2
        assert rates[warmup * 8 :] == sorted(rates[warmup * 8 :], reverse=True)


def test_a_decay_shorter_than_the_run_stays_at_the_minimum() -> None:
    schedule = schedule_of(lr_decay_iters=50)
    assert rate(schedule, 26) == pytest.approx(0.6)
    assert rate(schedule, 52) == 0.2


def test_warm_up_can_be_a_part_of_the_decay() -> None:
    schedule = schedule_of(lr_warmup_fraction=0.25, lr_decay_iters=50)
    assert schedule.warmup_samples == 100
    assert schedule.learning_rate(50) == pytest.approx(0.5)


def test_samples_and_steps_spell_the_same_schedule() -> None:
    in_steps = schedule_of(lr_warmup_iters=10, lr_decay_iters=90, lr_decay_style="WSD", lr_wsd_decay_iters=20)
    in_samples = schedule_of(
        train_iters=None,
        train_samples=800,
        lr_warmup_samples=80,
        lr_decay_samples=720,
        lr_decay_style="WSD",
        lr_wsd_decay_samples=160,
    )
    for consumed in range(0, 1000, 8):
        assert in_steps.learning_rate(consumed) == in_samples.learning_rate(consumed)


@pytest.mark.parametrize(("style", "quarter"), [("linear", 0.325), ("cosine", 0.3 + 0.1 * 0.14644660940672624)])
def test_weight_decay_goes_from_start_to_end(style: str, quarter: float) -> None:
    schedule = schedule_of(start_weight_decay=0.3, end_weight_decay=0.4, weight_decay_incr_style=style)
    assert [schedule.weight_decay(c) for c in (0, 200, 800, 900)] == pytest.approx([0.3, quarter, 0.4, 0.4])


def test_weight_decay_is_constant_unless_told() -> None:
    schedule = schedule_of(weight_decay=0.1)
    assert {schedule.weight_decay(consumed) for consumed in range(0, 2000, 8)} == {0.1}


RAMP = (64, 64, 300_000)  # and 1,024 samples a step after it


def ramped(**optimizer: Any) -> tuple[LearningRateSchedule, BatchSizeSchedule]:
    """1,000 steps, 263,616 samples before the last one, a warm-up of 100 steps, from 3e-4 to 3e-5 by a cosine."""
    config = replace(OptimizerConfig(lr=3e-4, min_lr=3e-5, lr_warmup_iters=100, lr_decay_style="cosine"), **optimizer)
    training = TrainingConfig(train_iters=1000, rampup_batch_size=RAMP)
    schedule = build_learning_rate_schedule(config, training, global_batch_size=1024)
    return schedule, BatchSizeSchedule.of(RAMP, global_batch_size=1024)


def test_with_a_ramp_lengths_in_steps_end_at_those_steps() -> None:
    schedule, batches = ramped(start_weight_decay=0.0, end_weight_decay=0.1, weight_decay_incr_style="linear")
    consumed = batches.consumed_samples
    assert consumed(999) == 263_616
    assert consumed(1000) == schedule.train_samples == schedule.decay_samples
    assert schedule.learning_rate(consumed(99)) < schedule.learning_rate(consumed(100)) == 3e-4
    assert schedule.learning_rate(consumed(101)) < 3e-4
    assert schedule.learning_rate(consumed(999)) == pytest.approx(3e-5, rel=1e-2)
    assert schedule.learning_rate(consumed(1000)) == pytest.approx(3e-5, rel=1e-12)
    assert schedule.weight_decay(consumed(1000)) == pytest.approx(0.1)


def test_with_a_ramp_wsd_decays_over_its_last_steps() -> None:
    schedule, batches = ramped(lr_decay_style="WSD", lr_wsd_decay_style="linear", lr_wsd_decay_iters=100)
    rates = [schedule.learning_rate(batches.consumed_samples(step)) for step in (100, 500, 900, 901, 1000)]
    assert rates[:3] == [3e-4] * 3
    assert 2.9e-4 < rates[3] < 3e-4
    assert rates[4] == pytest.approx(3e-5)


def test_a_ramp_leaves_lengths_in_samples_alone() -> None:
    config = OptimizerConfig(lr=3e-4, lr_warmup_samples=1000)
    training = TrainingConfig(train_samples=100_000, rampup_batch_size=RAMP)
    schedule = build_learning_rate_schedule(config, training, global_batch_size=1024)
    assert (schedule.warmup_samples, schedule.decay_samples, schedule.train_samples) == (1000, 100_000, 100_000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": None}, "lr is not given; add --lr"),
        ({"min_lr": 2.0}, "min_lr=2.0 must be between 0 and lr=1.0"),
        ({"lr_warmup_init": 2.0}, "lr_warmup_init=2.0 must not be above lr=1.0"),
        ({"lr_warmup_iters": 100}, "warm-up of 800 samples must be shorter than the decay of 800"),
        ({"lr_decay_style": "WSD"}, "give --lr-wsd-decay-iters"),
        ({"end_weight_decay": 0.5}, "cannot go from 0.01 to 0.5; use --weight-decay-incr-style"),
        ({"train_iters": None}, "add --train-iters, --train-samples or --num-epochs"),
    ],
)
def test_a_schedule_that_does_not_fit_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule_of(**settings)


RAMPS = [
    RampUp(start=4, increment=4, ramp_samples=100, global_batch_size=16),
    RampUp(start=16, increment=8, ramp_samples=5000, global_batch_size=64),
    RampUp(start=1, increment=1, ramp_samples=7, global_batch_size=13),
    RampUp(start=8, increment=3, ramp_samples=0, global_batch_size=17),
    RampUp(start=8, increment=1, ramp_samples=100, global_batch_size=8),
    BatchSizeSchedule.of(None, global_batch_size=24),
    StepWise(((0, 4), (50, 8), (51, 2), (700, 16))),
    StepWise(((0, 3), (1, 5))),
]


def test_a_ramp_gives_each_batch_size_an_equal_share_of_the_samples() -> None:
    ramp = BatchSizeSchedule.of((4, 4, 90), global_batch_size=16)
    assert [ramp.at(consumed) for consumed in (0, 29, 30, 59, 60, 89, 90, 91)] == [4, 4, 8, 8, 12, 12, 16, 16]


@pytest.mark.parametrize("ramp", RAMPS)
def test_steps_and_samples_of_a_ramp_agree_with_walking_it(ramp: BatchSizeSchedule) -> None:
    consumed = 0
    for step in range(400):
        assert ramp.consumed_samples(step) == consumed
        assert ramp.num_steps(consumed) == step
        assert ramp.num_steps(consumed + ramp.at(consumed) - 1) == step
        consumed += ramp.at(consumed)


def test_a_list_of_batch_sizes_counts_tokens_in_whole_samples() -> None:
    training = TrainingConfig(seq_length=2048, step_batch_size_schedule=("0:16", "2.4B:320", "4.8b:624,12_000M:1536"))
    sizes = batch_sizes_of(training, global_batch_size=1536)
    assert sizes == StepWise(((0, 16), (1_171_875, 320), (2_343_750, 624), (5_859_375, 1536)))
    assert [sizes.at(consumed) for consumed in (0, 1_171_874, 1_171_875, 10**10)] == [16, 16, 320, 1536]
    assert sizes.consumed_samples(73_244) == 73_243 * 16 + 320  # the step that crosses the threshold is a small one


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("16:4", "must begin with 0:BATCH_SIZE; for example 0:384"),
        ("0:4 x:8", "must be TOKENS:BATCH_SIZE ..., tokens with K, M, B or T"),
        ("0", "must be TOKENS:BATCH_SIZE"),
        ("0:4 16:8 31:12", "must have thresholds that grow by a sample of 16 tokens or more"),
        ("0:4 64:0", "must have batch sizes of at least 1"),
        ("", "must begin with 0:BATCH_SIZE"),
    ],
)
def test_a_crooked_list_of_batch_sizes_is_told(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_batch_sizes(words.split(), seq_length=16)


def test_without_a_ramp_steps_are_a_division() -> None:
    constant = BatchSizeSchedule.of(None, global_batch_size=24)
    assert constant.num_steps(1000) == 41
    assert constant.consumed_samples(10**9) == 24 * 10**9


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ((32, 8, 100), "starts at 32, which must be between 1 and global_batch_size=16"),
        ((4, 5, 100), "increment 5 must divide the way from 4 to global_batch_size=16, which is 12"),
        ((4, 0, 100), "increment 0 must divide"),
        ((4, 4, -1), "must not be negative"),
    ],
)
def test_a_ramp_that_does_not_arrive_is_refused(ramp: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSizeSchedule.of(ramp, global_batch_size=16)
