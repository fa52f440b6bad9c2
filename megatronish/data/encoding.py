"""Encoding of batches of JSON lines into tokens, whole or by sentences, without documents that cleaning leaves out."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatronish.data.cleaning import EXCERPT, KEEP_ALL, Cleaning, Reason, RemovedDocument
from megatronish.data.readers import Batch, read_record, value_under
from megatronish.data.weights import ONCE, TimesWritten


class Encoder(Protocol):
    """Interface of a tokenizer that preprocessing calls."""

    vocab_size: int
    eod: int

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; ValueError if one of them has none."""


@dataclass(frozen=True)
class EncodingJob:
    """Settings by which every worker encodes every line. `tokenizer` builds the tokenizer, in each worker."""

    tokenizer: Callable[[], Encoder]
    json_keys: tuple[str, ...]
    append_eod: bool
    split_sentences: bool = False
    """A sequence for each sentence of a document."""
    cleaning: Cleaning = KEEP_ALL

    def prepared(self) -> Callable[[Batch], "Encoded"]:
        """Encoding of a batch in this process, with a tokenizer of its own."""
        return self.with_tokenizer(self.tokenizer())

    def with_tokenizer(self, tokenizer: Encoder) -> Callable[[Batch], "Encoded"]:
        """Encoding of a batch in this process."""
        return partial(encode_batch, job=replace(self, cleaning=self.cleaning.opened()), tokenizer=tokenizer)

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields of a document that are read."""
        return tuple(dict.fromkeys((*self.json_keys, *self.cleaning.keys)))


class BadLine(NamedTuple):
    """A line that cannot be used, and why; it is counted from byte `origin` of the file on."""

    path: str
    line: int
    why: str
    origin: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}"


class Encoded(NamedTuple):
    """Encoded batch: for each key the documents' tokens end to end and their lengths; and the lines that are bad.

    `sequences` are the lengths of the sequences of each document, one of all its tokens, or its sentences.
    """

    tokens: list[NDArray[Any]]
    lengths: list[list[int]]
    sequences: list[list[list[int]]]
    bad_lines: list[BadLine]
    num_bytes: int
    removed: list[RemovedDocument]
    num_copies: list[int]
    """How often each document is written."""
    copied: list[RemovedDocument]
    """Documents that are written more than once, each as often as that."""


def encode_batch(batch: Batch, job: EncodingJob, tokenizer: Encoder) -> Encoded:
    """Tokens of all good lines of a batch."""
    texts, bad_lines, reasons, copies = texts_to_keep(batch, job.json_keys, job.cleaning)
    for number, (times, rule) in copies.items():
        if times == 0:
            reasons[number] = Reason(rule, texts.pop(number)[0])
    try:
        ids = _encode_lines(list(texts.values()), job, tokenizer)
    except ValueError:  # a text that has no tokens: line by line, to find which
        ids = []
        for number, of_line in list(texts.items()):
            try:
                ids += _encode_lines([of_line], job, tokenizer)
            except ValueError as error:
                bad_lines[number] = error
                del texts[number]
    kept = dict[int, list[list[list[int]]]]()
    for (number, of_line), of_keys in zip(texts.items(), ids, strict=True):
        why = job.cleaning.reason_of_length(sum(len(part) for of_key in of_keys for part in of_key))
        if why is None:
            kept[number] = of_keys
        else:
            reasons[number] = Reason(why, of_line[0])
    by_key = zip(*kept.values(), strict=True)
    documents = [[_document(parts, job, tokenizer) for parts in of_key] for of_key in by_key]
    documents = documents or [[] for _ in job.json_keys]
    empty = np.empty(0, np.int32)
    return Encoded(
        tokens=[np.concatenate([empty, *(part for parts in of_key for part in parts)]) for of_key in documents],
        lengths=[[sum(map(len, parts)) for parts in of_key] for of_key in documents],
        sequences=[[[len(part) for part in parts] for parts in of_key] for of_key in documents],
        bad_lines=[
            BadLine(batch.path, number, str(error), batch.origin) for number, error in sorted(bad_lines.items())
        ],
        num_bytes=batch.num_bytes,
        removed=[
            RemovedDocument(why, batch.path, number, text[:EXCERPT], batch.origin, batch.duplicates.get(number))
            for number, (why, text) in sorted(reasons.items())
        ],
        num_copies=[copies.get(number, ONCE).number for number in kept],
        copied=[
            RemovedDocument(copies[number].rule, batch.path, number, texts[number][0][:EXCERPT], batch.origin)
            for number in kept
            for _ in range(copies.get(number, ONCE).number - 1)
        ],
    )


class TextsToKeep(NamedTuple):
    """Texts of the documents of a batch that are kept, by their lines, bad lines, and why others are left out."""

    texts: dict[int, list[str]]
    bad_lines: dict[int, Exception]
    reasons: dict[int, Reason]
    copies: dict[int, TimesWritten]
    """How often documents are written, of those that a weight fits."""


def texts_to_keep(batch: Batch, json_keys: Sequence[str], cleaning: Cleaning) -> TextsToKeep:
    """What is read of a batch before anything is tokenized."""
    read = TextsToKeep({}, {}, {}, {})
    for number, line in enumerate(batch.lines, batch.first_line):
        if line.strip():
            try:
                record = read_record(line)
                texts = texts_of(record, json_keys)
                if number in batch.duplicates:
                    reason: Reason | None = Reason(cleaning.deduplication.reason, texts[0])
                else:
                    reason = cleaning.reason(record, texts)
                if reason is None:
                    read.texts[number] = texts
                    if (copies := cleaning.weights.copies(record, batch.path, texts)).rule:
                        read.copies[number] = copies
                else:
                    read.reasons[number] = reason
            except (ValueError, RecursionError) as error:
                read.bad_lines[number] = error
    return read


def read_line(line: bytes, json_keys: Sequence[str]) -> list[str]:
    """The texts under `json_keys` of a JSON line; ValueError if it has none."""
    return texts_of(read_record(line), json_keys)


def texts_of(record: dict[str, Any], json_keys: Sequence[str]) -> list[str]:
    """The texts under `json_keys` of an object; ValueError if it has none. `meta.body` is a key inside of `meta`."""
    texts = []
    for key in json_keys:
        value = value_under(record, key)
        if not isinstance(value, str):
            raise ValueError(f"key {key!r} must hold text, not {type(value).__name__}")
        texts.append(value)
    return texts


def _encode_lines(lines: Sequence[list[str]], job: EncodingJob, tokenizer: Encoder) -> list[list[list[list[int]]]]:
    """Ids of the parts of the texts of each line, [lines][keys][parts]: of the whole text, or of its sentences."""
    parts = [[split_sentences(text) if job.split_sentences else [text] for text in line] for line in lines]
    ids = iter(tokenizer.encode_all([part for line in parts for of_key in line for part in of_key]))
    return [[[next(ids) for _ in of_key] for of_key in line] for line in parts]


def _document(parts: list[list[int]], job: EncodingJob, tokenizer: Encoder) -> list[NDArray[Any]]:
    """Tokens of the parts of a text that have any, the last with the token that ends a document.

    As in Megatron, an empty text is an empty document without an end-of-document token.
    """
    nonempty_parts = [ids for ids in parts if ids]
    if nonempty_parts and job.append_eod:
        nonempty_parts[-1] = [*nonempty_parts[-1], tokenizer.eod]
    return [np.array(ids, np.int32) for ids in nonempty_parts]


# Splitting of a text into sentences, for BERT: by marks that end one, and what follows them.
#
# A sentence ends at a full stop, a question or an exclamation mark, with the quotes and brackets that close after
# it, where white space and then a capital, a digit, an opening quote or a letter of a script without capitals
# follows; at a mark of Chinese or Japanese; and at an empty line. A full stop after an initial, or after one of a
# few abbreviations, ends none. The rules are for texts in Latin, Cyrillic, Greek, Chinese and Japanese script; a
# splitter that was trained on a language finds more. Megatron-LM calls NLTK's; here nothing is downloaded, and a
# text is always split alike.

ABBREVIATIONS = {
    *("mr", "mrs", "ms", "dr", "prof", "rev", "sen", "rep", "gov", "gen", "col", "lt", "sgt", "capt", "st", "jr", "sr"),
    *("vs", "etc", "inc", "ltd", "co", "corp", "dept", "univ", "fig", "figs", "eq", "eqs", "no", "nos", "vol", "vols"),
    *("pp", "ed", "eds", "al", "cf", "ca", "approx", "e.g", "i.e", "a.m", "p.m", "u.s", "u.k", "z.b", "bzw", "usw"),
    *("jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov", "dec", "ggf", "nr", "bd", "hrsg"),
}
"""Words before a full stop that does not end a sentence, in lower case."""

# Possessive, and from the first of several marks alone: thousands of full stops in a row are read once.
_END = re.compile(
    r"""(?<![.!?…])(?P<mark>[.!?…]++)["'”’»)\]]*+"""  # a mark, what closes, and what follows
    r"""(?=\s+["'“‘«(\[]*[^\W_a-zà-öø-ÿα-ωа-я])"""
    r"|(?P<wide>[。！？]+[”’」』）]*)"
    r"|(?P<line>\n\s*\n)"
)
_LAST_WORD = re.compile(r"[\w.]*$")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, without the white space around them; none is empty."""
    sentences, begin = [], 0
    for end in _END.finditer(text):
        if end["mark"] != "." or not _is_abbreviation(text[max(begin, end.start() - 20) : end.start()]):
            sentences.append(text[begin : end.end()])
            begin = end.end()
    return [sentence for each in [*sentences, text[begin:]] if (sentence := each.strip())]


def _is_abbreviation(before: str) -> bool:
    """Whether the full stop after this text belongs to its last word: an initial, or an abbreviation."""
    match = _LAST_WORD.search(before)
    word = "" if match is None else match[0]
    return word.lower() in ABBREVIATIONS or (len(word) == 1 and word.isupper() and word.isalpha())
