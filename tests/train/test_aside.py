"""Tests of stepping aside: what only looks at a run, and fails by its own fault, is left out on all ranks."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from jobs import checkpoints_of, run_job, tiny

from megatronish.config.config import Config
from megatronish.core.aside import Aside
from megatronish.core.errors import RunError
from megatronish.estimate import room
from megatronish.train import run, setup
from megatronish.train.hooks import of_run, replicas
from megatronish.train.hooks.forecast import Forecast
from megatronish.train.hooks.goodput import Goodput
from megatronish.train.hooks.health import Health
from megatronish.train.hooks.log import Log, LogExperts, ProgressBar
from megatronish.train.hooks.profiler import OperatorProfile
from megatronish.train.hooks.stragglers import Stragglers

FLAGS = (
    "--dp 2 --num-experts 2 --moe-router-topk 1 --straggler-interval 2 --check-replicas-interval 2 --save-interval 3 "
    "--progress-bar on --profile --profile-step-start 2 --profile-step-end 4"
)


def failing(*_args: Any, **_options: Any) -> Any:
    raise ZeroDivisionError("planted")


def on_rank(rank: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which fails on one rank."""
    return lambda *args, **options: (failing if dist.get_rank() == rank else function)(*args, **options)


def plant_in_hooks() -> None:
    """Every observer fails on the main rank, and what communicates fails on rank 1 alone."""
    for hook in (Health, Forecast, ProgressBar, LogExperts):
        hook.after_step = failing  # type: ignore[method-assign]
    Goodput._count = Log._values = OperatorProfile.write = failing  # type: ignore[method-assign]
    replicas._hash = on_rank(1, replicas._hash)
    Stragglers._note = on_rank(1, Stragglers._note)  # type: ignore[method-assign]


def plant_at_the_start() -> None:
    """What is computed before the first step fails, the curves find no matplotlib, and a later window does not end."""
    of_run.forecast = run.first_lines = run.report_chats = failing  # type: ignore[attr-defined]
    room.memory_of_stages = setup.model_flops_per_token = failing  # type: ignore[attr-defined]
    Stragglers._at_work = on_rank(1, Stragglers._at_work)  # type: ignore[method-assign]
    replicas.copies_of = on_rank(0, replicas.copies_of)
    sys.modules["matplotlib"] = None  # type: ignore[assignment]


def plant_in_the_look_at_the_machine() -> None:
    """One rank fails where it looks at its machine."""
    room.available_memory = on_rank(1, room.available_memory)


LEFT_OUT = " failed and is left out from here on, training continues: "


def test_what_looks_at_a_run_never_ends_it(tmp_path: Path) -> None:
    ended = run_job(tiny(tmp_path / "run", FLAGS), tmp_path, plant=plant_in_hooks)
    assert ended.status == 0, ended.errors
    assert checkpoints_of(tmp_path / "run")[-1] == "step_00000006"
    told = [line for line in ended.errors.splitlines() if LEFT_OUT in line]
    for name in ("Health", "Forecast", "ProgressBar", "LogExperts", "Goodput", "OperatorProfile"):
        (line,) = [line for line in told if f"the hook {name}{LEFT_OUT}" in line]
        assert "ZeroDivisionError: planted (test_aside.py:" in line
    assert len([line for line in told if line.startswith(f"the log{LEFT_OUT}")]) == 1
    for name in ("the comparison of replicas", "the comparison of ranks' own times"):
        assert len([line for line in told if f"{name}{LEFT_OUT}it failed on another rank" in line]) == 1, told
        log = (tmp_path / "run" / "logs" / "rank_1.log").read_text()
        assert log.count(f"{name}{LEFT_OUT}ZeroDivisionError: planted") == 1, log
    assert "Traceback" not in ended.errors


def test_what_is_computed_before_and_after_training_never_ends_a_run(tmp_path: Path) -> None:
    flags = "--dp 2 --straggler-interval 2 --check-replicas-interval 2"
    ended = run_job(tiny(tmp_path / "run", flags), tmp_path, plant=plant_at_the_start, draws=True)
    assert ended.status == 0, ended.errors
    for name in (
        *("the forecast", "the table of expected costs", "the audit of the chats", "the comparison of replicas"),
        *("the comparison of memory", "the count of FLOPs in the log"),
    ):
        assert ended.errors.count(f"{name}{LEFT_OUT}ZeroDivisionError: planted") == 1, ended.errors
    assert ended.errors.count(f"the comparison of ranks' own times{LEFT_OUT}it failed on another rank") == 1
    assert "the curves were not drawn: pictures are drawn by matplotlib, which cannot be imported" in ended.errors
    assert "pip install matplotlib" in ended.errors and "Traceback" not in ended.errors


def test_what_was_looked_for_and_found_is_no_fault_of_its_own() -> None:
    aside = Aside("a check")
    with pytest.raises(RunError, match="replicas differ"), aside.guard():
        raise RunError("replicas differ")
    assert not aside.is_off


def test_a_rank_that_cannot_tell_its_room_starts_and_all_ranks_say_nothing_else(tmp_path: Path) -> None:
    ended = run_job(tiny(tmp_path / "run", "--dp 2"), tmp_path, plant=plant_in_the_look_at_the_machine)
    assert ended.status == 0, ended.errors
    log = (tmp_path / "run" / "logs" / "rank_1.log").read_text()
    assert log.count(f"the comparison of memory{LEFT_OUT}ZeroDivisionError: planted") == 1, log


def test_a_plan_says_that_its_memory_was_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(room, "memory_of_stages", failing)
    config = Config().with_fields(hidden_size=64, num_layers=2, num_attention_heads=4, num_query_groups=4)
    assert room.note_on_room(config, "cpu", vocab_size=100) is None
    assert "the comparison of memory failed" in capsys.readouterr().err
