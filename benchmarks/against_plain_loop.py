"""Is megatronish on one process as fast as the plain PyTorch loop of the same model?

Both live in one process, with the same weights, and take turns in blocks of a few steps: A B, then B A, and so on. So
whatever else the machine does falls on both alike, and the ratio of two neighbouring blocks is free of slow drift.
The first blocks are warm-up. Before the clock starts, both must have as many parameters and, for some steps, the same
loss. What is timed is what `tokens_per_second` counts: forward, backward, clipping, update, and
the loss on the host.

    OMP_NUM_THREADS=2 python benchmarks/against_plain_loop.py --blocks 10
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plain_loop import PlainLoop, Sizes, random_batch

from megatronish.config.model import ModelConfig
from megatronish.config.optimizer import OptimizerConfig
from megatronish.config.parallel import ParallelConfig
from megatronish.config.training import TrainingConfig
from megatronish.mesh.groups import Mesh
from megatronish.model.batch import MicroBatch
from megatronish.train.engine import Engine

LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.01
LOSS_TOLERANCE = 1e-4
Step = Callable[[int], tuple[float, float]]
"""A step number -> its loss and the norm of its gradient."""


def build_engine(sizes: Sizes) -> Engine:
    """Megatronish, on one process."""
    return Engine.build(
        Mesh.start(),
        model=ModelConfig(
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        parallel=ParallelConfig(),
        training=TrainingConfig(seq_length=sizes.seq_length, micro_batch_size=sizes.micro_batch_size),
        optimizer=OptimizerConfig(adam_beta2=0.999),
        vocab_size=sizes.vocab_size,
    )


def as_micro_batch(tokens: Tensor, labels: Tensor, step: int) -> MicroBatch:
    """The same samples, as the loader would hand them over."""
    batch, seq_length = tokens.shape
    return MicroBatch(
        tokens=tokens,
        labels=labels,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        position_ids=torch.arange(seq_length).expand(batch, seq_length),
        sample_ids=torch.arange(batch) + step * batch,
    )


def build_steps(sizes: Sizes) -> tuple[Step, Step]:
    """A step of megatronish and a step of the plain loop, from the same weights."""
    engine = build_engine(sizes)
    plain = PlainLoop(sizes, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    ours, theirs = list(engine.model.parameters()), list(plain.model.parameters())
    assert [parameter.shape for parameter in ours] == [parameter.shape for parameter in theirs]
    with torch.no_grad():
        torch._foreach_copy_(theirs, ours)

    def ours_step(step: int) -> tuple[float, float]:
        batch = as_micro_batch(*random_batch(sizes, step), step)
        result = engine.step([batch], step=step, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        return result.loss, result.grad_norm

    def plain_step(step: int) -> tuple[float, float]:
        return plain.step(*random_batch(sizes, step))

    print(f"{sum(parameter.numel() for parameter in ours):,} parameters in both")
    return ours_step, plain_step


def check_same(ours: Step, plain: Step, *, num_steps: int) -> None:
    """The same training, step by step."""
    for step in range(num_steps):
        found, expected = ours(step), plain(step)
        print(f"step {step}: loss and grad_norm {found} against {expected}")
        assert abs(found[0] - expected[0]) <= LOSS_TOLERANCE * expected[0]


def time_steps(take: Step, first: int, count: int) -> list[float]:
    """Seconds of each of `count` steps."""
    seconds = []
    for step in range(first, first + count):
        start = time.perf_counter()
        take(step)
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Compare, and print a row for docs/BENCHMARKS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10, help="blocks of each that count")
    parser.add_argument("--block-steps", type=int, default=4, help="steps of a block")
    arguments = parser.parse_args()
    sizes = Sizes()
    steps = build_steps(sizes)
    check_same(*steps, num_steps=3)
    seconds: tuple[list[list[float]], list[list[float]]] = ([], [])
    for block in range(arguments.blocks + 1):
        for which in (0, 1) if block % 2 == 0 else (1, 0):
            taken = time_steps(steps[which], 100 + block * arguments.block_steps, arguments.block_steps)
            if block > 0:
                seconds[which].append(taken)
    ours, plain = (statistics.median(sum(blocks, [])) for blocks in seconds)
    ratios = sorted(statistics.median(b) / statistics.median(a) for a, b in zip(*seconds, strict=True))
    tokens = sizes.micro_batch_size * sizes.seq_length
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.blocks} x {arguments.block_steps}")
    print(f"megatronish {ours:.4f} s a step, {tokens / ours:.0f} tokens/s")
    print(f"plain loop  {plain:.4f} s a step, {tokens / plain:.0f} tokens/s")
    quarter = len(ratios) // 4
    print(
        f"ratio (above 1: megatronish is faster) of medians {plain / ours:.3f}; of blocks: median "
        f"{statistics.median(ratios):.3f}, middle half {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}, "
        f"all {ratios[0]:.3f} to {ratios[-1]:.3f}"
    )


if __name__ == "__main__":
    main()
