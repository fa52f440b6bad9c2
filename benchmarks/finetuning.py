"""Benchmark of LoRA on chats: megatronish against transformers with PEFT, and what packing gains over padding.

One process each, in turns, one step each, in another order every round (turns.py). megatronish writes what all begin
with: a small Llama with random weights as a Hugging Face folder, its own initial adapter as PEFT writes it (A as drawn,
B zero), and the plan of the steps. Every contestant trains the same chats in the same step, without dropout, and must
have as many learning parameters and the losses of megatronish at the first two steps: the first shows the base, the
second the adapter. Tokens are those of the chats; what fills up rows does not count.

    python -m benchmarks.finetuning --quick
    python -m benchmarks.finetuning --steps 20

The peer has an environment of its own, which `make .venv-bench/transformers/.megatronish-requirements` installs.
"""

import argparse
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
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.contestants.chats import CASES, ChatJob
from benchmarks.side_by_side import commit, python_of
from benchmarks.side_by_side_report import Spread
from benchmarks.turns import ROOT, Runner, ask_all, start, take_turns, wait_until_built

TOLERANCE = 1e-5  # relative, of the losses of the steps that must agree
STEPS_THAT_AGREE = 2
HEADINGS = ("", "tokens/s", "ratio to the first row", "peak memory", "places filled", "losses within")


class Tuning(NamedTuple):
    """A row of the table: the module that builds it, whether it packs, and its environment if not ours."""

    name: str
    module: str
    packs: bool
    environment: str = ""


OURS = "megatronish"
PADDED = {OURS: "megatronish --no-pack-samples", "transformers + peft, packed": "transformers + peft"}
"""What packing is compared with."""
TUNINGS = (
    Tuning("transformers + peft", "peft_lora", packs=False, environment="transformers"),
    Tuning("transformers + peft, packed", "peft_lora", packs=True, environment="transformers"),
    Tuning("megatronish --no-pack-samples", "ours_lora", packs=False),
    Tuning(OURS, "ours_lora", packs=True),
)


def begin(tuning: Tuning, arguments: argparse.Namespace, folder: Path) -> Runner:
    """Start a contestant."""
    python = arguments.peer_python if tuning.environment and arguments.peer_python else python_of(tuning.environment)
    if python is None:
        reason = f"not installed: make .venv-bench/{tuning.environment}/.megatronish-requirements"
        return Runner(tuning.name, [], failure=reason)
    job = ChatJob(tuning.module, arguments.size, str(folder), tuning.packs)
    words = [str(python), "-m", "benchmarks.contestants.chat_worker", json.dumps(dataclasses.asdict(job))]
    return start(tuning.name, [words], threads=arguments.threads, folder=folder)


def leave_if_other(runners: Sequence[Runner]) -> list[str]:
    """Let those leave that train another model or other chats than megatronish; their names."""
    ours = next(runner for runner in runners if runner.name == OURS)
    if ours.failure is not None:
        raise SystemExit(f"megatronish failed: {ours.failure}")
    wrong: list[str] = []
    for runner in runners:
        if runner.failure is not None:
            continue
        if runner.parameters != ours.parameters:
            runner.leave(f"learns {runner.parameters} parameters, megatronish {ours.parameters}")
        for step, (found, wanted) in enumerate(zip(runner.losses, ours.losses, strict=True), start=1):
            assert found is not None and wanted is not None
            if runner.failure is None and not math.isclose(found, wanted, rel_tol=TOLERANCE):
                runner.leave(f"has loss {found} at step {step}, megatronish {wanted}")
        if runner.failure is not None:
            wrong.append(runner.name)
    return wrong


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[list[Runner], list[str]]:
    """The contestants after their turns, and the names of those that compute something else."""
    runners: list[Runner] = []
    try:
        for tuning in chosen(arguments):
            runners.append(begin(tuning, arguments, folder))
        for runner in runners:
            wait_until_built(runner)
        take_turns(runners, range(STEPS_THAT_AGREE), measured=False)
        wrong = leave_if_other(runners)
        first = max(arguments.warm_up, STEPS_THAT_AGREE)
        take_turns(runners, range(STEPS_THAT_AGREE, first), measured=False)
        ask_all(runners, {"reset": True})
        take_turns(runners, range(first, first + arguments.steps), measured=True)
        for runner, answers in ask_all(runners, {"peak": True}):
            runner.peak = answers[0]["peak"]
        return runners, wrong
    finally:
        for runner in runners:
            runner.end()


