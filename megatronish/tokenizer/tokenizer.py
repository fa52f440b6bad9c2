"""Tokenizers: text to token ids and back. One interface over SentencePiece, Hugging Face, tiktoken, bytes, numbers.

Special tokens are never read out of text: a document that spells "<|endoftext|>" stays text. Only `encode_marked`, for
prompts that are written so, reads them, and adds what the tokenizer puts around a text: a first token, say. Decoding
skips them, and ids beyond the tokenizer's own (a larger --vocab-size leaves some), so that whatever a model writes can
be shown.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import sentencepiece
import tokenizers

from megatronish.config.sections.data import MOCK_VOCAB_SIZE, DataConfig
from megatronish.core.contained import library_errors
from megatronish.core.errors import UserError
from megatronish.core.files import ordinary
from megatronish.tokenizer import trial
from megatronish.tokenizer.control_tokens import (
    BARS,
    MASK_NAMES,
    MIDDLE_NAMES,
    ByteControls,
    ControlEncoder,
    HuggingFaceControls,
    MaskTokens,
    MiddleTokens,
    SentencePieceControls,
    SpanTokens,
)
from megatronish.tokenizer.names import WORDPIECE, TokenizerType, tokenizer_type
from megatronish.tokenizer.settings import AddedName, TokenizerSettings, behind, read_settings, settings_of
from megatronish.tokenizer.tiktoken_file import read_tiktoken

EOD_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|end_of_sentence|>", "<eos>", "<eod>", "[EOS]", "[SEP]")
SPACE_MARK = "\u2581"
LARGEST_VOCABULARY = 2**28
NO_TOKENS = "the tokenizer cannot write it"


class Tokenizer(ABC):
    """Interface of every tokenizer: text to ids and back. Instances can be pickled, for worker processes."""

    vocab_size: int
    """The true vocabulary: every id is below it."""
    eod: int
    """Id of the token that ends a document."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without any special token. ValueError for a lone surrogate, which is no text."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, as `encode` gives them; ValueError if one of them is no text."""
        return [self.encode(text) for text in texts]

    def encode_marked(self, text: str) -> list[int]:
        """Ids of `text` with the special tokens that it spells, and those that the tokenizer itself puts around it."""
        return self.encode(text)

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""

    def control_encoder(self) -> ControlEncoder:
        """Encoder of texts with control tokens, for chats. UserError if the tokenizer has none."""
        raise UserError(
            f"a tokenizer of the kind {type(self).__name__} has no control tokens for chats; take another "
            "--tokenizer-type"
        )

    def mask_tokens(self) -> MaskTokens:
        """Special tokens of a model of masked tokens. UserError if the vocabulary has none."""
        names = " or ".join(", ".join(each) for each in MASK_NAMES)
        raise UserError(
            f"the tokenizer has no tokens for masked language modelling ({names}); take that of a BERT, with "
            "--tokenizer-type huggingface or wordpiece_lower"
        )

    def _named(self, name: str) -> int | None:
        """Id of a token that no text is written with, by its name; None if there is none."""
        return None

    def special_tokens(self) -> dict[str, int]:
        """Ids of the tokens that no text is written with, by their names: at least the one that ends a document."""
        return {EOD_NAMES[0]: self.eod}

    def token_named(self, name: str, *, flag: str) -> int:
        """Id of the token of this name, which a flag gives. UserError if there is none."""
        token = self._named(name)
        if token is None:
            raise UserError(f"{flag} {name} is no token of the tokenizer; name one that its vocabulary has")
        return token

    def middle_tokens(self, given: Sequence[str | None] = (None,) * 4) -> MiddleTokens:
        """Special tokens of texts whose middle comes last: those with these names, of the others the usual ones."""
        flags = ("--fim-prefix-token", "--fim-middle-token", "--fim-suffix-token", "--fim-pad-token")
        own: Sequence[int | None] = (None,) * 4
        for names in MIDDLE_NAMES:
            ids = [self._named(name) for name in names]
            if None not in ids[:3]:
                own = ids
                break
        tokens = [
            default if name is None else self.token_named(name, flag=flag)
            for name, default, flag in zip(given, own, flags, strict=True)
        ]
        prefix, middle, suffix, filler = tokens
        if prefix is None or middle is None or suffix is None:
            usual = "; ".join(", ".join(names[:3]) for names in MIDDLE_NAMES)
            raise UserError(
                f"--fim-data needs three special tokens, and the tokenizer has none of the usual names ({usual}); name "
                "its own with --fim-prefix-token, --fim-middle-token and --fim-suffix-token, or take another tokenizer"
            )
        if len({prefix, middle, suffix}) < 3:
            raise UserError(
                f"the tokens {prefix}, {middle}, {suffix} of --fim-prefix-token, --fim-middle-token and "
                "--fim-suffix-token must be three; name another one"
            )
        return MiddleTokens(prefix, middle, suffix, self.eod if filler is None else filler)

    def own_sentinels(self) -> list[int]:
        """Ids of the tokens called <extra_id_0>, <extra_id_1> and so on, in this order."""
        ids = (self._named(f"<extra_id_{number}>") for number in range(self.vocab_size))
        return list(takewhile(lambda token: token is not None, ids))  # type: ignore[arg-type]

    def span_tokens(self, number: int) -> SpanTokens:
        """Special tokens of a model of hidden spans: own sentinels, or the last `number` ids of the vocabulary."""
        end = self._named("</s>")
        end = self.eod if end is None else end
        filler = self._named("<pad>")
        filler = end if filler is None else filler
        sentinels = self.own_sentinels() or range(self.vocab_size - 1, self.vocab_size - 1 - number, -1)
        return SpanTokens(filler, end, filler, sentinels)


class BytesTokenizer(Tokenizer):
    """Bytes of UTF-8 as tokens; 256 ends a document."""

    def __init__(self) -> None:
        self.vocab_size = 257
        self.eod = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def control_encoder(self) -> ControlEncoder:
        return ByteControls(eod=self.eod)


class NullTokenizer(Tokenizer):
    """Tokenizer of text that is token ids already: "5 17 3". The last id of the vocabulary ends a document."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise UserError(
                f"{text!r} is not numbers, which the null tokenizer needs; write ids, as in '5 17 3', or name "
                "the text's own tokenizer with --tokenizer-model"
            ) from None
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise UserError(f"token {token} is outside the vocabulary of {self.vocab_size} (--vocab-size)")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids if token != self.eod)

    def _named(self, name: str) -> int | None:
        return int(name) if name.isdecimal() and int(name) < self.vocab_size else None

    def mask_tokens(self) -> MaskTokens:
        """The last four numbers of the vocabulary, of which the last ends a document and separates sentences."""
        if self.vocab_size < 5:
            return super().mask_tokens()
        return MaskTokens(self.vocab_size - 4, self.vocab_size - 1, self.vocab_size - 2, self.vocab_size - 3)

    def span_tokens(self, number: int) -> SpanTokens:
        """The last numbers of the vocabulary: its very last ends a row and a document, and sentinels are before it."""
        if self.vocab_size < number + 2:
            raise UserError(
                f"a vocabulary of {self.vocab_size} has no place for {number} sentinels and a text; use a larger "
                "--vocab-size, or fewer --vocab-extra-ids"
            )
        return SpanTokens(self.eod, self.eod, self.eod, range(self.eod - 1, self.eod - 1 - number, -1))


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer of a SentencePiece .model file.

    SentencePiece writes spaces as U+2581 and so reads a true U+2581 back as a space. Where the model spells unknown
    characters as bytes and leaves text as it is, that one is spelled so too: then decode(encode(text)) == text.
    """

    def __init__(self, path: Path) -> None:
        # 1. The model. Its true size is kept, as `vocab_size` may be widened later and ids beyond it have no piece.
        try:
            with library_errors("its library fails"):
                self._model = sentencepiece.SentencePieceProcessor(model_file=str(ordinary(path)))
        except (OSError, ValueError) as error:
            raise UserError(f"--tokenizer-model {path} is not a SentencePiece model: {error}") from error
        self._own_size = self._model.get_piece_size()
        settings = settings_of(path)
        added = behind(settings, self._own_size, source=path)
        self._added = {token.name: number for number, token in added.items()}
        self.vocab_size = max(self._added.values(), default=self._own_size - 1) + 1
        # 2. The end of a document: the one that its folder names, the model's own, or a piece of a usual name.
        named = next((token for name in settings.eos if (token := self._id_of(name)) is not None), None)
        self.eod = self._model.eos_id() if named is None else named
        if self.eod < 0:
            self.eod = _find_eod(self._id_of, path)
        # Added tokens that are not special are left out of texts, too: the library reads and writes its own pieces.
        # 3. What `encode_marked` puts around a text, and its markup: control pieces and tokens that were added, the
        # longest first, as one name may begin with another.
        first, last = self._model.bos_id(), self.eod
        self._first = [first] if first >= 0 and settings.adds_bos is not False else []
        self._last = [last] if settings.adds_eos else []
        controls = [self._model.id_to_piece(token) for token in range(self._own_size) if self._model.is_control(token)]
        longest_first = sorted([*controls, *self._added], key=len, reverse=True)
        self._markup = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")  # (?!) is nowhere
        # 4. A true U+2581 as three byte pieces, where the model has them. A model that adds a space before texts would
        # add one to each part, so there text keeps the library's reading.
        self._space_mark = [self._id_of(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        adds_prefix = self._model.encode("a", out_type=str)[0].startswith(SPACE_MARK)
        self._spells_space_mark = None not in self._space_mark and not adds_prefix

    def _id_of(self, piece: str) -> int | None:
        if piece in self._added:
            return self._added[piece]
        token = self._model.piece_to_id(piece)
        # The library returns the unknown piece's id for what it does not know.
        return token if self._model.id_to_piece(token) == piece else None

    def encode(self, text: str) -> list[int]:
        _check_unicode(text)
        if SPACE_MARK not in text or not self._spells_space_mark:
            return list(self._model.encode(text))
        # Between two parts lies one U+2581, which each of the byte pieces spells.
        first, *others = self._model.encode(text.split(SPACE_MARK))
        return [*first, *(token for part in others for token in (*self._space_mark, *part))]

    def encode_marked(self, text: str) -> list[int]:
        """Ids with a first token (BOS) where the model has one, unless tokenizer_config.json next to it says no."""
        ids = [*self._first]
        for place, part in enumerate(self._markup.split(text)):  # in turn text and what marks it
            ids += [self._marked_id(part)] if place % 2 else self.encode(part)
        return [*ids, *self._last]

    def _marked_id(self, name: str) -> int:
        token = self._id_of(name)
        assert token is not None, "markup is made of names that have ids"
        return token

    def decode(self, ids: Sequence[int]) -> str:
        # Ids of a wider vocabulary have no piece, and the library would raise.
        return str(self._model.decode([int(token) for token in ids if token < self._own_size and token != self.eod]))

    def control_encoder(self) -> ControlEncoder:
        return SentencePieceControls(self._model, self._added, eos=self.eod)

    def special_tokens(self) -> dict[str, int]:
        controls = (token for token in range(self._own_size) if self._model.is_control(token) or token == self.eod)
        return {self._model.id_to_piece(token): token for token in controls}

    def _named(self, name: str) -> int | None:
        return self._id_of(name)


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizer of a tokenizer.json of Hugging Face's `tokenizers`, of GPT-2's two files, or of a tiktoken file."""

    def __init__(self, model: tokenizers.Tokenizer, *, eod: int) -> None:
        self._model = model
        self._take_text_as_it_is()
        # Ids may have gaps, and added tokens may lie behind all others.
        self.vocab_size = max(model.get_vocab(with_added_tokens=True).values(), default=0) + 1
        if self.vocab_size > LARGEST_VOCABULARY:
            raise UserError(
                f"the tokenizer has the id {self.vocab_size - 1:,}, and a model a row for each up to it; ids up to "
                f"{LARGEST_VOCABULARY:,} are read, correct or fetch its file"
            )
        self.eod = eod

    @classmethod
    def from_path(cls, path: Path) -> "HuggingFaceTokenizer":
        """Tokenizer of a tokenizer.json, or of a folder that holds one or GPT-2's two files."""
        file = path / "tokenizer.json" if path.is_dir() else path
        # A folder without tokenizer.json may have GPT-2's two files.
        if path.is_dir() and not file.is_file():
            return cls.from_gpt2(path / "vocab.json", path / "merges.txt")
        try:
            with library_errors("its library fails"):
                model = tokenizers.Tokenizer.from_file(str(ordinary(file)))
        except ValueError as error:
            raise UserError(f"--tokenizer-model {file} is not a Hugging Face tokenizer.json: {error}") from error
        # The name in tokenizer_config.json comes first: of several usual names in a vocabulary, it is the one that this
        # model was trained to end with. Which tokens are put around a text, tokenizer.json says alone.
        settings = read_settings(file.parent)
        _make_special(model, settings)
        return cls(model, eod=_find_eod(model.token_to_id, file, first=settings.eos))

    @classmethod
    def from_gpt2(cls, vocab: Path, merges: Path) -> "HuggingFaceTokenizer":
        """Tokenizer of GPT-2's byte-level BPE, from its two files."""
        for path in (vocab, merges):
            if not path.is_file():
                raise UserError(
                    f"tokenizer file {path} does not exist; give --tokenizer-model a tokenizer.json, or its folder, "
                    "or --vocab-file vocab.json with --merge-file merges.txt"
                )
        try:
            with library_errors("its library fails"):
                model = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
        except ValueError as error:
            raise UserError(f"{vocab} and {merges} are not a GPT-2 tokenizer: {error}") from error
        # The two files hold no more than vocabulary and merges: the rest is byte-level BPE as GPT-2 had it, and its one
        # special token. OPT's files have others, which the folder names, and a first token.
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        settings = read_settings(vocab.parent)
        _add(model, behind(settings, model.get_vocab_size(), source=vocab), source=vocab)
        _make_special(model, settings)
        eod = _find_eod(model.token_to_id, vocab, first=settings.eos)
        model.add_special_tokens([model.id_to_token(eod)])
        _put_around(model, settings, eos=str(model.id_to_token(eod)))
        return cls(model, eod=eod)

    @classmethod
    def from_wordpieces(cls, path: Path, *, lowercase: bool) -> "HuggingFaceTokenizer":
        """Tokenizer of BERT's word pieces, from its vocab.txt."""
        try:
            with library_errors("its library fails"):
                pieces = tokenizers.models.WordPiece.from_file(str(ordinary(path)), unk_token="[UNK]")
        except ValueError as error:
            raise UserError(
                f"{path} is not a vocab.txt of word pieces: {error}; name the vocab.txt of a BERT"
            ) from error
        model = tokenizers.Tokenizer(pieces)
        model.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
        model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        model.decoder = tokenizers.decoders.WordPiece()
        special = ("[UNK]", *MASK_NAMES[0])
        if (missing := [name for name in special if model.token_to_id(name) is None]) != []:
            raise UserError(f"{path} has no piece {missing[0]}; name the vocab.txt of a BERT")
        model.add_special_tokens(list(special))
        return cls(model, eod=_find_eod(model.token_to_id, path, first=("[SEP]",)))

    @classmethod
    def from_tiktoken(cls, path: Path, data: DataConfig) -> "HuggingFaceTokenizer":
        """Tokenizer of a tiktoken file, a JSON list or lines of base64."""
        model = read_tiktoken(
            path,
            pattern=data.tiktoken_pattern,
            special_tokens=data.tiktoken_special_tokens,
            num_special_tokens=data.tiktoken_num_special_tokens,
            vocab_size=data.vocab_size,
        )
        # What the folder says is of a file whose special tokens no flag names.
        first = () if data.tiktoken_special_tokens else settings_of(path).eos
        return cls(model, eod=_find_eod(model.token_to_id, path, first=first))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_text_as_it_is()

    def _take_text_as_it_is(self) -> None:
        """Turn off truncation, padding and reading special tokens from text. Pickling forgets a part of this."""
        # tokenizer.json may ask for both, for a model of another length: text would be lost, or padding learned.
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        _check_unicode(text)
        with library_errors(NO_TOKENS):
            return list(self._model.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without the offsets that the library else keeps: a fifth less time for equal tokens."""
        for text in texts:
            _check_unicode(text)
        with library_errors(NO_TOKENS):
            return [list(each.ids) for each in self._model.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_marked(self, text: str) -> list[int]:
        _check_unicode(text)
        # Switched back in any case, as all other encoding relies on text staying text.
        self._model.encode_special_tokens = False
        try:
            with library_errors(NO_TOKENS):
                return list(self._model.encode(text, add_special_tokens=True).ids)
        finally:
            self._model.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        with library_errors("the tokenizer cannot read tokens"):
            return str(self._model.decode([int(token) for token in ids], skip_special_tokens=True))

    def mask_tokens(self) -> MaskTokens:
        for names in MASK_NAMES:
            ids = [token_id for name in names if (token_id := self._model.token_to_id(name)) is not None]
            if len(ids) == len(names):
                return MaskTokens(*ids)
        return super().mask_tokens()

    def _named(self, name: str) -> int | None:
        token_id: int | None = self._model.token_to_id(name)
        return token_id

    def control_encoder(self) -> ControlEncoder:
        return HuggingFaceControls(self._model, eos=str(self._model.id_to_token(self.eod)))

    def special_tokens(self) -> dict[str, int]:
        added = self._model.get_added_tokens_decoder().items()
        marked = {str(of.content): token for token, of in added if of.special or BARS.fullmatch(of.content)}
        return {str(self._model.id_to_token(self.eod)): self.eod} | marked


def _check_unicode(text: str) -> None:
    """UnicodeEncodeError, a ValueError, for half a surrogate pair: JSON can spell one, and the libraries fail on it."""
    text.encode()


def _make_special(model: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Let the tokens of the vocabulary that the settings call special be so: never read from texts, nor shown.

    Those without a name of their own (additional_special_tokens) stay as the vocabulary has them, as in transformers.
    """
    names = {*settings.tokens.values(), *(each.name for each in settings.added.values() if each.is_special)}
    added = model.get_added_tokens_decoder()
    for name in sorted(names):
        number = model.token_to_id(name)
        if number is None or (number in added and added[number].special):
            continue
        token = added.get(number, tokenizers.AddedToken(name, normalized=False))
        token.special = True
        model.add_special_tokens([token])


def _add(model: tokenizers.Tokenizer, added: Mapping[int, AddedName], *, source: Path) -> None:
    """Add tokens behind the vocabulary; UserError if their ids leave a gap, which the library would fill."""
    for number, each in added.items():
        token = tokenizers.AddedToken(each.name, special=each.is_special, normalized=not each.is_special)
        model.add_tokens([token])
        if model.token_to_id(each.name) != number:
            raise UserError(
                f"the files next to {source} give the added token {each.name!r} the id {number}, and the next free one "
                f"is {model.get_vocab_size() - 1}; save a tokenizer.json with transformers, which keeps gaps"
            )


def _put_around(model: tokenizers.Tokenizer, settings: TokenizerSettings, *, eos: str) -> None:
    """Let the tokenizer put a first and a last token around a text, as far as the settings ask for them."""
    first, last = settings.tokens.get("bos_token") if settings.adds_bos else None, eos if settings.adds_eos else None
    names = [name for name in (first, last) if name is not None and model.token_to_id(name) is not None]
    if names:
        text = [name for name in (first, "$A", last) if name == "$A" or name in names]
        special = [(name, model.token_to_id(name)) for name in dict.fromkeys(names)]
        model.post_processor = tokenizers.processors.TemplateProcessing(single=text, special_tokens=special)


def _find_eod(id_of: Callable[[str], int | None], path: Path, *, first: tuple[str, ...] = ()) -> int:
    for name in (*first, *EOD_NAMES):
        token = id_of(name)
        if token is not None:
            return token
    raise UserError(
        f"tokenizer {path} has no token that ends a document; give it one of {', '.join(EOD_NAMES)} "
        "(a Hugging Face folder may name another as eos_token in tokenizer_config.json)"
    )


def build_tokenizer(data: DataConfig) -> Tokenizer:
    """Tokenizer of a config; under --mock-data one that needs no file. A larger --vocab-size widens its vocabulary."""
    if data.mock_data:
        return NullTokenizer(data.vocab_size or MOCK_VOCAB_SIZE)
    kind = tokenizer_type(data.tokenizer_type)
    # Compiled libraries can end this process on a bad file: a child tries it first.
    if files := _files_of(kind, data):
        trial.try_once(kind, data, files)
    tokenizer = TOKENIZERS[kind](data)
    # Larger is fine, and rounds the model's table up; smaller would give ids without a row.
    if data.vocab_extra_ids and kind != "null" and not tokenizer.own_sentinels():
        tokenizer.vocab_size += data.vocab_extra_ids
    if data.vocab_size is not None and data.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"--vocab-size {data.vocab_size} is smaller than the {kind} tokenizer's vocabulary of "
            f"{tokenizer.vocab_size}; leave --vocab-size out, or give at least {tokenizer.vocab_size}, or take the "
            "tokenizer of the model that the run starts from"
        )
    tokenizer.vocab_size = data.vocab_size or tokenizer.vocab_size
    return tokenizer


