"""Measurement of how far bf16 and fp16 runs deviate from fp32, in any layout. Not a test: minutes, run by hand.

    python tests/support/precision_band.py --markdown

Trains the same small GPT for 200 steps in fp32 in one process, then in each precision in one process and in five
layouts, and prints the largest and the mean distance of the loss from fp32's.

The band: a rounding to b bits moves a value by up to 2^-b of it. In 200 steps of Adam, roundings of the weights that
the forward sees (not of the masters, which are fp32) act as noise on the gradient, whose effect on the loss averages
out; what is left is of the order of one rounding of the loss itself. So the mean distance must stay below one rounding
(bf16: 2^-8 = 0.4 %, fp16: 2^-11 = 0.05 %) and the largest of any step, where a batch may be more sensitive than
others, below four (1.6 %, 0.2 %). A wrong reduction, a lost gradient or a stale parameter leaves these bands within a
few steps.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from jobs import be_rank, steps_of
from ranks import run_ranks

STEPS = 200
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
LARGEST, MEAN = 4.0, 1.0  # roundings
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 256 --seq-length 64 --mock-data "
    "--vocab-size 256 --make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 16 --eval-iters 0 "
    f"--train-iters {STEPS} --lr 2e-3 --lr-warmup-iters 10 --attention-dropout 0 --hidden-dropout 0.1 --device cpu "
    "--position-embedding-type rope --init-method-std 0.08 --log-interval 1"
)
LAYOUTS = {
    "one process": "",
    "dp 2 x tp 2, sp, ZeRO-1": "--dp 2 --tp 2 --sequence-parallel --zero-stage 1",
    "dp 4, ZeRO-2": "--dp 4 --zero-stage 2",
    "dp 2 x pp 2, ZeRO-3": "--dp 2 --pp 2 --zero-stage 3",
    "cp 2 x tp 2": "--cp 2 --tp 2",
    "pp 4, zb-h1": "--pp 4 --pipeline-schedule zb-h1",
}
PRECISIONS = {"bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 65536 --hysteresis 1"}


class Distance(NamedTuple):
    """Largest and mean relative distance of a run's losses from those of fp32, and the run's last loss."""

    largest: float
    mean: float
    last_loss: float

    def is_within(self, rounding: float) -> bool:
        """Whether the distance stays in the band."""
        return self.largest <= LARGEST * rounding and self.mean <= MEAN * rounding


def losses(flags: str) -> list[float]:
    """Losses of every step of a run."""
    sizes = [int(word) for name, word in zip(flags.split(), flags.split()[1:], strict=False) if name in SIZES]
    world_size = 1
    for size in sizes:
        world_size *= size
    with TemporaryDirectory() as folder:
        argv = [*MODEL.split(), *flags.split(), "--run-dir", folder]
        run_ranks(world_size, be_rank, argv, timeout=1200)
        steps = steps_of(Path(folder))
    return [steps[step].loss for step in sorted(steps)]


SIZES = ("--dp", "--tp", "--pp", "--cp")


def distance(of: Sequence[float], exact: Sequence[float]) -> Distance:
    """The distance of a loss curve from another."""
    apart = [abs(a - b) / b for a, b in zip(of, exact, strict=True)]
    return Distance(max(apart), sum(apart) / len(apart), of[-1])


def main() -> int:
    """Print a table; 1 if a curve leaves its band."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--only", choices=PRECISIONS, help="one of the precisions")
    arguments = parser.parse_args()
    exact = losses("")
    failed = False
    heads = ("precision", "layout", "largest", "mean", "last loss", "in the band")
    rows = [("fp32", "one process", "", "", f"{exact[-1]:.4f}", "")]
    for precision, flag in PRECISIONS.items():
        if arguments.only not in (None, precision):
            continue
        for layout, flags in LAYOUTS.items():
            found = distance(losses(f"{flags} {flag}"), exact)
            within = found.is_within(ROUNDING[precision])
            failed |= not within
            cells = (f"{found.largest:.3%}", f"{found.mean:.3%}", f"{found.last_loss:.4f}", "yes" if within else "NO")
            rows.append((precision, layout, *cells))
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    separator = " | " if arguments.markdown else "  "
    for row in (heads, *(("---",) * 6,) * arguments.markdown, *rows):
        print(separator.join(cell.ljust(0 if arguments.markdown else 32) for cell in row))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
