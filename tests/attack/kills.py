"""Kills at random moments, over layouts, ZeRO stages and kinds of saves, with a table.

A run is killed with SIGKILL, from outside: one of its ranks (the launcher begins again, --max-restarts), its launcher
alone, or all of its processes (it is started again by hand, in some scenarios in another layout). Every start must
resume from the newest whole checkpoint. At the end the run must have the losses of an undisturbed one, bit for bit in
the same layout, and over layouts as near as undisturbed ones are; and must have left nothing: no partial folder, no
meeting folder, no lock, no process, and no words on the terminal other than the sentences of the launcher.

    PYTHONPATH=.:tests/support python tests/attack/kills.py --kills 200 --seed 1 [--minutes 4] [SCENARIO ...]
"""

import argparse
import contextlib
import fcntl
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jobs import Job, Seen, checkpoints_of, started, steps_of, tiny, train_on_ranks
from results import Result, publish

from megatronish.checkpoint import save
from megatronish.checkpoint.folder import steps_in
from megatronish.launch.cleanup import MEETING, RINGS
from megatronish.train import run as training
from megatronish.train.folder import last_step
from megatronish.train.trainer import Trainer

STEPS, INTERVAL = 80, 2
RUN = f"--train-iters {STEPS} --save-interval {INTERVAL} --keep-last 2 --max-restarts 50"
KILLS_PER_RUN = 7
PAUSE = 0.01  # seconds after each step, without which a run in one process ends before it is killed
EXPECTED = (
    r"rank \d+ failed: killed by SIGKILL \(by hand, or because memory ran out\)",
    r"killed by SIGKILL \(by hand, or because memory ran out\)",
    r"restart \d+ of \d+, after step \d+",
    r"no restart: the run failed \d+ times after step \d+ with the same sentence",
    r"no restart: --max-restarts \d+ are used up",
    r"the checkpoint of step \d+ is not whole: another rank has ended\. Those before it are whole; .*",
    r"TensorBoard is off.*",
)
"""What may be on the terminal of a run whose ranks are killed."""


class Scenario(NamedTuple):
    """A run that is killed: the flags of its first start, and of those that follow by hand, in turn."""

    name: str
    layouts: tuple[str, ...]
    base: bool = False  # it trains adapters of another run's model


LAYOUTS = {
    "one process": "",
    "dp 2": "--dp 2",
    "dp 2, ZeRO-1": "--dp 2 --zero-stage 1",
    "dp 2, ZeRO-2": "--dp 2 --zero-stage 2",
    "dp 2, ZeRO-3": "--dp 2 --zero-stage 3",
    "tp 2": "--tp 2",
    "pp 2": "--pp 2",
    "tp 2, pp 2": "--tp 2 --pp 2",
    "experts, ep 2": "--dp 2 --ep 2 --num-experts 4 --moe-router-topk 2",
}
ELSEWHERE = ("--dp 2 --zero-stage 1", "--tp 2", "--pp 2", "--dp 2 --zero-stage 3", "", "--tp 2 --dp 2", "--dp 4")
SCENARIOS = [
    *(
        Scenario(f"{name}{saves}", (f"{flags}{saves}",))
        for name, flags in LAYOUTS.items()
        for saves in ("", " --async-save")
    ),
    Scenario("adapters, dp 2", ("--dp 2 --adapter-type lora --lora-rank 2 --lora-dropout 0.1",), base=True),
    Scenario("adapters, tp 2 --async-save", ("--tp 2 --adapter-type ia3 --async-save",), base=True),
    Scenario("another layout by hand", ELSEWHERE),
    Scenario("another layout by hand --async-save", tuple(f"{each} --async-save" for each in reversed(ELSEWHERE))),
]


def world_size_of(flags: str) -> int:
    """Number of ranks of a layout."""
    return math.prod(int(size) for size in re.findall(r"--(?:dp|tp|pp) (\d+)", flags))


def plant(log: str, temporary: str) -> None:
    """Planted in a job: a temporary directory of its own, and the main rank notes what it resumes, makes and saves."""
    tempfile.tempdir = temporary
    begin, publish_, step = training.begin, save.publish, Trainer.step

    def note(**facts: int) -> None:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{json.dumps(facts)}\n".encode())
        os.close(descriptor)

    def begun(job: Any, *args: Any, **named: Any) -> Any:
        found = max(steps_in(job.config.run_dir / "checkpoints"), default=0)
        result = begin(job, *args, **named)
        if job.mesh.is_main:
            note(found=found, resumed=result.progress.step)
        return result

    def published(partial: Path, **named: Any) -> Path:
        path = publish_(partial, **named)
        note(saved=named["step"])
        return path

    def stepped(trainer: Trainer, *args: Any) -> Any:
        result = step(trainer, *args)
        time.sleep(PAUSE)
        if trainer.engine.mesh.is_main:
            note(step=trainer.progress.step)
        return result

    training.begin, save.publish, Trainer.step = begun, published, stepped  # type: ignore[method-assign]


