"""Tests of fp16 loss scaling: Megatron-LM's rule, written out step by step."""

import itertools
import json
import math

import pytest

from megatronish.config.sections.training import TrainingConfig
from megatronish.optim.loss_scale import ConstantLossScale, DynamicLossScale, LossScale, loss_scale_of


def dynamic(*, initial: float = 64.0, minimum: float = 1.0, window: int = 3, hysteresis: int = 2) -> DynamicLossScale:
    return DynamicLossScale(initial=initial, minimum=minimum, window=window, hysteresis=hysteresis)


def scales(scale: LossScale, steps: str) -> list[float]:
    """The scale after each step; `x` is one that overflows, `.` a good one."""
    found = []
    for step in steps:
        scale.update(overflow=step == "x")
        found.append(scale.scale)
    return found


# From 64, at least 16, three good steps in a row to grow; (steps, hysteresis) -> the scale after each step.
TABLE = {
    # with one to forgive, every overflow halves, down to the minimum
    ("xxxx", 1): [32, 16, 16, 16],
    # with two, the second halves, and so do all after it, good steps between them or not
    ("xxxx", 2): [64, 32, 16, 16],
    ("x.x.x", 2): [64, 64, 32, 32, 16],
    ("x..x..x", 2): [64, 64, 64, 32, 32, 32, 16],
    # three, and more than there are overflows
    ("xxxxx", 3): [64, 64, 32, 16, 16],
    ("xxx", 9): [64, 64, 64],
    # a window of good steps doubles; an overflow starts it anew
    ("......", 2): [64, 64, 128, 128, 128, 256],
    ("..x...", 2): [64, 64, 64, 64, 64, 128],
    # and after a window as many are forgiven as at first
    ("x...x.x", 2): [64, 64, 64, 128, 128, 128, 64],
    ("xx...xx", 2): [64, 32, 32, 32, 64, 64, 32],
    ("xx...x", 1): [32, 16, 16, 16, 32, 16],
    # what grows from the minimum is twice the minimum
    ("xxxxx...", 2): [64, 32, 16, 16, 16, 16, 16, 32],
}


@pytest.mark.parametrize(("steps", "hysteresis"), TABLE)
def test_the_scale_after_each_step_is_that_of_the_table(steps: str, hysteresis: int) -> None:
    assert scales(dynamic(minimum=16.0, hysteresis=hysteresis), steps) == TABLE[steps, hysteresis]


def halvings_and_doublings(steps: str, *, window: int, hysteresis: int) -> int:
    """The rule told of the whole history at once, instead of step by step: doublings less halvings."""
    power = 0
    end = 0
    for run in steps.split("x"):
        # Every whole window in a run of good steps doubles ...
        power += len(run) // window
        end += len(run) + 1
        if end > len(steps):
            break
        # ... and the overflow behind it halves unless it is among the first since the last whole window.
        history = steps[: end - 1]
        streaks = [i for i in range(len(history)) if history[: i + 1].endswith("." * window)]
        overflows = history[streaks[-1] + 1 :].count("x") if streaks else history.count("x")
        power -= overflows + 1 >= hysteresis
    return power


@pytest.mark.parametrize(("window", "hysteresis"), list(itertools.product((1, 2, 3), (1, 2, 3))))
def test_every_history_of_nine_steps_gives_the_power_of_two_that_the_rule_says(window: int, hysteresis: int) -> None:
    for history in itertools.product("x.", repeat=9):
        steps = "".join(history)
        scale = dynamic(initial=2.0**20, window=window, hysteresis=hysteresis)
        exponent = 20 + halvings_and_doublings(steps, window=window, hysteresis=hysteresis)
        assert scales(scale, steps)[-1] == 2.0**exponent, steps


def test_a_run_that_goes_on_elsewhere_has_the_same_scales() -> None:
    for history in itertools.product("x.", repeat=8):
        steps = "".join(history)
        whole = scales(dynamic(), steps)
        for cut in range(9):
            first, second = dynamic(), dynamic()
            before = scales(first, steps[:cut])
            second.load(json.loads(json.dumps(first.state())))
            assert before + scales(second, steps[cut:]) == whole


def test_a_scale_below_a_new_minimum_is_raised_to_it() -> None:
    low, high = dynamic(initial=2.0), dynamic(minimum=8.0)
    high.load(low.state())
    assert high.scale == 8


def test_a_run_that_had_no_dynamic_scale_leaves_the_initial_one() -> None:
    scale = dynamic()
    scale.load(ConstantLossScale(8.0).state())
    assert scales(scale, "xx") == [64, 32]
    constant = ConstantLossScale(8.0)
    constant.load(dynamic().state())
    assert scales(constant, "x...x") == [8] * 5


def test_at_the_minimum_the_scale_gives_way_no_more() -> None:
    scale = dynamic(initial=2.0)
    assert scale.can_shrink
    scales(scale, "xx")
    assert scale.scale == 1
    assert not scale.can_shrink


def test_the_config_says_which_scale() -> None:
    default = loss_scale_of(TrainingConfig(fp16=True))
    assert isinstance(default, DynamicLossScale) and default.skips_overflow
    assert (default.scale, default.minimum, default.window, default.hysteresis) == (2.0**32, 1.0, 1000, 2)
    constant = loss_scale_of(TrainingConfig(fp16=True, loss_scale=128.0))
    assert (constant.scale, constant.skips_overflow, constant.can_shrink) == (128.0, True, False)
    # Zero is how older launch scripts ask for a dynamic one.
    assert isinstance(loss_scale_of(TrainingConfig(fp16=True, loss_scale=0.0)), DynamicLossScale)
    for training in (TrainingConfig(), TrainingConfig(bf16=True, loss_scale=128.0)):
        none = loss_scale_of(training)
        assert (none.scale, none.skips_overflow, none.can_shrink) == (1.0, False, False)


def test_growth_without_end_stays_a_number() -> None:
    """What fp32 cannot hold overflows in the step, and is halved again."""
    scale = dynamic(window=1)
    assert math.isfinite(scales(scale, "." * 500)[-1])
