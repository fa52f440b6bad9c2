"""Benchmark of a training step in bf16 against fp32 on this machine.

Two engines of the same small GPT in one process, one in each precision, take turns, A B, B A, A B and so on: whatever
else the machine does falls on both alike. What is timed is a whole step: forward, backward, reduction, clipping, the
update of the fp32 masters, and the loss on the host. With `--seconds cpu` it is the processor's time and not the
clock's: what to look at where others use the machine.

    python benchmarks/precision.py --threads 1 --seconds cpu
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.engine.build import build_engine
from megatronish.engine.engine import Engine
from megatronish.model.batch import MicroBatch
from megatronish.parallel.mesh import Mesh

VOCAB_SIZE, SEQ_LENGTH, MICRO_BATCH_SIZE = 8192, 256, 8
WARM_UP_STEPS = 2
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def build(*, precision: str, num_layers: int, hidden_size: int) -> Engine:
    """An engine of a GPT-2 on one process."""
    return build_engine(
        Config(
            model=ModelConfig(
                num_layers=num_layers,
                hidden_size=hidden_size,
                num_attention_heads=hidden_size // 64,
                hidden_dropout=0.0,
                attention_dropout=0.0,
            ),
            parallel=ParallelConfig(device="cpu"),
            training=TrainingConfig(
                seq_length=SEQ_LENGTH,
                micro_batch_size=MICRO_BATCH_SIZE,
                bf16=precision == "bf16",
                fp16=precision == "fp16",
            ),
            optimizer=OptimizerConfig(),
        ),
        Mesh.start(),
        vocab_size=VOCAB_SIZE,
    )


def random_batch(step: int) -> MicroBatch:
    """A random batch, the same in every precision."""
    tokens = torch.randint(
        VOCAB_SIZE, (MICRO_BATCH_SIZE, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(step)
    )
    return MicroBatch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:].contiguous(),
        loss_mask=torch.ones(MICRO_BATCH_SIZE, SEQ_LENGTH, dtype=torch.bool),
        position_ids=torch.arange(SEQ_LENGTH).expand(MICRO_BATCH_SIZE, SEQ_LENGTH),
        sample_ids=torch.arange(MICRO_BATCH_SIZE) + step * MICRO_BATCH_SIZE,
    )


def time_steps(engine: Engine, steps: range, clock: Callable[[], float]) -> tuple[list[float], float]:
    """Seconds of each step, and the last loss."""
    seconds, loss = [], 0.0
    for step in steps:
        batch = random_batch(step)
        start = clock()
        loss = engine.step([batch], num_steps_done=step, learning_rate=1e-3, weight_decay=0.01).loss
        seconds.append(clock() - start)
    return seconds, loss


def take_turns(
    engines: dict[str, Engine], *, num_turns: int, num_steps: int, clock: Callable[[], float]
) -> list[dict[str, list[float]]]:
    """Seconds of the steps of each engine, turn by turn; all take the same steps."""
    for engine in engines.values():
        time_steps(engine, range(WARM_UP_STEPS), clock)
    turns = []
    for turn in range(num_turns):
        first = WARM_UP_STEPS + turn * num_steps
        seconds, losses = {}, {}
        for name in list(engines)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name], losses[name] = time_steps(engines[name], range(first, first + num_steps), clock)
        turns.append(seconds)
        told = (f"{name} {statistics.median(seconds[name]):.3f} s, loss {losses[name]:.4f}" for name in engines)
        print(f"turn {turn + 1}: {', '.join(told)}", flush=True)
    return turns


def report(turns: list[dict[str, list[float]]], *, clock: str) -> None:
    """Print the time of a step of each engine, and their ratio."""
    first, second = sorted(turns[0], key=("fp32", "bf16", "fp16").index)
    for name in (first, second):
        seconds = [each for turn in turns for each in turn[name]]
        print(f"{name}: {clock} time of a step, least {min(seconds):.3f} s, median {statistics.median(seconds):.3f} s")
    least = [min(each for turn in turns for each in turn[name]) for name in (first, second)]
    ratios = sorted(statistics.median(turn[first]) / statistics.median(turn[second]) for turn in turns)
    print(
        f"{first} / {second}: of the least {least[0] / least[1]:.2f}; of a turn: median "
        f"{statistics.median(ratios):.2f}, all {ratios[0]:.2f} to {ratios[-1]:.2f}"
    )


def main() -> None:
    """Warm up, measure in turns, print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs=2, choices=("fp32", "bf16", "fp16"), default=("fp32", "bf16"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="of each in a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", choices=tuple(CLOCKS), default="wall")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    engines = {
        name: build(precision=name, num_layers=arguments.layers, hidden_size=arguments.hidden_size)
        for name in arguments.precisions
    }
    count = sum(parameter.numel() for parameter in next(iter(engines.values())).stage.model.parameters())
    print(f"{count:,} parameters, {arguments.layers} layers of {arguments.hidden_size}")
    turns = take_turns(engines, num_turns=arguments.turns, num_steps=arguments.steps, clock=CLOCKS[arguments.seconds])
    print(f"torch {torch.__version__}, {arguments.threads} threads, load {os.getloadavg()[0]:.1f}")
    report(turns, clock=arguments.seconds)


if __name__ == "__main__":
    main()
