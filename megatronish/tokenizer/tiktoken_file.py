"""Files of tiktoken: byte-pair encodings as ranks of byte strings, read into a tokenizer of `tokenizers`.

Three forms are read. Megatron-LM's is a JSON list of {"rank", "token_bytes", "token_str"}: special tokens come first
(--tiktoken-num-special-tokens of them, the unnamed ones are <SPECIAL_7> and so on), and the ids of text follow. The
text form of tiktoken itself (Llama 3, Qwen, GPT-4) has a line "base64 rank" for each token: ids are ranks, and special
tokens follow. No file is fetched.

tiktoken has no list of merges: it joins the two neighbours whose joint bytes have the least rank. A list of merges that
does the same has, for each token in the order of ranks, every way to cut it into two tokens.
"""

import base64
import binascii
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from megatronish.core.contained import library_errors
from megatronish.core.errors import UserError
from megatronish.core.files import ordinary
from megatronish.tokenizer.names import LARGEST_VOCABULARY, SPECIAL_TOKENS_LAST, TEKKEN
from megatronish.tokenizer.settings import AddedName, behind, settings_of

PATTERNS: Mapping[str, str] = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "kimi": r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""How text is split before pairs are joined: Megatron-LM's two, GPT-2's, that of GPT-4 and Llama 3, and Kimi K2's."""

SPECIAL_TOKENS_FIRST = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
LARGEST_RANK = 2**30


def read_tiktoken(
    path: Path, *, pattern: str, special_tokens: Sequence[str], num_special_tokens: int, vocab_size: int | None
) -> tokenizers.Tokenizer:
    """Tokenizer of a tiktoken file; UserError if the file is of neither form.

    A JSON list that is longer than `vocab_size` is cut, as Megatron-LM does.
    """
    try:
        text = ordinary(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--tokenizer-model {path} cannot be read as a tiktoken file: {error}") from error
    if text.lstrip().startswith("["):
        names = list(special_tokens or SPECIAL_TOKENS_FIRST)
        if len(names) > num_special_tokens:
            raise UserError(
                f"--tiktoken-num-special-tokens {num_special_tokens} is less than the {len(names)} of "
                "--tiktoken-special-tokens; use a larger number"
            )
        names += [f"<SPECIAL_{number}>" for number in range(len(names), num_special_tokens)]
        size = (LARGEST_VOCABULARY if vocab_size is None else vocab_size) - num_special_tokens
        ids = {token: rank + num_special_tokens for token, rank in _of_json(text, path).items() if rank < size}
        return _build(ids, dict(zip(names, range(num_special_tokens), strict=True)), PATTERNS[pattern], path)
    if path.name == TEKKEN:
        return _tekken(text, path)
    ids = _of_lines(text, path)
    first = max(ids.values()) + 1
    if not special_tokens and (added := _in_folder(path, first)):
        shown = [token.name for token in added.values() if not token.is_special]
        special = {token.name: number for number, token in added.items()}
        return _build(ids, special, PATTERNS[pattern], path, shown=shown)
    names = list(special_tokens or SPECIAL_TOKENS_LAST)
    return _build(ids, dict(zip(names, range(first, first + len(names)), strict=True)), PATTERNS[pattern], path)


def _in_folder(path: Path, first: int) -> dict[int, AddedName]:
    """Tokens from the id `first` on that the folder's tokenizer_config.json adds, without a gap; empty for none."""
    added = behind(settings_of(path), first, source=path)
    end = max(added, default=first - 1) + 1
    return {id_: added.get(id_, AddedName(f"<|reserved_token_{id_}|>", True)) for id_ in range(first, end)}


def _tekken(text: str, path: Path) -> tokenizers.Tokenizer:
    """Tokenizer of Mistral's tekken.json: special tokens first, then those of text as far as the vocabulary goes.

    A text begins with <s>.
    """
    try:
        content: Any = json.loads(text)
        config = content["config"]
        num_special, pattern = int(config["default_num_special_tokens"]), str(config["pattern"])
        size = int(config["default_vocab_size"]) - num_special
        named = {int(each["rank"]): str(each["token_str"]) for each in content.get("special_tokens") or ()}
        entries = [entry for entry in content["vocab"] if int(entry["rank"]) < size]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"--tokenizer-model {path} is no tekken.json ({error!r}); a Hugging Face tokenizer.json is read by "
            "--tokenizer-type huggingface"
        ) from error
    if not 0 < num_special <= LARGEST_VOCABULARY or not {"<s>", "</s>"} <= set(named.values()):
        raise UserError(f"tokenizer {path} names no special tokens <s> and </s>; take the model's tokenizer.json")
    special = {named.get(number, f"<SPECIAL_{number}>"): number for number in range(num_special)}
    ids = {token: rank + num_special for token, rank in _of_json(entries, path).items()}
    model = _build(ids, special, pattern, path)
    first = ("<s>", special["<s>"])
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[first])
    return model


