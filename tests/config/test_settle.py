"""Tests of settings that exclude each other: in the file, on the command line, and repeated."""

from pathlib import Path

import pytest
from command_lines import DEMO, problems, read, small, toml

from megatronish.config.data_lists import DATA_LISTS
from megatronish.config.read import read_config

CONFLICTS = [
    "--train-iters 10 --train-samples 100",
    "--lr-warmup-fraction 0.1 --lr-warmup-iters 3",
    "--lr-warmup-fraction 0.1 --lr-warmup-samples 3",
    "--train-iters 10 --lr-decay-samples 100",
    "--swiglu --squared-relu",
    "--swiglu --openai-gelu",
    "--openai-gelu --squared-relu",
    "--quick-geglu --swiglu",
    "--quick-geglu --squared-relu",
    "--quick-geglu --openai-gelu",
    "--num-epochs 2 --train-iters 3",
    "--num-epochs 2 --train-samples 3",
    "--num-epochs 2 --lr-warmup-samples 3",
    "--data-path x --train-data-path y",
    "--pp 2 --pipeline-split auto --account-for-embedding-in-pipeline-split",
    "--rampup-batch-size 2 2 8 --step-batch-size-schedule 0:2",
]


@pytest.mark.parametrize("words", CONFLICTS)
def test_contradicting_flags_are_an_error(words: str) -> None:
    assert any(
        "contradicts" in problem and problem.endswith("leave one of them out") for problem in problems(words.split())
    )


MOCKED = (
    "--data-path x",
    "--train-data-path x --valid-data-path y",
    "--test-data-path x --multiple-validation-sets",
    "--data-path x --train-data-path y --dataset-type chat",
    *(f"--{name} nowhere" for name in DATA_LISTS),
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere",
    "--vocab-file nowhere --merge-file nowhere",
)


@pytest.mark.parametrize("words", MOCKED)
def test_made_up_data_stand_in_for_every_flag_of_data(words: str, tmp_path: Path) -> None:
    for flags in (["--mock-data", *words.split()], [*words.split(), "--mock_data"]):
        config, notes = read_config(small(*flags))
        assert config.data.mock_data and not (config.data.data_path or config.data.train_data_path)
        told = " ".join(notes)
        assert "idle" in told or "mock_data needs no file and no tokenizer" in told
        assert "nowhere" not in f"{config.data}"
    file = tmp_path / "a.toml"
    file.write_text('[data]\ndata-args-path = "nowhere"\n')
    assert read_config(["--config", str(file), *small("--mock-data")]).config.data.mock_data


def test_a_repeated_flag_that_says_the_same_is_fine() -> None:
    assert read("--tp", "2", "--tensor-model-parallel-size=2").layout.tp == 2
    assert read("--no-swiglu", "--squared-relu").model.squared_relu


LAST_COUNTS = {
    "--tp 2 --tp 4": "--tp is given twice; the last, --tp 4, counts",
    "--tp 2 --tp 1 --tp=4": "--tp is given 3 times; the last, --tp 4, counts",
    "--tp 2 --tensor-model-parallel-size 4": "--tp 2, --tensor-model-parallel-size 4 set the same field, "
    "tensor_model_parallel_size; the last, --tensor-model-parallel-size 4, counts",
}


@pytest.mark.parametrize("words", LAST_COUNTS)
def test_the_last_of_a_repeated_flag_counts_and_a_note_says_so(words: str) -> None:
    config, notes = read_config(small("--mock-data", *words.split()))
    assert config.layout.tp == 4
    assert notes[0] == LAST_COUNTS[words]
    assert not any("counts" in note for note in read_config(small("--mock-data", "--tp", "2", "--tp", "2")).notes)
    assert not read("--tp", "2", "--sequence-parallel", "--no-sequence-parallel").parallel.sequence_parallel
    rope = ("--position-embedding-type", "rope", "--use-rope-scaling", "--rope-scaling-type", "yarn")
    assert read(*rope).model.rope_scaling_type == "yarn"


def test_what_is_typed_makes_its_conflict_in_the_file_idle() -> None:
    config, notes = read_config(
        ["--config", DEMO, "--mock-data", "--train-samples", "320", "--lr-warmup-samples", "32"]
    )
    assert config.training.train_iters is None
    assert config.optimizer.lr_warmup_fraction is None
    assert config.data.data_path == ()
    (line,) = [note for note in notes if note.startswith("idle in ")]
    for part in (
        "train_iters (by --train-samples 320)",
        "lr_warmup_fraction (by --lr-warmup-samples 32)",
        "data_path (",
    ):
        assert part in line


def test_a_parent_that_is_switched_off_takes_its_child_along(tmp_path: Path) -> None:
    words = toml(tmp_path, "[model]\ngroup_query_attention = true\nnum_query_groups = 4\n")
    assert read_config(small("--mock-data", *words)).config.model.num_kv_heads == 4
    assert read_config(small("--mock-data", *words, "--no-group-query-attention")).config.model.num_kv_heads == 12


# Megatron-LM's flags: see also test_megatron_flags.py
