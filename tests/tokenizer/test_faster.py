"""Tests of the faster library of byte-level BPE, with a stand-in for tiktoken; tests/peers has the real one."""

import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers
from trained_bpe import TEXTS, tokenizer_of, trained

from megatronish.tokenizer import faster as faster_module
from megatronish.tokenizer.faster import FasterTokenizer, faster
from megatronish.tokenizer.plain import BytesTokenizer

Plant = Callable[[Callable[[str], list[int]]], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plant:
    """Let `tiktoken` be a library that writes texts with this function; characters are few."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(faster_module, "CHARACTERS", range(0x300))

    def planted(encode: Callable[[str], list[int]]) -> None:
        class Encoding:
            def __init__(self, name: str, **_options: Any) -> None:
                self.encode_ordinary = encode

        library = ModuleType("tiktoken")
        library.__spec__ = ModuleSpec("tiktoken", None)
        library.__version__, library.Encoding = "0", Encoding  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "tiktoken", library)

    return planted


def test_a_library_that_agrees_writes_the_texts(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    own, written = tokenizer_of(trained()), list[str]()
    plant(lambda text: (written.append(text), own.encode(text))[1])
    quick = faster(own)
    assert isinstance(quick, FasterTokenizer) and (quick.vocab_size, quick.eod) == (own.vocab_size, own.eod)
    assert capsys.readouterr().err == "tiktoken writes the tokens, which are the same\n"
    written.clear()
    assert quick.encode_all(TEXTS) == own.encode_all(TEXTS) and written == list(TEXTS)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        quick.encode_all(["\ud800"])
    written.clear()
    faster(own)
    assert not written, "what was proved is remembered"


def test_other_tokens_for_the_first_texts_of_a_run_turn_it_off(
    plant: Plant, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tokenizer_of(trained())
    plant(lambda text: own.encode(text.replace("many", "few")))
    quick = faster(own)
    assert quick.encode_all(["", ""]) == [[], []]  # which show nothing
    assert quick.encode_all(TEXTS) == own.encode_all(TEXTS)
    assert "it has other tokens for texts of this run" in capsys.readouterr().err
    assert quick.encode_all(["many"]) == [own.encode("many")]


def test_a_text_that_the_library_cannot_write_is_written_by_the_other(plant: Plant) -> None:
    own = tokenizer_of(trained())

    def encode(text: str) -> list[int]:
        if len(text) > 100_000:
            raise RuntimeError("stack overflow")
        return own.encode(text)

    plant(encode)
    assert faster(own).encode_all([" " * 100_001, "a"]) == [own.encode(" " * 100_001), own.encode("a")]


def normalized(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Lowercase"}


def with_an_added_token(content: dict[str, Any]) -> None:
    content["added_tokens"].append({**content["added_tokens"][0], "id": 400, "content": "<think>", "special": False})


def with_a_space(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["add_prefix_space"] = True


def with_other_words(content: dict[str, Any]) -> None:
    split = {"type": "Split", "pattern": {"Regex": r"\w+"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"]["use_regex"] = False
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}


def with_merges_in_another_order(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def with_a_merge_that_never_happens(content: dict[str, Any]) -> None:
    """`qz` is merged before `zx`, so that `q` never stands before `zx`, but tiktoken would merge `qz` with `x`."""
    for left, right in (("q", "z"), ("z", "x"), ("q", "zx")):
        content["model"]["vocab"][left + right] = len(content["model"]["vocab"])
        content["model"]["merges"].append([left, right])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (normalized, "the tokenizer changes texts before it splits them"),
        (with_an_added_token, "the tokenizer reads added tokens in any text"),
        (with_a_space, "the tokenizer splits words by other rules"),
        (with_other_words, "the tokenizer splits words by other rules"),
        (with_merges_in_another_order, "its merges are in another order than its ids"),
        (with_a_merge_that_never_happens, "its merges do not make each of its tokens"),
    ],
)
def test_a_tokenizer_that_the_library_may_read_otherwise_is_left_alone(
    plant: Plant, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], None], why: str
) -> None:
    content = json.loads(trained().to_str())
    change(content)
    own = tokenizer_of(tokenizers.Tokenizer.from_str(json.dumps(content)))
    plant(own.encode)
    assert faster(own) is own
    assert capsys.readouterr().err == f"tiktoken is not used: {why}\n"


def test_a_library_that_splits_at_other_characters_is_not_used(
    plant: Plant, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tokenizer_of(trained())
    plant(lambda text: own.encode(text.replace("\x85", "x")))
    assert faster(own) is own
    assert "it splits words at other characters" in capsys.readouterr().err


def test_other_kinds_of_tokenizers_and_a_missing_library_change_nothing(
    plant: Plant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(list)
    assert isinstance(faster(BytesTokenizer()), BytesTokenizer)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setattr(faster_module.importlib.util, "find_spec", {}.get)
    own = tokenizer_of(trained())
    assert faster(own) is own and not capsys.readouterr().err
