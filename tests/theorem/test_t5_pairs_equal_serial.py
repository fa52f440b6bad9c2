"""Pairs of texts for a T5 by every layout: a step from the files is that of one process, dropout and short rows too.

The process alone has a pair in each micro-batch, and layouts two: so rows are cut to other lengths there.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from chat_tokenizers import write_lines
from comparison import assert_close, whole
from ranks import run_ranks
from sweeps import some_of
from theorem import Parts, parts

from megatronish.config.config import Config
from megatronish.config.sections.data import DataConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh
from megatronish.train.setup import TrainingJob

SE, SD, PAIRS = 192, 128, 16
MODEL = ModelConfig(
    model_type="t5",
    num_layers=5,
    encoder_num_layers=2,
    decoder_num_layers=3,
    encoder_seq_length=SE,
    decoder_seq_length=SD,
    hidden_size=24,
    ffn_hidden_size=32,
    num_attention_heads=4,
    position_embedding_type="relative",
    relative_attention_num_buckets=8,
    relative_attention_max_distance=6,
    normalization="RMSNorm",
    disable_bias_linear=True,
    relu=True,
    attention_dropout=0.1,
    hidden_dropout=0.1,
    init_method_std=0.1,
)
LAYOUTS = {
    "tp 2, dp 2": {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 1},
    "cp 2, pp 2": {"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "cp_comm_type": "a2a"},
    "dp 4, ZeRO 3": {"data_parallel_size": 4, "zero_stage": 3},
    "tp 2, pp 2, dp 2": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "data_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_schedule": "zb-h1",
        "zero_stage": 1,
    },
    "tp 2, cp 2, dp 2": {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "data_parallel_size": 2,
        "sequence_parallel": True,
        "cp_comm_type": "a2a",
        "zero_stage": 2,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of pairs, of which some are longer than a row, and one process's lengths differ from two pairs'."""
    found, stream = tmp_path_factory.mktemp("pairs"), np.random.default_rng(1)
    for name, count in (("a", 11), ("b", 5)):
        sizes = np.where(stream.random((count, 2)) < 0.6, stream.integers(1, 60, (count, 2)), 180)
        lines = [
            {"input": "".join(map(chr, stream.integers(97, 123, asked))), "target": name * told}
            for asked, told in sizes
        ]
        write_lines(found / f"{name}.jsonl", lines)
    return found


class Seen(NamedTuple):
    """A step's metrics, its gradient norm, this rank's gradients, and the lengths of its micro-batches."""

    metrics: dict[str, float]
    grad_norm: float
    num_tokens: int
    gradients: Parts
    sides: list[tuple[int, ...]]


def one_step(place: Place, layout: dict[str, Any], folder: str, size: int) -> Seen:
    """Gradients of the first epoch as one step, in micro-batches of `size` pairs."""
    parallel = ParallelConfig(**layout)
    paths = (f"{folder}/a.jsonl", f"{folder}/b.jsonl")
    config = Config(
        model=MODEL,
        parallel=parallel,
        training=TrainingConfig(seq_length=SE + SD, micro_batch_size=size),
        optimizer=OptimizerConfig(optimizer="sgd"),
        data=DataConfig(train_data_path=paths, dataset_type="chat", tokenizer_type="bytes", vocab_extra_ids=8),
    )
    job = TrainingJob.open(config, Mesh.of(parallel, place))
    engine = job.build_engine()
    assert job.datasets.train.num_samples == PAIRS
    batches = job.batches_of(job.datasets.train)(0, PAIRS)
    result = engine.gradients(batches, num_steps_done=0)
    gradients = parts(engine, engine.data_parallel.gradients)
    sides = [batch.sides for batch in batches]
    return Seen(dict(result.metrics), result.grad_norm, result.num_loss_tokens, gradients, sides)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Seen:
    """One process with one pair in a micro-batch."""
    return one_step(Place(), {}, str(folder), 1)


@pytest.mark.parametrize("layout", some_of(LAYOUTS, ["cp 2, pp 2", "dp 4, ZeRO 3", "tp 2, pp 2, dp 2"]))
def test_a_step_on_pairs_is_that_of_one_process(layout: str, folder: Path, alone: Seen) -> None:
    sizes = LAYOUTS[layout]
    ranks = int(np.prod([size for name, size in sizes.items() if name.endswith("parallel_size")]))
    found = run_ranks(ranks, one_step, sizes, str(folder), 2)
    assert len({*alone.sides}) == 3 and all(each.sides != alone.sides[: len(each.sides)] for each in found)
    for each in found:
        assert set(each.metrics) == {"loss", "loss/a", "loss/b"}
        assert each.metrics == pytest.approx(alone.metrics, rel=1e-5)
        assert each.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
        assert each.num_tokens == alone.num_tokens
    expected = whole([alone.gradients])
    for name, gradient in whole([each.gradients for each in found]).items():
        assert_close(name, gradient, expected[name])
