"""The table of docs/FINETUNING.md is what the forecast computes now."""

import pytest
from paths import ROOT

from benchmarks.finetuning_table import GPU_SIZES, SHAPES, finetuning_table, rows
from megatronish.estimate.costs.parameters import num_parameters

PAGE = (ROOT / "docs" / "FINETUNING.md").read_text(encoding="utf-8")


def test_the_table_of_the_page_is_current() -> None:
    assert f"\n\n{finetuning_table()}\n\n" in PAGE, "run `python -m benchmarks.finetuning_table`"


@pytest.mark.parametrize(
    ("name", "billions"), [("Llama 3.2 1B", 1.236), ("Llama 3.1 8B", 8.030), ("Llama 3.1 70B", 70.554)]
)
def test_the_shapes_have_the_published_numbers_of_parameters(name: str, billions: float) -> None:
    count = num_parameters(SHAPES[name], vocab_size=128_256, seq_length=2048)
    assert round(count / 1e9, 3) == billions


def test_a_gpu_holds_what_is_said_to_fit_with_room_for_what_is_not_counted() -> None:
    fitting = {(row.model, row.way, row.num_gpus): [row.fits(size) for size in GPU_SIZES] for row in rows()}
    assert fitting["Llama 3.1 8B", "QLoRA", 1] == [True, True]
    assert fitting["Llama 3.1 8B", "all weights", 1] == [False, False]
    assert fitting["Llama 3.1 70B", "QLoRA", 1] == [False, True]
