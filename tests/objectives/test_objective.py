"""Tests of objectives from outside the package, which report sums of their own."""

from pathlib import Path

import pytest
from engines import NO_DROPOUT, world_size_of
from jobs import tiny
from ranks import run_ranks
from sweeps import further
from torch import Tensor

from megatronish.config.read import read_config
from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.objectives.objective import LOSS, Sums
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh

FLAGS = f"{NO_DROPOUT} --global-batch-size 8 --num-layers 4 --optimizer sgd"


class FocalLoss:
    """Losses weighed by how wrong a prediction is, divided by the samples; with the number of sure predictions."""

    names: tuple[str, ...] = (LOSS, "sure")

    def weight(self, batch: MicroBatch) -> int:
        """Number of samples of the batch."""
        return len(batch.tokens)

    def sums(self, token_losses: Tensor, batch: MicroBatch) -> Sums:
        """sum (1 - p)^2 (-log p), and how many p are above one in a hundred."""
        probability = (-token_losses).exp()
        return {
            LOSS: ((1 - probability).square() * token_losses * batch.loss_mask.t()).sum(),
            "sure": (probability > 0.01).float().sum(),
        }


def train(place: Place, flags: str) -> list[tuple[float, ...]]:
    """Loss, second sum and gradient norm of two steps, and both sums of an evaluation."""
    config, _ = read_config(tiny(Path("never-written"), flags))
    mesh = start_mesh(config, place)
    job = TrainingJob.open(config, mesh)
    engine = build_engine(config, mesh, vocab_size=job.vocab_size, objective=FocalLoss())
    batches = job.batches_of(job.datasets.train)
    seen: list[tuple[float, ...]] = []
    for step in range(2):
        result = engine.step(
            batches(8 * step, 8),
            num_steps_done=step,
            learning_rate=0.1,
            weight_decay=0.0,
            votes=lambda: {"rank": float(place.rank), "all": 1.0},
        )
        assert result.loss == result.metrics[LOSS]
        size = mesh.world.size  # votes are of ranks, and not of data ranks alone
        assert result.votes == {"rank": size * (size - 1) / 2, "all": size}
        seen.append((result.metrics[LOSS], result.metrics["sure"], result.grad_norm))
    totals = engine.evaluate(batches(0, 8))
    return [*seen, (totals.objective[LOSS], totals.objective["sure"], totals.weight)]


@pytest.mark.parametrize(
    "layout",
    [
        further("--dp 2 --tp 2 --sequence-parallel"),
        "--pp 2 --pipeline-schedule zb-h1",
        "--cp 2 --dp 2 --zero-stage 2",
        further("--tp 2 --pp 2"),
    ],
)
def test_an_objective_with_two_sums_is_the_same_in_every_layout(layout: str) -> None:
    (expected,) = run_ranks(1, train, FLAGS)
    assert expected[-1][2] == 8 and 0 < expected[0][1] < 16
    flags = f"{FLAGS} {layout}"
    for seen in run_ranks(world_size_of(flags), train, flags):
        for mine, theirs in zip(seen, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
