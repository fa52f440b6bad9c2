"""Tests of fill in the middle: nothing of a text is lost, and a sample is named by its number alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from megatronish.config.sections.data import DataConfig, FimConfig
from megatronish.core.errors import UserError
from megatronish.data.datasets import DatasetSplits, build_datasets
from megatronish.data.fill_in_middle import FilledMiddle, MiddleRule
from megatronish.data.indexed import IndexedWriter
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.data.packed import packing_notes
from megatronish.data.sample import Dataset, Sample
from megatronish.tokenizer.hugging_face import HuggingFaceTokenizer
from megatronish.tokenizer.plain import NullTokenizer
from megatronish.tokenizer.tokenizer import Tokenizer

NAMES = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file_sep>", "<|endoftext|>")
TEXTS = (
    "def add(a, b):\n    return a + b\n",
    "caf\u00e9 \u4f60\u597d and the rest of a line\n",
    "x = [1, 2, 3]  # list\n",
)
ALWAYS = FimConfig(fim_data=True, fim_rate=1.0, fim_spm_rate=0.0)


def byte_level() -> HuggingFaceTokenizer:
    """A tokenizer of byte-level BPE with StarCoder's special tokens."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(NAMES), initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(TEXTS * 5, trainer)
    return HuggingFaceTokenizer(model, eod=model.token_to_id("<|endoftext|>"))


TOKENIZER = byte_level()
P, M, S, PAD, SEP, EOD = (TOKENIZER.token_named(name, flag="") for name in NAMES)


class Rows:
    """A data set of given samples."""

    name, identity, num_samples = "training", "rows", None

    def __init__(self, *samples: Sample) -> None:
        self._samples = samples

    def sample(self, index: int) -> Sample:
        return self._samples[index % len(self._samples)]


def filled(sample: Sample, config: FimConfig = ALWAYS, tokenizer: Tokenizer = TOKENIZER, index: int = 0) -> Sample:
    return FilledMiddle(Rows(sample), MiddleRule.of(config, tokenizer), seed=1).sample(index)


def row_of(*documents: str, room: int = 0) -> Sample:
    """Documents end to end, then one of `room` tokens."""
    ids = [token for text in documents for token in (*TOKENIZER.encode(text), EOD)]
    return Sample(np.asarray([*ids, *TOKENIZER.encode("\n" * room)], np.int64))


def parts_of(ids: list[int]) -> tuple[str, str, str]:
    """Prefix, middle and suffix of a document as PSM, or as SPM, which reads as a PSM without a prefix."""
    decode = TOKENIZER.decode
    assert ids[0] == P
    assert [ids.count(token) for token in (P, M, S)] == [1, 1, 1]
    suffix, middle = ids.index(S), ids.index(M)
    return decode(ids[1:suffix]), decode(ids[middle + 1 :]), decode(ids[suffix + 1 : middle])


def test_every_document_is_whole_between_the_tokens_that_end_documents() -> None:
    for index in range(40):
        kind = replace(ALWAYS, fim_spm_rate=float(index % 2))
        is_spm = kind.fim_spm_rate == 1
        sample = filled(row_of(*TEXTS, room=60), kind, index=index)
        assert len(sample.tokens) == len(row_of(*TEXTS, room=60).tokens)
        ids = sample.tokens.tolist()
        for text in TEXTS:
            end = ids.index(EOD)
            prefix, middle, suffix = parts_of(ids[:end])
            assert prefix + middle + suffix == text
            assert not (is_spm and prefix)
            ids = ids[end + 1 :]


def test_cuts_are_between_characters_and_draws_are_named_by_the_number() -> None:
    text = "abcdefghijklmnopqrstuvwxyz" * 2
    sample = row_of(text, room=40)
    cuts = []
    for index in range(300):
        ids = filled(sample, index=index).tokens.tolist()
        prefix, middle, _ = parts_of(ids[: ids.index(EOD)])
        cuts.append((len(prefix), len(prefix) + len(middle)))
    assert {place for cut in cuts for place in cut} == set(range(len(text) + 1))
    again = [filled(sample, index=index).tokens.tolist() for index in (7, 0, 7)]
    assert again[0] == again[2] != again[1]


