"""Report of a machine with a GPU: tests of the kernels, their speed, and training beside a plain loop and FSDP2.

    make gpu-report                                        on a GPU: all five parts, forty minutes at most
    python3 benchmarks/gpu_report/report.py                the same, with the torch that is there; nothing is installed
    python3 benchmarks/gpu_report/report.py --part 4       one part, eight minutes at most
    make gpu-report GPU_REPORT_FLAGS=--tiny                a trial on a CPU: its numbers mean nothing

Each part consists of processes with time limits of their own, so one that fails or hangs loses itself alone. What is
done is not done again: a call after one that was stopped takes what is left. The report, which is written after every
process, says of every aim whether it was met, missed, or not measured.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from clock import Clock
from lines import rows_in
from needs import C_COMPILER, COMPILER, PACKAGE, TESTS, absent, add_wheels, told
from pages import page

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PART_LIMIT = 470.0  # seconds
BEGIN_UNTIL = 0.75  # of its limit a sweep begins contenders
STOPPED = 75  # exit status of a sweep that had no time left for all
FAMILIES = ("softmax", "norm", "cross_entropy", "activation", "dropout")  # of benchmarks/kernels.py
REAL = Clock()
DONE, FAILED, TOO_LONG, LEFT_OUT, UNFINISHED = "done", "failed", "too long", "left out", "unfinished"


class Task(NamedTuple):
    """A process of the report."""

    name: str
    words: Sequence[str]
    limit: float  # seconds
    needs: Sequence[str] = PACKAGE
    needs_gpu: bool = True


class Outcome(NamedTuple):
    """How a task ended: `done`, `failed`, `too long`, `unfinished` (call it again) or `left out`."""

    name: str
    command: str
    status: str
    seconds: float
    output: str


def gpu_tests(*, of_kernels: bool) -> list[str]:
    """Files with tests that need a GPU; compute-sanitizer takes hours and is left to `make gpu`."""
    kernels, marks = ROOT / "tests" / "kernels", re.compile(r"mark\.gpu|\bPLACES\b")
    paths = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "sanitizer" not in path.name)
    wanted = (path for path in paths if (kernels in path.parents) == of_kernels and marks.search(path.read_text()))
    return [str(path.relative_to(ROOT)) for path in wanted]


def parts_of(folder: Path, *, tiny: bool, times_slower: float = 1.0) -> list[list[Task]]:
    """The five parts. Limits of a part's tasks are no more than PART_LIMIT together."""
    pytest = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    triton = "tests/kernels/test_triton_gpu.py"
    cuda = [path for path in gpu_tests(of_kernels=True) if path != triton]
    turns = ["--dry-run"] if tiny else ["--turns", "20"]

    def kernels(family: str) -> Task:
        words = ["benchmarks/kernels.py", "--markdown", "--family", family, *turns]
        return Task(f"kernels: {family.replace('_', ' ')}", words, 60.0, needs_gpu=False)

    def sweep(model: str, limit: float) -> Task:
        words = [str(HERE / "sweep.py"), model, str(folder / "sweep.jsonl"), "--limit", str(BEGIN_UNTIL * limit)]
        return Task(f"sweep {model}", [*words, "--times-slower", str(times_slower)], limit, needs_gpu=False)

    models = ("tiny", "tiny", "tiny-llama", "tiny-wide") if tiny else ("124m", "350m", "1.3b", "8b")
    first, second, third, fourth = models
    return [
        [
            Task("build of the CUDA kernels", ["setup.py", "--quiet", "build_ext", "--inplace"], 160.0, (COMPILER,)),
            Task("tests: kernels in Triton", [*pytest, triton], 160.0, (*TESTS, "triton", C_COMPILER)),
            Task("tests: CUDA kernels", [*pytest, *cuda], 140.0, TESTS),
        ],
        [
            *(kernels(family) for family in FAMILIES),
            Task("tests: the rest on a GPU", [*pytest, *gpu_tests(of_kernels=False)], 160.0, TESTS),
        ],
        [sweep(model, 230.0) for model in dict.fromkeys((first, second))],
        [sweep(third, 460.0)],
        [sweep(fourth, 460.0)],
    ]


def run(task: Task, *, left: float, has_gpu: bool, clock: Clock = REAL) -> Outcome:
    """Run a task within its limit and what is left of its part; one that is too long is killed with all it started."""
    command, lacking = " ".join(task.words), absent(task.needs)
    if task.needs_gpu and not has_gpu:
        return Outcome(task.name, command, LEFT_OUT, 0.0, "there is no GPU here")
    if lacking:
        return Outcome(task.name, command, LEFT_OUT, 0.0, f"not here: {', '.join(lacking)}")
    limit = min(task.limit, left)
    if limit < 1:
        return Outcome(task.name, command, LEFT_OUT, 0.0, "no time was left for it")
    start = clock.now()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, *task.words],
        cwd=ROOT,
        env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, status = process.communicate(timeout=clock.real(limit))[0], None
    except subprocess.TimeoutExpired:
        status = TOO_LONG
    finally:  # also where the report itself is interrupted
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            output = process.communicate()[0]
    status = status or {0: DONE, STOPPED: UNFINISHED}.get(process.returncode, FAILED)
    return Outcome(task.name, command, status, clock.now() - start, output)


def circumstances() -> dict[str, Any]:
    """Hardware, versions and commit."""
    said = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    on_gpu = torch.cuda.is_available()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "device": torch.cuda.get_device_name() if on_gpu else f"the CPU of {platform.node() or 'this machine'}",
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / 2**30 if on_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": said.strip() or "unknown",
        "load": os.getloadavg()[0],
    }


