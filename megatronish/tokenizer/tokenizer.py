"""Interface of tokenizers: text to token ids and back. build.py makes the one of a config, by its kind.

Special tokens are never read out of text: a document that spells "<|endoftext|>" stays text. Only `encode_marked`, for
prompts that are written so, reads them, and adds what the tokenizer puts around a text: a first token, say. Decoding
skips them, and ids beyond the tokenizer's own (a larger --vocab-size leaves some), so that whatever a model writes can
be shown.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from megatronish.core.errors import UserError
from megatronish.tokenizer.control_tokens import (
    MASK_NAMES,
    MIDDLE_NAMES,
    ControlEncoder,
    MaskTokens,
    MiddleTokens,
    SpanTokens,
)

EOD_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|end_of_sentence|>", "<eos>", "<eod>", "[EOS]", "[SEP]")


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


def check_unicode(text: str) -> None:
    """UnicodeEncodeError, a ValueError, for half a surrogate pair: JSON can spell one, and the libraries fail on it."""
    text.encode()


def find_eod(id_of: Callable[[str], int | None], path: Path, *, first: tuple[str, ...] = ()) -> int:
    """Id of the token that ends a document, by its name: one of `first`, or a usual one. UserError if there is none."""
    for name in (*first, *EOD_NAMES):
        token = id_of(name)
        if token is not None:
            return token
    raise UserError(
        f"tokenizer {path} has no token that ends a document; give it one of {', '.join(EOD_NAMES)} "
        "(a Hugging Face folder may name another as eos_token in tokenizer_config.json)"
    )


def encode_prompt(tokenizer: Tokenizer, prompt: str, *, add_special_tokens: bool = False) -> list[int]:
    """Ids of a prompt; of an empty one the end-of-document token. UserError for what is no text."""
    encode = tokenizer.encode_marked if add_special_tokens else tokenizer.encode
    try:
        return encode(prompt) or [tokenizer.eod]
    except UserError as error:
        raise UserError(f"the prompt {prompt!r} cannot be turned into tokens: {error}") from error
    except ValueError as error:
        raise UserError(f"the prompt {prompt!r} cannot be turned into tokens: {error}; change it") from error