def test_rates_are_those_of_documents_and_of_their_kinds() -> None:
    config = FimConfig(fim_data=True, fim_rate=0.4, fim_spm_rate=0.25)
    sample, kinds = row_of(*TEXTS, room=40), []
    for index in range(400):
        ids = filled(sample, config, index=index).tokens.tolist()
        for _ in TEXTS:
            end = ids.index(EOD)
            kinds.append("no" if ids[0] != P else "spm" if ids[1] == S else "psm")
            ids = ids[end + 1 :]
    assert kinds.count("no") / len(kinds) == pytest.approx(0.6, abs=0.05)
    assert kinds.count("spm") / len(kinds) == pytest.approx(0.1, abs=0.03)
    assert filled(sample, replace(config, fim_rate=0.0)).tokens.tolist() == sample.tokens.tolist()


def test_fragments_and_documents_with_a_given_beginning() -> None:
    ids = [*TOKENIZER.encode(TEXTS[0]), SEP, *TOKENIZER.encode(TEXTS[2]), SEP, SEP, EOD]
    sample = Sample(np.asarray([*ids, *TOKENIZER.encode("\n" * 60)], np.int64))
    config = replace(ALWAYS, fim_split_sample="<file_sep>", fim_no_prefix="x =")
    seen = filled(sample, config).tokens.tolist()
    first = seen.index(SEP)
    assert "".join(parts_of(seen[:first])) == TEXTS[0]
    rest = seen[first + 1 : seen.index(EOD)]
    assert rest == [*TOKENIZER.encode(TEXTS[2]), SEP, SEP]
    none = filled(sample, replace(config, fim_fragment_rate=0.0)).tokens.tolist()
    assert none[: len(ids)] == ids


def test_what_text_would_lose_is_cut_between_tokens() -> None:
    half = TOKENIZER.encode("\u9f98")[1:]  # a sample that begins inside of a character
    for ids in ([*half, *TOKENIZER.encode(TEXTS[1])], [*TOKENIZER.encode("a b"), SEP, *TOKENIZER.encode("c d e")]):
        tokens = np.asarray([*ids, EOD, *TOKENIZER.encode("\n") * 9], np.int64)
        for index in range(20):
            seen = filled(Sample(tokens), index=index).tokens.tolist()
            seen = seen[: seen.index(EOD)]
            suffix, middle = seen.index(S), seen.index(M)
            assert [*seen[1:suffix], *seen[middle + 1 :], *seen[suffix + 1 : middle]] == ids


def test_a_shorter_sample_is_filled_up_without_a_loss() -> None:
    spelled = [token for character in TEXTS[0] for token in TOKENIZER.encode(character)]
    sample = filled(Sample(np.asarray([*spelled, EOD], np.int64)))
    assert sample.num_filler > 0
    assert set(sample.tokens[-sample.num_filler :].tolist()) == {PAD}
    batch = Collator(EOD)([sample], [0])
    assert (~batch.loss_mask[0]).sum() == sample.num_filler
    assert (~batch.loss_mask[0, -sample.num_filler :]).all()
    masked = Collator(EOD, eod_mask_loss=True)([filled(row_of(TEXTS[0], TEXTS[2]))], [0])
    assert masked.loss_mask[0].tolist() == (masked.tokens[0] != EOD).tolist()


