"""Tests of warm-ups, one cycle and the range test, against torch's OneCycleLR and DeepSpeed's formulas."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatronish.compat.importers.axolotl import from_axolotl
from megatronish.compat.importers.deepspeed import from_deepspeed
from megatronish.config.config import Config
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.optim.schedules import LearningRateSchedule, build_learning_rate_schedule

BATCH = 8
EXACT = {"rel": 1e-12, "abs": 1e-18}


def schedule_of(train_iters: int = 100, **optimizer: Any) -> LearningRateSchedule:
    config = OptimizerConfig(**{"lr": 1.0} | optimizer)
    return build_learning_rate_schedule(config, TrainingConfig(train_iters=train_iters), global_batch_size=BATCH)


def momentum(schedule: LearningRateSchedule, step: int) -> float:
    found = schedule.momentum(step * BATCH)
    assert found is not None
    return found


@pytest.mark.parametrize(("strategy", "style"), [("cos", "cosine"), ("linear", "linear")])
@pytest.mark.parametrize(("total", "start"), [(100, 0.3), (95, 0.3), (40, 0.25), (17, 0.61)])
def test_torchs_one_cycle_is_a_warm_up_and_a_decay_with_a_momentum(
    strategy: Any, style: str, total: int, start: float
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9)
    there = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=total, pct_start=start, anneal_strategy=strategy
    )
    here = schedule_of(
        total,
        **{"lr": 3e-3, "lr_warmup_init": 3e-3 / 25, "min_lr": 3e-3 / 25 / 1e4},
        **{"lr_warmup_style": style, "lr_decay_style": style, "lr_decay_iters": total - 1},
        **{"lr_warmup_fraction": (start * total - 1) / (total - 1)},
        **{"cycle_min_momentum": 0.85, "cycle_max_momentum": 0.95},
    )
    for step in range(total):
        group = optimizer.param_groups[0]
        assert here.learning_rate(step * BATCH) == pytest.approx(group["lr"], **EXACT), step
        assert momentum(here, step) == pytest.approx(group["momentum"], **EXACT), step
        if step < total - 1:
            optimizer.step()
            there.step()


@pytest.mark.parametrize(
    ("keys", "start", "options"),
    [
        ({"warmup_steps": 20}, 0.2, {}),
        ({"warmup_ratio": 0.095}, 0.1, {"anneal_strategy": "linear", "div_factor": 10.0, "cycle_momentum": False}),
        ({}, 0.25, {"pct_start": 0.25, "final_div_factor": 50.0, "base_momentum": 0.8, "max_momentum": 0.9}),
        ({}, 0.03, {}),
    ],
)
def test_axolotls_one_cycle_is_torchs(keys: dict[str, Any], start: float, options: dict[str, Any]) -> None:
    file = {"max_steps": 100, "learning_rate": 3e-3, "lr_scheduler": "one_cycle", "lr_scheduler_kwargs": options}
    found = from_axolotl({**file, **keys}, folder=Path())
    assert not found.complaints() and "lr_scheduler" not in found.otherwise
    here = build_learning_rate_schedule(
        *((config := Config().with_fields(**found.settings)).optimizer, config.training), global_batch_size=BATCH
    )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    there = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, 100, **{"pct_start": start} | options)
    for step in range(100):
        group = optimizer.param_groups[0]
        assert here.learning_rate(step * BATCH) == pytest.approx(group["lr"], **EXACT), step
        if options.get("cycle_momentum", True):
            assert momentum(here, step) == pytest.approx(group["betas"][0], **EXACT), step
        else:
            assert here.momentum(step * BATCH) is None
        optimizer.step()
        if step < 99:
            there.step()


def test_axolotls_one_cycle_says_what_it_lacks() -> None:
    file = {"learning_rate": 3e-3, "lr_scheduler": "one_cycle"}
    found = from_axolotl(file, folder=Path())
    assert found.otherwise["lr_scheduler"].startswith("one_cycle needs max_steps and learning_rate")
    assert found.settings["lr_decay_style"] == "constant"
    kwargs = {"three_phase": True, "pct_start": 0.0}
    odd = from_axolotl({**file, "max_steps": 100, "lr_scheduler_kwargs": kwargs}, folder=Path())
    assert "begins with its peak" in odd.otherwise["lr_scheduler"]
    assert odd.otherwise["lr_scheduler_kwargs.three_phase"] == "the cycle has two phases here"


# DeepSpeed, as its documentation has it: `step` is the number of optimizer steps done, the scheduler's own index is one
# less, and before the first one the learning rate is the lowest.
def warmup(step: int, *, low: float, high: float, length: int, kind: str) -> float:
    index = step - 1
    if index < 0:
        return low
    gamma = 1.0 if index >= length else index / length if kind == "linear" else math.log(index + 1) / math.log(length)
    return low + (high - low) * gamma


def warmup_decay(step: int, *, total: int, low: float, high: float, length: int, kind: str) -> float:
    if step - 1 < length:
        return warmup(step, low=low, high=high, length=length, kind=kind)
    return low + (high - low) * max(0.0, (total - (step - 1)) / (total - length))


def warmup_cosine(step: int, *, total: int, peak: float, first: float, least: float, length: int, kind: str) -> float:
    if step == 0:
        return 0.0
    if step - 1 < length:
        return peak * warmup(step, low=first, high=1.0, length=length, kind=kind)
    progress = min(1.0, (step - length) / (total - length))
    return peak * (least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2)


def cycle(step: int, halves: tuple[int, int], stairs: tuple[int, int]) -> float:
    """Height in the cycle, 0 at both ends and 1 in the middle."""
    is_rising = step <= halves[0]
    half, count, part = (
        (halves[0], stairs[0], step) if is_rising else (halves[1], stairs[1], halves[0] + halves[1] - step)
    )
    return part * count // half / count if count else part / half


def imported(scheduler: dict[str, Any], *, train_iters: int = 200, **optimizer: Any) -> LearningRateSchedule:
    """Schedule of a run from a ds_config.json with this scheduler."""
    adam = {"type": "Adam", "params": {"lr": 0.02, **optimizer}}
    found = from_deepspeed({"train_batch_size": BATCH, "optimizer": adam, "scheduler": scheduler})
    assert not found.complaints()
    config = Config().with_fields(**{"train_iters": train_iters} | found.settings)
    return build_learning_rate_schedule(config.optimizer, config.training, global_batch_size=BATCH)


LENGTHS = {"warmup_min_lr": 1e-4, "warmup_max_lr": 0.01}


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("length", [2, 3, 40])
def test_deepspeeds_warmups_are_the_same_step_for_step(kind: str, length: int) -> None:
    common: dict[str, Any] = {"warmup_num_steps": length, "warmup_type": kind}
    to: dict[str, Any] = {"low": 1e-4, "high": 0.01, "length": length, "kind": kind}
    cosine = {"warmup_min_ratio": 0.0, "cos_min_ratio": 0.05, "total_num_steps": 150}
    cases: list[tuple[str, dict[str, Any], Callable[[int], float]]] = [
        ("WarmupLR", LENGTHS, lambda step: warmup(step, **to)),
        ("WarmupDecayLR", LENGTHS | {"total_num_steps": 150}, lambda step: warmup_decay(step, total=150, **to)),
        (
            "WarmupCosineLR",
            cosine,
            lambda step: warmup_cosine(step, total=150, peak=0.02, first=0.0, least=0.05, length=length, kind=kind),
        ),
    ]
    for name, params, there in cases:
        here = imported({"type": name, "params": params | common})
        for step in range(200):
            assert here.learning_rate(step * BATCH) == pytest.approx(there(step), **EXACT), (name, step)
        assert here.momentum(0) is None


def test_the_cosine_starts_from_its_ratio_one_step_later_there() -> None:
    params = {"warmup_num_steps": 10, "warmup_min_ratio": 0.1, "total_num_steps": 50}
    here = imported({"type": "WarmupCosineLR", "params": params})
    to: dict[str, Any] = {"peak": 0.02, "first": 0.1, "least": 0.0001, "length": 10, "kind": "log"}
    for step in range(1, 60):
        assert here.learning_rate(step * BATCH) == pytest.approx(warmup_cosine(step, total=50, **to), **EXACT)
    found = from_deepspeed({"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupCosineLR", "params": params}})
    assert "very first step is 0 there" in found.otherwise["scheduler.params.warmup_min_ratio"]


@pytest.mark.long
@pytest.mark.parametrize("stairs", [None, (0, 0), (5, 3), (7, 0), (0, 4), (22, 23)])
@pytest.mark.parametrize("halves", [(30, 50), (49, 7), (1, 1), (22, 23)])
@pytest.mark.parametrize("decay", [0, 6])
def test_deepspeeds_one_cycle_is_the_same_step_for_step(
    stairs: tuple[int, int] | None, halves: tuple[int, int], decay: int
) -> None:
    params: dict[str, Any] = {"cycle_min_lr": 1e-4, "cycle_max_lr": 0.01, "cycle_min_mom": 0.7, "cycle_max_mom": 0.95}
    params |= {"cycle_first_step_size": halves[0], "cycle_second_step_size": halves[1]}
    params |= {"decay_step_size": decay, "decay_lr_rate": 0.3, "decay_mom_rate": 0.001}
    if stairs is not None:
        params |= {"cycle_first_stair_count": stairs[0], "cycle_second_stair_count": stairs[1]}
    here, total = imported({"type": "OneCycle", "params": params}, betas=[0.5, 0.6]), sum(halves)
    assert here.config.adam_beta2 == 0.99
    for step in range(200):
        late = (step - total) / decay if decay and step > total else 0.0
        height = 0.0 if step > total else cycle(step, halves, stairs or (0, 0))
        rate = (1e-4 + (0.01 - 1e-4) * height) / (1 + 0.3 * late)
        assert here.learning_rate(step * BATCH) == pytest.approx(rate, **EXACT), step
        assert momentum(here, step) == pytest.approx((0.95 - 0.25 * height) * (1 + 0.001 * late), **EXACT), step


def test_the_halves_of_a_cycle_are_alike_unless_told_and_2000_steps_long() -> None:
    params: dict[str, Any] = {"cycle_min_lr": 1e-4, "cycle_max_lr": 0.01, "cycle_first_stair_count": 4}
    here = imported({"type": "OneCycle", "params": params}, train_iters=5000)
    assert (here.warmup_samples, here.decay_samples) == (2000 * BATCH, 4000 * BATCH)
    assert (here.config.lr_warmup_stairs, here.config.lr_decay_stairs) == (4, 4)
    assert (here.config.cycle_min_momentum, here.config.cycle_max_momentum) == (0.8, 0.9)


@pytest.mark.parametrize("staircase", [False, True])
def test_deepspeeds_range_test_is_the_same_step_for_step(staircase: bool) -> None:
    params = {"lr_range_test_min_lr": 1e-5, "lr_range_test_step_size": 30, "lr_range_test_step_rate": 5.0}
    here = imported({"type": "LRRangeTest", "params": params | {"lr_range_test_staircase": staircase}})
    for step in range(500):
        interval = step // 30 if staircase else step / 30
        assert here.learning_rate(step * BATCH) == pytest.approx(1e-5 * (1 + 5 * interval), **EXACT)
    plain = imported({"type": "LRRangeTest", "params": {}})
    assert plain.learning_rate(1000 * BATCH) == pytest.approx(0.0015, **EXACT)


def test_momentum_is_highest_where_the_rate_is_lowest() -> None:
    cycled = {"cycle_min_momentum": 0.8, "cycle_max_momentum": 0.9, "lr_warmup_init": 0.1, "min_lr": 0.1}
    here = schedule_of(lr_warmup_iters=20, lr_decay_style="cosine", **cycled)
    found = [(here.learning_rate(step * BATCH), momentum(here, step)) for step in range(101)]
    assert [found[step] for step in (0, 20, 100)] == [
        (pytest.approx(0.1), 0.9),
        (1.0, pytest.approx(0.8)),
        (pytest.approx(0.1), pytest.approx(0.9)),
    ]
    for before, after in pairwise(found):
        assert (after[0] - before[0]) * (after[1] - before[1]) < 0
    wsd = schedule_of(lr_warmup_iters=20, lr_decay_style="WSD", lr_wsd_decay_iters=30, **cycled)
    assert [momentum(wsd, step) for step in (10, 20, 60, 70, 100)] == pytest.approx([0.85, 0.8, 0.8, 0.8, 0.9])


def test_a_schedule_of_a_checkpoint_is_made_of_numbers_alone() -> None:
    here = schedule_of(lr_warmup_iters=20, lr_warmup_style="log", cycle_min_momentum=0.8, cycle_max_momentum=0.9)
    saved = asdict(here)
    again = LearningRateSchedule(**saved | {"config": OptimizerConfig(**saved["config"])})
    assert [again.learning_rate(samples) for samples in range(900)] == [
        here.learning_rate(samples) for samples in range(900)
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_warmup_style": "log", "lr_warmup_iters": 1}, "needs a warm-up of 2 steps, 16 samples, and has 8 samples"),
        ({"momentum_tail_growth": 0.01}, "takes cycle_max_momentum=0.9 to 1.35 at the end of the run, which must be"),
        ({"momentum_tail_growth": -0.1}, "takes cycle_max_momentum=0.9 to -3.6 at the end of the run"),
    ],
)
def test_a_cycle_that_does_not_fit_together_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule_of(**{"cycle_min_momentum": 0.8, "cycle_max_momentum": 0.9, "lr_decay_iters": 50} | settings)


def test_without_a_cycle_there_is_no_momentum() -> None:
    assert replace(schedule_of(), lr=2.0).momentum(8) is None
