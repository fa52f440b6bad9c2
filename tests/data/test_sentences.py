"""Tests of pairs of sentences: which sentences make up a sample, how it is cut, and how texts are split."""

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatronish.core.errors import UserError
from megatronish.data.encoding import split_sentences
from megatronish.data.indexed import IndexedTokens, IndexedWriter
from megatronish.data.mock import open_mock, open_mock_samples
from megatronish.data.preprocess import preprocess
from megatronish.data.sample import DatasetSettings, DatasetSource, Sample
from megatronish.data.sentences import SentenceSamples, open_sentences
from megatronish.tokenizer.control_tokens import MaskTokens
from megatronish.tokenizer.plain import BytesTokenizer, NullTokenizer

MASKS = MaskTokens(first=1, separator=2, mask=3, filler=0)
S = 40


def settings(**changes: object) -> DatasetSettings:
    given = {"seq_length": S, "seed": 5, "vocab_size": 10_000, "eod": 2, "masks": MASKS, "short_seq_prob": 0.0}
    return DatasetSettings(**given | changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 1 to 12 sentences of 2 to 15 tokens, all of whose tokens differ and count up."""
    path = tmp_path_factory.mktemp("sentences") / "text_sentence"
    stream, at = np.random.default_rng(0), 10
    with IndexedWriter(path, dtype=np.dtype("<u2")) as writer:
        for _ in range(60):
            lengths = stream.integers(2, 15, stream.integers(1, 13)).tolist()
            writer.add_document(np.arange(at, at + sum(lengths)), lengths)
            at += sum(lengths)
        writer.add_document([], [])
    return str(path)


def opened(prefix: str, **changes: object) -> SentenceSamples:
    return open_sentences(DatasetSource("training", prefix), settings(**changes))


def parts_of(sample: Sample) -> tuple[list[int], list[int]]:
    """The two texts of a sample, after a check of all that is around them."""
    tokens, types = sample.tokens.tolist(), sample.token_types
    assert types is not None and sample.document_ids is not None and len(tokens) == S + 1
    real = S - sample.num_filler
    assert tokens[0] == MASKS.first and tokens[real - 1] == MASKS.separator
    assert set(tokens[real:]) == {MASKS.filler} and sample.document_ids.tolist() == [0] * real + [1] * (S + 1 - real)
    ends = [place for place in range(real) if tokens[place] == MASKS.separator]
    first, second = tokens[1 : ends[0]], tokens[ends[0] + 1 : ends[-1]] if len(ends) > 1 else []
    assert types.tolist() == [0] * (len(first) + 2) + [1] * (real - len(first) - 2) + [0] * (S + 1 - real)
    return first, second


def test_a_sample_is_two_runs_of_sentences_of_one_document_in_order_or_swapped(prefix: str) -> None:
    samples, file = opened(prefix), IndexedTokens(prefix)
    document_of = np.repeat(np.arange(file.num_documents), np.diff(file.document_starts()))
    swapped = []
    for index in range(samples.num_samples):
        sample = samples.sample(index)
        first, second = parts_of(sample)
        for text in (first, second):
            assert all(b == a + 1 for a, b in pairwise(text))
        assert len({int(document_of[token - 10]) for token in first + second}) == 1
        if second:
            assert sample.is_swapped == (first[0] > second[0])
            swapped.append(sample.is_swapped)
        else:
            assert not sample.is_swapped
    assert 0.3 < np.mean(swapped) < 0.7


def test_an_epoch_has_every_sentence_and_the_next_one_has_them_in_another_order(prefix: str) -> None:
    samples = opened(prefix)
    assert sum(run.end - run.begin for run in samples._runs) == len(IndexedTokens(prefix))
    first, again, other = (opened(prefix), opened(prefix), opened(prefix, seed=6))
    number = samples.num_samples + 3
    assert np.array_equal(first.sample(number).tokens, again.sample(number).tokens)
    assert first.identity == again.identity != other.identity
    orders = [samples._order_of(epoch).tolist() for epoch in range(2)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_some_samples_are_shorter_than_the_sequence_allows(prefix: str) -> None:
    def lengths(share: float) -> list[int]:
        samples = opened(prefix, short_seq_prob=share)
        return [sum(map(len, parts_of(samples.sample(number)))) for number in range(samples.num_samples)]

    assert np.mean(lengths(1.0)) < 0.75 * np.mean(lengths(0.0)) and len(lengths(1.0)) > len(lengths(0.0))


def test_a_vocabulary_that_is_too_small_and_a_row_that_is_too_short_are_refused(prefix: str) -> None:
    with pytest.raises(UserError, match=r"holds token id \d+, but the vocabulary has 20; train with the tokenizer"):
        opened(prefix, vocab_size=20)
    with pytest.raises(UserError, match=r"seq_length=4 has no room for two sentences .*use --seq-length 5 or more"):
        opened(prefix, seq_length=4)
    with pytest.raises(UserError, match="seq_length=4 has no room"):
        open_mock(DatasetSource("training"), settings(seq_length=4))


def test_mock_pairs_fill_the_row_and_are_swapped_half_of_the_time() -> None:
    masks = NullTokenizer(100).mask_tokens()
    data = open_mock(DatasetSource("training"), settings(vocab_size=100, masks=masks))
    samples = [data.sample(index) for index in range(100)]
    assert all(sample.num_filler == 0 and sample.document_ids is None for sample in samples)
    assert 0.3 < np.mean([sample.is_swapped for sample in samples]) < 0.7
    texts = open_mock_samples(DatasetSource("training"), settings(vocab_size=100, masks=masks))
    for number, sample in enumerate(samples):
        first, second = (
            part[:-1] for part in np.split(sample.tokens[1:S], [int((sample.token_types == 0)[:S].sum()) - 1])
        )
        in_order = [second, first] if sample.is_swapped else [first, second]
        assert np.array_equal(np.concatenate(in_order), texts.sample(number).tokens[: S - 3])


def test_texts_are_split_where_sentences_end() -> None:
    text = (
        'Mr. Smith went to Washington, D.C. on Jan. 5. "Really?" he said. It cost 3.5 dollars! (It was new.) '
        "J. R. Hill wrote it, e.g. here.\n\nA new paragraph\nover two lines"
    )
    assert split_sentences(text) == [
        "Mr. Smith went to Washington, D.C. on Jan. 5.",
        '"Really?" he said.',
        "It cost 3.5 dollars!",
        "(It was new.)",
        "J. R. Hill wrote it, e.g. here.",
        "A new paragraph\nover two lines",
    ]
    assert split_sentences("今日は。明日も。") == ["今日は。", "明日も。"]
    assert split_sentences("  \n\n ") == [] and split_sentences("one") == ["one"]


def test_preprocessing_writes_a_sequence_for_each_sentence(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "One. Two two. Three."}\n{"text": ""}\n{"text": "Four."}\n')
    for workers in (1, 2):
        preprocess(
            [tmp_path / "in.jsonl"],
            str(tmp_path / f"out{workers}"),
            tokenizer=BytesTokenizer,
            append_eod=True,
            split_sentences=True,
            workers=workers,
        )
    file = IndexedTokens(tmp_path / "out1_text_sentence")
    assert [bytes(file[n][file[n] < 256].tolist()).decode() for n in range(len(file))] == [
        *("One.", "Two two.", "Three.", "Four."),
    ]
    assert file.document_indices.tolist() == [0, 3, 3, 4] and [256 in file[n] for n in range(4)] == [
        *(False, False, True, True),
    ]
    for ending in ("bin", "idx"):
        one, two = (tmp_path / f"out{workers}_text_sentence.{ending}" for workers in (1, 2))
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    "text", ["." * 200_000 + "x", "Mr. A " * 50_000, "..! " * 50_000 + "x", "\n " * 100_000, "。" * 200_000]
)
def test_odd_texts_take_as_long_as_they_are(text: str) -> None:
    """Not its square: a web page of full stops would stop a worker."""
    began = time.process_time()
    split_sentences(text)
    assert time.process_time() - began < 5
