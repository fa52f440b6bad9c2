"""Tests of pairs of texts for a T5: what is read and written of each format, cuts, and rows of a micro-batch."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from chat_formats import chatml
from chat_tokenizers import save_tokenizer, write_lines
from torch import Tensor

from megatronish.config.sections.data import ChatConfig, DataConfig
from megatronish.core.errors import UserError
from megatronish.data.chat.audit import Audit
from megatronish.data.chat.dataset import ChatDataset, open_chats
from megatronish.data.chat.setup import ChatSetup, SideLimits
from megatronish.data.sample import DatasetSettings, DatasetSource
from megatronish.data.text_pairs import TextPairCollator
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.control_tokens import SpanTokens

END, START = 256, 260  # of bytes; a start that ends nothing, so that a mistake is seen
SPECIAL = SpanTokens(start=START, end=END, filler=259, sentinels=())
SE, SD = 24, 12
BYTES = {"tokenizer_type": "bytes"}


def opened(
    path: Path, *, sides: tuple[int, int] = (SE, SD), data: dict[str, Any] | None = None, end: int = END, **chat: Any
) -> tuple[ChatDataset, ChatSetup]:
    config = DataConfig(dataset_type="chat", **(BYTES if data is None else data))
    setup = ChatSetup.of(ChatConfig(**chat), config, build_tokenizer(config), sides=SideLimits(end, *sides))
    settings = DatasetSettings(seq_length=sum(sides), seed=1, vocab_size=300, eod=END, chats=setup)
    return open_chats(DatasetSource("training", str(path)), settings), setup


def pairs_of(folder: Path, *records: dict[str, Any], **options: Any) -> list[tuple[str, str]]:
    """Text of each side of every sample, its end as a bar."""
    data, _ = opened(write_lines(folder / "pairs.jsonl", list(records)), **options)
    collator = TextPairCollator(SPECIAL, *options.get("sides", (SE, SD)))
    rows = [collator.rows(data.sample(number)) for number in range(data.num_samples)]
    end = options.get("end", END)
    return sorted(
        tuple("".join("|" if token == end else chr(token) for token in side) for side in row)  # type: ignore[misc]
        for row in rows
    )


@pytest.mark.parametrize(
    "record",
    [
        {"input": "ask", "target": "tell"},
        {"inputs": "ask", "targets": "tell"},
        {"input": "ask", "output": "tell"},
        {"prompt": "ask", "completion": "tell"},
        {"instruction": "ask", "output": "tell"},
        {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "tell"}]},
        {"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "tell"}]},
    ],
    ids=lambda record: "+".join(record),
)
def test_a_record_of_every_format_is_an_input_and_a_target(tmp_path: Path, record: dict[str, Any]) -> None:
    assert pairs_of(tmp_path, record) == [("ask|", "tell|")]


def test_an_instruction_has_its_input_and_its_system_before_it(tmp_path: Path) -> None:
    record = {"system": "be", "instruction": "add", "input": "1 2", "output": "3"}
    assert pairs_of(tmp_path, record) == [("be\nadd\n1 2|", "3|")]


def said(*texts: str, **last: Any) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(texts)
    messages: list[dict[str, Any]] = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    messages[-1] |= last
    return {"messages": messages}


def test_a_conversation_gives_a_pair_for_each_answer_through_the_template(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", ("<|im_start|>", "<|im_end|>"), template=chatml())
    data = {"tokenizer_type": "huggingface", "tokenizer_model": str(tmp_path / "tokenizer")}
    path = write_lines(tmp_path / "chats.jsonl", [said("a", "b", "c", "d")])

    def texts(**options: Any) -> list[tuple[str, str]]:
        found, setup = opened(path, data=data, sides=(200, 9), end=setup_end(data), **options)
        collator = TextPairCollator(SPECIAL, 200, 9)
        rows = [collator.rows(found.sample(number)) for number in range(found.num_samples)]
        decoded = [(setup.tokenizer.decode(row.inputs.tolist()), row.targets) for row in rows]
        return sorted((text, setup.tokenizer.decode(target.tolist())) for text, target in decoded)

    asked = "user\na\nassistant\n"
    assert texts() == [(asked, "b"), (asked + "b\nuser\nc\nassistant\n", "d")]
    assert texts(train_on="last") == texts()[1:]


def setup_end(data: dict[str, Any]) -> int:
    return build_tokenizer(DataConfig(**data)).span_tokens(0).end


CALL = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}], "content": None}


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"input": "", "target": "b"}, "input must be a text that is not empty"),
        ({"input": "a", "target": 3}, "target must be a text that is not empty"),
        ({"prompt": "", "completion": "b"}, "its input is empty, and an encoder reads one"),
        ({"text": "b"}, "learn texts with --dataset-type pretrain"),
        (said("a", "b", "c", "d"), "is not one question, and no chat template makes one text of it"),
        (said("a", "b", **CALL), "message 2 calls a tool, and a decoder learns texts alone"),
        (said("a", "b", train=False), "has no trained token"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_line(tmp_path: Path, record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        opened(write_lines(tmp_path / "pairs.jsonl", [record]))
    assert sentence in str(refused.value) and "pairs.jsonl" in str(refused.value)


def test_long_sides_are_cut_and_what_is_read_keeps_its_end(tmp_path: Path) -> None:
    record = {"input": "abcdefgh", "target": "uvwxyz"}
    assert pairs_of(tmp_path, record, sides=(9, 7)) == [("abcdefgh|", "uvwxyz|")]
    assert pairs_of(tmp_path, record, sides=(8, 6)) == [("abcdefg|", "uvwxyz")]
    assert pairs_of(tmp_path, record, sides=(3, 3)) == [("ab|", "uvw")]
    data, setup = opened(tmp_path / "pairs.jsonl", sides=(8, 6))
    fit = data.files[0].fit
    assert (fit.cut, fit.lost_end, fit.dropped, fit.tokens, fit.trained) == (1, 1, 0, 14, 6)
    assert "abcdefg<|endoftext|>\u27e6uvwxyz\u27e7" in Audit.of(data, setup).text()


def test_lengths_of_sides_change_the_identity_and_not_the_cache(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", [{"input": "a", "target": "b"}])
    one, other, again = (opened(path, sides=sides)[0] for sides in ((24, 12), (12, 24), (24, 12)))
    assert one.identity == again.identity != other.identity
    assert one.files[0].masked.file.prefix == other.files[0].masked.file.prefix


def micro_batch(folder: Path, sizes: list[tuple[int, int]], multiple: int | None) -> Any:
    lines = [{"input": "i" * asked, "target": "t" * told} for asked, told in sizes]
    data, _ = opened(write_lines(folder / "pairs.jsonl", lines))
    collate = TextPairCollator(SPECIAL, SE, SD, multiple)
    numbers = range(len(sizes))
    return collate([data.sample(number) for number in numbers], numbers)


def rows_of(tensor: Tensor) -> list[list[int]]:
    return sorted(tensor.tolist())


def test_labels_are_the_target_and_the_decoder_reads_it_shifted(tmp_path: Path) -> None:
    batch = micro_batch(tmp_path, [(2, 3)], None)
    i, t, filler = ord("i"), ord("t"), SPECIAL.filler
    assert batch.encoder_length == SE and batch.tokens.shape == (1, SE + SD)
    encoder, decoder = batch.tokens[0].split([SE, SD])
    assert encoder.tolist() == [i, i, END, *[filler] * (SE - 3)]
    assert decoder.tolist()[:4] == [START, t, t, t] and set(decoder.tolist()[4:]) == {filler}
    assert batch.labels[0, SE : SE + 4].tolist() == [t, t, t, END]
    assert batch.loss_mask[0].nonzero()[:, 0].tolist() == list(range(SE, SE + 4))
    assert (batch.document_ids[0, :SE] == 0).tolist() == [True] * 3 + [False] * (SE - 3)


def test_sides_are_as_long_as_their_longest_row_and_places_stay(tmp_path: Path) -> None:
    batch = micro_batch(tmp_path, [(2, 3), (9, 1)], 4)
    assert batch.sides == (12, 4) and batch.starts(1) == (0, SE)
    assert micro_batch(tmp_path, [(2, 3), (9, 1)], None).starts(1) == (0, SE)
    assert micro_batch(tmp_path, [(23, 11)], 5).sides == (SE, SD)


def test_mixed_files_have_their_numbers_at_the_labels(tmp_path: Path) -> None:
    files = []
    for number in range(2):
        path = write_lines(tmp_path / f"{number}.jsonl", [{"input": "a", "target": "b"}])
        files.append(opened(path)[0])
    mixed = files[0].mixed(files, [None, None], name="training")
    batch = TextPairCollator(SPECIAL, SE, SD)([mixed.sample(0), mixed.sample(1)], range(2))
    assert batch.dataset_ids is not None and batch.encoder_length == SE
    assert rows_of(batch.dataset_ids) == [[0] * (SE + SD), [1] * (SE + SD)]


def test_pairs_are_never_packed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", [{"input": "a", "target": "b"}] * 3)
    data, _ = opened(path, pack_samples=True)
    assert data.num_samples == 3 and not data.settings.pack
    assert json.dumps(dataclasses.asdict(data.files[0].counts))
