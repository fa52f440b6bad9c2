"""Golden runs: twenty steps of small models, whose losses and gradient norms are kept in tests/golden/losses.

Losses of one commit are compared with those of another: a change that all layouts share (initial values, data order,
schedules, dropout masks) passes every comparison of layouts and is seen here alone. To write the files anew:

    python tests/support/golden_runs.py

A changed file needs a sentence in docs/LOG.md that says why the numbers changed.
"""

import math
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from paths import GOLDEN

if __name__ == "__main__":
    import conftest  # noqa: F401  one thread, and the paths of tests

import torch
from jobs import be_rank, tiny
from ranks import run_ranks

from megatronish.ops.build import find_compiler
from megatronish.ops.native import native
from megatronish.train.plot import read_lines

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


def this_machine(name: str) -> str:
    """What decides the last bits of a run's sums: the CPU's model, its vector instructions as torch uses them, torch.

    With dropout also the compiler of its softmax (ops/native.py).
    """
    cpus, model = Path("/proc/cpuinfo"), platform.machine()
    if cpus.exists():
        fields = dict(
            re.findall(r"^(model name|cpu family|model|stepping)\s*:\s*(.*)$", cpus.read_text(), re.MULTILINE)
        )
        model = " ".join(fields.values())
    compiler = "" if NO_DROPOUT in RUNS[name] else f", {_compiler()}"
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {model}{compiler}"


def _compiler() -> str:
    if native().reason is not None:
        return "no C++"
    said = subprocess.run([find_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    return said.splitlines()[0]


def run(name: str, run_dir: Path) -> Golden:
    """Train the run of this name."""
    flags = f"--train-iters {NUM_STEPS} --lr-warmup-iters 3 --lr-decay-style cosine {RUNS[name]}"
    run_ranks(2 if "--dp 2" in flags else 1, be_rank, tiny(run_dir, flags))
    lines = read_lines(run_dir / "metrics.jsonl")
    steps = [
        GoldenStep(each["step"], each["loss"], math.inf if each["grad_norm"] is None else each["grad_norm"])
        for each in lines
    ]
    return Golden(this_machine(name), steps)


def main() -> int:
    """Write every file anew."""
    from tempfile import TemporaryDirectory

    for name in RUNS:
        with TemporaryDirectory() as folder:
            run(name, Path(folder)).write(FOLDER / f"{name}.txt")
        print(f"wrote {FOLDER / name}.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
