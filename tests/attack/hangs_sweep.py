"""Sweep of hangs over kinds and layouts, with a table.

Each hang is planted into a real run. It must be told within --hang-seconds + 3 s, the run must end with status 1, and
the rank that hangs must be named; it is counted as exact if the collective, or what the rank does instead, is right
too. A sound rank that is named alone is the worst: it makes the sweep fail, as does a hang that is told too late.

    PYTHONPATH=.:tests/support python tests/attack/hangs_sweep.py [KIND ...] (minutes; `make attack`)
"""

import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import hangs
from frozen_disk import disk_that_freezes
from jobs import SECONDS, run_job, started, tiny
from ranks import wait_until
from results import Result, publish

from megatronish.train.folder import last_step

LIMIT = 4.0
SPARE = 3.0
ENTERED = r"has not (entered|sent|received) .*"


@dataclass(frozen=True)
class Hang:
    """A hang to plant: `says` is what the report must say of the rank, as a pattern."""

    kind: str
    layout: str
    rank: int
    says: str
    flags: str = ""
    args: tuple[str, ...] = ()
    status: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind}{' ' + ' '.join(self.args) if self.args else ''} {self.flags}".strip()


LAYOUTS = {"--tp 2": 1, "--dp 2": 1, "--pp 2": 1, "--tp 2 --pp 2": 3, "--dp 2 --zero-stage 3": 1}
SWEEP = [
    *(Hang("stopped", layout, rank, ENTERED + "is stopped by a signal") for layout, rank in LAYOUTS.items()),
    Hang("stopped", "--tp 2 --pp 2", 0, ENTERED + "is stopped by a signal"),
    *(Hang("in_loader", layout, rank, ENTERED + "waiting for the data of step 9") for layout, rank in LAYOUTS.items()),
    Hang("in_loader", "--tp 2", 0, ENTERED + "waiting for the data of step 9", "--num-workers 0"),
    *(Hang("in_layer", layout, rank, r"in step 9\. Its stack") for layout, rank in LAYOUTS.items()),
    Hang("in_step", "--cp 2", 1, ENTERED + r"in step 9\. Its stack"),
    Hang("in_step", "--dp 2 --zero-stage 1", 0, ENTERED + r"in step 9\. Its stack"),
    Hang("in_save", "--tp 2 --pp 2", 2, r"saving the checkpoint of step 12\. Its stack"),
    Hang("in_save", "--dp 2", 0, r"saving the checkpoint of step 12\. Its stack"),
    Hang("in_save", "--dp 2", 1, r"saving the checkpoint of step 12, in the background", "--async-save"),
    Hang("in_save", "--tp 2", 0, r"saving the checkpoint of step 12, in the background", "--async-save"),
    Hang("in_start", "--dp 2", 1, r"in the start \(opening the data\)"),
    Hang("in_start", "--tp 2 --pp 2", 0, r"in the start \(opening the data\)"),
    Hang("before_meeting", "--dp 2", 1, r"in the start \(the meeting of the ranks\)"),
    Hang("at_end", "--dp 2", 1, r"in the end of the run \(leaving the process group\)"),
    Hang("at_end", "--tp 2 --pp 2", 2, r"in the end of the run \(leaving the process group\)"),
    Hang("in_evaluation", "--dp 2", 0, r"in the evaluation after step 10", "--eval-iters 1 --eval-interval 10"),
    Hang("in_evaluation", "--pp 2", 1, r"in the evaluation after step 10", "--eval-iters 1 --eval-interval 10"),
    Hang("desync", "--dp 2", 1, r"do different things: in collective \d+ of world", args=("more",)),
    Hang("desync", "--tp 2 --pp 2", 2, r"do different things: in collective \d+ of world", args=("more",)),
    Hang("desync", "--tp 2", 1, r"do different things: in collective \d+ of world", args=("gather",)),
    Hang("circle", "--tp 2 --dp 2", 1, r"do different things"),
    Hang("all_stopped", "--dp 2", 0, r"is silent for \d+ s: process \d+ is stopped by a signal"),
    Hang("all_stopped", "--tp 2 --pp 2", 3, r"is stopped by a signal"),
    Hang("all_stopped", "", 0, r"is silent for \d+ s: process \d+ is stopped by a signal", status=-signal.SIGKILL),
    Hang("keeping_the_lock", "", 0, r"native code may keep Python's lock.*Its stack", status=-signal.SIGKILL),
    Hang("keeping_the_lock", "--max-restarts 1", 0, r"native code may keep Python's lock.*Its stack"),
    Hang("keeping_the_lock", "--tp 2", 0, r"native code may keep Python's lock.*Its stack"),
    Hang("frozen_disk", "--dp 2", 0, ENTERED + r"in the hook \w+ of step \d+\. Its stack"),
    Hang("frozen_disk", "--tp 2 --pp 2", 0, ENTERED + r"in the hook \w+ of step \d+\. Its stack"),
    Hang("leaving_early", "--dp 2", 1, r"failed: it ended with status 0 before the run had finished"),
    Hang("leaving_early", "--tp 2 --pp 2", 2, r"failed: it ended with status 0 before the run had finished"),
]