@dataclass
class Outcome:
    """What became of one run that was killed several times."""

    kills: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    again: int = 0
    """Largest number of steps that one restart made again."""

    def check(self, *, holds: bool, fault: str) -> None:
        """Note a fault unless a condition holds."""
        if not holds and fault not in self.faults:
            self.faults.append(fault)


def children_of(pid: int) -> list[int]:
    """Processes that a process has started and that still run."""
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Attack:
    """Kills of one scenario, with the folders of its run, its log and its temporary directory."""

    def __init__(self, scenario: Scenario, folder: Path, *, base: Path, numbers: random.Random) -> None:
        self.scenario, self.folder, self.numbers, self.outcome = scenario, folder, numbers, Outcome()
        self.run_dir, self.log, self.temporary = folder / "run", folder / "log", folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.load = f"--load {base}" if scenario.base else ""

    def argv(self, number: int, run_dir: Path | None = None) -> list[str]:
        """The command line of the start of this number."""
        layout = self.scenario.layouts[number % len(self.scenario.layouts)]
        return tiny(run_dir or self.run_dir, f"{RUN} {layout} {self.load}")

    def run(self, most: int, until: float) -> Outcome:
        """Start, kill, start again, until the run has finished."""
        for number in range(10 * KILLS_PER_RUN):
            planted = (str(self.log), str(self.temporary))
            with started(self.argv(number), self.folder, plant=plant, plant_args=planted) as job:
                left = most - self.outcome.kills.total() if time.monotonic() < until else 0
                self._kill(job, left)
                status = job.wait()
                self.outcome.check(holds=job.is_gone(), fault=f"processes of start {number} are left")
                self._check_words(job)
            if status == 0:
                break
            self.outcome.check(holds=status in (1, -signal.SIGKILL), fault=f"status {status}")
        self._check_log()
        self._check_leftovers()
        return self.outcome

    def _kill(self, job: Job, most: int) -> None:
        """Kill up to `most` times at random moments: in the start, in steps, in saves."""
        metrics = self.run_dir / "metrics.jsonl"
        assert job.process.pid is not None
        for _ in range(most):
            before = last_step(metrics)
            if self.numbers.random() < 0.8:
                while job.process.is_alive() and last_step(metrics) <= before:
                    time.sleep(0.005)
            time.sleep(self.numbers.uniform(0.0, 0.3))
            ranks = children_of(job.process.pid)
            if not job.process.is_alive():
                return
            kind = self.numbers.choices(
                ("rank", "launcher", "all"), (70, 15, 15) if len(self.scenario.layouts) == 1 else (40, 30, 30)
            )[0]
            if kind == "rank" and not ranks:
                continue
            pid = self.numbers.choice(ranks) if kind == "rank" else job.process.pid
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if kind == "all" else os.kill)(pid, signal.SIGKILL)
                self.outcome.kills[kind] += 1
            if kind != "rank":
                return
            deadline = time.monotonic() + 10
            while pid in children_of(job.process.pid) and time.monotonic() < deadline:
                time.sleep(0.005)

    def _check_words(self, job: Job) -> None:
        if not (job.folder / "stderr").exists():  # it was killed before it had begun
            return
        for line in job.errors.splitlines():
            known = any(re.fullmatch(pattern, line) for pattern in EXPECTED)
            self.outcome.check(holds=known or not line.strip(), fault=f"the terminal says: {line[:300]}")

    def _check_log(self) -> None:
        """Every start resumes from the newest checkpoint, and no more steps are lost than the interval allows."""
        allowed = 2 * INTERVAL if "--async-save" in self.scenario.layouts[0] else INTERVAL
        saved = made = 0
        for line in self.log.read_text().splitlines():
            facts = json.loads(line)
            saved, made = max(saved, facts.get("saved", 0)), max(made, facts.get("step", 0))
            if "resumed" in facts:
                resumed, again = facts["resumed"], made - facts["resumed"]
                self.outcome.check(
                    holds=resumed == facts["found"] and resumed >= saved,
                    fault=f"resumed from step {resumed}; saved were {saved}, found {facts['found']}",
                )
                self.outcome.check(holds=again <= allowed, fault=f"{again} steps were lost before step {made}")
                self.outcome.again = max(self.outcome.again, again)

    def _check_leftovers(self) -> None:
        names = ["latest", *(f"step_{n:08d}" for n in (STEPS - INTERVAL, STEPS))]
        self.outcome.check(holds=checkpoints_of(self.run_dir) == names, fault=f"left: {checkpoints_of(self.run_dir)}")
        odd = [
            path for path in self.run_dir.rglob("*") if re.search(r"\.(new|tmp|partial|removed|replaced)$", path.name)
        ]
        odd += [path for path in self.temporary.iterdir() if path.name.startswith((MEETING, RINGS))]
        self.outcome.check(holds=not odd, fault=f"left: {[str(path) for path in odd]}")
        for path in (self.run_dir / ".lock", self.run_dir / "checkpoints" / ".lock"):
            with path.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.outcome.check(holds=False, fault=f"{path} is locked")

    def check_losses(self, calm: Sequence[Path]) -> None:
        """Losses and gradient norms of all steps equal those of the undisturbed runs, one in each layout.

        Over layouts, losses differ by what rounding has become after so many steps: at most by twice what those of
        undisturbed runs differ by in any step.
        """
        seen, (whole, *others) = steps_of(self.run_dir), map(steps_of, calm)
        if not others:
            self.outcome.check(
                holds=seen == whole, fault="the losses are not those of the undisturbed run, bit for bit"
            )
            return
        self.outcome.check(holds=seen.keys() == whole.keys(), fault="steps are missing")
        worst, usual = apart(whole, seen), max(apart(whole, other) for other in others)
        self.outcome.check(
            holds=worst <= 2 * usual, fault=f"losses differ by {worst:.1e}, without a kill by {usual:.1e}"
        )


