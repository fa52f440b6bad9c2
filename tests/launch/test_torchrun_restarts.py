"""Tests of torchrun's restarts: workers that are killed, and ranks whose agent is killed."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import SECONDS, run_job, steps_of, tiny, train_on_ranks
from paths import ROOT
from planted_kills import kill_last_in_step
from ranks import is_running, wait_until
from sweeps import some_of
from torchrun import torchrun

from megatronish.train.folder import last_step

FLAGS = "--train-iters 24 --save-interval 2"


def workers(run_dir: Path) -> list[int]:
    """Process ids of the ranks of a run, in their order."""
    found = subprocess.run(["pgrep", "-f", f"run-dir {run_dir}"], capture_output=True, text=True, check=False)
    ranks: dict[int, int] = {}
    for pid in map(int, found.stdout.split()):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        except OSError:
            continue
        ranks |= {int(each.removeprefix("RANK=")): pid for each in variables if each.startswith("RANK=")}
    return [ranks[rank] for rank in sorted(ranks)]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of two ranks under torchrun, which begins again twice; it has no more variables than any."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    argv = [*torchrun, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(ROOT / "pretrain_gpt.py")]
    with (tmp_path / "errors").open("w") as errors:
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [*argv, *tiny(tmp_path / "run", FLAGS)], env=environ, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.mark.sweep
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_killed_worker_is_started_again_and_nothing_is_lost(agent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    metrics, told = tmp_path / "run" / "metrics.jsonl", tmp_path / "errors"
    assert wait_until(lambda: last_step(metrics) >= 3, timeout=SECONDS), told.read_text()
    first = workers(tmp_path / "run")
    os.kill(first[1], signal.SIGKILL)
    assert wait_until(lambda: len(set(workers(tmp_path / "run")) - set(first)) == 2, timeout=SECONDS), told.read_text()
    assert agent.wait(SECONDS) == 0, told.read_text()
    train_on_ranks(tiny(tmp_path / "calm", FLAGS))
    seen, calm = steps_of(tmp_path / "run"), steps_of(tmp_path / "calm")
    assert sorted(seen) == sorted(calm)
    for step, values in calm.items():
        assert seen[step] == pytest.approx(values, rel=1e-5)


def attempts(run_dir: Path, flags: str, folder: Path, *plant_args: object) -> list[int]:
    """Steps from which the attempts of a run of two ranks under torchrun continue; a rank is killed in one of them."""
    (run_dir / "logs" / "rank_0.log").unlink(missing_ok=True)
    agent = ["--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    plant = {"plant": kill_last_in_step, "plant_args": plant_args} if plant_args else {}
    ended = run_job([*agent, "--", *tiny(run_dir, flags)], folder, main=torchrun, **plant)
    assert ended.status == 0, ended
    text = (run_dir / "logs" / "rank_0.log").read_text()
    return [int(step) for step in re.findall(r"continuing from \S+/step_0+(\d+)", text)]


@pytest.mark.parametrize("starts_again", some_of([False, True], [False]))
def test_a_restart_goes_back_to_a_step_once(tmp_path: Path, starts_again: bool) -> None:
    """Ranks of all attempts find one name of the launch in the store of their agent; the next torchrun has another.

    And nothing is lost: losses are those of a run that was left in peace.
    """
    run_dir, flags = tmp_path / "run", "--save-interval 2 --lr-decay-iters 6"
    train_on_ranks(tiny(run_dir, f"--train-iters 4 {flags}"))
    back = f"--train-iters 10 {flags} --ckpt-step 2"
    # The checkpoint of step 6 is whole where step 7 is done, which takes both ranks.
    assert attempts(run_dir, back, tmp_path, 7, str(tmp_path / "marker")) == [2, 6]
    train_on_ranks(tiny(tmp_path / "calm", f"--train-iters 10 {flags}"))
    seen, calm = steps_of(run_dir), steps_of(tmp_path / "calm")
    assert sorted(seen) == sorted(calm)
    for step, values in calm.items():
        assert seen[step] == pytest.approx(values, rel=1e-5)
    if starts_again:
        assert attempts(run_dir, f"--train-iters 12 {flags} --ckpt-step 2", tmp_path) == [2]


AGENT = """
import os, subprocess, sys
rank = "import os, time; from megatronish.launch.ancestors import end_with_agent; end_with_agent(); "
child = [sys.executable, "-c", rank + "print(os.getpid(), flush=True); time.sleep(60)"]
through_a_shell = ["sh", "-c", '"$@"; true', "sh"] if sys.argv[1] == "shell" else []
subprocess.run([*through_a_shell, *child], env={**os.environ, "TORCHELASTIC_RUN_ID": "none"})
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prctl")
@pytest.mark.parametrize("between", ["nothing", "shell"])
def test_a_rank_does_not_outlive_torchruns_agent(between: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    environ["PYTHONPATH"] = str(ROOT)
    parent = subprocess.Popen([sys.executable, "-c", AGENT, between], env=environ, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    rank = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not is_running(rank), timeout=5)
