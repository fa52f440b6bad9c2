"""Tests of the main job end to end: what a run writes, how it stops and resumes, and that two runs share no folder."""

import json
import os
import re
import signal
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import (
    Job,
    call_main,
    checkpoints_of,
    run_job,
    started,
    state_of,
    steps_of,
    tiny,
    train_on_ranks,
    write_tokens,
)
from ranks import wait_until
from sweeps import some_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatronish.checkpoint.checksums import DamagedError
from megatronish.core.errors import RunError
from megatronish.engine.engine import Engine
from megatronish.engine.results import StepResult
from megatronish.optim.optimizer import Optimizer
from megatronish.report.plot import read_lines
from megatronish.train.folder import locked, refuse_other_function

# What Megatron-LM prints, up to where it ends and we go on.
MEGATRONS_LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration [ \d]{7}\d/[ \d]{7}\d \| consumed samples: [ \d]{11}\d \| "
    r"elapsed time per iteration \(ms\): \d+\.\d \| throughput per GPU \(TFLOP/s/GPU\): \d+\.\d+ \| "
    r"learning rate: \d\.\d{6}E[+-]\d\d \| global batch size: [ \d]{4}\d \| lm loss: \d\.\d{6}E[+-]\d\d \| "
    r"loss scale: \d+\.\d \| grad norm: \d+\.\d{3} \| num zeros: \d+ \| params norm: \d+\.\d{3} \| "
    r"number of skipped iterations: [ \d]{2}\d \| number of nan iterations: [ \d]{2}\d \| tokens per second: \d+ \| "
    r"data time \(ms\): \d+\.\d \|( ETA: \d+s \|)?"
)
METRICS = [
    *("step", "loss", "grad_norm", "learning_rate", "loss_scale", "skipped_iterations", "tokens", "consumed_samples"),
    *("step_seconds", "data_seconds"),
    *("tokens_per_second", "model_tflops_per_device", "mfu", "peak_memory_bytes", "goodput"),
]
TAGS = {
    *("learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "num-zeros", "params-norm"),
    *("iteration-time", "data-time", "throughput", "tokens-per-second"),
    *(f"lm loss {name}{ppl}" for name in ("second", "third", "test") for ppl in ("", " ppl")),
}
FLAGS = (
    "--eval-iters 2 --eval-interval 4 --save-interval 4 --log-params-norm --log-num-zeros-in-grad --micro-batch-size 2"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags that name a training set, two validation sets and a test set."""
    folder = tmp_path_factory.mktemp("data")
    first, second, third = (write_tokens(folder / name, seed=n) for n, name in enumerate(("first", "second", "third")))
    return (
        f"--tokenizer-type null --train-data-path {first} --valid-data-path {second} {third} "
        f"--multiple-validation-sets --test-data-path {third}"
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    """A whole run of six steps on two stages; what it printed is in `printed` beside it."""
    folder = tmp_path_factory.mktemp("whole")
    ended = run_job(tiny(folder / "run", f"{FLAGS} --pp 2", data=data), folder, draws=True)
    assert ended.status == 0, ended
    (folder / "run" / "printed").write_text(ended.output)
    return folder / "run"


# What a run writes


def test_each_step_has_a_line_that_parsers_of_megatrons_log_read(run_dir: Path) -> None:
    lines = [line for line in (run_dir / "printed").read_text().splitlines() if "iteration " in line and "[20" in line]
    assert len(lines) == 6
    for line, (step, seen) in zip(lines, steps_of(run_dir).items(), strict=True):
        assert MEGATRONS_LINE.fullmatch(line), line
        assert f"iteration {step:8d}/       6 | consumed samples: {4 * step:12d} |" in line
        assert f"lm loss: {seen.loss:.6E} |" in line


def test_metrics_have_their_fields_in_full_precision(tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path / "run"))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert list(line) == METRICS
        assert line["tokens"] == 16 * line["consumed_samples"] == 64 * line["step"]
        assert line["tokens_per_second"] == pytest.approx(64 / line["step_seconds"])
        assert line["mfu"] is None and line["model_tflops_per_device"] > 0 and line["peak_memory_bytes"] > 2**20
        assert line["learning_rate"] == pytest.approx(0.01 * (7 - line["step"]) / 6)
        assert line["loss"] != round(line["loss"], 8)


def test_evaluations_of_every_set_are_those_of_one_process(tmp_path: Path, run_dir: Path, data: str) -> None:
    train_on_ranks(tiny(tmp_path / "one", FLAGS, data=data))
    train_on_ranks(tiny(tmp_path / "two", f"{FLAGS} --dp 2 --tp 2", data=data), world_size=4)
    one, two, piped = (read_lines(path / "evaluations.jsonl") for path in (tmp_path / "one", tmp_path / "two", run_dir))
    assert [(line["step"], line["name"]) for line in one] == [
        *((4, "second"), (4, "third"), (6, "second"), (6, "third"), (6, "test"))
    ]
    for line in one:
        assert list(line) == ["step", "name", "loss", "perplexity", "tokens", "consumed_samples"]
        assert line["tokens"] == 2 * 4 * 16
    assert one[2]["loss"] != one[3]["loss"]
    for other in (two, piped):
        for line, expected in zip(other, one, strict=True):
            assert line.pop("name") == expected["name"]
            assert line == pytest.approx({name: expected[name] for name in line}, rel=1e-5)


def test_tensorboard_has_megatrons_tags_and_the_values_of_metrics(run_dir: Path) -> None:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == TAGS | {f"{tag} vs samples" for tag in TAGS}
    for tag, field in (("lm loss", "loss"), ("grad-norm", "grad_norm"), ("params-norm", "params_norm")):
        expected = {line["step"]: pytest.approx(line[field]) for line in read_lines(run_dir / "metrics.jsonl")}
        assert {event.step: event.value for event in events.Scalars(tag)} == expected
        over_samples = {event.step: event.value for event in events.Scalars(f"{tag} vs samples")}
        assert over_samples == {4 * step: value for step, value in expected.items()}


def test_a_run_leaves_its_logs_its_curve_and_its_config(run_dir: Path, data: str) -> None:
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (run_dir / "logs" / "rank_0.log").read_text() == (run_dir / "printed").read_text()
    assert (run_dir / "logs" / "rank_1.log").exists()
    assert checkpoints_of(run_dir) == ["latest", "step_00000004", "step_00000006"]
    assert {path.name for path in run_dir.iterdir()} == {
        "forecast.json",
        "goodput.json",
        "health.json",
        *("report.md", "report.html"),
        *(".lock", "checkpoints", "config.toml", "evaluations.jsonl", "logs", "loss.png", "metrics.jsonl"),
        *("printed", "tensorboard"),
    }


def test_the_config_that_a_run_leaves_is_that_run(tmp_path: Path, run_dir: Path) -> None:
    """Passed back, it names the same folder: the run was finished, and says so."""
    config = tomllib.loads((run_dir / "config.toml").read_text())
    assert config["parallel"]["pipeline_model_parallel_size"] == 2
    ended = run_job(["--config", str(run_dir / "config.toml")], tmp_path)
    assert (ended.status, ended.errors) == (0, "")
    assert "finished already: 6 steps of 6 are done" in ended.output and "changed since" not in ended.output


# Going on


def test_a_finished_run_says_so_and_goes_on_with_more_steps(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = call_main(tiny(run_dir, "--train-iters 2 --lr-decay-style constant"))
    again = call_main(tiny(run_dir, "--train-iters 2 --lr-decay-style constant"))
    assert first.status == again.status == 0
    assert "finished already: 2 steps of 2 are done" in again.output
    longer = call_main(tiny(run_dir, "--train-iters 3 --lr-decay-style constant --log-params-norm"))
    assert longer.status == 0
    assert "changed since: log.log_params_norm False -> True; training.train_iters 2 -> 3" in longer.output
    train_on_ranks(tiny(tmp_path / "at once", "--train-iters 3 --lr-decay-style constant"))
    assert steps_of(run_dir) == steps_of(tmp_path / "at once")


def test_a_run_killed_before_its_ending_gets_it_at_the_next_start(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train_on_ranks(tiny(run_dir, "--eval-iters 1"))
    ending = read_lines(run_dir / "evaluations.jsonl")
    (run_dir / "loss.png").unlink()
    (run_dir / "evaluations.jsonl").unlink()
    for _ in range(2):
        assert "finished already: 6 steps of 6" in train_on_ranks(tiny(run_dir, "--eval-iters 1 --tp 2"), world_size=2)
        again = read_lines(run_dir / "evaluations.jsonl")
        assert [line["name"] for line in again] == [line["name"] for line in ending if line["step"] == 6]
        assert (run_dir / "loss.png").exists()
    assert max(steps_of(run_dir)) == 6


def test_the_batch_grows_and_samples_count_the_run(tmp_path: Path) -> None:
    """12 samples in twos, then fours: 8 steps make 20. A resume in the midst of it changes nothing."""
    flags = "--rampup-batch-size 2 2 12 --train-samples 21 --lr-warmup-samples 4"
    argv = [word for word in tiny(tmp_path / "run", flags) if word not in ("--train-iters", "6")]
    train_on_ranks(argv)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["consumed_samples"] for line in lines] == [2, 4, 6, 8, 10, 12, 16, 20]
    parts = [word.replace(str(tmp_path / "run"), str(tmp_path / "parts")) for word in argv]
    for world_size, layout in ((2, ["--dp", "2"]), (1, [])):
        train_on_ranks([*parts, *layout, "--exit-interval", "5"], world_size=world_size)
    for step, seen in steps_of(tmp_path / "parts").items():
        assert seen == pytest.approx(steps_of(tmp_path / "run")[step], rel=1e-5)
    assert state_of(tmp_path / "parts", 8)["consumed_samples"] == 20


def test_a_run_leaves_in_time(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    output = train_on_ranks(tiny(run_dir, "--exit-duration-in-mins 0.0001 --train-iters 500"))
    step = max(steps_of(run_dir))
    assert step < 500 and state_of(run_dir, step)
    assert f"stopped after step {step} of 500: the time of --exit-duration-in-mins is over; start again" in output
    # A wish to leave that comes with the last step has nothing left to say.
    assert "stopped" not in train_on_ranks(tiny(tmp_path / "end", "--exit-interval 6"))


# Signals, company, accidents


def _has(job: Job, run_dir: Path, steps: int) -> bool:
    return job.process.exitcode is not None or max(steps_of(run_dir), default=0) >= steps


def test_of_two_starts_one_wins_and_saves_and_leaves_when_told(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = tiny(run_dir, "--tp 2 --train-iters 100000 --lr-decay-style constant")
    with started(argv, tmp_path) as one, started(argv, tmp_path) as other:
        assert wait_until(lambda: None not in (one.process.exitcode, other.process.exitcode) or
                          {one.process.exitcode, other.process.exitcode} != {None}, timeout=30)  # fmt: skip
        winner, loser = (other, one) if one.process.exitcode is not None else (one, other)
        assert loser.wait() == 2, loser.told
        assert (
            f"--run-dir {run_dir} is in use by process" in loser.errors and "choose another --run-dir" in loser.errors
        )
        assert "Traceback" not in loser.errors
        assert wait_until(lambda: _has(winner, run_dir, 2), timeout=30)

        winner.signal(signal.SIGUSR1)
        assert wait_until(lambda: (run_dir / "checkpoints" / "latest").exists(), timeout=30)
        saved = int((run_dir / "checkpoints" / "latest").read_text().strip()[-8:])
        assert wait_until(lambda: _has(winner, run_dir, saved + 2), timeout=30)

        winner.signal(signal.SIGTERM)
        assert winner.wait() == 0, winner.told
        assert winner.is_gone()
    last = max(steps_of(run_dir))
    assert (
        f"stopped after step {last} of 100000: SIGTERM or Ctrl-C asked for it; start again to resume" in winner.output
    )
    assert checkpoints_of(run_dir) == ["latest", f"step_{saved:08d}", f"step_{last:08d}"]
    train_on_ranks([*argv, "--exit-interval", "1"], world_size=2)
    assert max(steps_of(run_dir)) == last + 1


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_its_checkpoints(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ended = run_job(tiny(run_dir, "--tp 2 --lr 1e30 --save-interval 1"), tmp_path)
    assert ended.status == 1
    last = max(steps_of(run_dir), default=0)
    assert re.search(rf"loss=.* and grad_norm=.* in step {last + 1} must be finite; .* Lower --lr", ended.errors)
    assert ended.errors.count("must be finite") == 1 and "Traceback" not in ended.errors
    names = [f"step_{step:08d}" for step in range(1, last + 1)]
    assert checkpoints_of(run_dir) == ["latest", *names]


def plant_nan(after_step: int) -> None:
    """Planted in a job: rank 1 alone has a NaN in one of its parameters after that step."""
    step = Optimizer.step

    def stepped(self: Optimizer, **options: Any) -> None:
        step(self, **options)
        if self.num_steps == after_step and torch.distributed.get_rank() == 1:
            next(iter(self.shards.values())).master.view(-1)[3] = torch.nan

    Optimizer.step = stepped  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("layout", "way"),
    some_of(
        product(("--dp 2 --zero-stage 1", "--pp 2"), ("", "--async-save")),
        [("--dp 2 --zero-stage 1", "--async-save"), ("--pp 2", "")],
    ),
)
def test_a_checkpoint_with_nan_is_not_written_and_replaces_none(tmp_path: Path, way: str, layout: str) -> None:
    run_dir = tmp_path / "run"
    # With copies compared, the run would end: the other holder of the tied embedding has no NaN.
    flags = f"--no-check-for-nan-in-loss-and-grad --save-interval 1 --keep-last 2 {layout} {way} --micro-batch-size 2"
    flags += " --check-replicas-interval 0"
    ended = run_job(tiny(run_dir, flags), tmp_path, plant=plant_nan, plant_args=(4,))
    assert ended.status == 1, ended
    said = "the run ended with infinity or NaN in its parameters after step 6, and saved nothing of that: the newest "
    assert f"{said}checkpoint is that of step 3" in ended.errors
    assert len(steps_of(run_dir)) == 6
    assert checkpoints_of(run_dir) == ["latest", "step_00000002", "step_00000003"]
    for step in (4, 5, 6):
        told = rf"no checkpoint of step {step}: \d+ of the model's tensors hold infinity or NaN, and no run can resume"
        assert len(re.findall(told, ended.errors)) == 1, ended.errors
    again = train_on_ranks(tiny(run_dir, flags), world_size=2)
    assert "continuing from" in again and "step_00000003" in again
    assert checkpoints_of(run_dir) == ["latest", "step_00000005", "step_00000006"]


def kill_rank_one_in_step_three() -> None:
    """Planted in a job: before the gradients are summed, so that rank 0 cannot end its step without it."""
    gradients, steps = Engine.gradients, [0]

    def gradients_or_die(self: Engine, *args: Any, **options: Any) -> StepResult:
        steps[0] += 1
        if steps[0] == 3 and self.mesh.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return gradients(self, *args, **options)

    Engine.gradients = gradients_or_die  # type: ignore[method-assign]


def test_a_rank_that_is_killed_ends_the_run_with_a_message(tmp_path: Path) -> None:
    argv = tiny(tmp_path / "run", "--dp 2 --save-interval 1")
    ended = run_job(argv, tmp_path, plant=kill_rank_one_in_step_three)  # which waits until no rank is left
    assert ended.status == 1
    assert ended.errors == "rank 1 failed: killed by SIGKILL (by hand, or because memory ran out)\n"
    # Nothing waited in a buffer: the lines of the steps before are on the disk, and whole.
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [1, 2] and text.endswith("}\n")
    train_on_ranks(argv, world_size=2)
    assert sorted(steps_of(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def fail_on_rank_zero_in_step_two() -> None:
    """Planted in a job: rank 1 will wait for rank 0, and lose it."""
    clip, steps = Engine.clip, [0]

    def clip_or_fail(self: Engine, grad_norm: float) -> float:
        steps[0] += 1
        if steps[0] == 2 and self.mesh.world.rank == 0:
            raise RunError("the culprit has spoken")
        return clip(self, grad_norm)

    Engine.clip = clip_or_fail  # type: ignore[method-assign]


def test_the_rank_that_failed_is_heard_and_not_the_one_that_lost_it(tmp_path: Path) -> None:
    for number in range(3):  # it would be a race
        argv = tiny(tmp_path / str(number), "--pp 2")
        ended = run_job(argv, tmp_path, plant=fail_on_rank_zero_in_step_two)
        assert (ended.status, ended.errors) == (1, "rank 0 failed: the culprit has spoken\n")


@pytest.mark.parametrize(("first", "then"), [(4, 2), (2, 4)])
def test_samples_end_a_run_whose_batch_was_changed(tmp_path: Path, first: int, then: int) -> None:
    def part(batch: int, *flags: str) -> list[str]:
        words = tiny(tmp_path / "run", f"--global-batch-size {batch} --train-samples 24 --eval-iters 0")
        return [*(word for word in words if word not in ("--train-iters", "6")), *flags]

    train_on_ranks(part(first, "--exit-interval", "4"))
    train_on_ranks(part(then))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["consumed_samples"] for line in lines] == [
        *range(first, 4 * first + 1, first),
        *range(4 * first + then, 25, then),
    ]


def test_two_runs_do_not_share_a_folder_of_checkpoints(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    with locked(shared, flag="--save"):
        ended = call_main(tiny(tmp_path / "run", f"--save {shared}"))
    assert ended.status == 2
    assert re.search(rf"--save {shared} is in use by process \d+ on .*; .* choose another --save", ended.errors)


def test_a_run_may_not_save_into_the_folder_of_another(tmp_path: Path) -> None:
    argv = tiny(tmp_path / "one", "--train-iters 100000 --lr-decay-style constant")
    with started(argv, tmp_path) as one:
        assert wait_until(lambda: _has(one, tmp_path / "one", 1), timeout=30)
        ended = call_main(tiny(tmp_path / "other", f"--save {tmp_path}/one/checkpoints"))
    assert ended.status == 2 and "/one/checkpoints is in use by process" in ended.errors


def test_a_backend_that_torch_does_not_know_is_told_with_those_it_knows(tmp_path: Path) -> None:
    ended = call_main(tiny(tmp_path / "run", "--distributed-backend carrier-pigeon"))
    assert ended.status == 2
    assert re.search("distributed_backend=carrier-pigeon is none that this torch knows; it knows .*gloo", ended.errors)


def test_a_config_of_another_version_is_told() -> None:
    now = {"model": {}, "training": {"seq_length": 16}}
    with pytest.raises(DamagedError, match=r"its config is not one of this version .*colour"):
        refuse_other_function(now | {"model": {"colour": "red"}}, now, source=Path("step_1"))