def main() -> int:
    """Run the sweep, print the table; 1 if a hang was told wrongly or too late."""
    wanted = sys.argv[1:]
    told, exact, bad, latest = 0, 0, 0, 0.0
    sweep = [hang for hang in SWEEP if not wanted or hang.kind in wanted]
    print(f"{'hang':44} {'layout':24} rank  told after  verdict")
    for hang in sweep:
        seconds, errors, status = run(hang)
        lines = [line for line in errors.splitlines() if re.search(r"the run |rank \d+ (failed|.*is silent)", line)]
        sentence = next(
            (line for line in lines if re.search(rf"rank {hang.rank}\b", line)), lines[0] if lines else errors
        )
        named = re.search(rf"rank {hang.rank}\b", sentence) is not None
        right = named and re.search(hang.says, sentence) is not None
        in_time = status == hang.status and seconds <= LIMIT + SPARE
        told, exact = told + (named and in_time), exact + right
        verdict = "exact" if right else "rank right" if named else "WRONG"
        bad, latest = bad + (not (named and in_time)), max(latest, seconds)
        late = "" if in_time else " LATE"
        print(f"{hang.name:44} {hang.layout:24} {hang.rank:4}  {seconds:8.1f} s  {verdict}{late}", flush=True)
        if not right:
            print(f"    status {status}: {sentence[:600]}")
    if not wanted or "stalled_terminal" in wanted:
        bad += not goes_on_without_a_reader()
    kinds = len({hang.kind for hang in sweep})
    measured = f"of {kinds} kinds; {told} named in time, {exact} exactly; at most {latest:.1f} s, limit {LIMIT:g} s"
    return publish(Result("hangs", len(sweep), bad, measured))


def goes_on_without_a_reader() -> bool:
    """Whether runs whose terminal nobody reads come to their end, with all lines in the log."""
    for layout in ("", "--dp 2"):
        with tempfile.TemporaryDirectory() as folder:
            argv = tiny(Path(folder) / "run", f"{layout} --train-iters 60 --log-interval 1 --hang-seconds {LIMIT}")
            ended = run_job(argv, Path(folder), plant=hangs.stalled_terminal)
            has_all = "iteration       60/" in (Path(folder) / "run" / "logs" / "rank_0.log").read_text()
            print(
                f"{'stalled_terminal':44} {layout:24}       status {ended.status}, log {'whole' if has_all else 'NOT'}"
            )
            if ended.status != 0 or not has_all:
                return False
    return True


def run_on_frozen_disk(hang: Hang) -> tuple[float, str, int]:
    """The same where the disk of the run folder does not answer from some step on."""
    with tempfile.TemporaryDirectory() as folder, disk_that_freezes(Path(folder)) as disk:
        run = disk.folder / "run"
        argv = tiny(run, f"{hang.layout} --hang-seconds {LIMIT} --train-iters 100000 --save-interval 12 {hang.flags}")
        with started(argv, Path(folder)) as job:
            wait_until(lambda: last_step(run / "metrics.jsonl") > 8, timeout=SECONDS)
            with disk.frozen():
                began = time.monotonic()
                wait_until(lambda: "cannot be ended" in job.errors, timeout=SECONDS)
                seconds, errors = time.monotonic() - began, job.errors
                status = job.wait()
            return seconds, errors, status


def run(hang: Hang) -> tuple[float, str, int]:
    """Seconds from the beginning of the hang until the run had ended, what it printed, and its status."""
    if hang.kind == "frozen_disk":
        return run_on_frozen_disk(hang)
    with tempfile.TemporaryDirectory() as folder:
        began = Path(folder) / "began"
        iterations = 8 if hang.kind == "at_end" else 30
        flags = f"{hang.layout} --hang-seconds {LIMIT} --train-iters {iterations} --save-interval 12 {hang.flags}"
        arguments = (hang.rank, 8, str(began), *hang.args)
        ended = run_job(
            tiny(Path(folder) / "run", flags), Path(folder), plant=getattr(hangs, hang.kind), plant_args=arguments
        )
        seconds = time.monotonic() - float(began.read_text()) if began.exists() else float("nan")
        return seconds, ended.errors, ended.status


if __name__ == "__main__":
    sys.exit(main())
