"""Hidden spans of a text, for T5: how many tokens and spans are hidden, and how long a text may be (data/spans.py)."""

from typing import NamedTuple

from megatronish.core.errors import UserError


class SpanRule(NamedTuple):
    """Part of a text's tokens that is hidden, and the mean length of a span of them."""

    density: float
    mean_length: float

    def hidden(self, length: int) -> "HiddenSpans":
        """Tokens that are hidden of a text of at least two tokens, and their spans."""
        tokens = min(max(round(length * self.density), 1), length - 1)
        spans = min(max(round(tokens / self.mean_length), 1), tokens, length - tokens)
        return HiddenSpans(tokens, spans)

    def row_lengths(self, length: int) -> tuple[int, int]:
        """Tokens of the encoder's and of the decoder's row of a text, each with its end."""
        tokens, spans = self.hidden(length)
        return length - tokens + spans + 1, tokens + spans + 1


class HiddenSpans(NamedTuple):
    """Numbers of hidden tokens and of their spans."""

    tokens: int
    spans: int


def text_length(rule: SpanRule, *, encoder_length: int, decoder_length: int) -> int:
    """The most tokens of a text whose two rows fit; UserError if not even two do."""
    length = encoder_length + decoder_length
    while length > 1:
        rows = rule.row_lengths(length)
        if rows[0] <= encoder_length and rows[1] <= decoder_length:
            return length
        length -= 1
    raise UserError(
        f"encoder_seq_length={encoder_length} and decoder_seq_length={decoder_length} have no room for a text of two "
        "tokens with a sentinel and an end; use at least 3 each"
    )


def too_few_sentinels(rule: SpanRule, encoder_length: int, decoder_length: int, num_sentinels: int) -> str | None:
    """Complaint about a text that fits the two rows and has more hidden spans than there are sentinels."""
    length = text_length(rule, encoder_length=encoder_length, decoder_length=decoder_length)
    if (spans := rule.hidden(length).spans) <= num_sentinels:
        return None
    return (
        f"a text of {length} tokens, which fits encoder_seq_length={encoder_length}, has {spans} hidden spans, and "
        f"there are {num_sentinels} sentinels; use --vocab-extra-ids {spans}, if the tokenizer has no own ones, or a "
        "shorter --encoder-seq-length"
    )
