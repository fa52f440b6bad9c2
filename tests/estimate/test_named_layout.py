"""Tests of layouts that a user writes for --explain: what each part means, and a sentence for what has no meaning."""

import pytest

from megatronish.core.errors import UserError
from megatronish.estimate.planner.named_layout import read_layout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tp=8,pp=8,sp,zero=7", "zero must be one of 0, 1, 2, 3"),
        ("tp=8,sp=maybe", "sp must be one of true, false, 1, 0"),
        ("tp=1,sp", "sp shares the sequence out over tp, and tp=1"),
        ("tp=0", "tp needs a whole number above 0"),
        ("tp=" + "9" * 5000, "tp needs a whole number above 0 of at most 9 digits"),
        ("pp=2,chunks=0", "chunks needs a whole number above 0"),
        ("pp=2,schedule=1f1b,chunks=5", "1f1b has 1 chunk a stage in any case, and not 5"),
        ("pp=2,schedule=zb-v,chunks=3", "zb-v has 2 chunks a stage in any case, and not 3"),
        ("pp=2,schedule=interleaved", "interleaved needs chunks=2 or more"),
        ("tp=8,pp=2,tp=4", "tp is there twice"),
        ("ep=4", "ep=4 is for experts, and the model has none"),
        ("", "names no layout; name a row of the list"),
        (" , ", "names no layout; name a row of the list"),
    ],
)
def test_what_a_layout_cannot_have_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as refused:
        read_layout(text, gpus=64, has_experts=False)
    assert ";" in str(refused.value)


@pytest.mark.parametrize(("word", "is_on"), [("sp", True), ("sp=1", True), ("sp=true", True)])
@pytest.mark.parametrize("off", ["sp=0", "sp=false", "zero=1"])
def test_sequence_parallelism_is_on_where_the_text_says_so(word: str, is_on: bool, off: str) -> None:
    assert read_layout(f"tp=8,{word}", gpus=64).sequence_parallel is is_on
    assert read_layout(f"tp=8,{off}", gpus=64).sequence_parallel is False


def test_the_number_of_chunks_may_be_said_where_it_is_the_schedules_own() -> None:
    assert read_layout("pp=4,schedule=zb-v,chunks=2", gpus=4).chunks == 2
    assert read_layout("pp=4,chunks=3", gpus=4).schedule == "interleaved"
