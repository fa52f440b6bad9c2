"""Tests of data and tokenizers in a config: missing files, blends and splits."""

from pathlib import Path

import pytest
from command_lines import problems, small

from megatronish.config.sections.data import parse_blend, parse_split


def test_a_missing_data_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    for name in ("a.bin", "b_text_document.bin", "b_text_document.idx"):
        (tmp_path / name).touch()
    words = small("--tokenizer-type", "bytes", "--data-path")
    assert problems([*words, f"{tmp_path}/a"])[0].endswith(
        f"{tmp_path}/a.idx does not exist; make them with megatronish preprocess, or use --mock-data"
    )
    assert problems([*words, f"{tmp_path}/b"])[0].endswith(f"use {tmp_path}/b_text_document")
    assert problems([*words, f"{tmp_path}/a.bin"])[0].endswith(f"leave .bin off: use {tmp_path}/a")
    assert problems([*words, f"{tmp_path}/b_text_document"]) == []


def test_a_tokenizer_without_its_file_is_told(tmp_path: Path) -> None:
    for end in ("bin", "idx"):
        (tmp_path / f"a.{end}").touch()
    words = small("--data-path", f"{tmp_path}/a")
    assert "tokenizer_type=sentencepiece needs its file" in problems(words)[0]
    assert "tokenizer_model=x.model does not exist" in problems([*words, "--tokenizer-model", "x.model"])[0]
    assert "needs a vocabulary; add --vocab-size" in problems([*words, "--tokenizer-type", "NullTokenizer"])[0]
    gpt2 = problems([*words, "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(tmp_path / "a.bin")])
    assert "vocab_file and merge_file belong together" in gpt2[0]


def test_packing_is_for_pairs_and_gpts(tmp_path: Path) -> None:
    for end in ("bin", "idx"):
        (tmp_path / f"a.{end}").touch()
    words = small("--tokenizer-type", "bytes", "--packing", "best-fit")
    assert problems([*words, "--data-path", f"{tmp_path}/a"]) == []
    (complaint,) = problems([*words, "--mock-data"])
    assert complaint == "packing=best-fit packs documents of .bin/.idx pairs, and mock_data reads none; leave it out"
    complaints = problems([*words, "--data-path", f"{tmp_path}/a", "--dataset-type", "chat"])
    assert "packing=best-fit packs documents of .bin/.idx pairs, and dataset_type=chat reads none; leave it out" in (
        complaints
    )
    complaints = problems([*words, "--data-path", f"{tmp_path}/a", "--model-type", "bert"])
    assert any(each.startswith("packing=best-fit is for GPTs, and model_type=bert") for each in complaints)


def test_fill_in_the_middle_is_for_pairs_and_gpts_and_needs_its_switch(tmp_path: Path) -> None:
    for end in ("bin", "idx"):
        (tmp_path / f"a.{end}").touch()
    words = [*small("--tokenizer-type", "bytes", "--data-path"), f"{tmp_path}/a"]
    assert problems([*words, "--fim-data", "--fim-rate", "0.7", "--fim-spm-rate", "1"]) == []
    assert problems([*words, "--fim-rate", "0.5"]) == []  # what Megatron-LM has without it, too
    assert problems([*words, "--fim-rate", "0.7"]) == [
        "fim_rate=0.7 says nothing without --fim-data; add it, or leave this out"
    ]
    assert "fim_rate=1.5 must be at most 1" in problems([*words, "--fim-data", "--fim-rate", "1.5"])[0]
    (complaint,) = problems([*words, "--fim-data", "--fim-fragment-rate", "0.5"])
    assert complaint.startswith("fim_fragment_rate=0.5 is for fragments; add --fim-split-sample TOKEN")
    assert problems([*small("--tokenizer-type", "bytes", "--mock-data"), "--fim-data"]) == [
        "fim_data cuts documents of .bin/.idx pairs, and mock_data reads none; leave it out"
    ]
    complaints = problems([*words, "--fim-data", "--model-type", "bert"])
    assert any(each.startswith("fim_data is for GPTs, and model_type=bert") for each in complaints)


@pytest.mark.parametrize(
    ("values", "blend"),
    [
        ([], []),
        (["a"], [(None, "a")]),
        (["a", "b", "c"], [(None, "a"), (None, "b"), (None, "c")]),
        (["0.3", "a", "0.7", "b"], [(0.3, "a"), (0.7, "b")]),
        (["1", "./2"], [(1.0, "./2")]),
    ],
)
def test_a_blend_is_prefixes_or_weights_and_prefixes(values: list[str], blend: list[tuple[float | None, str]]) -> None:
    assert parse_blend(values) == blend


@pytest.mark.parametrize("values", [["1"], ["a", "1"], ["1", "a", "b"], ["1", "a", "b", "2"], ["0", "a"], ["-1", "a"]])
def test_a_crooked_blend_is_told(values: list[str]) -> None:
    with pytest.raises(ValueError, match=r"weights and prefixes must alternate|must not be negative"):
        parse_blend(values)


def test_a_split_sums_to_one() -> None:
    assert parse_split("95, 5, 0") == (0.95, 0.05, 0.0)
    assert parse_split("1") == (1.0, 0.0, 0.0)
    for bad in ("", "0,0", "a,b", "1,-1", "nan", "1,2,3,4"):
        with pytest.raises(ValueError, match="must be up to three parts"):
            parse_split(bad)
