"""Tests of preference data: formats, pairs in rows, cuts, labels, mismatched completions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_formats import chatml
from chat_tokenizers import said, save_tokenizer, write_lines
from preference_runs import IM, answered, asked

from megatronish.config.sections.data import ChatConfig, DataConfig
from megatronish.core.errors import UserError
from megatronish.data.chat.conversation import Conversation, PlainText
from megatronish.data.chat.dataset import ChatDataset, open_chats
from megatronish.data.chat.prepare import _pairs, format_of
from megatronish.data.chat.setup import ChatSetup
from megatronish.data.loader import Collator
from megatronish.data.sample import DatasetSettings, DatasetSource
from megatronish.tokenizer.build import build_tokenizer

END = 257  # </s>
FIRST_LETTER = "!"  # token 0
CHATS = ChatConfig()


def opened(
    folder: Path, records: list[dict[str, Any]], *, seq_length: int = 64, chats: ChatConfig = CHATS
) -> ChatDataset:
    tokenizer = save_tokenizer(folder / "tokenizer", IM, template=chatml())
    data = DataConfig(tokenizer_type="huggingface", tokenizer_model=str(tokenizer))
    setup = ChatSetup.of(chats, data, build_tokenizer(data))
    path = write_lines(folder / "records.jsonl", records)
    settings = DatasetSettings(seq_length=seq_length, seed=1, vocab_size=264, eod=END, chats=setup)
    return open_chats(DatasetSource("training", str(path)), settings)


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "ask: ", "chosen": "yes", "rejected": "no"},
        {"chosen": "ask: yes", "rejected": "ask: no"},
    ],
)
def test_prompts_of_texts_are_given_or_the_common_beginning(record: dict[str, Any]) -> None:
    assert format_of(record) == "pairs"
    found = _pairs(record)
    assert isinstance(found.first, PlainText) and isinstance(found.second, PlainText)
    assert found.first.prompt == found.second.prompt
    assert found.first.prompt + found.first.completion == "ask: yes"
    assert found.second.completion.strip() == "no"


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": asked("a"), "chosen": answered("yes"), "rejected": answered("no")},
        {"prompt": "a", "chosen": answered("yes"), "rejected": answered("no")},
        {"prompt": asked("a"), "chosen": answered("yes")[0], "rejected": answered("no")[0]},
        {"messages": asked("a"), "chosen": answered("yes")[0], "rejected": answered("no")[0]},
        {"messages": asked("x"), "chosen": asked("a") + answered("yes"), "rejected": asked("a") + answered("no")},
        {"chosen": asked("a") + answered("yes"), "rejected": asked("a") + answered("no")},
        {"prompt": "a", "chosen": asked("a") + answered("yes"), "rejected": asked("a") + answered("no")},
    ],
)
def test_prompts_of_messages_are_given_or_the_common_beginning(record: dict[str, Any]) -> None:
    found = _pairs(record)
    assert isinstance(found.first, Conversation) and isinstance(found.second, Conversation)
    assert [message["content"] for message in found.first.messages] == ["a", "yes"]
    assert [message["content"] for message in found.second.messages] == ["a", "no"]


def test_both_completions_of_a_pair_are_documents_of_one_row(tmp_path: Path) -> None:
    data = opened(tmp_path, [pair("ab", "c" * size, "d" * (9 - size)) for size in range(1, 9)], seq_length=39)
    assert data.is_paired and data.num_samples == 4  # two pairs a row, of 2 (2 + 1) + 9 tokens each
    for number in range(data.num_samples):
        sample = data.sample(number)
        assert sample.document_ids is not None and sample.pair_labels is not None and sample.loss_mask is not None
        assert len(sample.pair_labels) == 2 and sample.pair_labels.all()
        for document in range(2 * len(sample.pair_labels)):
            tokens = sample.tokens[sample.document_ids == document].tolist()
            text = bytes(tokens[2:-1]) if tokens[-1] == END else b""
            assert tokens[-1] == END and len(set(text)) == 1
        batch = Collator(END)([sample], [0])
        assert batch.pairs is not None
        assert batch.pairs.lengths.sum().item() == batch.num_loss_tokens
        assert (batch.pairs.text_lengths.sum(1) == 13).all()


@pytest.mark.parametrize(("sizes", "lengths"), [((20, 30), (20, 20)), ((5, 90), (8, 32)), ((90, 5), (32, 8))])
def test_completions_that_do_not_fit_are_cut_in_halves_or_to_what_is_left(
    tmp_path: Path, sizes: tuple[int, int], lengths: tuple[int, int]
) -> None:
    data = opened(tmp_path, [pair("ab", "c" * sizes[0], "d" * sizes[1])], seq_length=39)
    sample = data.sample(0)
    assert np.bincount(sample.document_ids).tolist() == list(lengths)  # type: ignore[arg-type]
    assert (data.files[0].fit.cut, data.files[0].fit.lost_end) == (1, 1)


def test_a_pair_of_which_a_cut_leaves_one_completion_is_dropped(tmp_path: Path) -> None:
    records = [pair("a" * 30, "b", "c"), pair("a", "b", "c")]
    data = opened(tmp_path, records, seq_length=39)
    assert data.files[0].fit.dropped == 1 and data.files[0].num_samples == 1
    with pytest.raises(UserError, match="which has to hold both completions of a pair; give a longer --seq-length"):
        opened(tmp_path / "all", records[:1], seq_length=39)


def test_a_labelled_completion_has_the_completion_of_the_next_record_beside_it(tmp_path: Path) -> None:
    labels = [True, False, False]
    records = [
        {"prompt": prompt, "completion": completion, "label": label}
        for prompt, completion, label in zip("pqr", "xyz", labels, strict=True)
    ]
    data = opened(tmp_path, records, chats=ChatConfig(pack_samples=False))
    found = {}
    for number in range(3):
        sample = data.sample(number)
        assert sample.pair_labels is not None and sample.document_ids is not None
        texts = [sample.tokens[sample.document_ids == document][:2].tolist() for document in (0, 1)]
        found[bytes(texts[0]).hex(), bytes(texts[1]).hex()] = bool(sample.pair_labels[0])
    letters = data.files[0].texts(0)[0].tokens
    assert len(letters) == 3 and sorted(found.values()) == sorted(labels)
    assert len({first[:2] for first, _ in found}) == 3
    assert all(first[:2] == second[:2] and first != second for first, second in found)


def test_pairs_that_are_read_as_labelled_are_a_wanted_and_an_unwanted_completion(tmp_path: Path) -> None:
    records = [pair("p", "a", "b"), pair("q", "c", "d"), {"prompt": "r", "completion": "e", "label": False}]
    file = opened(tmp_path, records, chats=ChatConfig(chat_format="labelled")).files[0]
    found = {
        tuple("".join(chr(ord(FIRST_LETTER) + token) for token in text.tokens[:2]) for text in file.texts(place)): (
            file.label(place)
        )
        for place in range(file.num_samples)
    }
    assert found == {
        ("pa", "pc"): True,
        ("pb", "pd"): False,
        ("qc", "qe"): True,
        ("qd", "qe"): False,
        ("re", "ra"): False,
    }
    with pytest.raises(UserError, match="the only record of its file"):
        opened(tmp_path / "one", records[:1], chats=ChatConfig(chat_format="labelled"))


def test_pairs_and_chats_do_not_mix(tmp_path: Path) -> None:
    pairs, chats = opened(tmp_path / "a", [pair("a", "b", "c")]), opened(tmp_path / "b", [said("q", "a")])
    with pytest.raises(UserError, match="which no objective learns from together"):
        pairs.mixed([pairs, chats], [None, None], name="training")
