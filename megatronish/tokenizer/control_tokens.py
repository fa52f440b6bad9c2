"""Control tokens: the tokens that only a chat template writes, and encoders that read them at given places alone.

A user may write "<|im_end|>" into a message. So an encoder is given a text and the places of the control tokens in it;
a name that is spelled anywhere else is text. The text is tokenized as a whole, because a tokenizer that puts a space
before every piece would change the tokens of a text that is cut; each token has its place in the text.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import tokenizers

from megatronish.core.contained import library_errors
from megatronish.core.errors import UserError

PRIVATE = 0x100000
"""First character of the private names, in plane 16 of Unicode, which chat data must not use."""
BARS = re.compile(r"<[|\uff5c].+[|\uff5c]>")
"""Names that only control tokens have; DeepSeek writes full-width bars."""
FILLER = chr(PRIVATE + 0xFFF0)


class PlacedTokens(NamedTuple):
    """Tokens of a text; token i is characters [begins[i], ends[i]) of it."""

    ids: list[int]
    begins: list[int]
    ends: list[int]


class MaskTokens(NamedTuple):
    """Ids of the special tokens of a model of masked tokens, such as BERT's [CLS], [SEP], [MASK] and [PAD]."""

    first: int
    separator: int
    mask: int
    filler: int


MASK_NAMES = (("[CLS]", "[SEP]", "[MASK]", "[PAD]"), ("<s>", "</s>", "<mask>", "<pad>"))
"""Names of these tokens in BERT's vocabularies, and in RoBERTa's."""


class SpanTokens(NamedTuple):
    """Ids of the special tokens of a model of hidden spans, such as T5: start and end of a row, filler, sentinels."""

    start: int
    end: int
    filler: int
    sentinels: Sequence[int]


class MiddleTokens(NamedTuple):
    """Ids of the special tokens of texts whose middle comes last: before beginning, middle and end, and filler."""

    prefix: int
    middle: int
    suffix: int
    filler: int


MIDDLE_NAMES = (
    ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"),
    ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    (
        "<\uff5cfim\u2581begin\uff5c>",
        "<\uff5cfim\u2581end\uff5c>",
        "<\uff5cfim\u2581hole\uff5c>",
        "<\uff5c\u2581pad\u2581\uff5c>",
    ),
    ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"),
    ("\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>", "<pad>"),
)
"""Names of these tokens in StarCoder's vocabularies, Qwen's and CodeGemma's, DeepSeek's, SantaCoder's, Code Llama's.

DeepSeek's hole stands where the middle was: after it comes the end, and the middle after the token of the end.
"""


class ControlEncoder(Protocol):
    """Encoder of texts with control tokens at given places."""

    names: Mapping[str, int]
    """Ids of the control tokens, by the names that templates write."""
    bos: str | None
    """Name of the token that begins a text, if the tokenizer's files tell."""
    eos: str
    """Name of the token that ends a text."""
    identity: str
    """Hash of all that determines the tokens of a text."""

    def encode(self, text: str, places: Sequence[tuple[int, int]], /) -> PlacedTokens:
        """Tokens of `text`, in which [begin, end) of each place is the name of a control token; places rise."""
        ...


class HuggingFaceControls:
    """Control tokens of a tokenizer of Hugging Face's library: its added tokens that are special or named <|...|>.

    Some tokenizers mark only a part of the tokens that their templates write as special. Others that are added, such as
    <think>, are read wherever a text spells them, because contents of answers do.

    A copy of the tokenizer has private names for them, as long as their own, and so the whole text is tokenized at
    once: the private names are written at the places of control tokens, and no user can write them elsewhere.
    """

    bos: str | None = None

    def __init__(self, model: tokenizers.Tokenizer, *, eos: str) -> None:
        model = tokenizers.Tokenizer.from_str(model.to_str())
        model.add_special_tokens([eos])  # an ordinary piece of some vocabularies, whose number it keeps
        added = model.get_added_tokens_decoder()
        self.names: Mapping[str, int] = {
            token.content: number
            for number, token in added.items()
            if token.content and (token.special or BARS.fullmatch(token.content))
        }
        self.eos = eos
        self.identity = hashlib.sha256(model.to_str().encode()).hexdigest()
        self._private = {
            name: FILLER * (len(name) - 1) + chr(PRIVATE + number) for number, name in enumerate(self.names)
        }
        self._ids = frozenset(self.names.values())
        self._model = _renamed(model, self._private)

    def encode(self, text: str, places: Sequence[tuple[int, int]]) -> PlacedTokens:
        parts, done = [], 0
        for begin, end in places:
            parts += [text[done:begin], self._private[text[begin:end]]]
            done = end
        with library_errors("the tokenizer cannot write it"):
            encoded = self._model.encode("".join([*parts, text[done:]]), add_special_tokens=False)
        offsets = encoded.offsets
        placed = PlacedTokens(list(encoded.ids), [begin for begin, _ in offsets], [end for _, end in offsets])
        self._narrow(placed, places)
        return placed

    def _narrow(self, placed: PlacedTokens, places: Sequence[tuple[int, int]]) -> None:
        """Set control tokens to their own places: some take the space around them along."""
        following = iter(places)
        for index, token in enumerate(placed.ids):
            if token in self._ids and (place := next(following, None)) is not None:
                placed.begins[index], placed.ends[index] = place


