"""Benchmark of the fused kernels on this GPU, beside a copy, torch's own operations, torch.compile and apex.

All these kernels wait for memory, so what counts is how many bytes a second they move: of those that cannot be spared,
inputs read once and outputs written once, whatever else a contender may move. The measure is a copy of a tensor of the
same size in the same run. Tensors are several times the L2 cache and rotate, so nothing is there from the time before.

A turn is a forward and its backward; times are those between CUDA events, medians over turns. Work is queued ahead, so
the GPU never waits for Python. Before it is timed every contender is held against torch's own operations.

    python setup.py build_ext --inplace && python benchmarks/kernels.py --markdown

`--dry-run` takes every case once at a tiny size on the CPU, where the references run: its numbers mean nothing.
"""

import argparse
import datetime
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kernel_cases import FAMILIES, Case, Run, Sizes
from torch import Tensor

from megatronish.ops.library import load_kernels
from megatronish.ops.report import kernels_line

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# How far contenders may be apart, of the largest number: the output of torch's own operations is rounded in between.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}
LEAST_BYTES = 512 * 2**20  # of the largest tensor of a case, and
LEAST_CACHES = 8  # times the L2 cache
NUM_SETS, WARM_UP_TURNS, QUEUED_CYCLES = 2, 5, 100_000_000


class Inputs(NamedTuple):
    """Inputs of one turn, and the gradients of its outputs."""

    tensors: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]

    @property
    def leaves(self) -> list[Tensor]:
        """The inputs that have gradients."""
        return [x for x in self.tensors if x.requires_grad]


class Times(NamedTuple):
    """Median seconds of forward and backward."""

    forward: float
    backward: float


# Measuring


def outputs_of(run: Run, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a contender as a tuple."""
    out = run(*tensors)
    return out if isinstance(out, tuple) else (out,)


def check(case: Case, name: str, run: Run, inputs: Inputs) -> None:
    """RuntimeError if a contender computes something else than torch's own operations. Some overwrite their inputs."""
    results = []
    for each in (case.torchs, run):
        tensors = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs.tensors)
        outputs = outputs_of(each, tensors)
        values = [out.detach().clone() for out in outputs]
        grads = torch.autograd.grad(outputs, [x for x in tensors if x.requires_grad], inputs.grads)
        results.append([*values, *grads])
    for number, (expected, found) in enumerate(zip(*results, strict=True)):
        limit = TOLERANCE[inputs.leaves[0].dtype] * float(expected.abs().max())
        apart = float((found.float() - expected.float()).abs().max())
        if not apart <= limit:
            raise RuntimeError(f"{case.name} {case.shape}: number {number} of {name} is off by {apart:.3g}")


def measure(run: Run, sets: Sequence[Inputs], *, num_turns: int) -> Times:
    """Times of a contender, turn by turn, each turn on other tensors than the last."""
    device = sets[0].tensors[0].device
    stamps = []
    if device.type == "cuda":
        torch.cuda._sleep(QUEUED_CYCLES)  # the GPU begins when Python is ahead of it
    for turn in range(WARM_UP_TURNS + num_turns):
        inputs = sets[turn % len(sets)]
        start = _stamp(device)
        outputs = outputs_of(run, inputs.tensors)
        middle = _stamp(device)
        torch.autograd.grad(outputs, inputs.leaves, inputs.grads)
        stamps.append((start, middle, _stamp(device)))
    if device.type == "cuda":
        torch.cuda.synchronize()
    counted = stamps[WARM_UP_TURNS:]
    return Times(*(statistics.median(_seconds(stamp[i], stamp[i + 1]) for stamp in counted) for i in (0, 1)))


