"""One command for a machine with a GPU: build, test, measure, and one report of it all, in under nine minutes.

    make gpu-report                          on a GPU
    make gpu-report GPU_REPORT_FLAGS=--tiny  a trial of the report itself, on a CPU: its numbers mean nothing

Each part is a process with a time limit, so a part that fails or hangs loses itself alone. The report says of every aim
whether it was met, missed, or not measured.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pages import Row, page

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
WHOLE_LIMIT = 530.0  # seconds
LAST_LINES = 15


class Part(NamedTuple):
    """A process of the report."""

    name: str
    words: Sequence[str]
    limit: float  # seconds
    needs_gpu: bool = True


class Outcome(NamedTuple):
    """How a part ended: `done`, `failed`, `too long` or `left out`."""

    name: str
    command: str
    status: str
    seconds: float
    output: str


def parts_of(folder: Path, *, tiny: bool) -> list[Part]:
    """All parts, in their order; each model of the sweep by itself."""
    lines, kernels = str(folder / "sweep.jsonl"), ["benchmarks/kernels.py", "--markdown"]
    sweep = {"tiny": 300.0, "tiny-llama": 300.0} if tiny else {"1.3b": 90.0, "124m": 60.0, "8b": 150.0, "350m": 60.0}
    build = ["setup.py", "--quiet", "build_ext", "--inplace"]
    return [
        Part("build of the kernels", build, 120.0),
        *(Part(f"sweep {model}", [str(HERE / "sweep.py"), model, lines], each, False) for model, each in sweep.items()),
        Part("kernels", [*kernels, *(["--dry-run", "--family", "norm"] if tiny else ["--turns", "20"])], 90.0, False),
        Part("tests on a GPU", ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"], 120.0),
    ]


def run(part: Part, *, left: float, has_gpu: bool) -> Outcome:
    """Run a part within its limit and what is left of the whole one; a part that is too long is killed with all."""
    command = " ".join(part.words)
    if part.needs_gpu and not has_gpu:
        return Outcome(part.name, command, "left out", 0.0, "there is no GPU here")
    limit = min(part.limit, left)
    if limit < 1:
        return Outcome(part.name, command, "left out", 0.0, "no time was left for it")
    start = time.monotonic()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, *part.words],
        cwd=ROOT,
        env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, status = process.communicate(timeout=limit)[0], None
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, status = process.communicate()[0], "too long"
    status = status or ("done" if process.returncode == 0 else "failed")
    return Outcome(part.name, command, status, time.monotonic() - start, output)


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


def rows_in(path: Path) -> list[Row]:
    """The sweep's lines, those that were written before a part was killed, too."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # its writer was killed
            continue
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; the exit status, 1 if a part did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: a trial of the report, on a CPU too")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu_report")
    parser.add_argument("--part", action="append", help="parts whose names begin so alone; several times for several")
    parser.add_argument("--limit", type=float, default=WHOLE_LIMIT, help="seconds of all parts together")
    arguments = parser.parse_args(argv)
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not arguments.tiny:
        print("the report is about a CUDA GPU, and torch sees none here; --tiny tries it without one", file=sys.stderr)
        return 2
    folder: Path = arguments.folder
    parts = parts_of(folder, tiny=arguments.tiny)
    for wanted in arguments.part or ():
        if not any(part.name.startswith(wanted) for part in parts):
            names = ", ".join(part.name for part in parts)
            print(f"--part {wanted} is the beginning of no part's name; the parts are: {names}", file=sys.stderr)
            return 2
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.jsonl").unlink(missing_ok=True)
    end, outcomes = time.monotonic() + arguments.limit, []
    for part in parts:
        if arguments.part and not any(part.name.startswith(wanted) for wanted in arguments.part):
            continue
        remove_weights(folder)
        print(f"{part.name} ...", flush=True)
        outcomes.append(run(part, left=end - time.monotonic(), has_gpu=has_gpu))
        remove_weights(folder)
        print(f"{part.name}: {outcomes[-1].status} after {outcomes[-1].seconds:.0f} s", flush=True)
        # The report is written after every part: whoever interrupts it has what was measured.
        report = {
            "circumstances": circumstances(),
            "is_trial": arguments.tiny or not has_gpu,
            "sweep": rows_in(folder / "sweep.jsonl"),
            "parts": [outcome._asdict() for outcome in outcomes],
        }
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (folder / "report.md").write_text(page(report))
    print(f"the report: {folder / 'report.md'} and {folder / 'report.json'}")
    return int(any(outcome.status in ("failed", "too long") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
