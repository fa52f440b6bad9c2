"""Tests of the time model against the published steps that it is calibrated on."""

import pytest

from megatronish.costs.flops import model_flops_per_token
from megatronish.planner.efficiencies import FITTED, Efficiencies
from megatronish.planner.fit import fitted, loss
from megatronish.planner.published import PublishedStep, errors, published_steps


def flops_a_device(step: PublishedStep) -> float:
    work = step.work
    flops = model_flops_per_token(work.model, vocab_size=work.vocab_size, seq_length=work.seq_length, attention="full")
    return work.tokens * flops / step.candidate.mesh.world_size


def test_published_steps_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    steps = published_steps()
    predicted = [step.predicted(Efficiencies()).expected for step in steps]
    found = errors(predicted, [step.seconds for step in steps], [flops_a_device(step) for step in steps])
    with capsys.disabled():
        print(
            f"\n{len(steps)} published steps: MAPE {found.mean:.2%}, p90 {found.p90:.2%}, worst {found.worst:.2%}, "
            f"bias {found.bias:+.2%}, rank correlation of MFU {found.rank_correlation:.3f}"
        )
    assert len(steps) == 31
    assert found.mean <= 0.045
    assert found.p90 <= 0.08
    assert found.worst <= 0.10
    assert found.rank_correlation >= 0.95


def test_constants_lie_inside_their_physical_bounds_and_near_their_priors() -> None:
    for name, bounds in FITTED.items():
        value = getattr(Efficiencies(), name)
        assert bounds.low < value < bounds.high, name
        assert abs(value - bounds.prior) <= 0.2 * (bounds.high - bounds.low), name


def test_the_constants_are_those_of_the_fit() -> None:
    assert loss(Efficiencies()) <= loss(fitted()) + 5e-4


def test_errors_are_those_of_the_definition() -> None:
    found = errors([1.1, 1.8, 4.0], [1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    assert found.mean == pytest.approx(0.2 / 3)
    assert found.worst == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.0, abs=1e-12)
    assert found.rank_correlation == pytest.approx(1.0)
    assert errors([1.0, 2.0], [2.0, 1.0], [1.0, 1.0]).rank_correlation == pytest.approx(-1.0)
