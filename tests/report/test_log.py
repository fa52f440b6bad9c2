"""Tests of the log lines of exceptional steps. (Others: in test_train.py.)"""

import json
import math
import re
import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatronish.config.sections.run import LogConfig
from megatronish.engine.results import StepResult
from megatronish.report.metrics import Console, add_line, points
from megatronish.report.trackers.tracker import Trackers
from megatronish.train.hooks.log import Log, Speed
from megatronish.train.trainer import LearningRates, Progress, StepRecord, Trainer

COUNTS = re.compile(
    r"loss scale: ([\d.]+) \| grad norm: (\S+) \|.* "
    r"skipped iterations: ([ \d]+) \| number of nan iterations: ([ \d]+) \|"
)


def record_of(step: int, **result: Any) -> StepRecord:
    """A step with this result, and usual values for the rest."""
    result = dict(result)
    metrics = {"loss": result.pop("loss", 2.0), **result.pop("metrics", {})}
    whole = StepResult(metrics, **({"grad_norm": 1.0, "num_loss_tokens": 8} | result))
    return StepRecord(
        step, whole, learning_rates=LearningRates(0.1), global_batch_size=1, consumed_samples=1, seconds=1.0
    )


def lines_of(
    steps: list[dict[str, Any]], folder: Path, *, interval: int, resumed_at: int | None = None
) -> list[dict[str, Any]]:
    """What metrics.jsonl has after these steps, of which the overflows before them skipped seven."""

    def make_log() -> Log:
        return Log(
            speed=Speed(seq_length=8, model_flops_per_token=1.0, num_devices=1, peak_tflops=None),
            config=LogConfig(log_interval=interval, tensorboard_log_interval=100),
            file=folder / "metrics.jsonl",
            trackers=Trackers([]),
            console=Console.of("auto"),
            device=torch.device("cpu"),
            extras={"params_norm": lambda: math.nan},
        )

    log = make_log()
    trainer = SimpleNamespace(schedule=SimpleNamespace(num_steps=100), progress=Progress(skipped_steps=7))
    for number, step in enumerate(steps, start=1):
        if number == resumed_at:
            state = json.loads(json.dumps(log.state()))
            log = make_log()
            log.load_state(state)
        record = record_of(number, **step)
        trainer.progress.skipped_steps += record.result.skipped
        log.after_step(cast(Trainer, trainer), record)
    text = (folder / "metrics.jsonl").read_text()
    assert not re.search("NaN|Infinity", text), "that is no JSON"
    return [json.loads(line) for line in text.splitlines()]


OVERFLOW = {"grad_norm": math.inf, "skipped": True, "loss_scale": 65536.0}
NO_NUMBER = {"grad_norm": math.nan, "loss": math.nan, "skipped": True, "loss_scale": 32768.0}
GOOD = {"loss_scale": 16384.0}


@pytest.mark.parametrize("resumed_at", [None, 2, 3, 4])
def test_skipped_steps_are_counted_from_line_to_line_and_over_the_run_a_resume_or_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resumed_at: int | None
) -> None:
    steps = [OVERFLOW, NO_NUMBER, GOOD, OVERFLOW, GOOD, GOOD, GOOD]
    lines = lines_of(steps, tmp_path, interval=3, resumed_at=resumed_at)
    assert [(line["step"], line["skipped_iterations"]) for line in lines] == [(3, 9), (6, 10)]
    told = [match.groups() for match in map(COUNTS.search, capsys.readouterr().out.splitlines()) if match]
    assert told == [("16384.0", "1.000", "  2", "  1"), ("16384.0", "1.000", "  1", "  0")]


def test_the_line_of_a_skipped_step_has_its_scale_and_null_for_what_is_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overflow, no_number = lines_of([OVERFLOW, NO_NUMBER], tmp_path, interval=1)
    assert (overflow["loss"], overflow["grad_norm"], overflow["loss_scale"]) == (2.0, None, 65536.0)
    assert (no_number["loss"], no_number["grad_norm"], no_number["params_norm"]) == (None, None, None)
    assert "loss scale: 65536.0 | grad norm: inf |" in capsys.readouterr().out


def test_what_an_objective_reports_besides_its_loss_is_told_under_its_own_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = lines_of([{"metrics": {"chosen_margin": 0.25}}], tmp_path, interval=1)
    assert (line["loss"], line["chosen_margin"]) == (2.0, 0.25)
    assert "lm loss: 2.000000E+00 | chosen margin: 0.25 | loss scale:" in capsys.readouterr().out
    assert points({"loss": 2.0, "chosen_margin": 0.25}) == {"lm loss": 2.0, "chosen-margin": 0.25}


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which Linux has")
def test_a_line_that_finds_no_room_is_told_and_ends_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    add_line(FULL, {"step": 3})
    assert capsys.readouterr().err == "/dev/full lacks the line of step 3: No space left on device\n"


def test_half_a_line_is_taken_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "metrics.jsonl"
    add_line(file, {"step": 1})
    whole = file.read_bytes()
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 4, before[1]))
    try:
        add_line(file, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "lacks the line of step 2: No space left on device" in capsys.readouterr().err
    assert file.read_bytes() == whole
