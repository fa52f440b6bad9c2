"""Tokenizer of Hugging Face's library: of its tokenizer.json, and of the files of GPT-2, BERT and tiktoken."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from megatronish.config.sections.data import DataConfig
from megatronish.core.contained import library_errors
from megatronish.core.errors import UserError
from megatronish.core.files import ordinary
from megatronish.tokenizer.control_tokens import BARS, MASK_NAMES, ControlEncoder, HuggingFaceControls, MaskTokens
from megatronish.tokenizer.settings import AddedName, TokenizerSettings, behind, read_settings, settings_of
from megatronish.tokenizer.tiktoken_file import read_tiktoken
from megatronish.tokenizer.tokenizer import Tokenizer, check_unicode, find_eod

LARGEST_VOCABULARY = 2**28
NO_TOKENS = "the tokenizer cannot write it"


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

    @property
    def model(self) -> tokenizers.Tokenizer:
        """The library's own tokenizer."""
        return self._model

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
        return cls(model, eod=find_eod(model.token_to_id, file, first=settings.eos))

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
        eod = find_eod(model.token_to_id, vocab, first=settings.eos)
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
        return cls(model, eod=find_eod(model.token_to_id, path, first=("[SEP]",)))

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
        return cls(model, eod=find_eod(model.token_to_id, path, first=first))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._take_text_as_it_is()

    def _take_text_as_it_is(self) -> None:
        """Turn off truncation, padding, dropped merges and special tokens in text. Pickling forgets a part of this."""
        # tokenizer.json may ask for both, for a model of another length: text would be lost, or padding learned.
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        if getattr(self._model.model, "dropout", None):  # of BPE: a text would have other tokens each time
            self._model.model.dropout = None

    def encode(self, text: str) -> list[int]:
        check_unicode(text)
        with library_errors(NO_TOKENS):
            return list(self._model.encode(text, add_special_tokens=False).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without the offsets that the library else keeps: a fifth less time for equal tokens."""
        for text in texts:
            check_unicode(text)
        with library_errors(NO_TOKENS):
            return [list(each.ids) for each in self._model.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_marked(self, text: str) -> list[int]:
        check_unicode(text)
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
