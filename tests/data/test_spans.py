"""Tests of hidden spans: what the rows of both sides hold, and that no layout changes them."""

import numpy as np
import pytest

from megatronish.core.errors import UserError
from megatronish.core.hidden_spans import SpanRule, text_length
from megatronish.data.sample import Sample
from megatronish.data.spans import SideRows, SpanCollator, side_by_side
from megatronish.tokenizer.control_tokens import SpanTokens

SPECIAL = SpanTokens(start=0, end=1, filler=0, sentinels=range(999, 899, -1))
RULE = SpanRule(0.15, 3.0)


def text_of(rows: SideRows) -> list[int]:
    """The text that two rows were made of: each sentinel replaced by what it hides."""
    hidden: dict[int, list[int]] = {}
    for token in rows.targets[:-1].tolist():
        if token >= 900:
            hidden[token] = sentinel = []
        else:
            sentinel.append(token)
    return [each for token in rows.inputs[:-1].tolist() for each in hidden.get(token, [token])]


def collator(encoder: int = 100, decoder: int = 40, rule: SpanRule = RULE) -> SpanCollator:
    return SpanCollator(SPECIAL, encoder, decoder, seed=1, rule=rule)


@pytest.mark.parametrize("length", [2, 3, 7, 50, 109])
def test_both_rows_together_are_the_text_and_as_long_as_the_rule_says(length: int) -> None:
    text = np.arange(2, 2 + length)
    rows = [collator().rows(Sample(np.append(text, 5)), number) for number in range(20)]
    for row in rows:
        assert text_of(row) == text.tolist()
        assert row.inputs[-1] == row.targets[-1] == SPECIAL.end
        assert (len(row.inputs), len(row.targets)) == RULE.row_lengths(length)
        assert [token for token in row.inputs if token >= 900] == [token for token in row.targets if token >= 900]
        assert row.inputs[0] == text[0], "a text begins with what is shown"
    assert length < 8 or len({tuple(row.inputs) for row in rows}) > 1, "each sample hides other tokens"


def test_a_part_of_the_tokens_is_hidden_in_spans_of_a_mean_length() -> None:
    hidden = RULE.hidden(512)
    assert hidden.tokens == round(512 * 0.15) and hidden.spans == round(hidden.tokens / 3)


def test_what_is_hidden_follows_from_the_number_of_the_sample() -> None:
    sample = Sample(np.arange(2, 60))
    alone, together = collator()([sample], [7]), collator()([sample, sample], [6, 7])
    assert alone.tokens[0].equal(together.tokens[1]) and not alone.tokens[0].equal(together.tokens[0])
    shorter = Sample(np.append(sample.tokens, [0, 0]), num_filler=2)
    assert collator()([shorter], [7]).tokens.equal(alone.tokens), "filler is no part of a text"


@pytest.mark.parametrize(("encoder", "decoder"), [(512, 114), (512, 128), (64, 400), (40, 12), (3, 3)])
def test_texts_have_the_most_tokens_whose_rows_fit(encoder: int, decoder: int) -> None:
    length = text_length(RULE, encoder_length=encoder, decoder_length=decoder)
    fits = [all(a <= b for a, b in zip(RULE.row_lengths(n), (encoder, decoder), strict=True)) for n in range(2, 700)]
    assert length == max(number for number, fit in enumerate(fits, 2) if fit)


def test_sides_without_room_for_a_text_are_refused() -> None:
    with pytest.raises(UserError, match=r"encoder_seq_length=2 and .* have no room .*; use at least 3 each"):
        text_length(RULE, encoder_length=2, decoder_length=9)


def test_the_decoder_reads_what_it_wrote_one_token_before() -> None:
    rows = [SideRows(np.array([5, 6, 1]), np.array([7, 8, 1])), SideRows(np.array([9, 1]), np.array([4, 1]))]
    batch = side_by_side(rows, [3, 4], special=SPECIAL, encoder_length=4, decoder_length=5)
    assert batch.tokens.tolist() == [[5, 6, 1, 0, 0, 7, 8, 0, 0], [9, 1, 0, 0, 0, 4, 0, 0, 0]]
    assert batch.labels[:, 4:].tolist() == [[7, 8, 1, 0, 0], [4, 1, 0, 0, 0]]
    assert batch.loss_mask.int().tolist() == [[0] * 4 + [1, 1, 1, 0, 0], [0] * 4 + [1, 1, 0, 0, 0]]
    assert batch.document_ids is not None
    assert batch.document_ids[:, :4].tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]
    assert (batch.encoder_length, batch.num_loss_tokens) == (4, 5)
