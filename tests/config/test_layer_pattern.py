"""Tests of patterns over the layers: Megatron-LM's notation, and what is no pattern."""

import pytest

from megatronish.config.layer_pattern import canonical, marked_layers, parse_frequency
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError

SIZES = {"hidden_size": 8, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("1", "1111"),
        ("2", "0101"),
        ("3", "0010"),
        ("5", "0000"),
        ("[1,0,0,1]", "1001"),
        ("1, 0, 0, 1", "1001"),
        ("[1]*3+[0]", "1110"),
        ("([1]+[0])*2", "1010"),
        ("2*[0, 1]", "0101"),
    ],
)
def test_a_pattern_marks_layers(text: str, marks: str) -> None:
    found = marked_layers(text, num_layers=4, every_nth=True)
    assert "".join(str(int(mark)) for mark in found) == marks
    assert marked_layers(canonical(found), num_layers=4, every_nth=True) == found


def test_a_number_marks_the_layers_that_remain_where_it_says_which_are_left_out() -> None:
    assert marked_layers("2", num_layers=4, every_nth=False) == (True, False, True, False)
    assert marked_layers("[1, 0, 0, 0]", num_layers=4, every_nth=False) == (True, False, False, False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0", "must be at least 1"),
        ("[1]*3", r"is a list of 3, and must have one number for each of num_layers=4"),
        ("[1, 2, 0, 0]", "must be a list of 0 and 1"),
        ("[1]*10000000000", "is a list of more than 100000"),
        ("[[1]]", "is no pattern"),
        ("-1", "is no pattern"),
        ("True", "is no pattern"),
        ("[1", "is no pattern"),
        ("[1]+2", "is no pattern"),
        ("2**70", "is no pattern"),
        ("__import__('os')", "is no pattern"),
        ("(" * 1000, "is no pattern"),
        ("", "is no pattern"),
    ],
)
def test_what_is_no_pattern_is_told(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        marked_layers(text, num_layers=4, every_nth=True)


@pytest.mark.parametrize(
    ("text", "frequency"), [("2", 2), ("2*3+1", 7), ("([0]*1+[1]*3)", [0, 1, 1, 1]), ("[1]+2", None), ("[[1]]", None)]
)
def test_a_frequency_of_experts_is_a_number_or_a_list(text: str, frequency: int | list[int] | None) -> None:
    if frequency is None:
        with pytest.raises(ValueError, match="is neither a number nor a list"):
            parse_frequency(text)
    else:
        assert parse_frequency(text) == frequency


def test_layers_have_window_and_rope_as_the_patterns_say() -> None:
    model = ModelConfig(num_layers=4, **SIZES, window_size=3, position_embedding_type="rope")
    assert model.windowed_layers == model.rotated_layers == (True,) * 4
    some = ModelConfig(**vars(model) | {"window_attn_skip_freq": "2", "no_rope_freq": "4"})
    assert some.windowed_layers == (True, False, True, False)
    assert some.rotated_layers == (True, True, True, False)
    without = ModelConfig(**vars(some) | {"window_size": None, "position_embedding_type": "alibi"})
    assert without.windowed_layers == without.rotated_layers == (False,) * 4
    wrong = ModelConfig(**vars(some) | {"no_rope_freq": "x"})
    with pytest.raises(
        UserError, match="no_rope_freq=x is no pattern; it must be a number N for every N-th layer, or a"
    ):
        _ = wrong.rotated_layers
