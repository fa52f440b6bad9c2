"""tiktoken in the place of the library of tokenizer.json: the same tokens of random texts, and files as before."""

import json
import random
from functools import partial
from pathlib import Path

import pytest
from trained_bpe import TEXTS, tokenizer_of, trained

from megatronish.commands.preprocess import plugged_tokenizer, writing_tokenizer
from megatronish.config.sections.data import DataConfig
from megatronish.data.preprocess import preprocess
from megatronish.tokenizer.faster import SPLITS, FasterTokenizer, faster

pytestmark = pytest.mark.peers("tiktoken")


def texts(number: int) -> list[str]:
    """Random texts of pieces of texts, and of any characters."""
    draws = random.Random(1)
    likely = [character for text in TEXTS for character in text] * 200
    every = [*likely, *map(chr, range(0xD800)), *map(chr, range(0xE000, 0x20000))]
    return ["".join(draws.choices(every, k=draws.randrange(60))) for _ in range(number)]


@pytest.mark.parametrize("pattern", [None, *SPLITS], ids=["gpt2", "llama3", "qwen"])
def test_tokens_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str | None) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = tokenizer_of(trained(pattern))
    quick = faster(own)
    assert isinstance(quick, FasterTokenizer)
    quick.encode_all(TEXTS)
    all_texts = [*texts(3000), " " * 300_000, "a" * 300_000, "\n" * 5000 + "x"]
    assert quick.encode_all(all_texts) == own.encode_all(all_texts)


@pytest.mark.parametrize("workers", [1, 2])
def test_files_are_the_same(tmp_path: Path, workers: int) -> None:
    trained().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(2000)))
    settings = DataConfig(tokenizer_type="huggingface", tokenizer_model=str(tmp_path / "tokenizer.json"))
    for build in (plugged_tokenizer, writing_tokenizer):
        output = str(tmp_path / build.__name__)
        preprocess([str(tmp_path / "a.jsonl")], output, tokenizer=partial(build, (), settings), workers=workers)
    for ending in ("bin", "idx"):
        names = (f"{build.__name__}_text_document.{ending}" for build in (plugged_tokenizer, writing_tokenizer))
        one, other = ((tmp_path / name).read_bytes() for name in names)
        assert one == other
