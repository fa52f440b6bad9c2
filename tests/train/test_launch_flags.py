"""Tests of runs with flags of launch scripts: growing batches, ways to stop, determinism, a checkpoint's schedule."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import checkpoints_of, started, state_of, steps_of, tiny, train_on_ranks
from ranks import run_ranks, wait_until
from sweeps import some_of

from megatronish.launch.place import Place
from megatronish.report.plot import read_lines
from megatronish.train.checkpoint_state import saved_schedule

NO_DECAY = "--lr-decay-style constant"


def metrics(run_dir: Path, name: str) -> list[Any]:
    return [line[name] for line in read_lines(run_dir / "metrics.jsonl")]


def test_the_batch_follows_its_list_over_a_resume_and_in_another_layout(tmp_path: Path) -> None:
    """16 tokens a sample: batches of 2 up to 4 samples, of 4 up to 16, then of 8."""
    flags = "--step-batch-size-schedule 0:2 64:4 256:8 --train-samples 40 --lr-warmup-samples 8 --lr-decay-style cosine"
    words = tiny(tmp_path / "whole", flags)
    del words[words.index("--global-batch-size") : words.index("--global-batch-size") + 2]
    del words[words.index("--train-iters") : words.index("--train-iters") + 2]
    train_on_ranks(words)
    assert metrics(tmp_path / "whole", "consumed_samples") == [2, 4, 8, 12, 16, 24, 32, 40]
    rates = dict(zip([0, 2, 4, 8], metrics(tmp_path / "whole", "learning_rate"), strict=False))
    assert rates == {samples: pytest.approx(1e-2 * samples / 8) for samples in (0, 2, 4, 8)}

    parts = [word.replace("whole", "parts") for word in words]
    train_on_ranks([*parts, "--exit-interval", "3"])
    train_on_ranks([*parts, "--tp", "2"], world_size=2)
    for step, seen in steps_of(tmp_path / "whole").items():
        assert steps_of(tmp_path / "parts")[step] == pytest.approx(seen, rel=1e-5)


def test_an_evaluation_has_a_batch_of_its_own(tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path, "--eval-iters 3 --eval-global-batch-size 2 --train-iters 1 --hidden-dropout 0"))
    assert {line["tokens"] for line in read_lines(tmp_path / "evaluations.jsonl")} == {3 * 2 * 16}


def test_a_run_leaves_once_its_kill_switch_exists(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    output = train_on_ranks(tiny(tmp_path / "run", f"--kill-switch-path {tmp_path}/stop --tp 2"), world_size=2)
    assert "stopped after step 1 of 6: the file of --kill-switch-path exists" in output
    assert checkpoints_of(tmp_path / "run") == ["latest", "step_00000001"]


@pytest.mark.parametrize("name", some_of(["SIGUSR2", "SIGHUP", "SIGUSR1"], ["SIGUSR2"]))
def test_a_run_leaves_on_the_signal_that_it_is_given(tmp_path: Path, name: str) -> None:
    argv = tiny(tmp_path / "run", f"--tp 2 --train-iters 100000 --exit-signal {name} {NO_DECAY}")
    with started(argv, tmp_path) as job:
        assert wait_until(lambda: len(steps_of(tmp_path / "run")) > 1 if _has_lines(tmp_path) else False, timeout=30)
        job.signal(getattr(signal, name))
        assert job.wait() == 0, job.told
    last = max(steps_of(tmp_path / "run"))
    assert f"stopped after step {last} of 100000" in job.output
    assert checkpoints_of(tmp_path / "run") == ["latest", f"step_{last:08d}"]


def _has_lines(folder: Path) -> bool:
    return (folder / "run" / "metrics.jsonl").exists()


def switches(place: Place, argv: list[str]) -> tuple[bool, bool, bool]:
    """torch's switches after a run."""
    from jobs import be_rank

    be_rank(place, argv)
    reduced = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    fills = torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.are_deterministic_algorithms_enabled(), reduced, fills


def test_deterministic_mode_gives_the_same_numbers_on_a_cpu(tmp_path: Path) -> None:
    """Every operation of a run has a deterministic kernel, or torch would raise."""
    flags = "--dp 2 --eval-iters 1 --position-embedding-type rope --swiglu --zero-stage 1 --train-iters 3"
    train_on_ranks(tiny(tmp_path / "plain", flags), world_size=2)
    for name in ("one", "two"):
        asked = f"{flags} --deterministic-mode --disable-bf16-reduced-precision-matmul"
        assert run_ranks(2, switches, tiny(tmp_path / name, asked)) == [(True, False, False)] * 2
        assert steps_of(tmp_path / name) == steps_of(tmp_path / "plain")
    assert run_ranks(1, switches, tiny(tmp_path / "after", "--train-iters 1")) == [(False, True, False)]


SCHEDULE = "--lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 1 --start-weight-decay 0.1 --end-weight-decay 0.4"
INCREASE = "--weight-decay-incr-style cosine"
OTHER = "--lr 1e-3 --lr-decay-style linear --weight-decay 0.3 --use-checkpoint-opt-param-scheduler"


def test_a_run_follows_the_schedule_of_its_checkpoint_where_asked_to(tmp_path: Path) -> None:
    """Twice stopped, and each time started with another schedule on the command line."""
    train_on_ranks(tiny(tmp_path / "whole", f"{SCHEDULE} {INCREASE}"))
    train_on_ranks(tiny(tmp_path / "parts", f"{SCHEDULE} {INCREASE} --exit-interval 2"))
    output = train_on_ranks(tiny(tmp_path / "parts", f"{OTHER} --exit-interval 2"))
    assert "learning rate and weight decay follow the schedule of" in output
    train_on_ranks(tiny(tmp_path / "parts", OTHER))
    assert metrics(tmp_path / "parts", "learning_rate") == metrics(tmp_path / "whole", "learning_rate")
    assert steps_of(tmp_path / "parts") == steps_of(tmp_path / "whole")
    # Weights alone bring no schedule.
    words = f"{OTHER} --load {tmp_path}/whole --finetune --train-iters 1"
    assert "follow the schedule" not in train_on_ranks(tiny(tmp_path / "tuned", words))
    assert metrics(tmp_path / "tuned", "learning_rate") == [1e-3]


def test_a_state_without_a_schedule_has_that_of_its_config(tmp_path: Path) -> None:
    """As older versions wrote it, and with fields of a newer one."""
    train_on_ranks(tiny(tmp_path, f"{SCHEDULE} {INCREASE} --train-iters 1 --lr-decay-iters 9"))
    state = state_of(tmp_path, 1)
    expected = saved_schedule(state)
    assert json.loads(json.dumps(state["schedule"])) == state["schedule"]
    del state["schedule"]
    state["config"]["optimizer"]["of_a_newer_version"] = 3
    assert saved_schedule(state) == expected
    assert expected.decay_samples == 36
