"""Test of context parallelism on a sequence too long for one rank: each rank keeps its share of the activations."""

import pytest
import torch
from ranks import run_ranks
from saved import saved_by
from sweeps import some_of

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.layout import Layout
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.data.mock import MockSamples
from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh

VOCABULARY = 64
MODEL = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=1,
    ffn_hidden_size=32,
    hidden_dropout=0.1,
    attention_dropout=0.0,
    position_embedding_type="rope",
)


def train(place: Place, cp: int, length: int) -> tuple[list[float], int]:
    """Loss and gradient norm of a step, and the bytes that it kept for its backward."""
    mesh = Mesh.start(Layout(cp=cp), rank=place.rank, init_method=place.rendezvous)
    engine = build_engine(
        Config(
            model=MODEL,
            parallel=ParallelConfig(context_parallel_size=cp),
            training=TrainingConfig(seq_length=length, micro_batch_size=1, global_batch_size=1),
            optimizer=OptimizerConfig(),
        ),
        mesh,
        vocab_size=VOCABULARY,
    )
    dataset = MockSamples(name="train", seq_length=length, seed=1, vocab_size=VOCABULARY, eod=0)
    batch = micro_batches(
        dataset, consumed_samples=0, global_batch_size=1, share=BatchShare(0, 1, 1), collate=Collator(eod=0)
    )
    with saved_by(engine.stage.model) as saved:
        result = engine.step(batch, num_steps_done=0, learning_rate=1e-2, weight_decay=0.0)
    return [result.loss, result.grad_norm], saved.num_bytes


@pytest.mark.parametrize("length", some_of([4096, 32_768], [4096]))
def test_a_long_sequence_on_four_ranks_takes_a_quarter_of_the_activations(length: int) -> None:
    alone, whole = train(Place(), 1, length)
    ranks = run_ranks(4, train, 4, length, timeout=240)
    for others, kept in ranks:
        assert others == pytest.approx(alone, rel=1e-5)
        assert kept <= 0.30 * whole
    assert torch.tensor([kept for _, kept in ranks]).float().std() < 0.01 * whole