def _files_of(kind: str, data: DataConfig) -> list[Path]:
    """Files that a compiled library reads; empty if there are none, or not all of them."""
    if kind not in ("sentencepiece", "huggingface", "tiktoken", *WORDPIECE):
        return []
    if data.tokenizer_model is None or (kind == "huggingface" and (data.vocab_file or data.merge_file)):
        files = [Path(name) for name in (data.vocab_file, data.merge_file) if name is not None]
    elif (path := Path(data.tokenizer_model)).is_dir():
        one, two = [path / "tokenizer.json"], [path / "vocab.json", path / "merges.txt"]
        files = one if one[0].is_file() else two
    else:
        files = [path]
    return files if all(file.is_file() for file in files) else []


def _build(kind: str, data: DataConfig) -> Tokenizer:
    if kind == "bytes":
        return BytesTokenizer()
    if kind == "null":
        if data.vocab_size is None:
            raise UserError("--tokenizer-type null has no vocabulary of its own; give --vocab-size")
        return NullTokenizer(data.vocab_size)
    if kind == "huggingface" and (data.vocab_file or data.merge_file):
        if not (data.vocab_file and data.merge_file):
            raise UserError("a GPT-2 tokenizer is two files; give --vocab-file and --merge-file together")
        return HuggingFaceTokenizer.from_gpt2(Path(data.vocab_file), Path(data.merge_file))
    if kind in WORDPIECE and data.vocab_file and data.tokenizer_model is None:
        data = replace(data, tokenizer_model=data.vocab_file)
    if data.tokenizer_model is None:
        raise UserError(
            f"--tokenizer-type {kind} needs the tokenizer's file; give --tokenizer-model, or use --tokenizer-type bytes"
        )
    path = Path(data.tokenizer_model)
    if not path.exists():
        raise UserError(f"--tokenizer-model {path} does not exist; check the path")
    if kind in WORDPIECE:
        path = path / "vocab.txt" if path.is_dir() else path
        return HuggingFaceTokenizer.from_wordpieces(path, lowercase=kind == "wordpiece_lower")
    if kind == "tiktoken":
        return HuggingFaceTokenizer.from_tiktoken(path, data)
    return SentencePieceTokenizer(path) if kind == "sentencepiece" else HuggingFaceTokenizer.from_path(path)


TOKENIZERS: dict[str, Callable[[DataConfig], Tokenizer]] = {
    kind: partial(_build, kind) for kind in get_args(TokenizerType)
}
"""The tokenizers of --tokenizer-type, under the names of `TOKENIZER_NAMES`."""


def tokenizer_trial_of_child() -> Callable[[tuple[str, Any, list[str]]], str]:
    """What the child of a trial calls (trial.py)."""
    return trial.trial_of(TOKENIZERS)


def encode_prompt(tokenizer: Tokenizer, prompt: str, *, add_special_tokens: bool = False) -> list[int]:
    """Ids of a prompt; of an empty one the end-of-document token. UserError for what is no text."""
    encode = tokenizer.encode_marked if add_special_tokens else tokenizer.encode
    try:
        return encode(prompt) or [tokenizer.eod]
    except UserError as error:
        raise UserError(f"the prompt {prompt!r} cannot be turned into tokens: {error}") from error
    except ValueError as error:
        raise UserError(f"the prompt {prompt!r} cannot be turned into tokens: {error}; change it") from error
