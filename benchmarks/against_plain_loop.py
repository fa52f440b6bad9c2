"""Benchmark of megatronish on one process against a plain PyTorch loop of the same model.

First both get the same weights in one process, must have as many parameters and, for some steps, the same loss and
gradient norm. Then they take turns, A B, B A, A B and so on, so that whatever else the machine does falls on both
alike, and the ratio of two neighbours is free of slow drift. The turns are, as `--through` says,

    pretrain_gpt.py  whole runs of the two scripts, the first steps of each left out: what a user sees;
    engine           blocks of a few steps of both in this process: finer, for work on the step itself.

What is timed is what `tokens_per_second` counts: forward, backward, clipping, update, and the loss on the host.

    python benchmarks/against_plain_loop.py --through engine
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from plain_loop import WARM_UP_STEPS, PlainLoop, Sizes, random_batch
from torch import Tensor

from megatronish.config.config import Config
from megatronish.config.model import ModelConfig
from megatronish.config.optimizer import OptimizerConfig
from megatronish.config.parallel import ParallelConfig
from megatronish.config.training import TrainingConfig
from megatronish.mesh import Mesh
from megatronish.model.batch import MicroBatch
from megatronish.train.build import build_engine
from megatronish.train.engine import Engine

ROOT = Path(__file__).resolve().parent.parent
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.01
TOLERANCE = 1e-4
SIZES = Sizes()


class Turn(NamedTuple):
    """Seconds of the steps of one turn, of both programs."""

    ours: list[float]
    plain: list[float]


class Pair(NamedTuple):
    """A training step of each program: step number -> loss and gradient norm."""

    ours: Callable[[int], tuple[float, float]]
    plain: Callable[[int], tuple[float, float]]


def megatronish_engine() -> Engine:
    """A megatronish training job on one process."""
    return build_engine(
        Config(
            model=ModelConfig(
                num_layers=SIZES.num_layers,
                hidden_size=SIZES.hidden_size,
                num_attention_heads=SIZES.num_heads,
                hidden_dropout=0.0,
                attention_dropout=0.0,
            ),
            parallel=ParallelConfig(),
            training=TrainingConfig(seq_length=SIZES.seq_length, micro_batch_size=SIZES.micro_batch_size),
            optimizer=OptimizerConfig(adam_beta2=0.999),
        ),
        Mesh.start(),
        vocab_size=SIZES.vocab_size,
    )


def as_micro_batch(tokens: Tensor, labels: Tensor, step: int) -> MicroBatch:
    """The samples as a micro-batch of the loader."""
    batch, seq_length = tokens.shape
    return MicroBatch(
        tokens=tokens,
        labels=labels,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        position_ids=torch.arange(seq_length).expand(batch, seq_length),
        sample_ids=torch.arange(batch) + step * batch,
    )


def build_pair() -> Pair:
    """Both programs in this process, with the same weights."""
    engine = megatronish_engine()
    loop = PlainLoop(SIZES, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    ours: list[Tensor] = list(engine.stage.model.parameters())
    plain: list[Tensor] = list(loop.model.parameters())
    assert [parameter.shape for parameter in ours] == [parameter.shape for parameter in plain]
    with torch.no_grad():
        torch._foreach_copy_(plain, ours)
    print(f"{sum(parameter.numel() for parameter in ours):,} parameters in both")

    def our_step(step: int) -> tuple[float, float]:
        tokens, labels = random_batch(SIZES, step)
        batch = as_micro_batch(tokens, labels, step)
        result = engine.step([batch], num_steps_done=step, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        return result.loss, result.grad_norm

    def plain_step(step: int) -> tuple[float, float]:
        return loop.step(*random_batch(SIZES, step))

    return Pair(our_step, plain_step)


def check_same(pair: Pair, *, num_steps: int) -> None:
    """Check that loss and gradient norm of both agree, step by step."""
    for step in range(num_steps):
        found, expected = pair.ours(step), pair.plain(step)
        print(f"step {step + 1}: loss and gradient norm {found} against {expected}")
        assert all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(found, expected, strict=True))


def time_steps(take: Callable[[int], object], num_steps: int) -> list[float]:
    """Seconds of each step."""
    seconds = []
    for step in range(num_steps):
        start = time.perf_counter()
        take(step)
        seconds.append(time.perf_counter() - start)
    return seconds


def run_pretrain_gpt(num_steps: int) -> list[float]:
    """Seconds of the steps of a whole run, without the first."""
    with tempfile.TemporaryDirectory() as folder:
        command = f"""
            pretrain_gpt.py --mock-data --run-dir {folder}/run --train-iters {WARM_UP_STEPS + num_steps}
            --num-layers {SIZES.num_layers} --hidden-size {SIZES.hidden_size} --num-attention-heads {SIZES.num_heads}
            --seq-length {SIZES.seq_length} --vocab-size {SIZES.vocab_size} --attention-dropout 0 --hidden-dropout 0
            --micro-batch-size {SIZES.micro_batch_size} --lr {LEARNING_RATE} --lr-decay-style constant
            --log-interval 1 --eval-iters 0
        """
        _run_script(command.split())
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["step_seconds"] for line in lines][WARM_UP_STEPS:]


def run_plain_loop(num_steps: int) -> list[float]:
    """Seconds of the steps of a whole run, without the first."""
    printed = _run_script(["benchmarks/plain_loop.py", "--steps", str(WARM_UP_STEPS + num_steps)])
    return [float(seconds) for seconds in re.findall(r"seconds ([\d.]+)", printed)][WARM_UP_STEPS:]


def _run_script(words: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def take_turns(
    ours: Callable[[int], list[float]], plain: Callable[[int], list[float]], *, num_turns: int, num_steps: int
) -> list[Turn]:
    """Turns of both programs; `ours` and `plain` map a number of steps to the seconds of each."""
    turns = []
    for turn in range(num_turns):
        if turn % 2 == 0:
            first = ours(num_steps)
            turns.append(Turn(first, plain(num_steps)))
        else:
            first = plain(num_steps)
            turns.append(Turn(ours(num_steps), first))
        medians = [statistics.median(seconds) for seconds in turns[-1]]
        print("turn {}: {:.4f} against {:.4f} s a step".format(turn + 1, *medians), flush=True)
    return turns


def report(turns: list[Turn]) -> None:
    """Print the numbers of a row of docs/BENCHMARKS.md."""
    ours = statistics.median([seconds for turn in turns for seconds in turn.ours])
    plain = statistics.median([seconds for turn in turns for seconds in turn.plain])
    ratios = sorted(statistics.median(turn.plain) / statistics.median(turn.ours) for turn in turns)
    tokens, quarter = SIZES.micro_batch_size * SIZES.seq_length, len(ratios) // 4
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    print(f"megatronish {ours:.4f} s a step, {tokens / ours:.0f} tokens/s")
    print(f"plain loop  {plain:.4f} s a step, {tokens / plain:.0f} tokens/s")
    print(
        f"ratio (above 1: megatronish is faster): of all medians {plain / ours:.3f}; of a turn: median "
        f"{statistics.median(ratios):.3f}, middle half {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}, "
        f"all {ratios[0]:.3f} to {ratios[-1]:.3f}"
    )


def main() -> None:
    """Check that both train the same model, measure, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--through", choices=("pretrain_gpt.py", "engine"), default="pretrain_gpt.py")
    parser.add_argument("--turns", type=int, help="default 4; engine: 12")
    parser.add_argument("--steps", type=int, help="that count, of each in a turn; default 20; engine: 4")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pair = build_pair()
    check_same(pair, num_steps=WARM_UP_STEPS)
    if arguments.through == "engine":
        ours, plain = partial(time_steps, pair.ours), partial(time_steps, pair.plain)
        turns = take_turns(ours, plain, num_turns=arguments.turns or 12, num_steps=arguments.steps or 4)
    else:
        turns = take_turns(
            run_pretrain_gpt, run_plain_loop, num_turns=arguments.turns or 4, num_steps=arguments.steps or 20
        )
    report(turns)


if __name__ == "__main__":
    main()
