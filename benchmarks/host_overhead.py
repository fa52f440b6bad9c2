"""Overhead of the engine on the host: a step of a tiny model, against the same modules in a plain loop.

    python benchmarks/host_overhead.py

Both compute the same forward, backward, norm, clipping and fused AdamW, in turns within one process. Processor time
counts, and not time: a busy machine changes it less. What the engine adds per step and per micro-batch is the same for
a model of any size with as many parameters.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from megatronish.commands.configuration import read_config
from megatronish.engine.engine import Engine
from megatronish.engine.forward import run_chunk
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh

FLAGS = (
    "--mock-data --vocab-size 128 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0 --train-iters 10 --lr 1e-3 "
    "--device cpu --run-dir never-written"
)


def steps_of(num_microbatches: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A step of the engine, and of the plain loop, over as many micro-batches."""
    config, _ = read_config([*FLAGS.split(), "--global-batch-size", str(num_microbatches)])
    job = TrainingJob.open(config, start_mesh(config, Place()))
    batches = job.batches_of(job.datasets.train)(0, num_microbatches)
    engine = job.build_engine()

    def step() -> object:
        return engine.step(batches, num_steps_done=1, learning_rate=1e-3, weight_decay=0.1)

    return step, plain_step(job.build_engine(), batches)


def plain_step(engine: Engine, batches: Sequence[MicroBatch]) -> Callable[[], object]:
    """The loop that one would write by hand around the engine's model."""
    model, objective = engine.stage.model, engine.objective
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True)
    weight = sum(batch.num_loss_tokens for batch in batches)

    def step() -> object:
        optimizer.zero_grad(set_to_none=False)
        total = torch.zeros(())
        for batch in batches:
            loss = run_chunk(model, objective, 0, None, batch, step=1).x / weight
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return total.item()

    return step


def main(argv: Sequence[str]) -> int:
    """Print milliseconds of both, medians over turns, and what the engine adds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20, help="steps in each turn")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    added = {}
    for num_microbatches in (1, 8):
        loops = steps_of(num_microbatches)
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(options.turns + 1):
            for loop, found in zip(loops, times, strict=True):
                start = time.process_time()
                for _ in range(options.steps):
                    loop()
                if turn > 0:  # the first one warms up
                    found.append(1000 * (time.process_time() - start) / options.steps)
        engine, plain = map(statistics.median, times)
        added[num_microbatches] = engine - plain
        spread = ", ".join(f"{min(each):.2f} to {max(each):.2f}" for each in times)
        print(f"{num_microbatches} micro-batches: engine {engine:.2f} ms, plain loop {plain:.2f} ms ({spread})")
    of_each = (added[8] - added[1]) / 7
    print(f"the engine adds {added[1] - of_each:.2f} ms a step and {of_each:.2f} ms a micro-batch")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
