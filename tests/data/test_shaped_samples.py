"""Tests of runs whose samples are packed by best fit, with middles that come last: every layout sees the same ones."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from comparison import assert_close, whole
from jobs import VOCABULARY, call_main, steps_of, tiny, train_on_ranks, write_tokens
from ranks import run_ranks
from sweeps import some_of
from theorem import Parts, parts

from megatronish.config.config import Config
from megatronish.config.sections.data import DataConfig, FimConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh
from megatronish.train.setup import TrainingJob

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    ffn_hidden_size=32,
    position_embedding_type="rope",
)
FIM = FimConfig(
    fim_data=True, fim_rate=0.8, fim_prefix_token="1", fim_middle_token="2", fim_suffix_token="3", fim_pad_token="4"
)
LAYOUTS = {
    "dp 2": ParallelConfig(data_parallel_size=2),
    "cp 2": ParallelConfig(context_parallel_size=2),
    "pp 2": ParallelConfig(pipeline_model_parallel_size=2),
    "tp 2": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    "dp 2, ZeRO 3": ParallelConfig(data_parallel_size=2, zero_stage=3),
}
ROWS = 12


class ShapedStep(NamedTuple):
    """Loss and gradient norm of a step, the tokens of its loss, and this rank's gradients."""

    loss: float
    grad_norm: float
    num_tokens: int
    gradients: Parts


def one_step(place: Place, parallel: ParallelConfig, prefix: str) -> ShapedStep:
    """Gradients of some rows as one step."""
    config = Config(
        model=MODEL,
        parallel=parallel,
        training=TrainingConfig(seq_length=64, micro_batch_size=1),
        optimizer=OptimizerConfig(optimizer="sgd"),
        data=DataConfig(
            data_path=(prefix,), split="1", packing="best-fit", tokenizer_type="null", vocab_size=VOCABULARY
        ),
        fim=FIM,
    )
    job = TrainingJob.open(config, Mesh.of(parallel, place))
    engine = job.build_engine()
    result = engine.gradients(job.batches_of(job.datasets.train)(0, ROWS), num_steps_done=0)
    gradients = parts(engine, engine.data_parallel.gradients)
    return ShapedStep(result.metrics["loss"], result.grad_norm, result.num_loss_tokens, gradients)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pair of 60 documents."""
    return str(write_tokens(tmp_path_factory.mktemp("pair") / "tokens"))


@pytest.mark.parametrize("layout", some_of(LAYOUTS, ["cp 2", "pp 2"]))
def test_a_layout_computes_what_one_process_does(layout: str, prefix: str) -> None:
    alone = one_step(Place(), ParallelConfig(), prefix)
    ranks = run_ranks(2, one_step, LAYOUTS[layout], prefix)
    for each in ranks:
        assert each[:2] == pytest.approx(alone[:2], rel=1e-5)
        assert each.num_tokens == alone.num_tokens < ROWS * 64
    expected = whole([alone.gradients])
    for name, gradient in whole([each.gradients for each in ranks]).items():
        assert_close(name, gradient, expected[name])


def flags(prefix: str, more: str = "") -> str:
    tokens = "--fim-prefix-token 1 --fim-middle-token 2 --fim-suffix-token 3"
    data = f"--data-path {prefix} --split 1 --tokenizer-type null --vocab-size {VOCABULARY} --seq-length 32"
    return f"{data} --fim-data {tokens} {more}"


def test_a_run_resumes_with_the_same_samples_and_notices_another_rate(prefix: str, tmp_path: Path) -> None:
    whole_run, parted = tmp_path / "whole", tmp_path / "parted"
    train_on_ranks(tiny(whole_run, "--train-iters 9", data=flags(prefix)))
    train_on_ranks(tiny(parted, "--train-iters 9 --exit-interval 5", data=flags(prefix)))
    refused = call_main(tiny(parted, "--train-iters 9", data=flags(prefix, "--fim-rate 0.6")))
    assert refused.status == 2
    assert "other settings: fim.fim_rate was 0.5 and is 0.6" in refused.errors
    train_on_ranks(tiny(parted, "--dp 2 --train-iters 9", data=flags(prefix)), world_size=2)
    seen, expected = (np.array(list(steps_of(run).values())) for run in (parted, whole_run))
    assert seen == pytest.approx(expected, rel=1e-5)


def test_a_tokenizer_without_the_tokens_ends_a_run_with_one_sentence(prefix: str, tmp_path: Path) -> None:
    words = flags(prefix).replace(" --fim-prefix-token 1", "")
    refused = call_main(tiny(tmp_path, data=words))
    assert refused.status == 2
    assert "--fim-data needs three special tokens, and the tokenizer has none of the usual names" in refused.errors
