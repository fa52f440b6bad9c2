"""Tokenizer files against the libraries that wrote them: SentencePiece's against transformers, Kimi's against tiktoken.

Texts that begin with a space are left out of the first where a model puts a space before them: transformers 5 then puts
none, while the SentencePiece library, transformers 4 and we have two. So is U+2581, which is a space there, and <unk>.
"""

import base64
import io
import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from megatronish.config.sections.data import DataConfig
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.names import tokenizer_in
from megatronish.tokenizer.tiktoken_file import PATTERNS
from megatronish.tokenizer.tokenizer import Tokenizer

TEXTS = (
    *("Hello, wörld 123", "a  b\n\n c", "trailing ", "\n", "\t\ttabs\t", "", "a\r\nb", "\x00a", "1234567890"),
    *(
        "漢字テキスト",
        "漢字 text 😀👩‍👩‍👧",
        "é vs e\u0301",
        "ﬁ ½",
        "Ελλάδα Привет مرحبا",
        "\u200b zero\u00a0width",
        "<0x41>",
    ),
    *("a</s>b", "<s>a", "x<|im_start|>user\nhi<|im_end|>", "a<think>b</think>", "<think>", "don't DON'T</think>"),
)
BEGIN_WITH_SPACE = (" leading", "   ", "<|im_end|> a", "a <think> b</think>", " <|im_end|>  x")
ADDED = {"<|im_start|>": True, "<|im_end|>": True, "<think>": False}
CORPUS = "Question: what is this? Answer: a text of many words, don't. 漢字 Ελλάδα naïve 12345\n"


def tokenizer_of(folder: Path, config: dict[str, Any], *, first: int) -> Tokenizer:
    """Our tokenizer of a folder with this tokenizer_config.json, whose added tokens have ids from `first` on."""
    added = {
        str(first + place): {"content": name, "special": special} for place, (name, special) in enumerate(ADDED.items())
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": added}))
    return build_tokenizer(DataConfig(**tokenizer_in(folder, like_gpt2=True)))


# SentencePiece


def write_sentencepiece(folder: Path, **options: Any) -> int:
    """Write a tokenizer.model; its size."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([CORPUS] * 9),
        model_writer=model,
        vocab_size=340,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()


GEMMA = {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}


@pytest.mark.peers("transformers", "google.protobuf")
@pytest.mark.parametrize(
    ("own", "legacy"), [("LlamaTokenizer", True), ("LlamaTokenizer", False), ("GemmaTokenizer", None)]
)
def test_a_sentencepiece_file_has_the_tokens_of_transformers(own: str, legacy: bool | None, tmp_path: Path) -> None:
    import transformers

    begins_plain = own == "GemmaTokenizer"
    size = write_sentencepiece(tmp_path, model_type="bpe", **(GEMMA if begins_plain else {}))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    ours = tokenizer_of(tmp_path, {"tokenizer_class": own, "legacy": legacy, **special}, first=size)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert type(theirs).__name__ == own and theirs.eos_token_id == ours.eod
    others = BEGIN_WITH_SPACE if begins_plain else BEGIN_WITH_SPACE[2:4] if legacy is False else ()
    for text in (*TEXTS, *others):
        ids = theirs(text)["input_ids"]
        assert ours.encode_marked(text) == ids, text
        # The space that follows an added token is shown there, though no text had it.
        is_text = bool(legacy) and "<think>" in text
        assert ours.decode(ids) == (text if is_text else theirs.decode(ids, skip_special_tokens=True)), text
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode(text) == plain, text
        controls = ours.control_encoder()
        if text.startswith("x<|im_start|>"):
            assert controls.encode(text, [(1, 13), (len(text) - 10, len(text))]).ids == ids[1:]


# tiktoken


def write_tiktoken(folder: Path) -> dict[bytes, int]:
    """Write a tiktoken.model with pairs of a corpus, the most frequent first; its ranks."""
    words = [[bytes([byte]) for byte in word.encode()] for word in (CORPUS + "aaa aaaa abab ababab ").split(" ")]
    tokens = [bytes([byte]) for byte in range(256)]
    while len(tokens) < 300:
        pairs = [pair for word in words for pair in pairwise(word)]
        a, b = max(sorted(set(pairs)), key=pairs.count)
        tokens.append(a + b)
        words = [_joined(word, a, b) for word in words]
    ranks = {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items())
    (folder / "tiktoken.model").write_text("\n".join(lines))
    return ranks


def _joined(word: list[bytes], a: bytes, b: bytes) -> list[bytes]:
    out: list[bytes] = []
    for part in word:
        if out and out[-1] == a and part == b:
            out[-1] += part
        else:
            out.append(part)
    return out


@pytest.mark.peers("tiktoken")
def test_kimis_file_has_the_tokens_of_tiktoken(tmp_path: Path) -> None:
    import tiktoken

    ranks = write_tiktoken(tmp_path)
    first = len(ranks)
    ours = tokenizer_of(tmp_path, {"eos_token": "<|im_end|>", "tokenizer_class": "TikTokenTokenizer"}, first=first)
    special = {name: first + place for place, name in enumerate(ADDED)}
    theirs = tiktoken.Encoding(
        "kimi", pat_str=PATTERNS["kimi"], mergeable_ranks=ranks, special_tokens=special, explicit_n_vocab=first + 3
    )
    numbers = random.Random(3)
    made = ["".join(numbers.choices("ab a漢字é😀1.\n'", k=numbers.randint(1, 40))) for _ in range(300)]
    for text in (*TEXTS, *BEGIN_WITH_SPACE, "a \u2581", *made):
        ids = theirs.encode(text, allowed_special="all")
        assert ours.encode_marked(text) == ids, text
        shown = [token for token in ids if token < first or token == special["<think>"]]
        assert ours.decode(ids) == theirs.decode(shown), text
        plain = theirs.encode(text, allowed_special={"<think>"}, disallowed_special=())
        assert ours.encode(text) == plain, text
