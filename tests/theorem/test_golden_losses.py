"""Tests of golden losses: loss and gradient norm of twenty steps equal those of earlier commits (golden_runs.py).

Files are compared by tolerance on every machine: no name of a machine says how its libraries sum. What is sharp are the
first steps, before rounding has grown. To the bit, a run is compared with itself; and with another commit by
`golden_runs.py --against COMMIT`.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
from golden_runs import FOLDER, NUM_STEPS, RUNS, Golden, run
from sweeps import some_of


class Tolerance(NamedTuple):
    """Relative tolerances of loss and gradient norm."""

    loss: float
    norm: float


# Measured against files of AVX512, with AVX2, without vector instructions and with three dispatches of MKL (LOG.md,
# 2026-11-25): 1e-7 and 2.5e-7 in the first five steps, 2.1e-7 and 3e-6 in twenty. A loss is an fp32 number: 1.2e-7 is
# its last bit.
NUM_SHARP = 5
SHARP, LATER = Tolerance(3e-7, 1e-6), Tolerance(1e-6, 1e-5)
# Products in fp16 may be rounded on the way, too: 9e-7 and 3.4e-5 in the first five steps, 3.3e-5 and 1e-3 in twenty.
SHARP_FP16, LATER_FP16 = Tolerance(1e-5, 2e-4), Tolerance(2.0**-9, 2.0**-6)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_repeats_the_losses_of_the_commits_before(tmp_path: Path, name: str) -> None:
    expected, actual = Golden.read(FOLDER / f"{name}.txt"), run(name, tmp_path)
    assert [each.step for each in actual.steps] == list(range(1, NUM_STEPS + 1))
    sharp, later = (SHARP_FP16, LATER_FP16) if name == "fp16" else (SHARP, LATER)
    for mine, theirs in zip(actual.steps, expected.steps, strict=True):
        allowed = sharp if theirs.step <= NUM_SHARP else later
        assert mine.loss == pytest.approx(theirs.loss, rel=allowed.loss), f"step {theirs.step}"
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=allowed.norm), f"step {theirs.step}"


@pytest.mark.parametrize("name", some_of(["dropout", "zero2"], ["zero2"]))
def test_a_run_is_the_same_to_the_bit_when_it_is_repeated_here(tmp_path: Path, name: str) -> None:
    first, second = (run(name, tmp_path / each) for each in ("first", "second"))
    assert list(map(str, first.steps)) == list(map(str, second.steps))


def test_every_golden_file_is_of_a_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == RUNS.keys()
