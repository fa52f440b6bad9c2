"""A faster library for byte-level BPE: tiktoken, where it is installed and gives the same tokens.

The two agree if text is split into the same words, and words are merged in the same order. The library behind
tokenizer.json merges the pairs that its file lists; tiktoken any neighbours that make a token, the lowest id first.
That is the same where ids rise with the merges, and where each token, taken as a word, becomes itself: what is merged
inside of a part of a word does not depend on what is around it, so neighbours that make a token are the last pair of
that token, which the file lists. This is checked for each file; the split of words, for each character of Unicode that
is assigned, between letters, digits, marks and spaces; and a run's own first texts are written by both.
"""

import hashlib
import importlib.util
import json
import multiprocessing
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import tokenizers

from megatronish.core.contained import library_errors
from megatronish.core.files import one_builder
from megatronish.core.private import cache_folder, is_own, private_folder
from megatronish.tokenizer.hugging_face import HuggingFaceTokenizer
from megatronish.tokenizer.tiktoken_file import byte_letters
from megatronish.tokenizer.tokenizer import Tokenizer, check_unicode

FORMAT = "megatronish faster tokenizer 1"
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""GPT-2's words, which the pre-tokenizer ByteLevel has built in."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPLITS = tuple(_WORDS.format(digits=digits) for digits in (r"\p{N}{1,3}", r"\p{N}"))
"""Words of GPT-4 and Llama 3, and of Qwen. An expression that leaves a character out would lose it in tiktoken."""
CHARACTERS = (*range(0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE0200))
CHECKED_AT_ONCE = 1024


class NotTheSameError(ValueError):
    """Why the faster library is not used for a tokenizer."""


class FasterTokenizer:
    """Tokenizer of texts alone that writes with tiktoken what `own` would write."""

    def __init__(self, own: HuggingFaceTokenizer) -> None:
        """NotTheSameError if the libraries are not known to agree."""
        self.own, self.vocab_size, self.eod = own, own.vocab_size, own.eod
        content = json.loads(own.model.to_str())
        pattern = _pattern(content)
        self._library: Any = _encoding(content["model"], own.special_tokens(), pattern)
        self._is_compared = False
        self._prove_once(content)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; ValueError if one of them has none."""
        if self._library is None:
            return self.own.encode_all(texts)
        for text in texts:
            check_unicode(text)
        try:
            with library_errors("tiktoken cannot write it"):
                ids = [self._library.encode_ordinary(text) for text in texts]
        except ValueError:  # millions of spaces in a row, for which it has no room
            return self.own.encode_all(texts)
        if not self._is_compared:
            right = self.own.encode_all(texts)
            self._is_compared = any(right)
            if right != ids:
                self._library = None
                print("tiktoken is not used: it has other tokens for texts of this run", file=sys.stderr)
                return right
        return ids

    def _prove_once(self, content: dict[str, Any]) -> None:
        """Prove that both agree, unless it was done before on this machine for the same file and libraries."""
        versions = [importlib.import_module(name).__version__ for name in ("tokenizers", "tiktoken")]
        key = hashlib.sha256(json.dumps([FORMAT, versions, content], sort_keys=True).encode()).hexdigest()
        try:
            proved = private_folder(cache_folder() / "tokenizers") / f"{key[:32]}.same"
        except OSError:  # it is proved by each process of each start
            self._prove(content["model"])
            return
        if not is_own(proved):
            with one_builder(proved, patience_seconds=120):
                if not is_own(proved):
                    self._prove(content["model"])
                    with suppress(OSError):
                        proved.touch()

    def _prove(self, model: dict[str, Any]) -> None:
        bare = tokenizers.Tokenizer(tokenizers.models.BPE(model["vocab"], _merges(model)))
        words = list(_made_tokens(model))
        encoded = bare.encode_batch_fast(words, add_special_tokens=False)
        if any(made.ids != [model["vocab"][word]] for made, word in zip(encoded, words, strict=True)):
            raise NotTheSameError("its merges do not make each of its tokens")
        for first in range(0, len(CHARACTERS), CHECKED_AT_ONCE):
            characters = map(chr, CHARACTERS[first : first + CHECKED_AT_ONCE])
            text = "".join(f"a{character}1 {character}'{character}\n" for character in characters)
            if self.own.encode(text) != self._library.encode_ordinary(text):
                raise NotTheSameError("it splits words at other characters")


def faster(tokenizer: Tokenizer) -> Tokenizer | FasterTokenizer:
    """The tokenizer, written with the faster library where that is installed and the same; a line tells which."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or importlib.util.find_spec("tiktoken") is None:
        return tokenizer
    try:
        with library_errors("its library fails"):
            quick: Tokenizer | FasterTokenizer = FasterTokenizer(tokenizer)
        told = "tiktoken writes the tokens, which are the same"
    except (ImportError, ValueError) as error:
        quick, told = tokenizer, f"tiktoken is not used: {error}"
    if multiprocessing.parent_process() is None:  # workers have nothing else to tell
        print(told, file=sys.stderr)
    return quick


def _pattern(content: dict[str, Any]) -> str:
    """The expression of words of a tokenizer.json, as tiktoken reads it; NotTheSameError for other rules."""
    if content["normalizer"] is not None:
        raise NotTheSameError("the tokenizer changes texts before it splits them")
    if any(not token["special"] for token in content["added_tokens"]):
        raise NotTheSameError("the tokenizer reads added tokens in any text")
    rule = content["pre_tokenizer"] or {}
    rules = rule["pretokenizers"] if rule.get("type") == "Sequence" else [rule]
    last = rules[-1] if rules else {}
    if last.get("type") == "ByteLevel" and not last["add_prefix_space"]:
        if len(rules) == 1 and last["use_regex"]:
            return GPT2
        pattern = rules[0].get("pattern", {}).get("Regex") if rules[0].get("type") == "Split" else None
        is_plain = rules[0].get("behavior") == "Isolated" and not rules[0].get("invert")
        if len(rules) == 2 and pattern in SPLITS and is_plain and not last["use_regex"]:
            return str(pattern)
    raise NotTheSameError("the tokenizer splits words by other rules")


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    return [tuple(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]]


def _made_tokens(model: dict[str, Any]) -> dict[str, int]:
    """The tokens that merges make and the places of their merges; NotTheSameError if their ids do not rise."""
    made = dict[str, int]()
    largest = -1
    for place, (left, right) in enumerate(_merges(model)):
        token = model["vocab"].get(left + right, -1)
        if token < largest:
            raise NotTheSameError("its merges are in another order than its ids")
        largest = token
        made[left + right] = place
    return made


def _encoding(model: dict[str, Any], special: dict[str, int], pattern: str) -> Any:
    """tiktoken's encoder of a byte-level BPE."""
    import tiktoken

    changed = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model["type"] != "BPE" or any(model.get(name) for name in changed):
        raise NotTheSameError("it knows byte-level BPE alone")
    letters = {letter: bytes([byte]) for byte, letter in enumerate(byte_letters())}
    made = _made_tokens(model)
    others = model["vocab"].keys() - made.keys() - letters.keys() - special.keys()
    if others or not letters.keys() <= model["vocab"].keys():
        raise NotTheSameError("its vocabulary has pieces that no merge makes, or lacks bytes")
    ranks = {b"".join(letters[letter] for letter in token): model["vocab"][token] for token in (*letters, *made)}
    if len(set(ranks.values())) < len(ranks):
        raise NotTheSameError("two of its tokens have one id")
    return tiktoken.Encoding("texts alone", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
