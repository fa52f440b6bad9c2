"""Tests of golden losses: loss and gradient norm of twenty steps equal those of earlier commits (golden_runs.py)."""

from pathlib import Path

import pytest
from golden_runs import FOLDER, NUM_STEPS, RUNS, Golden, run, this_machine

# Between CPUs of two models, which sum in another order (measured, AVX512 against AVX2: 2e-7 and 1.2e-6; products in
# fp16 may be rounded on the way, too).
LOSS_RTOL, NORM_RTOL = 1e-6, 1e-5
FP16_RTOL = 2.0**-9


@pytest.mark.parametrize("name", RUNS)
def test_a_run_repeats_the_losses_of_the_commits_before(tmp_path: Path, name: str) -> None:
    expected, actual = Golden.read(FOLDER / f"{name}.txt"), run(name, tmp_path)
    assert [each.step for each in actual.steps] == list(range(1, NUM_STEPS + 1))
    if expected.machine == this_machine(name):
        assert list(map(str, actual.steps)) == list(map(str, expected.steps))
        return
    loss_rtol, norm_rtol = (FP16_RTOL, 8 * FP16_RTOL) if name == "fp16" else (LOSS_RTOL, NORM_RTOL)
    for mine, theirs in zip(actual.steps, expected.steps, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=loss_rtol), f"step {theirs.step}"
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=norm_rtol), f"step {theirs.step}"


def test_every_golden_file_is_of_a_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == RUNS.keys()
