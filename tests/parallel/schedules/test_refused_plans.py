"""Tests of refused plans: a schedule whose plan cannot run ends with an error and a picture before any rank starts."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatronish.commands.pretrain import main
from megatronish.core.errors import UserError
from megatronish.parallel.schedules.plan import Action
from megatronish.parallel.schedules.simulate import MAX_ACTIONS, refuse_schedule
from megatronish.parallel.schedules.table import SCHEDULES

FLAGS = (
    "--mock-data --device cpu --num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--micro-batch-size 1 --train-iters 1 --pp 2 --vocab-size 32 --lr 0.1"
)


def hanging(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """The last stage begins with the last micro-batch, whose backward the first stage does last."""
    order = range(num_microbatches)
    if stage == num_stages - 1:
        return [Action(kind, 0, i) for i in reversed(order) for kind in ("F", "B")]
    return [Action(kind, 0, i) for kind in ("F", "B") for i in order]


def crossing(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """The last stage receives in pairs, the later one first."""
    forwards = [i ^ 1 for i in range(num_microbatches)] if stage == num_stages - 1 else range(num_microbatches)
    return [*(Action("F", 0, i) for i in forwards), *(Action("B", 0, i) for i in range(num_microbatches))]


def incomplete(*, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """No backward of the last micro-batch."""
    return SCHEDULES["gpipe"].row(stage=stage, num_stages=num_stages, num_microbatches=num_microbatches)[:-1]


def test_a_run_with_a_schedule_that_hangs_ends_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SCHEDULES, "1f1b", replace(SCHEDULES["1f1b"], generate=hanging))
    argv = [*FLAGS.split(), "--global-batch-size", "2", "--run-dir", str(tmp_path / "run")]
    assert main(argv) == 2
    told = capsys.readouterr()
    assert told.err == (
        "pipeline_schedule=1f1b cannot run 2 micro-batches on 2 stages: schedule hangs at tick 1:\n"
        "stage 0:  F0   .\n"
        "stage 1:   .   .\n"
        "Use another --pipeline-schedule, or correct the generator of this one\n"
    )
    assert told.out == "" and not (tmp_path / "run").exists()


def test_the_first_batch_of_a_ramp_up_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has two micro-batches, and only with two does this schedule hang."""

    def sometimes(*, num_microbatches: int, **sizes: int) -> list[Action]:
        generate = hanging if num_microbatches == 2 else SCHEDULES["gpipe"].generate
        return generate(num_microbatches=num_microbatches, **sizes)

    monkeypatch.setitem(SCHEDULES, "1f1b", replace(SCHEDULES["1f1b"], generate=sometimes))
    flags = FLAGS.replace("--train-iters 1", "--train-samples 40 --rampup-batch-size 2 2 20 --global-batch-size 4")
    assert main([*flags.split(), "--run-dir", str(tmp_path / "run")]) == 2
    assert "pipeline_schedule=1f1b cannot run 2 micro-batches on 2 stages" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("generate", "told"),
    [
        (crossing, "schedule crosses messages: stage 0 sends what F0 of stage 1 needs while that waits for F1"),
        (incomplete, "schedule of stage 0 misses B3; every action must appear once"),
    ],
)
def test_messages_that_cross_and_actions_that_lack_are_refused(generate: object, told: str) -> None:
    schedule = replace(SCHEDULES["1f1b"], generate=generate)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"pipeline_schedule=1f1b cannot run 4 micro-batches on 2 stages: {told}"):
        refuse_schedule(schedule, num_stages=2, num_microbatches=4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_the_table_passes_with_any_number_of_micro_batches(name: str) -> None:
    for num_stages in range(1, 6):
        for num_microbatches in (*range(1, 3 * num_stages), 97):
            refuse_schedule(SCHEDULES[name], num_stages=num_stages, num_microbatches=num_microbatches)


def test_what_is_simulated_is_bounded() -> None:
    """However many micro-batches there are; and of plans that are too large nothing is."""
    start = time.process_time()
    refuse_schedule(SCHEDULES["1f1b"], num_stages=8, num_microbatches=1_000_000)
    refuse_schedule(SCHEDULES["interleaved"], num_stages=64, num_microbatches=1_000_000, num_chunks=8)
    assert time.process_time() - start < 1.0
    assert MAX_ACTIONS < 64 * 8 * 128 * 2
