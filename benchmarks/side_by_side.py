"""Benchmark of megatronish against what one would use instead: the same model on the same tokens, in turns.

All contestants of a case (contestants/) are built in processes of their own, in their own environments, from the same
initial weights. They must have equally many parameters and, at the first step, the loss of the plain loop. Then they
take turns, one step each, in another order every round (turns.py). Results are appended to a file, a line for each
case; `--report` makes the table and the chart of docs/BENCHMARKS.md out of it.

    python -m benchmarks.side_by_side --quick
    python -m benchmarks.side_by_side --only one,dp2 --sizes small --dtypes fp32,dropout
    python -m benchmarks.side_by_side --report

One process computes with `--threads` threads, by default one for each core; two processes with one thread each.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from benchmarks.contestants.case import SIZES, Case, Job, Layout, Numbers
from benchmarks.contestants.entries import BASELINE, DEFAULT_CASES, ENTRIES, PEAK, PROCESSES, Entry, groups
from benchmarks.side_by_side_report import print_record, write_report
from benchmarks.turns import ROOT, Runner, ask_all, start, take_turns, wait_until_built

ENVIRONMENTS = ROOT / ".venv-bench"
RESULTS = ROOT / "benchmarks" / "side_by_side.jsonl"
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "dropout": 1e-2}  # relative; masks differ between frameworks
ROUNDS_BETWEEN_PRODUCTS = 4  # a peak needs fewer measurements, and takes nearly as long as a step


def python_of(environment: str) -> str | None:
    """Interpreter of an environment, None if it was not made or its installation failed."""
    if not environment:
        return sys.executable
    folder = ENVIRONMENTS / environment
    is_ready = (folder / ".megatronish-requirements").exists()
    return str(folder / "bin" / "python") if is_ready else None


def begin(entry: Entry, case: Case, *, threads: int, state: Path) -> Runner:
    """Start a contestant in the processes that the case wants. The baseline has one, with all threads."""
    python = python_of(entry.environment)
    if python is None:
        reason = f"not installed: `make bench` found no way to install benchmarks/environments/{entry.environment}.txt"
        return Runner(entry.name, [], failure=reason)
    world_size = 1 if entry.name == BASELINE else PROCESSES[case.layout]
    commands = []
    for rank in range(world_size):
        job = dataclasses.asdict(Job(case, entry.module, entry.variant, rank, world_size))
        commands.append([python, "-m", "benchmarks.contestants.worker", json.dumps(job), str(state)])
    return start(entry.name, commands, threads=threads if world_size == 1 else 1, folder=state.parent)


def leave_if_other(runners: Sequence[Runner], case: Case) -> list[str]:
    """Let those leave that train another model than the baseline does: other parameters, or another first loss.

    Returns their names.
    """
    baseline, *others = runners
    if baseline.failure is not None:
        raise SystemExit(f"the plain loop failed: {baseline.failure}")
    expected = baseline.losses[0]
    assert expected is not None
    wrong: list[str] = []
    for runner in others:
        if runner.failure is not None or runner.name == PEAK:
            continue
        found = runner.losses[0]
        if runner.parameters != baseline.parameters:
            runner.leave(f"has {runner.parameters} parameters, the plain loop {baseline.parameters}")
        elif found is None or not math.isclose(found, expected, rel_tol=LOSS_TOLERANCE[case.numbers]):
            runner.leave(f"begins with loss {found}, the plain loop with {expected}")
        if runner.failure is not None:
            wrong.append(runner.name)
    return wrong


def measure(case: Case, entries: Sequence[Entry], arguments: argparse.Namespace, state: Path) -> dict[str, Any]:
    """The record of one case: these contestants in turns, with the baseline and the matrix products among them."""
    everyone = [ENTRIES[0], *entries, Entry(PEAK, "products", ())]
    runners: list[Runner] = []
    try:
        runners.extend(begin(entry, case, threads=arguments.threads, state=state) for entry in everyone)
        runners[-1].period = ROUNDS_BETWEEN_PRODUCTS if arguments.steps > 2 * ROUNDS_BETWEEN_PRODUCTS else 1
        for runner in runners:
            wait_until_built(runner)
        take_turns(runners, range(1), measured=False)
        wrong = leave_if_other(runners, case)
        take_turns(runners, range(1, arguments.warm_up), measured=False)
        ask_all(runners, {"reset": True})
        take_turns(runners, range(arguments.warm_up, arguments.warm_up + arguments.steps), measured=True)
        for runner, answers in ask_all(runners, {"peak": True}):
            runner.peak = sum(answer["peak"] for answer in answers)
        return record_of(case, runners, arguments) | {"wrong": wrong}
    finally:
        for runner in runners:
            runner.end()


def record_of(case: Case, runners: Sequence[Runner], arguments: argparse.Namespace) -> dict[str, Any]:
    """What is kept of a case."""
    *contestants, products = runners
    rate = 0.0
    if products.seconds:
        flops = case.linear_flops * case.micro_batch_size * case.sizes.seq_length * PROCESSES[case.layout]
        rate = flops / statistics.median(products.seconds)
    rows = [
        {
            "name": runner.name,
            "failure": runner.failure,
            "seconds": [round(seconds, 5) for seconds in runner.seconds],
            "losses": runner.losses,
            "peak_bytes": runner.peak,
        }
        for runner in contestants
    ]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "torch": version("torch"),
        "load": os.getloadavg()[0],
        "threads": arguments.threads,
        "case": dataclasses.asdict(case),
        "tokens": case.num_tokens,
        "flops": case.flops,
        "parameters": contestants[0].parameters,
        "products_flops_per_second": rate,
        "rows": rows,
    }


def processor() -> str:
    """Name of this machine's processor, or at least its kind."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str:
    """Short hash of the commit that is measured; empty outside a checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def chosen_cases(arguments: argparse.Namespace) -> list[Case]:
    """The cases that the flags choose."""
    if not (arguments.only or arguments.sizes or arguments.dtypes or arguments.quick):
        return list(DEFAULT_CASES)
    sizes = ["tiny"] if arguments.quick else arguments.sizes or ["small"]
    layouts = arguments.only or (get_args(Layout) if arguments.quick else ["one"])
    return [
        Case(layout, size, numbers) for size in sizes for layout in layouts for numbers in arguments.dtypes or ["fp32"]
    ]


def chosen_entries(case: Case, arguments: argparse.Namespace) -> list[Entry]:
    """The contestants of a case, without the baseline; megatronish comes first."""
    found = entries_of(case)
    if arguments.contestants:
        patterns = arguments.contestants.split(",")
        found = [each for each in found if any(fnmatchcase(each.name, pattern) for pattern in patterns)]
    elif case.size == "gpt2-124m" and not arguments.sizes:
        found = [each for each in found if each.module in ("plain", "ours")]
    return sorted(found, key=lambda entry: entry.name != "megatronish")


def entries_of(case: Case) -> list[Entry]:
    """The contestants that can run a case, without the baseline."""
    return [each for each in ENTRIES if case.layout in each.layouts and case.numbers in each.dtypes]


def write_state(size: str, path: Path) -> None:
    """Have megatronish write the initial weights of a model."""
    command = [sys.executable, "-m", "benchmarks.contestants.ours", size, str(path)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def words_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Reader of a flag with comma-separated words, each of which must be known."""

    def read(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}; use these, with commas")
        return words

    return read