def _renamed(model: tokenizers.Tokenizer, names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Copy of a tokenizer with other names of special tokens, which keeps the places of spaces."""
    data: dict[str, Any] = json.loads(model.to_str())
    data |= {"post_processor": None, "truncation": None, "padding": None}
    for token in data["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    own, vocabulary = data["model"], data["model"]["vocab"]
    if isinstance(vocabulary, dict):
        own["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    else:
        own["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if own.get("unk_token") in names:
        own["unk_token"] = names[own["unk_token"]]
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def without_prefix(model: Any) -> Any:
    """The SentencePiece model without the space that it puts before a text."""
    # In the format of its file a later message of a field is merged into the first: this one is the normaliser's
    # add_dummy_prefix (field 3 of field 3), which is false.
    return type(model)(model_proto=model.serialized_model_proto() + b"\x1a\x02\x18\x00")


def either_of(names: Iterable[str]) -> re.Pattern[str]:
    """Pattern, with a group, of any of these names, the longest first, as one may begin with another."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")  # (?!) is nowhere


class SentencePieceControls:
    """Control pieces of a SentencePiece model, and tokens that its folder adds.

    What is between them is tokenized piece by piece, as prompts are: by `inner` behind one of them. Tokens of `shown`
    are read wherever a text spells them.
    """

    def __init__(self, model: Any, inner: Any, added: Mapping[str, int], shown: Mapping[str, int], *, eos: int) -> None:
        pieces = [number for number in range(model.get_piece_size()) if model.is_control(number)]
        self.names: Mapping[str, int] = {model.id_to_piece(number): number for number in pieces} | dict(added)
        named = next((name for name, number in self.names.items() if number == eos), None)
        if named is None:
            raise UserError("the SentencePiece model has no eos piece to end an answer with; take another tokenizer")
        self.eos = named
        self.bos = model.id_to_piece(model.bos_id()) if model.bos_id() >= 0 else None
        # What was tokenized when places were counted in bytes has wrong masks: it is found under another identity.
        told = b"places in characters" + model.serialized_model_proto() + (repr(added).encode() if added else b"")
        if inner is not model:
            told += b"one prefix"
        if shown:
            told += b"shown" + repr(shown).encode()
        self.identity = hashlib.sha256(told).hexdigest()
        self._model, self._inner = model, inner
        self._shown = either_of(shown)

    def encode(self, text: str, places: Sequence[tuple[int, int]]) -> PlacedTokens:
        tokens, done = PlacedTokens([], [], []), 0
        for begin, end in [*self._with_shown(text, places), (len(text), len(text))]:
            if done < begin:
                for number, (first, last) in self._pieces(text[done:begin], self._inner if done else self._model):
                    # All but one of the bytes of a character have an empty place: they belong to the character.
                    _add(tokens, number, done + first, done + max(last, first + 1))
            if begin < end:
                _add(tokens, self.names[text[begin:end]], begin, end)
            done = end
        return tokens

    def _with_shown(self, text: str, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The places, and those of tokens that a text spells between them."""
        between = zip((0, *(end for _, end in places)), (*(begin for begin, _ in places), len(text)), strict=True)
        spelled = [match.span() for span in between for match in self._shown.finditer(text, *span)]
        return sorted([*places, *spelled])

    @staticmethod
    def _pieces(text: str, model: Any) -> Iterable[tuple[int, tuple[int, int]]]:
        """Pieces with their places in characters. Versions of the library up to 0.2.0 have another word for them.

        What newer versions call `proto` counts bytes.
        """
        try:
            encoding = model.encode(text, return_type="offset_mapping")
        except (TypeError, ValueError):
            pieces = model.encode(text, out_type="immutable_proto").pieces
            return [(piece.id, (piece.begin, piece.end)) for piece in pieces]
        return zip(encoding["ids"], encoding["offsets"], strict=True)


class ByteControls:
    """Control token of the tokenizer of bytes: the one that ends a document."""

    bos: str | None = None
    eos = "<|endoftext|>"

    def __init__(self, *, eod: int) -> None:
        self.names: Mapping[str, int] = {self.eos: eod}
        self.identity = f"bytes {eod}"

    def encode(self, text: str, places: Sequence[tuple[int, int]]) -> PlacedTokens:
        tokens, done = PlacedTokens([], [], []), 0
        for begin, end in [*places, (len(text), len(text))]:
            for place in range(done, begin):
                for byte in text[place].encode():
                    _add(tokens, byte, place, place + 1)
            if begin < end:
                _add(tokens, self.names[text[begin:end]], begin, end)
            done = end
        return tokens


def _add(found: PlacedTokens, token: int, begin: int, end: int) -> None:
    found.ids.append(token)
    found.begins.append(begin)
    found.ends.append(end)
