"""Frozen parameters wherever they lie: before all that learns, on a whole stage, between layers that learn."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from engines import in_few_micro_batches, world_size_of
from jobs import tiny
from ranks import run_ranks
from sweeps import some_of

from megatronish.config.read import read_config
from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.parallel.sharding import Sharding
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh

FULL = "--recompute-granularity full"
LEARNING: dict[str, Callable[[str], bool]] = {
    "all but the embedding": lambda name: not name.startswith("embedding"),
    "the second half": lambda name: not name.startswith(("embedding", "layers.0.", "layers.1.")),
    "the first layer": lambda name: name.startswith("layers.0."),
    "norms and biases": lambda name: "norm" in name or name.endswith("bias"),
    "the last norm": lambda name: name.startswith("final_norm"),
}


def train(place: Place, flags: str, which: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of two steps."""

    def learns(name: str, _sharding: Sharding) -> bool:
        return LEARNING[which](name)

    config, _ = read_config(tiny(Path("never-written"), flags))
    mesh = start_mesh(config, place)
    job = TrainingJob.open(config, mesh)
    engine = build_engine(config, mesh, vocab_size=job.vocab_size, trainable=learns)
    batches, found = job.batches_of(job.datasets.train), []
    for step in range(2):
        result = engine.step(batches(8 * step, 8), num_steps_done=step, learning_rate=1e-2, weight_decay=0.1)
        found.append((result.loss, result.grad_norm))
    return found


LAYOUTS = [
    f"{FULL} --recompute-num-layers 2",
    "--recompute-granularity selective --tp 2",
    f"--pp 2 {FULL}",
    "--pp 2 --pipeline-schedule zb-v",
    "--pp 2 --pipeline-schedule zb-h1 --untie-embeddings-and-output-weights",
    f"--dp 2 --zero-stage 3 {FULL}",
    "--pp 2 --zero-stage 3",
    "--dp 2 --zero-stage 2 --pp 2 --num-virtual-stages-per-pipeline-rank 2",
]

PAIRS = [(layout, list(LEARNING)[(number + more) % 5]) for number, layout in enumerate(LAYOUTS) for more in (0, 2)]
"""Of each layout two choices, so that every choice meets several layouts; every run takes five with a choice each."""


@cache
def alone(flags: str, which: str) -> list[tuple[float, float]]:
    """The same in one process."""
    (found,) = run_ranks(1, train, f"{flags} --micro-batch-size 8", which)
    return found


@pytest.mark.parametrize(("layout", "which"), some_of(PAIRS, PAIRS[:10:2]))
def test_what_learns_around_frozen_parameters_is_the_same_in_every_layout(layout: str, which: str) -> None:
    flags = "--num-layers 4 --lr 1e-2 --global-batch-size 8"
    untied = " --untie-embeddings-and-output-weights" if "--untie" in layout else ""
    expected = alone(flags + untied, which)
    assert expected[0][1] > 0 and expected[0][0] != expected[1][0]
    flags = in_few_micro_batches(f"{flags} {layout}")
    for found in run_ranks(world_size_of(flags), train, flags, which):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
