"""Test of a dataset from outside the package: its samples carry loss masks and documents, and train in every layout.

Dialogues of unequal lengths, of which the second half of each is trained; packed two to a sample, or one a sample.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import pytest
from ranks import run_ranks

from megatronish.config.config import Config
from megatronish.config.sections.data import DataConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.layout import Layout
from megatronish.data.datasets import DATASETS, build_datasets, kind_of
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.data.sample import Dataset, DatasetSettings, DatasetSource, Sample
from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.streams import numpy_stream

S, VOCABULARY, EOD, NUM_DIALOGUES = 16, 32, 0, 8
MODEL = ModelConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0, ffn_hidden_size=32
)


def dialogue(number: int) -> Sample:
    """4 to 8 tokens, EOD among them here and there; the later half is trained."""
    stream = numpy_stream(1, "dialogue", number)
    tokens = stream.integers(0, VOCABULARY, int(stream.integers(4, 9)))
    return Sample(tokens, np.arange(len(tokens)) >= len(tokens) // 2)


def packed(dialogues: Sequence[Sample]) -> Sample:
    """One sample of S + 1 tokens; what is left over is a document of its own that is not trained."""
    left = S + 1 - sum(len(each.tokens) for each in dialogues)
    parts = [*dialogues, Sample(np.zeros(left, np.int64), np.zeros(left, np.bool_))]
    return Sample(
        tokens=np.concatenate([part.tokens for part in parts]),
        loss_mask=np.concatenate(
            [np.zeros(0, np.bool_), *(part.loss_mask for part in parts if part.loss_mask is not None)]
        ),
        document_ids=np.repeat(np.arange(len(parts)), [len(part.tokens) for part in parts]),
    )


class Dialogues:
    """So many dialogues to a sample."""

    num_samples = None

    def __init__(self, path: str, per_sample: int, *, name: str) -> None:
        self.name, self.per_sample = name, per_sample
        self.identity = hashlib.sha256(f"{path} {per_sample}".encode()).hexdigest()

    def sample(self, index: int) -> Sample:
        first = index * self.per_sample
        return packed([dialogue(number) for number in range(first, first + self.per_sample)])


def open_dialogues(source: DatasetSource, settings: DatasetSettings) -> Dataset:
    assert settings.seq_length == S
    return Dialogues(source.path, 2, name=source.name)


def train(place: Place, layout: Layout, per_sample: int) -> list[tuple[float, float, int]]:
    """Loss, gradient norm and loss tokens of three steps over the same dialogues."""
    mesh = Mesh.start(layout, rank=place.rank, init_method=place.rendezvous)
    engine = build_engine(
        Config(
            model=MODEL,
            parallel=ParallelConfig(data_parallel_size=layout.dp, context_parallel_size=layout.cp),
            training=TrainingConfig(seq_length=S, micro_batch_size=2),
            optimizer=OptimizerConfig(optimizer="sgd"),
        ),
        mesh,
        vocab_size=VOCABULARY,
    )
    size = NUM_DIALOGUES // per_sample
    results = []
    for step in range(3):
        batches = micro_batches(
            Dialogues("any", per_sample, name="training"),
            consumed_samples=step * size,
            global_batch_size=size,
            share=BatchShare(mesh.dp.rank, layout.dp, 2),
            collate=Collator(EOD),
        )
        result = engine.step(batches, num_steps_done=step, learning_rate=0.1, weight_decay=0.0)
        results.append((result.loss, result.grad_norm, result.num_loss_tokens))
    return results


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(cp=2)])
def test_it_trains_and_two_ranks_find_what_one_process_finds(layout: Layout) -> None:
    alone = train(Place(), Layout(), 2)
    trained = sum(int(dialogue(number).loss_mask.sum()) for number in range(NUM_DIALOGUES))  # type: ignore[union-attr]
    assert alone[0][2] == trained
    for found in run_ranks(2, train, layout, 2):
        assert np.array(found) == pytest.approx(np.array(alone), rel=1e-5)


def test_packed_samples_are_the_same_samples_one_to_a_row() -> None:
    packed_, one_to_a_row = (np.array(train(Place(), Layout(), per_sample)) for per_sample in (2, 1))
    assert packed_ == pytest.approx(one_to_a_row, rel=1e-5)


def test_a_kind_of_data_set_is_one_line_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataConfig(data_path=("0.25", "a", "0.75", "b"), split="9,1,0")
    monkeypatch.setitem(DATASETS, kind_of(data), open_dialogues)
    datasets = build_datasets(data, seq_length=S, seed=1, vocab_size=VOCABULARY, eod=EOD)
    assert list(datasets.valid) == ["validation"]
    for index in range(8):
        found = datasets.train.sample(index)
        assert found.document_ids is not None
        assert len(found.tokens) == S + 1