def remove_weights(folder: Path) -> None:
    """Remove the initial weights that a killed part has left: gigabytes, and the next one would start from them."""
    for path in folder.glob("sweep.*.pt"):
        path.unlink()


@dataclass
class Report:
    """The report in a folder, and what earlier calls have left there."""

    folder: Path
    about: Mapping[str, Any]
    is_trial: bool
    outcomes: dict[str, Outcome]

    @classmethod
    def of(cls, folder: Path, about: Mapping[str, Any], *, is_trial: bool) -> "Report":
        """Go on with the report of the folder. One of another commit, device or torch is moved into `earlier`."""
        folder.mkdir(parents=True, exist_ok=True)
        path, outcomes = folder / "report.json", {}
        if path.exists():
            earlier = json.loads(path.read_text())
            same = earlier["is_trial"] == is_trial
            if same and all(earlier["circumstances"][key] == about[key] for key in ("commit", "device", "torch")):
                outcomes = {each["name"]: Outcome(**each) for each in earlier["parts"]}
            else:
                kept = folder / "earlier" / time.strftime("%Y-%m-%d_%H-%M-%S")
                kept.mkdir(parents=True)
                for name in ("report.json", "report.md", "sweep.jsonl"):
                    if (folder / name).exists():
                        (folder / name).rename(kept / name)
                print(f"the report of {earlier['circumstances']['commit']} is kept in {kept}")
        return cls(folder, about, is_trial, outcomes)

    def is_done(self, task: Task) -> bool:
        """Whether an earlier call has done it."""
        return task.name in self.outcomes and self.outcomes[task.name].status == DONE

    def add(self, outcome: Outcome) -> None:
        """Write the report with one more outcome: whoever interrupts it has what was measured."""
        self.outcomes[outcome.name] = outcome
        report = {
            "circumstances": self.about,
            "is_trial": self.is_trial,
            "sweep": list(rows_in(self.folder / "sweep.jsonl").values()),
            "parts": [each._asdict() for each in self.outcomes.values()],
        }
        for name, text in (("report.json", json.dumps(report, indent=1) + "\n"), ("report.md", page(report))):
            unfinished = self.folder / f"{name}.new"
            unfinished.write_text(text)
            unfinished.replace(self.folder / name)


def chosen(parts: Sequence[Sequence[Task]], wanted: Sequence[str]) -> list[list[Task]]:
    """The parts that have these numbers, and the tasks whose names begin so; ValueError if there is none."""
    names = [task.name for part in parts for task in part]
    for each in wanted:
        numbered = each.isdecimal() and 1 <= int(each) <= len(parts)
        if not numbered and not any(name.startswith(each) for name in names):
            raise ValueError(
                f"--part {each} is neither a number from 1 to {len(parts)} nor the beginning of a name: "
                f"{', '.join(names)}"
            )

    def is_wanted(number: int, task: Task) -> bool:
        return not wanted or any(each == str(number) or task.name.startswith(each) for each in wanted)

    return [[task for task in part if is_wanted(number, task)] for number, part in enumerate(parts, 1)]


def carry_out(part: Sequence[Task], report: Report, *, limit: float, has_gpu: bool, clock: Clock) -> Iterator[Outcome]:
    """The tasks of a part that are not done, within its time."""
    end = clock.now() + limit
    for task in part:
        if report.is_done(task):
            print(f"{task.name}: done by an earlier call", flush=True)
            continue
        remove_weights(report.folder)
        print(f"{task.name} ...", flush=True)
        outcome = run(task, left=end - clock.now(), has_gpu=has_gpu, clock=clock)
        remove_weights(report.folder)
        why = f" ({outcome.output})" if outcome.status == LEFT_OUT else f" after {outcome.seconds:.0f} s"
        print(f"{task.name}: {outcome.status}{why}", flush=True)
        report.add(outcome)
        yield outcome


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--tiny", action="store_true", help="tiny sizes: a trial of the report, on a CPU too")
    made.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu_report")
    made.add_argument("--part", action="append", metavar="N", help="this of five parts; several times for several")
    made.add_argument("--limit", type=float, default=PART_LIMIT, help="seconds of a part")
    made.add_argument("--wheels", type=Path, help="folder of wheels to take what is not installed from")
    made.add_argument("--times-slower", type=float, default=1.0, help="a trial as on a machine so many times slower")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; the exit status, 1 if a task did not end well."""
    arguments = parser().parse_args(argv)
    has_gpu, clock = torch.cuda.is_available(), Clock(arguments.times_slower)
    if not has_gpu and not arguments.tiny:
        print("the report is about a CUDA GPU, and torch sees none here; --tiny tries it without one", file=sys.stderr)
        return 2
    folder: Path = arguments.folder.resolve()
    try:
        parts = parts_of(folder, tiny=arguments.tiny, times_slower=clock.factor)
        parts = chosen(parts, arguments.part or ())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.wheels is not None:
        wheels = add_wheels(arguments.wheels)
        os.environ["PYTHONPATH"] = os.pathsep.join([*wheels, *filter(None, [os.environ.get("PYTHONPATH")])])
    lacking = told()
    print(*lacking, sep="\n", end="\n" if lacking else "", flush=True)
    about = circumstances() | {"not_here": lacking}
    report = Report.of(folder, about, is_trial=arguments.tiny or not has_gpu)
    outcomes = [
        outcome
        for part in parts
        for outcome in carry_out(part, report, limit=arguments.limit, has_gpu=has_gpu, clock=clock)
    ]
    print(f"the report: {folder / 'report.md'} and {folder / 'report.json'}")
    return int(any(outcome.status in (FAILED, TOO_LONG, UNFINISHED) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
