"""Tests of files of chats as data sets: the cache, bad lines, cutting, packing, mixing, and the order."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_formats import chatml
from chat_tokenizers import said, save_tokenizer, write_lines

from megatronish.config.sections.data import ChatConfig, DataConfig
from megatronish.core.errors import UserError
from megatronish.data.chat.dataset import WINDOW, ChatDataset, packs_of
from megatronish.data.chat.masked import counts_path, mask_path
from megatronish.data.chat.setup import ChatSetup, read_model_templates
from megatronish.data.datasets import build_datasets
from megatronish.data.indexed import bin_path
from megatronish.data.samples import TooSmallError
from megatronish.parallel.streams import numpy_stream
from megatronish.tokenizer.build import build_tokenizer

IM = ("<|im_start|>", "<|im_end|>")
S = 128
EMPTY, GOOD = said("q", " "), said("q", "a")


def records(count: int, *, letter: str = "q", longest: int = 40) -> list[dict[str, Any]]:
    """Dialogues of different lengths; each has its number in it."""
    stream = numpy_stream("chats of the test", letter)
    lengths = stream.integers(1, longest, (count, 2)).tolist()
    return [said(f"{letter}{number} " + "x" * a, f"{number} " + "y" * b) for number, (a, b) in enumerate(lengths)]


def open_chats(
    folder: Path, *paths: object, seq_length: int = S, seed: int = 1, split: str = "1", **options: Any
) -> ChatDataset:
    return splits_of(folder, *paths, seq_length=seq_length, seed=seed, split=split, **options).train  # type: ignore[no-any-return]


def splits_of(folder: Path, *paths: object, seq_length: int, seed: int, split: str, **options: Any) -> Any:
    tokenizer_folder = folder / "tokenizer"
    if not tokenizer_folder.exists():
        save_tokenizer(tokenizer_folder, IM, template=chatml())
    data = DataConfig(
        data_path=tuple(map(str, paths)),
        dataset_type="chat",
        split=split,
        tokenizer_type="huggingface",
        tokenizer_model=str(tokenizer_folder),
    )
    tokenizer = build_tokenizer(data)
    setup = ChatSetup.of(ChatConfig(**options), data, tokenizer)
    return build_datasets(
        data, seq_length=seq_length, seed=seed, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod, chats=setup
    )


def chats_of(data: ChatDataset, rows: range) -> list[tuple[int, ...]]:
    """Tokens of every chat in rows, without padding."""
    found = []
    for row in rows:
        sample = data.sample(row)
        assert sample.document_ids is not None and sample.loss_mask is not None
        for document in np.unique(sample.document_ids):
            inside = sample.document_ids == document
            if sample.loss_mask[inside].any():
                found.append(tuple(sample.tokens[inside].tolist()))
    return found


# the cache


def test_equal_data_and_settings_are_encoded_once(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", records(9))
    first = open_chats(tmp_path, path)
    (cached,) = (tmp_path / "cache").glob("*.json")
    before = cached.stat().st_mtime_ns
    again = open_chats(tmp_path, path, seq_length=64)
    assert cached.stat().st_mtime_ns == before, "the sequence length does not change the tokens"
    assert first.identity != again.identity
    assert open_chats(tmp_path, path).identity == first.identity


@pytest.mark.parametrize("change", ["data", "template", "tokenizer", "train_on", "date", "format", "special token"])
def test_whatever_changes_the_samples_changes_the_name_in_the_cache(tmp_path: Path, change: str) -> None:
    path = write_lines(tmp_path / "chats.jsonl", records(9))
    open_chats(tmp_path, path)
    folder, options = tmp_path / "tokenizer", {}
    if change == "data":
        write_lines(path, [*records(8), said("q", "other")])
    elif change == "template":
        save_tokenizer(folder, IM, template=chatml(start="x"))
    elif change == "tokenizer":
        save_tokenizer(folder, [*IM, "<|new|>"], template=chatml())
    elif change == "special token":
        save_tokenizer(folder, IM, template=chatml(), bos_token="<|im_start|>")
    else:
        given = {
            "train_on": ("train_on", "last"),
            "date": ("chat_date", "2025-01-01"),
            "format": ("chat_format", "openai"),
        }
        options = dict([given[change]])
    open_chats(tmp_path, path, **options)
    assert len(list((tmp_path / "cache").glob("*.json"))) == 2


def test_the_template_is_the_model_s_own_one_of_its_named_ones_or_a_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", records(3))
    named = [{"name": name, "template": chatml(start=start)} for name, start in (("default", "d"), ("tools", "t"))]
    save_tokenizer(tmp_path / "tokenizer", IM, chat_template=named)

    def first_letters(**options: Any) -> set[str]:
        return {chr(tokens[0]) for tokens in letters(open_chats(tmp_path, path, **options))}

    assert first_letters() == {"d"}
    assert first_letters(chat_template="tools") == {"t"}
    save_tokenizer(tmp_path / "odd", IM, chat_template=[{"name": "default", "template": 5}])
    with pytest.raises(UserError, match=r"tokenizer_config.json: chat_template lists .*5.*, where each template is an"):
        read_model_templates(tmp_path / "odd")
    (tmp_path / "own.jinja").write_text(chatml(start="f"))
    assert first_letters(chat_template=str(tmp_path / "own.jinja")) == {"f"}
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(chatml(start="j"))
    assert first_letters() == {"j"}


def letters(data: ChatDataset) -> list[list[int]]:
    """The first tokens of chats as codes of letters, which are bytes of this tokenizer."""
    alphabet = sorted(range(256), key=lambda byte: bytes_as_letters()[byte])
    return [[alphabet[token] for token in chat[:1]] for chat in chats_of(data, range(data.num_samples))]


def bytes_as_letters() -> dict[int, str]:
    """Letters of byte-level tokenizers: printable bytes are themselves."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def test_a_damaged_mask_is_one_sentence(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", records(9))
    prefix = open_chats(tmp_path, path).files[0].masked.file.prefix
    content = bytearray(mask_path(Path(prefix)).read_bytes())
    content[-1] ^= 1
    mask_path(Path(prefix)).write_bytes(content)
    with pytest.raises(UserError, match=r"\.mask is damaged or of another \.idx; remove .* so that it is made again"):
        open_chats(tmp_path, path)
    mask_path(Path(prefix)).write_bytes(content[:-1])
    with pytest.raises(UserError, match=r"\.mask is missing or truncated; remove"):
        open_chats(tmp_path, path)