def _of_json(text: str | Sequence[Any], path: Path) -> dict[bytes, int]:
    """{bytes: rank} of Megatron-LM's list, or of its text."""
    try:
        entries: Any = json.loads(text) if isinstance(text, str) else text
        ranks = {base64.b64decode(entry["token_bytes"], validate=True): int(entry["rank"]) for entry in entries}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"--tokenizer-model {path} is not a list of {{rank, token_bytes, token_str}}, as --tokenizer-type tiktoken "
            f"reads ({error!r}); a Hugging Face tokenizer.json is read by --tokenizer-type huggingface"
        ) from error
    return _checked(ranks, path)


def _of_lines(text: str, path: Path) -> dict[bytes, int]:
    """{bytes: rank} of lines "base64 rank"."""
    ranks = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        try:
            if words:
                token, rank = words
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(
                f"{path}:{number}: {line[:40]!r} is not a line of a tiktoken file, which is a base64 text and a rank; "
                "for other files choose another --tokenizer-type"
            ) from error
    return _checked(ranks, path)


def _checked(ranks: dict[bytes, int], path: Path) -> dict[bytes, int]:
    """The ranks, if every byte has one and no two tokens share one; else UserError."""
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(f"tokenizer {path} has no token for {len(missing)} of the 256 bytes, {missing[0]} for one")
    if len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0 or max(ranks.values()) > LARGEST_RANK:
        raise UserError(
            f"tokenizer {path} gives two tokens one rank, or one below 0 or above {LARGEST_RANK}; it is damaged"
        )
    return ranks


def _build(
    ids: dict[bytes, int], special: dict[str, int], pattern: str, path: Path, *, shown: Collection[str] = ()
) -> tokenizers.Tokenizer:
    """Tokenizer of the ids of byte strings and of special tokens, of which those that are `shown` are a part of texts.

    Such as <think>, which answers contain.
    """
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {spell(token): number for token, number in ids.items()}
    both = vocabulary.keys() & special.keys()
    if both:
        raise UserError(
            f"tokenizer {path} has {min(both)!r} as a token of text, and as a special token; name other special tokens "
            "with --tiktoken-special-tokens"
        )
    merges = [
        (spell(token[:cut]), spell(token[cut:]))
        for token, _ in sorted(ids.items(), key=lambda item: item[1])
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    # A word that is a token is taken as it is: tiktoken looks the whole word up first.
    bpe = tokenizers.models.BPE(vocabulary | special, merges, ignore_merges=True)
    model = tokenizers.Tokenizer(bpe)
    try:
        with library_errors("its pattern is no regular expression"):
            words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    except ValueError as error:
        raise UserError(f"tokenizer {path} cannot be used: {error}; fetch it again") from error
    as_letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, as_letters])
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens([name for name in special if name not in shown])
    model.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in shown])
    return model


def byte_letters() -> list[str]:
    """Letter of each byte, as byte-level BPE writes bytes: printable ones as they are, the others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
