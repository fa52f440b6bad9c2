"""Tokenizers without a file: bytes, and numbers that are token ids already."""

from collections.abc import Sequence

from megatronish.core.errors import UserError
from megatronish.tokenizer.control_tokens import ByteControls, ControlEncoder, MaskTokens, SpanTokens
from megatronish.tokenizer.tokenizer import Tokenizer


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