def test_damaged_tokens_and_counts_are_one_sentence(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", records(9))
    prefix = Path(open_chats(tmp_path, path).files[0].masked.file.prefix)
    tokens = bytearray(bin_path(prefix).read_bytes())
    bin_path(prefix).write_bytes(b"\xff\xff" + tokens[2:])
    with pytest.raises(UserError, match=r"\.bin holds a token id outside of the vocabulary of \d+ .*; remove"):
        open_chats(tmp_path, path)
    bin_path(prefix).write_bytes(tokens)
    for content, told in (
        (b"\xef", r"\.json cannot be read .*; remove it"),
        (b'{"records": []}', r"'records' is none of its values"),
    ):
        counts_path(prefix).write_bytes(content)
        with pytest.raises(UserError, match=told):
            open_chats(tmp_path, path)


# what is wrong


def test_bad_lines_are_dropped_counted_and_named_with_file_and_line(tmp_path: Path) -> None:
    lines = [*records(6), "not json", {"messages": []}, "", {"text": "other"}, said("q", " ")]
    counts = open_chats(tmp_path, write_lines(tmp_path / "chats.jsonl", lines)).files[0].counts
    assert (counts.records, counts.samples, counts.num_bad) == (10, 6, 4)
    places = [told.removeprefix(f"{tmp_path / 'chats.jsonl'}:").partition(" ")[0] for told in counts.told]
    assert places == ["7:", "8:", "10:", "11:"]
    assert "the line is no JSON that can be read" in counts.told[0]
    assert "it is of the format text, and the lines before it of openai" in counts.told[2]


@pytest.mark.parametrize(
    ("lines", "options", "sentence"),
    [
        ([], {}, "chats.jsonl is empty; write a chat as a JSON object on each line"),
        (
            [EMPTY, said("q", "a"), "{"],
            {},
            "2 of 3 lines of .*chats.jsonl cannot be trained on, more than half; the first",
        ),
        ([EMPTY], {}, "the first: .*chats.jsonl:1: message 2 of the assistant is empty"),
        ([said("q", "a", train=False)], {}, "has no trained token in its 1 lines; look at `train` and `weight`"),
        ([GOOD], {"chat_template": "no"}, "--chat-template no is not known; name one of default, chatml, llama3"),
        ([GOOD], {"chat_template": "llama3"}, "the chat template llama3 does not fit the tokenizer"),
        ([GOOD], {"chat_template": "no/such.jinja"}, "chat template no/such.jinja cannot be read"),
        ([GOOD], {"chat_date": "yesterday"}, "--chat-date yesterday is no date .*; write it as 2024-07-26"),
        ([GOOD], {"chat_template": "gemma"}, "chats.jsonl:1: .* no control token of the tokenizer ends it"),
    ],
)
def test_what_cannot_be_trained_on_is_one_sentence(
    tmp_path: Path, lines: list[object], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        open_chats(tmp_path, write_lines(tmp_path / "chats.jsonl", lines), **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("cache/*.bin")) and not list(tmp_path.glob("cache/*.json"))


def test_files_that_are_none_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--data-path .*none.jsonl does not exist; name a file of chats, as JSON lines"
    ):
        open_chats(tmp_path, tmp_path / "none.jsonl")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1....")
    with pytest.raises(UserError, match=r"rows.parquet is Parquet; write its rows as JSON lines"):
        open_chats(tmp_path, tmp_path / "rows.parquet")


def test_a_tokenizer_without_a_template_is_one_sentence(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", IM)
    path = write_lines(tmp_path / "chats.jsonl", records(3))
    with pytest.raises(
        UserError, match=r"the tokenizer in .* has no chat template; name one with --chat-template: chatml"
    ):
        open_chats(tmp_path, path)
    text = write_lines(tmp_path / "texts.jsonl", [{"text": "needs none"}])
    assert open_chats(tmp_path, text).files[0].counts.chat_format == "text"


def test_two_tokens_that_begin_a_text_are_an_error(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer", IM, template=chatml(start="<s>").join(["{{ bos_token }}", ""]))
    with pytest.raises(UserError, match=r"3 samples begin with two tokens .*chats.jsonl:1: .* begins with two <s>"):
        open_chats(tmp_path, write_lines(tmp_path / "chats.jsonl", records(3)))


# cutting


def test_what_is_too_long_is_cut_and_what_has_no_trained_token_left_is_dropped(tmp_path: Path) -> None:
    lines = [said("short", "short"), said("q", "y" * S), said("x" * S, "too late")]
    data = open_chats(tmp_path, write_lines(tmp_path / "chats.jsonl", lines))
    fit = data.files[0].fit
    assert (fit.num_samples, fit.cut, fit.lost_end, fit.dropped) == (3, 2, 2, 1)
    assert sorted(len(chat) for chat in chats_of(data, range(data.num_samples)))[-1] == S + 1
    assert fit.trained == sum(int(data.sample(row).loss_mask[1:].sum()) for row in range(data.num_samples))  # type: ignore[index]
    with pytest.raises(TooSmallError, match=r"all 3 samples of .* for training have their first trained token after"):
        open_chats(tmp_path, tmp_path / "chats.jsonl", seq_length=4)


def test_splits_share_out_chats(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", records(40))
    splits = splits_of(tmp_path, path, seq_length=S, seed=1, split="80,15,5")
    sets = [splits.train, splits.valid["validation"], splits.test]
    assert [data.files[0].num_samples for data in sets] == [32, 6, 2]
    found = [chat for data in sets for chat in chats_of(data, range(data.num_samples))]
    assert len(set(found)) == 40


# packing


def log_normal(count: int, *, mean: float = 5.9, deviation: float = 0.9, longest: int = 2049) -> Any:
    return np.clip(np.random.default_rng(1).lognormal(mean, deviation, count).astype(np.int64), 1, longest)


def test_packing_fills_98_of_100_places_at_2048() -> None:
    lengths = log_normal(20_000)
    packs = packs_of(lengths, 2049)
    assert lengths.sum() / (len(packs) * 2049) >= 0.98
    assert sorted(packs.members.tolist()) == list(range(len(lengths)))
    fill = [int(lengths[packs.row(row)].sum()) for row in range(len(packs))]
    assert max(fill) <= 2049


def test_packing_stays_within_windows() -> None:
    packs = packs_of(log_normal(WINDOW + 500), 2049)
    windows = [set((packs.row(row) // WINDOW).tolist()) for row in range(len(packs))]
    assert all(len(each) == 1 for each in windows)


def test_an_epoch_has_every_chat_once_and_the_next_one_packs_again(tmp_path: Path) -> None:
    data = open_chats(tmp_path, write_lines(tmp_path / "chats.jsonl", records(60)))
    rows = data.num_samples
    first = chats_of(data, range(rows))
    assert len(first) == len(set(first)) == 60
    second = chats_of(data, range(rows, rows + len(data.epoch(1).packs)))
    assert set(second) == set(first) and second != first


def test_rows_are_a_function_of_names_alone(tmp_path: Path) -> None:
    """Read in another order, from another folder, in the middle of a later epoch: the same rows."""
    lines = records(60)
    data = open_chats(tmp_path / "a", write_lines(tmp_path / "a" / "chats.jsonl", lines))
    moved = open_chats(tmp_path / "b", write_lines(tmp_path / "b" / "moved.jsonl", lines))
    assert data.identity == moved.identity
    last = 5 * data.num_samples
    expected = [data.sample(row).tokens for row in range(last)]
    for row in reversed(range(last)):
        assert np.array_equal(moved.sample(row).tokens, expected[row])
    other = open_chats(tmp_path / "a", tmp_path / "a" / "chats.jsonl", seed=2)
    assert other.identity != data.identity
    assert not all(np.array_equal(other.sample(row).tokens, expected[row]) for row in range(3))


def test_one_chat_a_row_where_packing_is_off(tmp_path: Path) -> None:
    data = open_chats(tmp_path, write_lines(tmp_path / "chats.jsonl", records(20)), pack_samples=False)
    assert data.num_samples == 20
    sample = data.sample(3)
    assert sample.document_ids is not None and len(np.unique(sample.document_ids)) == 2


# mixing


def test_files_are_mixed_by_weight_and_told_apart(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", records(90, letter="a"))
    b = write_lines(tmp_path / "b.jsonl", records(30, letter="b"))
    even = open_chats(tmp_path, 0.5, a, 0.5, b)
    assert even.names == ["a", "b"]
    counts = np.zeros(2, np.int64)
    for row in range(even.num_samples):
        sample = even.sample(row)
        assert sample.dataset_ids is not None and sample.document_ids is not None and sample.loss_mask is not None
        for document in np.unique(sample.document_ids[sample.loss_mask]):
            (number,) = np.unique(sample.dataset_ids[sample.document_ids == document])
            counts[number] += 1
    assert counts.tolist() == [60, 60], "an epoch has as many chats as all files; b has its second pass begun"
    sized = open_chats(tmp_path, a, b)
    assert len(chats_of(sized, range(sized.num_samples))) == len(set(chats_of(sized, range(sized.num_samples)))) == 120
    assert open_chats(tmp_path, a).sample(0).dataset_ids is None


def test_files_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / folder / "chats.jsonl", records(3, letter=folder)) for folder in "ab"]
    assert open_chats(tmp_path, *paths).names == [str(path) for path in paths]


def test_counts_are_kept_in_the_cache(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", [*records(3), "{"])
    made, read = (open_chats(tmp_path, path).files[0].counts for _ in range(2))
    assert made == read == replace(read)
    assert made.ends == {"<|im_end|>": 3}
    (cached,) = (tmp_path / "cache").glob("*.json")
    assert json.loads(cached.read_text())["records"] == 4
