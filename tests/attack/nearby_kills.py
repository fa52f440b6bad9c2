"""Sweep of kills at random moments with copies nearby, each followed by the loss of a random host, with a table.

Runs are killed again and again, and after every kill the local folder of one host is removed. No start may lose more
than N steps, no file may be left at the end, and the losses are those of a run that was left in peace, bit for bit.

    PYTHONPATH=.:tests/support:tests/attack python tests/attack/nearby_kills.py [kills of each layout]   (minutes)
"""

import random
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from hosts import killed_after
from jobs import checkpoints_of, run_job, steps_of, tiny
from results import Result, publish

# flags, ranks of a host, number of hosts, N
RUNS = (
    ("--dp 2 --zero-stage 1", 1, 2, 3),
    ("--dp 2 --zero-stage 3", 1, 2, 5),
    ("--dp 2", 1, 2, 1),
    ("--tp 2 --pp 2", 2, 2, 4),
    ("--dp 4 --zero-stage 2", 1, 4, 2),
    ("--tp 2 --save-interval 4 --async-save", 1, 2, 3),
)


def sweep(flags: str, per_host: int, num_hosts: int, interval: int, *, kills: int) -> str:
    """One run to its end; what is to be said of it. AssertionError for a promise that is broken."""
    numbers, lost = random.Random(flags), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = f"--train-iters {8 * kills} {flags}"
        argv = tiny(folder / "run", f"{steps} --save-replicated-interval {interval}")
        status, removed = -signal.SIGKILL, 0
        while status == -signal.SIGKILL:
            done = max(steps_of(folder / "run"), default=0) if (folder / "run" / "metrics.jsonl").exists() else 0
            after = numbers.uniform(0.05, 1.0) if len(lost) < kills else 1e6
            job = run_job(argv, folder, plant=killed_after, plant_args=(folder / "local", per_host, after))
            status = job.status
            assert status in (0, -signal.SIGKILL), job
            found = re.search(r"continuing from \S+/step_(\d+)", job.output)
            lost.append(done - (int(found[1]) if found else 0))
            assert lost[-1] <= interval, f"{flags}: {lost[-1]} steps lost, N = {interval}\n{job.output}{job.errors}"
            if status != 0:
                host = folder / "local" / f"host_{numbers.randrange(num_hosts)}"
                removed += host.exists()
                shutil.rmtree(host, ignore_errors=True)
        left = [path for path in (folder / "local").rglob("*") if not path.name.startswith("host_")]
        assert not left and ".copies" not in checkpoints_of(folder / "run"), left
        job = run_job(tiny(folder / "whole", steps), folder)
        assert job.status == 0, job.errors
        assert steps_of(folder / "run") == steps_of(folder / "whole")
    return f"{flags:40} N {interval}: {len(lost) - 1} kills, {removed} hosts lost, steps lost {lost[1:]}"


def main() -> int:
    """Run all of them; 1 if a promise was broken."""
    kills, failed = int(sys.argv[1]) if len(sys.argv) > 1 else 6, 0
    for run in RUNS:
        try:
            print(sweep(*run, kills=kills), flush=True)
        except AssertionError as error:
            print(f"WRONG {run[0]}: {error}", flush=True)
            failed += 1
    told = f"in {len(RUNS)} layouts, each with the copies of a random host lost; never more than N steps done again"
    return publish(Result("kills with copies nearby", kills * len(RUNS), failed, told))


if __name__ == "__main__":
    sys.exit(main())
