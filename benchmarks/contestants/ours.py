"""megatronish: the engine of `pretrain_gpt.py` with its default settings. It also draws everybody's initial weights.

    python -m benchmarks.contestants.ours SIZE FILE

writes these. Variants: compile, zero1, zero3, sp (sequence parallel), zb-h1 (the schedule).
"""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants.case import (
    LEARNING_RATE,
    MAX_NORM,
    WEIGHT_DECAY,
    Case,
    Job,
    State,
    UnavailableError,
    count,
    count_over_ranks,
)
from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.engine.build import build_engine
from megatronish.engine.engine import Engine
from megatronish.launch.libraries import keep_freed_memory
from megatronish.launch.place import place_from_environment
from megatronish.model.batch import MicroBatch
from megatronish.parallel.mesh import Mesh

PARALLEL: Mapping[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"data_parallel_size": 2},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
VARIANTS: Mapping[str, dict[str, Any]] = {
    "zero1": {"zero_stage": 1},
    "zero3": {"zero_stage": 3},
    "sp": {"sequence_parallel": True},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
}


class Ours:
    """An engine and one step of training."""

    def __init__(self, job: Job, engine: Engine) -> None:
        self.job, self.engine = job, engine
        self.num_parameters = 0
        self._num_steps = 0

    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        """One update."""
        micro_batches = self.job.micro_batches(tokens, labels)
        result = self.engine.step(
            [self._micro_batch(*each, number) for number, each in enumerate(micro_batches)],
            num_steps_done=self._num_steps,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
        )
        self._num_steps += 1
        return result.loss

    def _micro_batch(self, tokens: Tensor, labels: Tensor, number: int) -> MicroBatch:
        batch, seq_length = tokens.shape
        data_rank = self.job.rank if self.job.case.layout == "dp2" else 0
        return MicroBatch(
            tokens=tokens,
            labels=labels,
            loss_mask=torch.ones_like(tokens, dtype=torch.bool),
            position_ids=torch.arange(seq_length).expand(batch, seq_length),
            sample_ids=torch.arange(batch) + batch * (number + data_rank),
        )


def config_of(case: Case, variants: list[str], *, world_size: int) -> Config:
    """The config of a case; everything that it does not say is the default."""
    sizes = case.sizes
    training: dict[str, Any] = {}
    if "compile" in variants:
        if "compile" not in {field.name for field in fields(TrainingConfig)}:
            raise UnavailableError("this version of megatronish has no --compile")
        training["compile"] = True
    parallel = PARALLEL[case.layout] if world_size > 1 else {}
    for variant in set(variants) - {"compile"}:
        parallel = parallel | VARIANTS[variant]
    return Config(
        model=ModelConfig(
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            num_attention_heads=sizes.num_heads,
            hidden_dropout=case.dropout,
            attention_dropout=case.dropout,
            make_vocab_size_divisible_by=64,
        ),
        parallel=ParallelConfig(**parallel),
        training=TrainingConfig(
            seq_length=sizes.seq_length,
            micro_batch_size=case.micro_batch_size,
            bf16=case.numbers == "bf16",
            **training,
        ),
        optimizer=OptimizerConfig(clip_grad=MAX_NORM),
    )


def build(job: Job, state: State) -> Ours:
    """The engine on this rank. Its names draw its weights, which are those of `state`: the losses tell."""
    keep_freed_memory()  # as every run on the CPU does
    config = config_of(job.case, job.variant.split(), world_size=job.world_size)
    place = place_from_environment() if "RANK" in os.environ else None
    ours = Ours(job, build_engine(config, Mesh.of(config.parallel, place), vocab_size=job.case.sizes.vocab_size))
    shardings = ours.engine.stage.shardings
    # A stage has a part of the names: what it has must be of the whole model's shapes.
    assert all(tuple(state[name].shape) == tuple(shardings[name].shape) for name in shardings)
    mine = {name: math.prod(sharding.shape) for name, sharding in shardings.items()}
    ours.num_parameters = count(ours.engine.stage.model) if job.world_size == 1 else count_over_ranks(mine)
    return ours


def write_state(size: str, path: str) -> None:
    """Initial weights of a model, in fp32."""
    config = config_of(Case("one", size, "fp32"), [], world_size=1)
    engine = build_engine(config, Mesh.of(config.parallel), vocab_size=Case("one", size, "fp32").sizes.vocab_size)
    torch.save({name: each.detach() for name, each in engine.stage.model.named_parameters()}, path)


if __name__ == "__main__":
    write_state(*sys.argv[1:])