def _stamp(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def copy_bandwidth(sizes: Sizes, *, num_turns: int) -> float:
    """Bandwidth of a copy in bytes a second, reads and writes together."""
    count = sizes.num_bytes // sizes.dtype.itemsize
    pairs = [sizes.random((count,), (count,)) for _ in range(2)]
    stamps = []
    for turn in range(WARM_UP_TURNS + num_turns):
        target, source = pairs[turn % 2]
        start = _stamp(sizes.device)
        target.detach().copy_(source)
        stamps.append((start, _stamp(sizes.device)))
    if sizes.device.type == "cuda":
        torch.cuda.synchronize()
    return 2 * sizes.num_bytes / statistics.median(_seconds(*stamp) for stamp in stamps[WARM_UP_TURNS:])


def measure_case(case: Case, *, num_turns: int, compile_backend: str) -> dict[str, Times | None]:
    """Times by contender; None where apex is not installed or lacks the operation."""
    torch._dynamo.reset()
    contenders = {
        "ours": case.ours,
        "eager": case.torchs,
        "compile": torch.compile(case.torchs, fullgraph=True, dynamic=False, backend=compile_backend),
        "apex": case.apex,
    }
    sets = []
    for _ in range(NUM_SETS):
        tensors = case.make()
        with torch.no_grad():
            grads = tuple(torch.randn_like(out) for out in outputs_of(case.torchs, tensors))
        sets.append(Inputs(tensors, grads))
    times: dict[str, Times | None] = {}
    for name, run in contenders.items():
        times[name] = None
        if run is None:
            continue
        try:
            check(case, name, run, sets[0])
            times[name] = measure(run, sets, num_turns=num_turns)
        except Exception as error:
            if name != "apex":
                raise
            print(f"apex: {case.name} {case.shape}: {error}", file=sys.stderr)  # a part of it may not have been built
    return times


# Telling

COLUMNS = ("operation", "shape", "pass", "time", "GB/s", "of a copy", "eager", "torch.compile", "apex")


def rows_of(case: Case, times: dict[str, Times | None], copy: float) -> Iterator[tuple[str, ...]]:
    """Rows of forward and backward; other contenders by their time relative to ours."""
    ours = times["ours"]
    assert ours is not None
    for number, (name, num_bytes) in enumerate((("forward", case.forward_bytes), ("backward", case.backward_bytes))):
        seconds = ours[number]
        others = (times[other] for other in ("eager", "compile", "apex"))
        yield (
            case.name,
            case.shape,
            name,
            f"{seconds * 1e6:.0f} us",
            f"{num_bytes / seconds / 1e9:.0f}",
            f"{num_bytes / seconds / copy:.0%}",
            *("-" if other is None else f"x {other[number] / seconds:.2f}" for other in others),
        )


def print_row(cells: Sequence[str], *, markdown: bool) -> None:
    """Print a row in columns, or as Markdown."""
    if markdown:
        print(f"| {' | '.join(cells)} |", flush=True)
    else:
        widths = (24, 22, 9, 10, 8, 10, 9, 14, 8)
        print("".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)


def circumstances(sizes: Sizes, copy: float) -> str:
    """Hardware, versions and method of the measurement, for docs/BENCHMARKS.md."""
    on_gpu = sizes.device.type == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else "dry run on the CPU, numbers mean nothing"
    root = Path(__file__).parents[1]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    ).stdout.strip()
    return (
        f"{datetime.date.today()}, {device}, torch {torch.__version__}, CUDA {torch.version.cuda}, commit "
        f"{commit or 'unknown'}, {sizes.dtype}; a copy of {sizes.num_bytes / 2**20:.0f} MiB: {copy / 1e9:.0f} GB/s\n"
        f"{kernels_line(sizes.device)}"
    )


def why_not() -> str | None:
    """The reason why a measurement would mean nothing, or None."""
    if not torch.cuda.is_available():
        return (
            "the kernels are measured on a CUDA GPU, and torch sees none here; --dry-run tries this script without one"
        )
    reason = load_kernels()
    return None if reason is None else f"there are no kernels to measure: {reason}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status, 2 without a GPU or without kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=tuple(FAMILIES), action="append", help="these alone")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--markdown", action="store_true", help="a table for docs/BENCHMARKS.md")
    parser.add_argument("--dry-run", action="store_true", help="every case once at a tiny size on the CPU")
    arguments = parser.parse_args(argv)
    dtype, num_turns, compile_backend = DTYPES[arguments.dtype], arguments.turns, "inductor"
    if arguments.dry_run:
        tiny: dict[str, Any] = {"lengths": (16,), "hidden": (24,), "vocabularies": (50,), "features": (32,)}
        sizes = Sizes(torch.device("cpu"), dtype, 4096, **tiny)
        num_turns, compile_backend = 1, "eager"
    elif (reason := why_not()) is not None:
        print(reason, file=sys.stderr)
        return 2
    else:
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        sizes = Sizes(torch.device("cuda"), dtype, max(LEAST_BYTES, LEAST_CACHES * cache))
    torch.manual_seed(0)
    copy = copy_bandwidth(sizes, num_turns=num_turns)
    print(circumstances(sizes, copy))
    tell = partial(print_row, markdown=arguments.markdown)
    tell(COLUMNS)
    if arguments.markdown:
        tell(["---"] * len(COLUMNS))
    for family in arguments.family or FAMILIES:
        for case in FAMILIES[family](sizes):
            for row in rows_of(case, measure_case(case, num_turns=num_turns, compile_backend=compile_backend), copy):
                tell(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
