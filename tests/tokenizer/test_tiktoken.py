"""Tests of tiktoken files: ids equal those of the joining by ranks, in both forms, and an error for each wrong file."""

import base64
import json
import pickle
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from paths import ROOT

from megatronish.config.sections.data import DataConfig
from megatronish.config.vocabulary_size import vocabulary_of_files
from megatronish.core.errors import UserError
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.tiktoken_file import PATTERNS
from megatronish.tokenizer.tokenizer import Tokenizer

CORPUS = ROOT.joinpath("CONTRIBUTING.md").read_text() + "Ein Stück Käse für 12345 €, naïve Ελλάδα 漢字 \U0001f389\n"
WHOLE_WORD = "zqxjv"  # a token that no joining of pairs reaches: only a whole word is it
SAMPLES = [
    WHOLE_WORD, f"a {WHOLE_WORD}",
    "def f(x):\n\treturn  x // 2   # half\n\n\n", " leading", "trailing ", "  two  spaces  ", "", "\n", "\r\n",
    "12345 678", "HelloWorld HTTPServer don't DON'T", "</s> <unk> <|endoftext|>", "Stück Käse €\U0001f389漢字",
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> list[bytes]:
    """Tokens in the order of their ranks: the 256 bytes, then joined pairs of a corpus, the most frequent first."""
    words = [[bytes([byte]) for byte in word.encode()] for word in CORPUS.split(" ")]
    found = [bytes([byte]) for byte in range(256)]
    while len(found) < 500:
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        pair = max(counts, key=lambda each: (counts[each], each))
        found.append(b"".join(pair))
        words = [joined(word, pair) for word in words]
    return [*found, WHOLE_WORD.encode()]


def joined(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """The word with the pair joined wherever it stands."""
    out: list[bytes] = []
    for part in word:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return out


def by_ranks(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's rule itself: a whole word if it is a token, else join the neighbours of least rank, leftmost first."""
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [(ranks.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
        best = min(((rank, i) for rank, i in pairs if rank is not None), default=None)
        if best is None:
            return [ranks[part] for part in parts]
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]


def json_file(folder: Path, ranks: list[bytes]) -> Path:
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(ranks)
    ]
    (folder / "vocab.json").write_text(json.dumps(entries))
    return folder / "vocab.json"


def text_file(folder: Path, ranks: list[bytes]) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (folder / "mine.tiktoken").write_text("".join(lines))
    return folder / "mine.tiktoken"


def tiktoken(path: Path, **options: object) -> Tokenizer:
    return build_tokenizer(DataConfig(tokenizer_type="tiktoken", tokenizer_model=str(path), **options))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("pattern", ["v1", "v2", "gpt2", "cl100k"])
def test_ids_are_those_of_joining_by_ranks(tmp_path: Path, ranks: list[bytes], pattern: str) -> None:
    tokenizer = tiktoken(text_file(tmp_path, ranks), tiktoken_pattern=pattern)
    table = {token: rank for rank, token in enumerate(ranks)}
    chosen = random.Random(5)
    texts = [*SAMPLES, CORPUS, *("".join(chosen.choices(CORPUS, k=80)) for _ in range(30))]
    for text in texts:
        words = words_of(text, pattern)
        assert "".join(words) == text
        assert tokenizer.encode(text) == [token for word in words for token in by_ranks(word.encode(), table)], text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def words_of(text: str, pattern: str) -> list[str]:
    """The words of a text, by the pattern alone."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pattern]), "isolated")
    return [word for word, _ in split.pre_tokenize_str(text)]


def test_the_patterns_split_words_numbers_and_marks() -> None:
    assert words_of("Don't a1234!\n x", "v2") == ["Don", "'t", " a", "1", "2", "3", "4", "!\n", " x"]
    assert words_of("don't a1234", "cl100k") == ["don", "'t", " a", "123", "4"]
    assert words_of("HelloWorld", "v1") == ["HelloWorld"]
    assert words_of("HelloWorld", "v2") == ["Hello", "World"]


def test_special_tokens_come_first_in_a_json_list_and_last_in_a_text_file(tmp_path: Path, ranks: list[bytes]) -> None:
    listed = tiktoken(json_file(tmp_path, ranks), tiktoken_num_special_tokens=10)
    lines = tiktoken(text_file(tmp_path, ranks))
    assert (listed.vocab_size, listed.eod) == (511, 2)
    assert (lines.vocab_size, lines.eod) == (502, 501)
    for text in SAMPLES:
        assert listed.encode(text) == [token + 10 for token in lines.encode(text)]
    assert listed.encode_marked("<s>x</s><SPECIAL_9>") == [1, ranks.index(b"x") + 10, 2, 9]
    assert listed.decode([1, *listed.encode("x"), 2]) == "x"
    own = tiktoken(text_file(tmp_path, ranks), tiktoken_special_tokens=("<|begin|>", "<|end_of_text|>"))
    assert (own.vocab_size, own.eod) == (503, 502)


def test_a_dry_run_reads_the_size_of_the_vocabulary_from_the_file(tmp_path: Path, ranks: list[bytes]) -> None:
    for path, options in (
        (json_file(tmp_path, ranks), {"tiktoken_num_special_tokens": 10}),
        (text_file(tmp_path, ranks), {}),
        (text_file(tmp_path, ranks), {"tiktoken_special_tokens": ("<|begin|>", "<|end_of_text|>")}),
    ):
        data = DataConfig(tokenizer_type="tiktoken", tokenizer_model=str(path), **options)
        assert vocabulary_of_files(data) == build_tokenizer(data).vocab_size


def test_a_long_list_is_cut_to_the_vocabulary(tmp_path: Path, ranks: list[bytes]) -> None:
    cut = tiktoken(json_file(tmp_path, ranks), tiktoken_num_special_tokens=10, vocab_size=310)
    assert cut.vocab_size == 310
    table = {token: rank for rank, token in enumerate(ranks[:300])}
    for text in SAMPLES:
        expected = [token + 10 for word in words_of(text, "v2") for token in by_ranks(word.encode(), table)]
        assert cut.encode(text) == expected


def test_a_tiktoken_tokenizer_travels_to_workers(tmp_path: Path, ranks: list[bytes]) -> None:
    tokenizer = tiktoken(text_file(tmp_path, ranks))
    assert pickle.loads(pickle.dumps(tokenizer)).encode(CORPUS) == tokenizer.encode(CORPUS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "is not a list of .*rank, token_bytes, token_str"),
        ('{"model": {}}', "is not a line of a tiktoken file"),
        ("[" * 100_000, "is not a list of"),
        ("YQ== 0\n", "has no token for 255 of the 256 bytes"),
        ("YQ== x\n", r":1: 'YQ== x' is not a line of a tiktoken file"),
        ("\x80".join("ab"), "is not a line of a tiktoken file"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        tiktoken(path)


def test_ranks_and_special_tokens_that_clash_are_refused(tmp_path: Path, ranks: list[bytes]) -> None:
    path = text_file(tmp_path, ranks)
    path.write_text(path.read_text() + "YWJjZGVm 3\n")
    with pytest.raises(UserError, match="gives two tokens one rank"):
        tiktoken(path)
    path.write_text(text_file(tmp_path, ranks).read_text() + "YWJjZGVm 99999999999\n")
    with pytest.raises(UserError, match="or one below 0 or above"):
        tiktoken(path)
    with pytest.raises(UserError, match="has 'a' as a token of text, and as a special token"):
        tiktoken(text_file(tmp_path, ranks), tiktoken_special_tokens=("a", "</s>"))
    with pytest.raises(UserError, match="--tiktoken-num-special-tokens 3 is less than the 7"):
        tiktoken(json_file(tmp_path, ranks), tiktoken_num_special_tokens=3)


def test_preprocessing_reads_megatrons_flags_of_tiktoken(tmp_path: Path, ranks: list[bytes]) -> None:
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "Hello World 12"}) + "\n")
    words = f"--input {tmp_path}/text.jsonl --output-prefix {tmp_path}/out --tokenizer-type TikTokenizer".split()
    words += ["--tokenizer-model", str(json_file(tmp_path, ranks)), "--tiktoken-pattern", "v2"]
    tool = ROOT / "tools" / "preprocess_data.py"
    done = subprocess.run(
        [sys.executable, tool, *words], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1 documents" in done.stdout or "1 document" in done.stdout
