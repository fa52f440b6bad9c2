"""Kills of random workers under torchrun, one after the other in one run, each followed by torchrun's own restart.

No environment variable is set. After every kill all ranks must be new ones that make steps; at the end the losses must
be those of a run that was left in peace, no step missing.

    PYTHONPATH=.:tests/support:tests/attack:tests/launch python tests/attack/torchrun_kills.py [kills]   (minutes)
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jobs import run_job, steps_of, tiny
from paths import ROOT
from ranks import wait_until
from results import Result, publish
from test_torchrun_restarts import workers

from megatronish.train.folder import last_step

RANKS, STEPS_BETWEEN, LIMIT = 2, 4, 60.0


def attack(kills: int, folder: Path) -> tuple[int, list[float]]:
    """Kills after which no step was made, and the seconds from each of the others to the next new step."""
    run, numbers = folder / "run", random.Random(1)
    flags = f"--train-iters {STEPS_BETWEEN * 3 * kills} --save-interval 2 --zero-stage 1"
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--max-restarts", str(kills)]
    argv += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        str(ROOT / "pretrain_gpt.py"),
        *tiny(run, flags),
    ]
    metrics, failed, seconds = run / "metrics.jsonl", 0, []
    with (folder / "errors").open("w") as errors:
        agent = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=errors)
        for _ in range(kills):
            before = last_step(metrics)
            if not wait_until(lambda at=before: last_step(metrics) >= at + STEPS_BETWEEN, timeout=LIMIT):
                failed += 1
                break
            known = workers(run)
            if len(known) < RANKS:  # it has finished
                break
            made, begin = last_step(metrics), time.monotonic()
            os.kill(numbers.choice(known), signal.SIGKILL)
            new = wait_until(lambda old=known: len(set(workers(run)) - set(old)) == RANKS, timeout=LIMIT)
            if not (new and wait_until(lambda at=made: last_step(metrics) > at, timeout=LIMIT)):
                failed += 1
                break
            seconds.append(time.monotonic() - begin)
        if agent.wait(LIMIT * 2) != 0:
            failed += 1
            print((folder / "errors").read_text()[-3000:])
    calm = run_job(tiny(folder / "calm", f"{flags} --dp {RANKS}"), folder)
    assert calm.status == 0, calm.errors
    differs = steps_of(run) != steps_of(folder / "calm")
    return failed + differs, seconds


def main() -> int:
    """Attack and print; 1 if a kill was not recovered from, or a loss differs."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        failed, seconds = attack(kills, Path(folder))
    middle = statistics.median(seconds) if seconds else 0.0
    told = f"to a new step {middle:.1f} s (at most {max(seconds, default=0):.1f}); losses equal bit for bit"
    return publish(Result("workers killed under torchrun", len(seconds), failed, told))


if __name__ == "__main__":
    sys.exit(main())
