"""Tests of the trial of foreign tokenizers: a file that ends, fills or stops a process is one sentence."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from chat_tokenizers import byte_level
from paths import ROOT

from megatronish.config.sections.data import DataConfig
from megatronish.core.contained import ChildBounds
from megatronish.core.errors import UserError
from megatronish.tokenizer import trial
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.hugging_face import HuggingFaceTokenizer

GOOD: dict[str, Any] = json.loads(byte_level().to_str())


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replaced(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def word(kind: str, **more: Any) -> dict[str, Any]:
    return {"model": {"type": kind, "vocab": {"a": 0, "</s>": 1}, **more}}


REFUSED = {
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA/w=="}},
    "long charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////fwAAAAA="}},
    "plus in plus": {"pre_tokenizer": split("(a+)+$")},
    "two ways": {"pre_tokenizer": split("(a|aa)+$")},
    "of another letter": {"pre_tokenizer": split("(ж+)+$")},
    "of words": {"pre_tokenizer": split(r"(\w+\s?)+$")},
    "exploding": {"normalizer": {"type": "Sequence", "normalizers": [replaced("a", "a" * 100)] * 9}},
    "exploding from nothing": {"normalizer": {"type": "Sequence", "normalizers": [replaced("", "aaaaaaaaaa")] * 12}},
    "no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
}
SENTENCES = {
    "no json": "{",
    "deep": "[" * 100_000,
    "huge id": json.dumps(GOOD | {"added_tokens": [{**GOOD["added_tokens"][0], "id": 4_000_000_000}]}),
    "huge ids": json.dumps(GOOD | {"model": GOOD["model"] | {"vocab": {"a": 4_000_000_000, "</s>": 1}}}),
    "larger id": json.dumps(GOOD | {"model": GOOD["model"] | {"vocab": {"a": 2**63, "</s>": 1}}}),
    "empty": json.dumps(GOOD | {"model": GOOD["model"] | {"vocab": {}}, "added_tokens": []}),
}


@pytest.fixture(autouse=True)
def small_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "BOUNDS", ChildBounds(memory=1 << 30, seconds=0.4))


def built(folder: Path, text: str, kind: str = "huggingface") -> Any:
    path = folder / "tokenizer.json"
    path.write_text(text)
    return build_tokenizer(DataConfig(tokenizer_type=kind, tokenizer_model=str(path)))  # type: ignore[arg-type]


@pytest.mark.processes
@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_panics_aborts_explodes_or_does_not_end_is_one_sentence(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json (cannot be used|is not)") as caught:
        built(tmp_path, json.dumps(GOOD | REFUSED[name]))
    assert len(str(caught.value)) < 1000
    assert capfd.readouterr().err == ""


@pytest.mark.processes
@pytest.mark.parametrize("name", SENTENCES)
def test_a_file_that_is_no_tokenizer_or_has_huge_ids_is_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer"):
        built(tmp_path, SENTENCES[name])


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["WordPiece", "WordLevel", "Unigram"])
def test_a_text_that_has_no_tokens_is_a_sentence_of_its_own(kind: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    if kind == "Unigram":
        more = {"unk_id": None, "vocab": [["a", 0.0], ["</s>", -1.0]], "byte_fallback": False}
    tokenizer = built(tmp_path, json.dumps(GOOD | word(kind, **more) | {"pre_tokenizer": None, "added_tokens": []}))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(ValueError, match="the tokenizer cannot write it"):
        tokenizer.encode("b")
    with pytest.raises(ValueError, match="the tokenizer cannot write it"):
        tokenizer.encode_all(["a", "b"])


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_other_kinds_are_tried_the_same_way(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        built(tmp_path, "\n\x0c\n\x05" * 100, kind)


@pytest.mark.processes
def test_a_tokenizer_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(trial, "_try", lambda kind, *_: tried.append(kind))
    for _ in range(3):
        built(tmp_path, json.dumps(GOOD))
    assert tried == ["huggingface"]
    built(tmp_path, json.dumps(GOOD, indent=1))
    assert len(tried) == 2


@pytest.mark.processes
def test_without_a_cache_folder_it_is_tried_once_and_without_any_folder_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(trial, "_try", lambda kind, *_: tried.append(kind))
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    for _ in range(3):
        built(tmp_path, json.dumps(GOOD))
    assert tried == ["huggingface"]
    (folder,) = (tmp_path / "tmp").iterdir()
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path)  # another user's: what was tried there was not tried
    for _ in range(2):
        built(tmp_path, json.dumps(GOOD))
    assert len(tried) == 3


@pytest.mark.processes
def test_of_processes_that_start_together_without_a_cache_folder_one_tries(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tokenizer.json").write_text(json.dumps(GOOD))
    program = f"""
import time
from pathlib import Path
from megatronish.tokenizer import trial
from megatronish.tokenizer.build import build_tokenizer
from megatronish.config.sections.data import DataConfig
def tried(*_):
    with open({str(tmp_path / "tried")!r}, "a") as file:
        file.write("once\\n")
    time.sleep(1)
trial._try = tried
build_tokenizer(DataConfig(tokenizer_type="huggingface", tokenizer_model={str(tmp_path / "tokenizer.json")!r}))
"""
    environ = os.environ | {"XDG_CACHE_HOME": "/proc/none", "TMPDIR": str(tmp_path / "tmp")}
    running = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environ) for _ in range(3)]
    assert [each.wait(120) for each in running] == [0, 0, 0]
    assert (tmp_path / "tried").read_text() == "once\n"


@pytest.mark.skipif(os.getuid() != 0, reason="a file of another user needs root to be made")
@pytest.mark.processes
def test_what_another_user_says_was_tried_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(trial, "_try", lambda kind, *_: tried.append(kind))
    built(tmp_path, json.dumps(GOOD))
    (passed,) = (tmp_path / "cache" / "megatronish" / "tokenizers").iterdir()
    os.chown(passed, 12345, 12345)
    built(tmp_path, json.dumps(GOOD))
    assert len(tried) == 2


def test_ids_beyond_a_vocabulary_are_refused() -> None:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 2**29, "</s>": 0}, unk_token="a"))
    with pytest.raises(UserError, match="has the id 536,870,912"):
        HuggingFaceTokenizer(model, eod=0)
