"""Golden runs: twenty steps of small models, whose losses and gradient norms are kept in tests/golden/losses.

Losses of one commit are compared with those of another: a change that all layouts share (initial values, data order,
schedules, dropout masks) passes every comparison of layouts and is seen here alone. To write the files anew:

    python tests/support/golden_runs.py

A changed file needs a sentence in docs/LOG.md that says why the numbers changed. The files are compared by tolerance:
the last bits are not the machine's name's to tell (instructions that a hypervisor hides, the library's choice of a
kernel, alignment). To the bit, two commits are compared on one machine:

    python tests/support/golden_runs.py --against main
"""

import argparse
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from paths import GOLDEN

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))
    import conftest  # noqa: F401  one thread, and the paths of tests

import torch
from jobs import be_rank, tiny
from ranks import run_ranks

from megatronish.report.plot import read_lines

FOLDER = GOLDEN / "losses"
NUM_STEPS = 20
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --group-query-attention "
    "--num-query-groups 4 --untie-embeddings-and-output-weights"
)
RUNS = {
    "gpt2": NO_DROPOUT,
    "llama_gqa": f"{LLAMA} {NO_DROPOUT}",
    "fp16": f"--fp16 --initial-loss-scale 4194304 --loss-scale-window 4 --hysteresis 1 {NO_DROPOUT}",
    "muon": f"--optimizer muon {LLAMA} {NO_DROPOUT}",
    "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1",
    "zero2": f"--dp 2 --zero-stage 2 {NO_DROPOUT}",
}


class GoldenStep(NamedTuple):
    """One step of a run, in full precision; a gradient that overflowed has an infinite norm."""

    step: int
    loss: float
    grad_norm: float

    def __str__(self) -> str:
        return f"{self.step} {self.loss.hex()} {self.grad_norm.hex()}"


class Golden(NamedTuple):
    """A file of golden steps, and the machine that wrote it."""

    machine: str
    steps: list[GoldenStep]

    def write(self, path: Path) -> None:
        """A line for the machine, a line for each step."""
        path.write_text("\n".join([f"# {self.machine}", *map(str, self.steps)]) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Golden":
        """The inverse of `write`."""
        head, *lines = path.read_text().splitlines()
        words = [line.split() for line in lines]
        steps = [GoldenStep(int(step), float.fromhex(loss), float.fromhex(norm)) for step, loss, norm in words]
        return cls(head.removeprefix("# "), steps)


def this_machine() -> str:
    """Words for people about what sums here: torch, its vector instructions, the CPU's model. Nothing compares them."""
    cpus, model = Path("/proc/cpuinfo"), platform.machine()
    if cpus.exists():
        fields = dict(
            re.findall(r"^(model name|cpu family|model|stepping)\s*:\s*(.*)$", cpus.read_text(), re.MULTILINE)
        )
        model = " ".join(fields.values())
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {model}"


def run(name: str, run_dir: Path) -> Golden:
    """Train the run of this name."""
    flags = f"--train-iters {NUM_STEPS} --lr-warmup-iters 3 --lr-decay-style cosine {RUNS[name]}"
    run_ranks(2 if "--dp 2" in flags else 1, be_rank, tiny(run_dir, flags))
    lines = read_lines(run_dir / "metrics.jsonl")
    steps = [
        GoldenStep(each["step"], each["loss"], math.inf if each["grad_norm"] is None else each["grad_norm"])
        for each in lines
    ]
    return Golden(this_machine(), steps)


def write_all(folder: Path) -> None:
    """Write the file of every run into a folder."""
    for name in RUNS:
        with TemporaryDirectory() as run_dir:
            run(name, Path(run_dir)).write(folder / f"{name}.txt")
        print(f"wrote {folder / name}.txt", flush=True)


def differing(commit: str) -> list[str]:
    """Runs whose numbers here are not, to the bit, those of a commit; both are run now, on this machine."""
    root = Path(__file__).resolve().parents[2]
    with TemporaryDirectory() as temporary:
        there, before, now = (Path(temporary) / name for name in ("tree", "before", "now"))
        before.mkdir()
        now.mkdir()
        subprocess.run(["git", "-C", root, "worktree", "add", "--quiet", "--detach", there, commit], check=True)
        try:
            # This file runs both: the older commit's file may have other runs.
            for tree, folder in ((there, before), (root, now)):
                paths = os.pathsep.join(map(str, (tree, root / "tests", root)))
                command = [sys.executable, __file__, "--into", folder]
                subprocess.run(command, check=True, cwd=tree, env={**os.environ, "PYTHONPATH": paths})
        finally:
            subprocess.run(["git", "-C", root, "worktree", "remove", "--force", there], check=True)
        pairs = {name: [Golden.read(each / f"{name}.txt").steps for each in (before, now)] for name in RUNS}
    return [name for name, (one, other) in pairs.items() if list(map(str, one)) != list(map(str, other))]


def main() -> int:
    """Write every file anew, or compare with a commit; 1 if a number differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=FOLDER, help="folder of the files")
    parser.add_argument("--against", metavar="COMMIT", help="compare, to the bit, with what this commit computes here")
    options = parser.parse_args()
    if options.against is None:
        write_all(options.into)
        return 0
    found = differing(options.against)
    print(f"differ from {options.against}: {', '.join(found)}" if found else f"equal to {options.against} to the bit")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