def test_documents_of_a_packed_row_stay_apart_and_the_row_loses_its_end_alone() -> None:
    texts = [TOKENIZER.encode(text) for text in TEXTS]  # without a token at their ends
    for room in (30, 0):
        tokens = np.asarray([token for text in (*texts, [EOD] * room) for token in text], np.int64)
        documents = np.repeat(np.arange(4), [*map(len, texts), room])
        sample = Sample(tokens, np.arange(len(tokens)) < len(tokens) - room, documents, num_filler=room)
        for index in range(20):
            seen = filled(sample, index=index)
            assert seen.document_ids is not None and seen.loss_mask is not None
            assert len(seen.tokens) == len(tokens)
            whole = [seen.tokens[seen.document_ids == number].tolist() for number in range(3 if room else 2)]
            assert ["".join((a, b, c)) for a, b, c in map(parts_of, whole)] == list(TEXTS[: len(whole)])
            batch = Collator(EOD)([seen], [0])
            assert batch.document_ids is not None
            begins = np.flatnonzero(np.diff(seen.document_ids))
            assert not batch.loss_mask[0, begins].any()
            assert int((~batch.loss_mask).sum()) == len(begins) + max(0, seen.num_filler - 1)
            assert (batch.position_ids[0, begins[:2] + 1] == 0).all()


def datasets(folder: Path, config: FimConfig, *, blend: bool = False, **options: Any) -> DatasetSplits:
    prefix = folder / "code"
    if not prefix.with_suffix(".idx").exists():
        with IndexedWriter(prefix, dtype=np.dtype("<u2")) as writer:
            for number in range(60):
                writer.add_document([*TOKENIZER.encode(TEXTS[number % 3] * (1 + number % 4)), EOD])
    paths = ("2", str(prefix), "1", f"{prefix}[0:0.5]") if blend else (str(prefix),)
    data = DataConfig(data_path=paths, split="8,2,0", **options)
    splits = build_datasets(data, seq_length=48, seed=3, vocab_size=TOKENIZER.vocab_size, eod=EOD)
    return splits.with_middles(MiddleRule.of(config, TOKENIZER), seed=3)


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_layouts_share_the_samples_of_a_blend_over_epochs(tmp_path: Path, packing: str) -> None:
    train, resumed = (datasets(tmp_path, FimConfig(fim_data=True), blend=True, packing=packing).train for _ in range(2))

    def rows(dp: int, micro: int, consumed: int, size: int = 24, train: Dataset = train) -> dict[int, list[Any]]:
        seen = {}
        for rank in range(dp):
            share = BatchShare(rank, dp, micro)
            for batch in micro_batches(
                train, consumed_samples=consumed, global_batch_size=size, share=share, collate=Collator(EOD)
            ):
                fields = (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids, batch.document_ids)
                for place, number in enumerate(batch.sample_ids.tolist()):
                    seen[number] = [None if each is None else each[place].tolist() for each in fields]
        return seen

    assert train.num_samples is not None
    first = 2 * train.num_samples - 12  # over the end of an epoch
    serial = rows(1, 1, first)
    assert (
        serial == rows(4, 3, first) == rows(2, 2, first) == rows(3, 1, first, 12) | rows(1, 4, first + 12, 12, resumed)
    )
    assert any(P in row[0] for row in serial.values())
    assert len(list(packing_notes(train))) == (2 if packing == "best-fit" else 0)


def test_identity_has_the_settings(tmp_path: Path) -> None:
    config = FimConfig(fim_data=True)
    splits = datasets(tmp_path, config)
    assert splits.valid["validation"].identity != splits.train.identity
    assert splits.train.identity == datasets(tmp_path, config).train.identity
    assert splits.train.identity != datasets(tmp_path, replace(config, fim_rate=0.6)).train.identity


def test_tokens_that_are_missing_are_told() -> None:
    null = NullTokenizer(50)
    with pytest.raises(UserError, match=r"--fim-data needs three special tokens, and the tokenizer has none of the"):
        MiddleRule.of(ALWAYS, null)
    named = replace(ALWAYS, fim_prefix_token="1", fim_middle_token="2", fim_suffix_token="3")
    assert MiddleRule.of(named, null).tokens == (1, 2, 3, null.eod)
    with pytest.raises(UserError, match=r"--fim-middle-token 77 is no token of the tokenizer; name one"):
        MiddleRule.of(replace(named, fim_middle_token="77"), null)
    with pytest.raises(UserError, match=r"the tokens 1, 1, 3 of --fim-prefix-token, .* must be three"):
        MiddleRule.of(replace(named, fim_middle_token="1"), null)