def parse(told: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    layouts, numbers, sizes = get_args(Layout), get_args(Numbers), [name for name in SIZES if name != "tiny"]
    parser.add_argument("--only", type=words_of(layouts), help=f"layouts, of {', '.join(layouts)}")
    parser.add_argument(
        "--sizes", type=words_of(sizes), help=f"of {', '.join(sizes)}; by default the peers train the first only"
    )
    parser.add_argument("--dtypes", type=words_of(numbers), help=f"of {', '.join(numbers)} (0.1, in fp32)")
    parser.add_argument("--contestants", metavar="PATTERNS", help="names, with commas: megatronish*,DDP")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each contestant")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before these")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of one process; two have one each")
    parser.add_argument("--quick", action="store_true", help="a tiny model and two steps, to see that all run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to append to, or to report from")
    parser.add_argument("--report", action="store_true", help="write docs/BENCHMARKS.md's table and chart; run nothing")
    arguments = parser.parse_args(told)
    if arguments.quick:
        arguments.steps, arguments.warm_up = 2, 1
    names = dict.fromkeys([BASELINE, *(each.name for case in chosen_cases(arguments) for each in entries_of(case))])
    for pattern in (arguments.contestants or "*").split(","):
        if not any(fnmatchcase(name, pattern) for name in names):
            parser.error(f"--contestants: {pattern!r} is none of those in these cases; they are {', '.join(names)}")
    return arguments


def main(told: Sequence[str] | None = None) -> int:
    """Measure the chosen cases, print each, and append it to the results."""
    arguments = parse(told)
    if arguments.report:
        write_report(arguments.results, ROOT / "docs")
        return 0
    wrong = False
    with tempfile.TemporaryDirectory(prefix="side_by_side_") as folder:
        for case in chosen_cases(arguments):
            state = Path(folder) / f"{case.size}.pt"
            if not state.exists():
                write_state(case.size, state)
            for group in groups(chosen_entries(case, arguments), case):
                record = measure(case, group, arguments, state)
                print_record(record)
                wrong |= bool(record["wrong"])
                if not arguments.quick:
                    with arguments.results.open("a", encoding="utf-8") as results:
                        results.write(json.dumps(record) + "\n")
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
