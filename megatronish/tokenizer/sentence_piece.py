"""Tokenizer of a SentencePiece model, with the tokens that the files next to it add."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from megatronish.core.contained import library_errors
from megatronish.core.errors import UserError
from megatronish.core.files import ordinary
from megatronish.tokenizer.control_tokens import ControlEncoder, SentencePieceControls, either_of, without_prefix
from megatronish.tokenizer.settings import behind, settings_of
from megatronish.tokenizer.tokenizer import Tokenizer, check_unicode, find_eod

SPACE_MARK = "\u2581"


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
        self._inner = without_prefix(self._model) if settings.one_prefix else self._model
        self.vocab_size = max(self._added.values(), default=self._own_size - 1) + 1
        # 2. The end of a document: the one that its folder names, the model's own, or a piece of a usual name.
        named = next((token for name in settings.eos if (token := self._id_of(name)) is not None), None)
        self.eod = self._model.eos_id() if named is None else named
        if self.eod < 0:
            self.eod = find_eod(self._id_of, path)
        # Added tokens that are not special, such as <think>, are read and shown in any text.
        self._shown = {number: token.name for number, token in added.items() if not token.is_special}
        self._spelled = either_of(list(self._shown.values()))
        # 3. What `encode_marked` puts around a text, and its markup: control pieces and tokens that were added.
        first, last = self._model.bos_id(), self.eod
        self._first = [first] if first >= 0 and settings.adds_bos is not False else []
        self._last = [last] if settings.adds_eos else []
        controls = [self._model.id_to_piece(token) for token in range(self._own_size) if self._model.is_control(token)]
        self._markup = either_of([*controls, *self._added])
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
        check_unicode(text)
        if not self._shown:  # a search for nothing takes a twentieth of the time
            return self._text_ids(text, self._model)
        return self._ids(text, self._spelled)

    def encode_marked(self, text: str) -> list[int]:
        """Ids with a first token (BOS) where the model has one, unless tokenizer_config.json next to it says no."""
        check_unicode(text)
        return [*self._first, *self._ids(text, self._markup), *self._last]

    def _ids(self, text: str, markup: re.Pattern[str]) -> list[int]:
        ids: list[int] = []
        for place, part in enumerate(markup.split(text)):  # in turn text and what marks it
            ids += [self._marked_id(part)] if place % 2 else self._text_ids(part, self._inner if place else self._model)
        return ids

    def _text_ids(self, text: str, model: Any) -> list[int]:
        if SPACE_MARK not in text or not self._spells_space_mark:
            return list(model.encode(text))
        # Between two parts lies one U+2581, which each of the byte pieces spells.
        first, *others = model.encode(text.split(SPACE_MARK))
        return [*first, *(token for part in others for token in (*self._space_mark, *part))]

    def _marked_id(self, name: str) -> int:
        token = self._id_of(name)
        assert token is not None, "markup is made of names that have ids"
        return token

    def decode(self, ids: Sequence[int]) -> str:
        texts: list[str] = []
        run: list[int] = []
        model = self._model
        for token in map(int, ids):
            if token in self._shown:
                texts += [model.decode(run), self._shown[token]]
                run, model = [], self._inner
            elif token < self._own_size and token != self.eod:  # ids of a wider vocabulary have no piece
                run.append(token)
        return "".join([*texts, model.decode(run)])

    def control_encoder(self) -> ControlEncoder:
        shown = {name: number for number, name in self._shown.items()}
        return SentencePieceControls(self._model, self._inner, self._added, shown, eos=self.eod)

    def special_tokens(self) -> dict[str, int]:
        controls = (token for token in range(self._own_size) if self._model.is_control(token) or token == self.eod)
        return {self._model.id_to_piece(token): token for token in controls}

    def _named(self, name: str) -> int | None:
        return self._id_of(name)
