"""Engines and batches of one rank, built from the flags of a tiny run."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jobs import tiny

from megatronish.config.read import read_config
from megatronish.engine.engine import Engine
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.parallel.data_parallel.zero import Zero
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh

NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


def world_size_of(flags: str) -> int:
    """Number of ranks of a run with these flags."""
    return read_config(tiny(Path("never-written"), flags))[0].layout.world_size


def in_few_micro_batches(flags: str) -> str:
    """These flags with as large micro-batches as leave two in a step for each stage of the pipeline.

    A micro-batch takes as long as a larger one at the sizes of tests, where calls cost more than numbers.
    """
    config = read_config(tiny(Path("never-written"), flags))[0]
    each = config.global_batch_size // config.layout.dp
    most = max(1, each // (2 * config.layout.pp))
    return f"{flags} --micro-batch-size {max(size for size in range(1, most + 1) if each % size == 0)}"


def open_job(place: Place, flags: str) -> TrainingJob:
    """This rank's part of a run with these flags."""
    config, _ = read_config(tiny(Path("never-written"), flags))
    return TrainingJob.open(config, start_mesh(config, place))


def take_step(job: TrainingJob, engine: Engine, step: int) -> None:
    """Train step number `step` on its batch."""
    batch = job.config.global_batch_size
    micro_batches = job.batches_of(job.datasets.train)(step * batch, batch)
    engine.step(micro_batches, num_steps_done=step, learning_rate=1e-3, weight_decay=0.1)


class Shape(NamedTuple):
    """What the formulas of sharing count on this rank, in elements.

    `held` is what the model has, `padded` what buckets or rows take on all ranks that share them, `padded_share` on
    this one, and `kept` is what the optimizer reads there, padding left out.
    """

    held: int
    padded: int
    padded_share: int
    kept: int


def shape_of(engine: Engine) -> Shape:
    """As the padding is stated in docs/SHARDING.md."""
    sharing = engine.data_parallel
    return _shape_of_buckets(engine, sharing) if isinstance(sharing, Zero) else _shape_of_rows(engine)


def _shape_of_buckets(engine: Engine, sharing: Zero) -> Shape:
    """Of stages 0 to 2: parameters, and the parts of the ranks that share a bucket, begin at multiples of 16 bytes."""
    shard = engine.mesh.domains["dense"].shard
    unit = 4 if next(engine.stage.model.parameters()).dtype == torch.float32 else 8

    def rounded(size: int, multiple: int) -> int:
        return -(-size // multiple) * multiple

    shares, kept = [], 0
    for plan in (bucket.plan for bucket in sharing.buckets.buckets):
        share = rounded(sum(rounded(size, unit) for size in plan.sizes), unit * shard.size) // shard.size
        begin = 0
        for size in plan.sizes:
            kept += max(min(begin + size, (shard.rank + 1) * share) - max(begin, shard.rank * share), 0)
            begin += rounded(size, unit)
        shares.append(share)
    held = sum(parameter.numel() for parameter in engine.stage.model.parameters())
    return Shape(held, shard.size * sum(shares), sum(shares), kept)


def _shape_of_rows(engine: Engine) -> Shape:
    """Of stage 3: every rank has room for as many rows of a parameter, the last ones may have fewer."""
    axis = engine.mesh.domains["dense"].shard
    shapes = [(parameter.shape[0], parameter.shape[1:].numel()) for parameter in engine.stage.model.parameters()]
    room = [-(-rows // axis.size) for rows, _ in shapes]
    kept = [min(max(rows - axis.rank * most, 0), most) for (rows, _), most in zip(shapes, room, strict=True)]
    share = sum(most * row for most, (_, row) in zip(room, shapes, strict=True))
    return Shape(
        held=sum(rows * row for rows, row in shapes),
        padded=axis.size * share,
        padded_share=share,
        kept=sum(mine * row for mine, (_, row) in zip(kept, shapes, strict=True)),
    )


def evaluated(engine: Engine, micro_batches: Sequence[MicroBatch]) -> tuple[float, int]:
    """The sum of the losses of an evaluation, and what divides it."""
    totals = engine.evaluate(micro_batches)
    return totals.objective["loss"], totals.weight
