"""Tests of packed samples: rows are those of best fit, whole documents stay whole, each token is a label once."""

from pathlib import Path

import numpy as np
import pytest

from megatronish.config.sections.data import DataConfig
from megatronish.core.errors import UserError
from megatronish.data.datasets import build_datasets
from megatronish.data.indexed import IndexedTokens, IndexedWriter
from megatronish.data.loader import Collator
from megatronish.data.packed import PackedSamples, best_fit, packing_notes, pieces_of
from megatronish.data.sample import DatasetSettings, DatasetSource
from megatronish.data.samples import GPTSamples, TooSmallError

EOD = 9_999


def opened(
    prefix: Path,
    *,
    seq_length: int = 8,
    seed: int = 1,
    part: tuple[float, float] = (0.0, 1.0),
    vocab_size: int = 10_000,
) -> PackedSamples:
    settings = DatasetSettings(seq_length, seed, vocab_size, EOD, packing="best-fit")
    return PackedSamples(IndexedTokens(prefix), DatasetSource("training", str(prefix), part), settings)


def write(prefix: Path, lengths: list[int]) -> Path:
    """Documents of these lengths, whose tokens are 0, 1, 2 and so on over the file."""
    with IndexedWriter(prefix, dtype=np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(sum(lengths)), lengths)
    return prefix


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Best fit, the longest first, as it is defined: one piece after another, over the spaces of all rows."""
    spaces, rows = list[int](), [0] * len(lengths)
    for piece in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        fitting = [(space, row) for row, space in enumerate(spaces) if space >= lengths[piece]]
        if not fitting:
            spaces.append(capacity)
        row = min(fitting)[1] if fitting else len(spaces) - 1
        spaces[row] -= lengths[piece]
        rows[piece] = row
    return rows


def test_rows_are_those_of_best_fit_one_by_one() -> None:
    draw = np.random.default_rng(0)
    for capacity in (2, 7, 33):
        for _ in range(60):
            lengths = draw.integers(1, capacity + 1, draw.integers(0, 80))
            rows = best_fit(lengths, capacity)
            expected = np.asarray(one_by_one(lengths.tolist(), capacity), np.int64)
            filled = [sorted(np.bincount(of_pieces, weights=lengths).tolist()) for of_pieces in (rows, expected)]
            assert filled[0] == filled[1], "equal rows may be exchanged, and no row is fuller than it should be"
            assert max(filled[0], default=0) <= capacity


def test_a_long_document_becomes_pieces_that_share_a_token() -> None:
    starts, lengths = pieces_of(np.array([0, 1, 3, 20, 20]), np.array([1, 2, 17, 0, 9]), 8)
    assert starts.tolist() == [1, 3, 11, 20]
    assert lengths.tolist() == [2, 9, 9, 9]


def test_every_token_is_a_label_once_and_documents_that_fit_are_whole(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(0, 25, 300).tolist()
    samples = opened(write(tmp_path / "a", lengths))
    firsts = (np.cumsum(lengths) - lengths)[np.asarray(lengths) > 0].tolist()
    labels, whole = list[int](), list[tuple[int, int]]()
    for index in range(samples.num_samples):
        sample = samples.sample(index)
        batch = Collator(EOD)([sample], [index])
        labels += batch.labels[batch.loss_mask].tolist()
        documents = sample.document_ids
        assert documents is not None
        for document in range(documents.max() + 1):
            tokens = sample.tokens[documents == document]
            if not len(tokens) or (sample.num_filler and document == documents.max()):
                continue
            assert np.diff(tokens).tolist() == [1] * (len(tokens) - 1)
            whole.append((int(tokens[0]), len(tokens)))
    assert sorted(labels) == sorted(set(range(sum(lengths))) - set(firsts))
    expected = {
        (first, size) for first, size in zip(np.cumsum(lengths) - lengths, lengths, strict=True) if 2 <= size <= 9
    }
    assert expected <= set(whole)


def test_a_row_as_the_model_sees_it(tmp_path: Path) -> None:
    samples = opened(write(tmp_path / "a", [5, 3]))
    assert samples.num_samples == 1
    batch = Collator(EOD)([samples.sample(0)], [0])
    assert batch.tokens[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.labels[0].tolist() == [1, 2, 3, 4, 5, 6, 7, EOD]
    assert batch.loss_mask[0].tolist() == [True, True, True, True, False, True, True, False]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.document_ids is not None
    assert batch.document_ids[0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert samples.efficiency == 8 / 9
    assert list(packing_notes(samples)) == [
        f"packing of {tmp_path}/a (training): 2 documents and pieces in 1 rows, 88.89% full; "
        "0 documents are cut (about 1 with --packing concatenate)"
    ]


def test_cut_documents_are_about_those_of_concatenation(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(0, 25, 4000)
    cut, otherwise = opened(write(tmp_path / "a", lengths.tolist()), vocab_size=10**6).num_cut
    assert cut == (lengths > 9).sum()
    ends = np.cumsum(np.random.default_rng(1).permutation(lengths))
    begins = np.concatenate([[0], ends[:-1]])
    counted = (ends - 1) // 8 > begins // 8  # a sample ends in each eighth place
    assert otherwise == pytest.approx(counted[np.diff(np.append(0, ends)) > 0].sum(), rel=0.03)


def test_an_epoch_has_all_rows_in_an_order_of_its_own_which_the_seed_names(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", np.random.default_rng(0).integers(2, 9, 60).tolist())
    one, again, other = opened(prefix), opened(prefix), opened(prefix, seed=2)
    count = one.num_samples
    epochs = [[one.sample(epoch * count + place).tokens.tolist() for place in range(count)] for epoch in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    for index in reversed(range(2 * count)):  # in whatever order samples are read
        assert again.sample(index).tokens.tolist() == epochs[index // count][index % count]
    assert (one.identity == again.identity, one.identity == other.identity) == (True, False)
    assert [other.sample(place).tokens.tolist() for place in range(count)] != epochs[0]


def test_rows_are_kept_in_the_cache_and_a_damaged_file_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write(tmp_path / "a", [5, 3, 7, 2])
    before = [opened(prefix).sample(index).tokens.tolist() for index in range(2)]
    (path,) = (tmp_path / "cache").glob("*.rows")
    built, pack = list[int](), PackedSamples._pack
    monkeypatch.setattr(PackedSamples, "_pack", lambda self: built.append(1) or pack(self))
    opened(prefix)
    assert built == []
    content = path.read_bytes()
    for damaged in (content[:-8], content[:8] + b"\1" + content[9:], b"", content[:-3]):
        path.write_bytes(damaged)
        built.clear()
        samples = opened(prefix)
        assert [samples.sample(index).tokens.tolist() for index in range(2)] == before
        assert built == [1]
        assert path.read_bytes() == content


def test_a_config_opens_packed_samples_of_a_part(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [5] * 40)
    data = DataConfig(data_path=(str(prefix),), split="3,1,0", tokenizer_type="bytes")
    given = {"seq_length": 9, "seed": 1, "vocab_size": 10_000, "eod": EOD}
    packed = build_datasets(
        DataConfig(data_path=data.data_path, split=data.split, tokenizer_type="bytes", packing="best-fit"),
        **given,  # type: ignore[arg-type]
    )
    assert isinstance(packed.train, PackedSamples)
    assert (packed.train.num_samples, packed.valid["validation"].num_samples) == (15, 5)
    assert isinstance(build_datasets(data, **given).train, GPTSamples)  # type: ignore[arg-type]


def test_data_without_a_label_or_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TooSmallError, match=r"has no document of two tokens in 3 of its 3 documents; give it more data"
    ):
        opened(write(tmp_path / "a", [1, 0, 1]))
    with pytest.raises(UserError, match=r"b.bin holds token id 4, but the vocabulary has 4; train with the tokenizer"):
        opened(write(tmp_path / "b", [5]), vocab_size=4)
