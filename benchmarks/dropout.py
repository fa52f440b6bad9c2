"""Cost of dropout on one process: steps without it, and with hidden dropout, attention dropout, and both.

All take turns in one process, step by step, so that whatever else the machine does falls on all alike. On a busy
machine the CPU seconds of one thread are steadier than the wall clock:

    OMP_NUM_THREADS=1 python -m benchmarks.dropout --clock cpu

Peak memory is that of a process of its own for each: `--memory`.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.contestants.case import Case, Job
from benchmarks.contestants.ours import Ours
from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.engine.build import build_engine
from megatronish.parallel.mesh import Mesh

CASE = Case("one", "small", "fp32")
WARM_UP_STEPS = 3
RATES = {"none": (0.0, 0.0), "hidden": (0.1, 0.0), "attention": (0.0, 0.1), "both": (0.1, 0.1)}
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def steps_of(name: str, *, bf16: bool) -> Callable[[int], None]:
    """A training step, by its number, of the model with these rates."""
    (hidden, attention), sizes = RATES[name], CASE.sizes
    engine = build_engine(
        Config(
            model=ModelConfig(
                num_layers=sizes.num_layers,
                hidden_size=sizes.hidden_size,
                num_attention_heads=sizes.num_heads,
                hidden_dropout=hidden,
                attention_dropout=attention,
            ),
            parallel=ParallelConfig(),
            training=TrainingConfig(seq_length=sizes.seq_length, micro_batch_size=sizes.micro_batch_size, bf16=bf16),
            optimizer=OptimizerConfig(),
        ),
        Mesh.start(),
        vocab_size=sizes.vocab_size,
    )

    ours = Ours(Job(CASE, "ours"), engine)

    def step(number: int) -> None:
        ours.step(*CASE.batch(number))

    return step


def print_times(names: list[str], *, num_steps: int, clock: Callable[[], float], bf16: bool) -> None:
    """Milliseconds of a step, and its ratio to that of the first name in the same turn."""
    steps = {name: steps_of(name, bf16=bf16) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARM_UP_STEPS + num_steps):
        for name in names if number % 2 == 0 else reversed(names):
            start = clock()
            steps[name](number)
            seconds[name].append(clock() - start)
    base = seconds[names[0]][WARM_UP_STEPS:]
    for name, each in seconds.items():
        measured = each[WARM_UP_STEPS:]
        ratios = statistics.quantiles((mine / plain for mine, plain in zip(measured, base, strict=True)), n=4)
        print(
            f"{name:<9} least {min(measured) * 1e3:7.1f} ms, median {statistics.median(measured) * 1e3:7.1f}; "
            f"ratio of the least {min(measured) / min(base):.3f}, median of ratios {ratios[1]:.3f} "
            f"(middle half {ratios[0]:.3f} to {ratios[2]:.3f})"
        )


def print_memory(name: str, *, bf16: bool) -> None:
    """Peak memory of this process after three steps, of which importing and building take a part."""
    step = steps_of(name, bf16=bf16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(3):
        step(number)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{name:<9} {after / 1024:7.0f} MiB, {(after - before) / 1024:.0f} of them by three steps")


def main() -> int:
    """Print times, or memory, of each."""
    parser = argparse.ArgumentParser(description="Cost of dropout on one process.")
    parser.add_argument("--names", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    if not arguments.memory:
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, clock {arguments.clock}")
        clock = CLOCKS[arguments.clock]
        print_times(arguments.names, num_steps=arguments.steps, clock=clock, bf16=arguments.bf16)
    elif len(arguments.names) == 1:
        print_memory(arguments.names[0], bf16=arguments.bf16)
    else:
        for name in arguments.names:
            more = ["--bf16"] if arguments.bf16 else []
            subprocess.run([sys.executable, "-m", "benchmarks.dropout", "--memory", "--names", name, *more], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