def chosen(arguments: argparse.Namespace) -> list[Tuning]:
    """The contestants that the flags choose; megatronish always runs."""
    patterns = arguments.contestants.split(",")
    return [each for each in TUNINGS if each.name == OURS or any(fnmatchcase(each.name, word) for word in patterns)]


def cells_of(runner: Runner, reference: Runner | None, ours: Runner) -> list[str]:
    """Cells of the table, under HEADINGS. A ratio is that of two steps of one round."""
    if runner.failure is not None:
        return [runner.name, runner.failure, "", "", "", ""]
    steps = runner.facts[-len(runner.seconds) :]
    speed = Spread.of([each["tokens"] / each["seconds"] for each in steps])
    ratio = ratio_of(reference, runner) if reference is not None else None
    differences = [abs(a - b) / abs(b) for a, b in zip(runner.losses, ours.losses, strict=True) if a and b]
    return [
        runner.name,
        f"{speed.median:,.0f} ({speed.low:,.0f} to {speed.high:,.0f})",
        said(ratio) if ratio is not None else "",
        f"{runner.peak / 2**30:.2f} GiB",
        f"{sum(each['tokens'] for each in steps) / sum(each['places'] for each in steps):.0%}",
        f"{max(differences):.0e}",
    ]


def ratio_of(slow: Runner, fast: Runner) -> Spread:
    """How many times faster the steps of the second are than those of the first in the same rounds."""
    return Spread.of([a / b for a, b in zip(slow.seconds, fast.seconds, strict=True)])


def said(ratio: Spread) -> str:
    """A ratio with its middle half."""
    return f"**{ratio.median:.2f}** ({ratio.low:.2f} to {ratio.high:.2f})"


def print_table(runners: Sequence[Runner], arguments: argparse.Namespace) -> None:
    """The table as docs/BENCHMARKS.md has it, the conditions, and packing's gain."""
    by_name = {runner.name: runner for runner in runners if runner.failure is None}
    ours, case = by_name[OURS], CASES[arguments.size]
    tokens = statistics.median(each["tokens"] for each in ours.facts)
    print(
        f"\nLoRA of rank 16 on a Llama of {case.num_layers} layers, hidden {case.hidden_size}, vocabulary "
        f"{case.vocab_size}; rows of {case.seq_length}, fp32; {ours.parameters:,} learning parameters, about "
        f"{tokens:,.0f} tokens of chats a step\n"
    )
    print("| " + " | ".join(HEADINGS) + " |")
    print("|" + "---|" * len(HEADINGS))
    reference = runners[0] if runners[0].failure is None else None
    for runner in runners:
        print("| " + " | ".join(cells_of(runner, reference, ours)) + " |")
    print()
    for packed, padded in PADDED.items():
        if packed in by_name and padded in by_name:
            print(f"packing's gain, {packed} against {padded}: {said(ratio_of(by_name[padded], by_name[packed]))}")
    print(
        f"{time.strftime('%Y-%m-%d %H:%M')}, commit {commit()}, {platform.machine()}, {os.cpu_count()} cores, torch "
        f"{version('torch')}, load {os.getloadavg()[0]:.1f}; {arguments.steps} steps, {arguments.threads} threads",
        flush=True,
    )


def parse(told: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=CASES, default="small")
    parser.add_argument("--contestants", metavar="PATTERNS", default="*", help="names, with commas: transformers*")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each contestant")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before these")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peer-python", type=Path, help="interpreter with transformers and peft, instead of its own")
    parser.add_argument("--quick", action="store_true", help="a tiny model and two steps, to see that all run")
    arguments = parser.parse_args(told)
    if arguments.quick:
        arguments.size, arguments.steps, arguments.warm_up = "tiny", 2, 2
    return arguments


def main(told: Sequence[str] | None = None) -> int:
    """Prepare, measure and print; 1 if a contestant computes something else."""
    arguments = parse(told)
    with tempfile.TemporaryDirectory(prefix="finetuning_") as folder:
        steps = str(arguments.steps + max(arguments.warm_up, STEPS_THAT_AGREE))
        words = [sys.executable, "-m", "benchmarks.contestants.ours_lora", arguments.size, folder, steps]
        subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
        runners, wrong = measure(arguments, Path(folder))
    print_table(runners, arguments)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
