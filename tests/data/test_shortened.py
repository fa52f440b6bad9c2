"""Tests of shorter rows: filler that no sample of a micro-batch needs is left out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatronish.config.config import Config
from megatronish.config.sections.data import ChatConfig, DataConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.data.loader import places_together, shortened
from megatronish.data.sample import Sample

MODEL = ModelConfig(num_layers=2, hidden_size=24, num_attention_heads=4)


def test_rows_of_one_chat_are_cut_to_the_longest_of_a_micro_batch() -> None:
    def sample(used: int) -> Sample:
        tokens = np.arange(301)
        return Sample(tokens, tokens < used, (tokens >= used).astype(np.int64), num_filler=301 - used)

    lengths = {
        used: {len(each.tokens) for each in shortened([sample(20), sample(used)], multiple=64)}
        for used in (1, 65, 66, 257, 258, 301)
    }
    assert lengths == {1: {65}, 65: {65}, 66: {129}, 257: {257}, 258: {301}, 301: {301}}
    (cut,) = shortened([sample(66)], multiple=64)
    assert cut.num_filler == 129 - 66 and np.array_equal(cut.tokens, np.arange(129))
    assert cut.loss_mask is not None and cut.loss_mask.sum() == 66
    assert len(shortened([sample(20)], multiple=None)[0].tokens) == 301


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 64),
        ({"parallel": ParallelConfig(context_parallel_size=3, tensor_model_parallel_size=4)}, 192),
        ({"chat": ChatConfig()}, None),
        ({"training": TrainingConfig(seq_length=300, micro_batch_size=1, compile=True)}, None),
        ({"model": replace(MODEL, num_experts=4)}, None),
        ({"model": replace(MODEL, position_embedding_type="rope", rope_scaling_type="longrope")}, None),
    ],
)
def test_rows_keep_their_length_where_shapes_experts_or_longrope_need_it(
    change: dict[str, Any], expected: int | None
) -> None:
    training = TrainingConfig(seq_length=300, micro_batch_size=1)
    config = Config(
        model=MODEL,
        parallel=ParallelConfig(),
        training=training,
        optimizer=OptimizerConfig(),
        data=DataConfig(),
        chat=ChatConfig(pack_samples=False),
    )
    assert places_together(replace(config, **change)) == expected
