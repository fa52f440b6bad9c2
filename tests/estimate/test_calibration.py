"""Tests of the time model against the published steps that it is calibrated on."""

from collections.abc import Sequence
from functools import cache

import pytest
from paths import ROOT

from benchmarks.calibration import Errors, PublishedStep, errors, fitted, loss, measured_steps, published_steps
from megatronish.estimate.planner.device_speed import FITTED, Efficiencies, known_error
from megatronish.estimate.planner.step_time import StepSeconds
from megatronish.specs.flops import model_flops_per_token


def flops_a_device(step: PublishedStep) -> float:
    work = step.work
    flops = model_flops_per_token(work.model, vocab_size=work.vocab_size, seq_length=work.seq_length, attention="full")
    return work.tokens * flops / step.candidate.mesh.world_size


@cache
def printed() -> list[StepSeconds]:
    """All published steps as a plan prints them: the simulator takes a second or two for each."""
    return [step.printed(Efficiencies()) for step in published_steps()]


def errors_of(name: str, seconds: list[float], steps: Sequence[PublishedStep] = published_steps()) -> Errors:
    """Errors of these seconds of published steps, and a line about them."""
    found = errors(seconds, [step.seconds for step in steps], [flops_a_device(step) for step in steps])
    print(
        f"\n{len(steps)} published steps, {name}: MAPE {found.mean:.2%}, p90 {found.p90:.2%}, worst {found.worst:.2%}, "
        f"bias {found.bias:+.2%}, rank correlation of MFU {found.rank_correlation:.3f}"
    )
    return found


def assert_near(found: Errors, *, worst: float) -> None:
    assert found.worst <= worst
    assert found.mean <= 0.045
    assert found.p90 <= 0.08
    assert found.rank_correlation >= 0.95


def test_published_steps_are_predicted_in_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    steps = published_steps()
    with capsys.disabled():
        closed = errors_of("closed form", [step.predicted(Efficiencies()).expected for step in steps])
    assert len(steps) == 31
    assert_near(closed, worst=0.10)


@pytest.mark.sweep
def test_published_steps_are_predicted_as_a_plan_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        simulated = errors_of("as printed", [each.expected for each in printed()])
    assert_near(simulated, worst=0.105)


def test_steps_are_split_into_those_of_the_fit_and_those_of_the_test_before_it() -> None:
    assert sum(step.is_fitted for step in measured_steps()) == 140
    assert len(measured_steps()) == 140 + 276


@pytest.mark.long
@pytest.mark.parametrize("many", [False, True], ids=["one node", "several nodes"])
def test_steps_that_were_kept_from_the_fit_are_predicted(capsys: pytest.CaptureFixture[str], many: bool) -> None:
    kept = [step for step in measured_steps() if not step.is_fitted and (step.candidate.mesh.world_size > 8) == many]
    steps = [step.printed(Efficiencies()) for step in kept]
    parts = [known_error(step.device, step.work.model).part for step in kept]
    ends = [(step.low * (1 - part), step.high * (1 + part)) for step, part in zip(steps, parts, strict=True)]
    inside = sum(low <= step.seconds <= high for step, (low, high) in zip(kept, ends, strict=True)) / len(kept)
    with capsys.disabled():
        found = errors_of("kept from the fit", [step.expected for step in steps], kept)
        print(f"{inside:.0%} of them inside the printed interval")
    of_them = f"{len(kept)} | {100 * found.mean:.1f} % | {100 * found.p90:.0f} % | {100 * inside:.0f} % |"
    assert of_them in (ROOT / "docs/PLANNER.md").read_text(encoding="utf-8")
    assert found.mean <= 0.08
    assert inside >= 0.80


@pytest.mark.sweep
def test_all_published_steps_are_simulated_but_those_of_a_schedule_that_is_not_there() -> None:
    alike = {
        step.name
        for step, seconds in zip(published_steps(), printed(), strict=True)
        if step.candidate.mesh.pp > 1 and seconds == step.predicted(Efficiencies())
    }
    assert alike == {"zero_bubble ZB-2p 24", "zero_bubble ZB-2p 32", "zero_bubble ZB-2p 64"}


def test_constants_lie_inside_their_physical_bounds_and_near_their_priors() -> None:
    for name, bounds in FITTED.items():
        value = getattr(Efficiencies(), name)
        assert bounds.low < value < bounds.high, name
        assert abs(value - bounds.prior) <= 0.2 * (bounds.high - bounds.low), name


@pytest.mark.long
def test_the_constants_are_those_of_the_fit() -> None:
    assert loss(Efficiencies()) <= loss(fitted()) + 5e-4


def test_errors_are_those_of_the_definition() -> None:
    found = errors([1.1, 1.8, 4.0], [1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    assert found.mean == pytest.approx(0.2 / 3)
    assert found.worst == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.0, abs=1e-12)
    assert found.rank_correlation == pytest.approx(1.0)
    assert errors([1.0, 2.0], [2.0, 1.0], [1.0, 1.0]).rank_correlation == pytest.approx(-1.0)