def apart(some: Mapping[int, Seen], others: Mapping[int, Seen]) -> float:
    """The largest relative difference of the losses of a step."""
    return max(abs(others[n].loss - some[n].loss) / some[n].loss for n in some.keys() & others.keys())


def main() -> int:
    """Run the scenarios in turn until there were enough kills; 1 if anything was lost or left."""
    parser = argparse.ArgumentParser(description="kills at random moments")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="no kill after that")
    parser.add_argument("scenarios", nargs="*", help="parts of their names")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    wanted = [each for each in SCENARIOS if not args.scenarios or any(name in each.name for name in args.scenarios)]
    kills, faults, again, numbers = Counter[str](), 0, 0, random.Random(args.seed)
    print(f"seed {args.seed}\n{'scenario':40} seed        kills (ranks, launchers, all)  done again  verdict")
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        train_on_ranks(tiny(folder / "base", "--train-iters 1"))
        calm: dict[str, list[Path]] = {}
        for number in range(10**6):
            if kills.total() >= args.kills or time.monotonic() > until:
                break
            scenario, seed = wanted[number % len(wanted)], numbers.randrange(2**31)
            most = min(KILLS_PER_RUN, args.kills - kills.total())
            attack = Attack(scenario, folder / str(number), base=folder / "base", numbers=random.Random(seed))
            if scenario.name not in calm:
                calm[scenario.name] = [folder / f"calm_{number}_{n}" for n in range(len(scenario.layouts))]
                for n, (flags, run_dir) in enumerate(zip(scenario.layouts, calm[scenario.name], strict=True)):
                    train_on_ranks(attack.argv(n, run_dir), world_size=world_size_of(flags))
            outcome = attack.run(most, until)
            attack.check_losses(calm[scenario.name])
            kills += outcome.kills
            faults, again = faults + len(outcome.faults), max(again, outcome.again)
            counts = ", ".join(str(outcome.kills[kind]) for kind in ("rank", "launcher", "all"))
            verdict = "as if nothing had been" if not outcome.faults else "WRONG"
            told = f"{outcome.kills.total():5} ({counts}) {outcome.again:20}"
            print(f"{scenario.name:40} {seed:10} {told}  {verdict}", *outcome.faults, sep="\n    ", flush=True)
    measured = f"{kills['rank']} ranks, {kills['launcher']} launchers, {kills['all']} whole runs; "
    measured += f"at most {again} steps done again"
    return publish(Result("kills", kills.total(), faults, measured))


if __name__ == "__main__":
    sys.exit(main())
