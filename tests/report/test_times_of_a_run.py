"""Tests of where time goes: slow ranks, goodput over several starts, the sign of life."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job, started, tiny, train_on_ranks
from ranks import wait_until

from megatronish.config.sections.parallel import ParallelConfig
from megatronish.model.block import TransformerBlock
from megatronish.parallel.mesh import Mesh
from megatronish.report.plot import read_lines
from megatronish.train.hooks.goodput import Ledger
from megatronish.train.hooks.stragglers import RankAtWork, Stragglers


def plant_slow(rank: int, seconds: float) -> None:
    """Planted in a job: each layer of one rank takes longer."""
    forward = TransformerBlock.forward

    def slow(self: TransformerBlock, *args: Any, **kwargs: Any) -> Any:
        if torch.distributed.get_rank() == rank:
            time.sleep(seconds)
        return forward(self, *args, **kwargs)

    TransformerBlock.forward = slow  # type: ignore[method-assign]


@pytest.mark.sweep
def test_a_slow_rank_is_named_and_no_other(tmp_path: Path) -> None:
    flags = "--dp 2 --tp 2 --train-iters 14 --straggler-interval 6 --micro-batch-size 2"
    ended = run_job(tiny(tmp_path / "run", flags), tmp_path, plant=plant_slow, plant_args=(2, 0.2))
    assert ended.status == 0
    lines = [line for line in ended.output.splitlines() if "is slow since step" in line]
    assert len(lines) == 1 and " rank 2 (" in lines[0] and "tp 0, dp 1) is slow since step 1: it computes" in lines[0]


def test_a_rank_is_told_after_two_windows_and_again_when_it_is_quick() -> None:
    hook = Stragglers(Mesh.of(ParallelConfig()), interval=10, ratio=1.3)
    hook._workers = [RankAtWork(rank, "host", rank // 3, f"dp {rank % 3}") for rank in range(6)]
    usual = [0.1, 0.11, 0.1, 0.3, 0.31, 0.3]  # stage 1 has other layers than stage 0
    slow = [0.1, 0.11, 0.1, 0.3, 0.31, 0.45]
    assert hook.compare(usual, step=10) == [] and hook.compare(slow, step=20) == []
    (told,) = hook.compare(slow, step=30)
    assert told == (
        " rank 5 (host; dp 2) is slow since step 11: it computes 450 ms a step, 1.5 times the 310 ms of its peers, and "
        "all others wait for it"
    )
    assert hook.compare(slow, step=40) == [] and hook.slow == {5: 11}
    assert hook.compare(usual, step=50) == [] and hook.compare(slow, step=60) == []  # quick once
    assert hook.compare(usual, step=70) == [] and hook.slow == {5: 11}
    assert hook.compare(usual, step=80) == [" rank 5 is as quick as its peers again, at step 80"]
    assert hook.compare(slow, step=90) == [] and hook.compare(usual, step=100) == []  # one accident is none
    assert hook.compare(slow, step=110) == [] and hook.slow == {}


def test_a_stage_of_one_rank_is_compared_with_itself_and_with_how_the_others_do() -> None:
    hook = Stragglers(Mesh.of(ParallelConfig()), interval=10, ratio=1.3)
    hook._workers = [RankAtWork(rank, "host", rank, "") for rank in range(3)]
    usual, slow = [0.1, 0.2, 0.4], [0.1, 0.31, 0.4]
    assert [hook.compare(usual, step=step) for step in (10, 20, 30)] == [[], [], []]
    # A larger batch takes all longer, and one stage that gets quicker makes no other slow.
    for others in ([0.2, 0.4, 0.8], [0.05, 0.2, 0.4]):
        assert hook.compare(others, step=40) == [] and hook.compare(others, step=50) == []
    assert hook.compare(slow, step=60) == []
    (told,) = hook.compare(slow, step=70)
    assert told == (
        " rank 1 (host) is slow since step 51: it computes 310 ms a step, 1.5 times the 200 ms that its stage took "
        "before, and all others wait for it"
    )
    assert hook.compare(usual, step=80) == []
    assert hook.compare(usual, step=90) == [" rank 1 is as quick again as it was, at step 90"]


def test_the_ledger_moves_what_was_done_again_and_counts_the_pause_after_a_failure() -> None:
    ledger = Ledger({"training": 10.0, "saving": 2.0}, {"last_step": 10, "steps": 10, "starts": 1}, seen=100.0)
    ledger.has_ended = False
    assert ledger.begin(6, now=103.0) == 3.0
    assert ledger.seconds == {"training": 6.0, "saving": 2.0, "lost": 4.0, "down": 3.0}
    assert ledger.counts == {"last_step": 6, "steps": 6, "starts": 2, "lost_steps": 4}
    assert ledger.goodput == pytest.approx(6 / 15)
    ledger.has_ended = True
    assert ledger.begin(6, now=1e6) is None and ledger.seconds["down"] == 3.0  # nobody waited


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"counts": {"starts": {}}}', '{"seconds": 3}', '{"seen": "x"}', '{"seconds": {"\\ud800": 1}}']
)
def test_a_ledger_that_cannot_be_read_begins_again(tmp_path: Path, text: str) -> None:
    (tmp_path / "goodput.json").write_text(text)
    assert Ledger.read(tmp_path / "goodput.json") == Ledger()


def test_a_killed_run_accounts_for_its_time_and_its_recovery(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = tiny(run_dir, "--dp 2 --train-iters 100000 --save-interval 3")
    with started(argv, tmp_path) as job:
        assert wait_until(lambda: (run_dir / "goodput.json").exists() and (run_dir / "health.json").exists())
        assert wait_until(lambda: (run_dir / "checkpoints/latest").exists())
        health = json.loads((run_dir / "health.json").read_text())
        assert health["phase"] == "step" and health["step"] >= 1 and abs(health["time"] - time.time()) < 60
        job.kill()
    time.sleep(0.5)
    before = json.loads((run_dir / "goodput.json").read_text())
    assert not before["has_ended"]
    output = train_on_ranks([*argv, "--exit-interval", "1"], world_size=2)
    after = json.loads((run_dir / "goodput.json").read_text())
    assert after["has_ended"] and after["counts"]["starts"] == 2 and len(after["recoveries"]) == 1
    assert after["seconds"]["down"] >= 0.4 and "recovery, on average in" in output and " goodput " in output
    line = read_lines(run_dir / "metrics.jsonl")[-1]
    assert 0 < line["goodput"] < 1
    assert os.getpid() != health["pid"]
