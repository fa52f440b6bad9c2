"""Tests of `megatronish preprocess cache`: what it builds, what it says, and that a run builds nothing afterwards."""

from pathlib import Path

import numpy as np
import pytest
from command_lines import small
from jobs import tiny, train_on_ranks, write_tokens
from sweeps import some_of

from megatronish.commands.configuration import read_config
from megatronish.commands.preprocess_tasks import main
from megatronish.data.indexed import IndexedWriter
from megatronish.data.samples import GPTSamples
from megatronish.train.setup import open_datasets


def test_indices_are_built_ahead_and_a_run_builds_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    for length, name in ((400, "a"), (410, "b")):  # equal lengths would share their indices
        with IndexedWriter(tmp_path / name, dtype=np.dtype("<u2")) as writer:
            for _ in range(100):
                writer.add_document(rng.integers(0, 256, length))
    flags = "--tokenizer-type bytes --split 80,20,0 --seq-length 32 --micro-batch-size 1 --train-iters 5"
    words = small(*flags.split(), "--data-path", str(tmp_path / "a"), str(tmp_path / "b"))
    for built in (4, 0):
        assert main(["cache", *words]) == 0
        num_bytes = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
        told = capsys.readouterr().out
        assert "for 5 samples of the training data, and 100 of each other data set\n" in told
        expected = f"{tmp_path / 'cache'}: 4 files, {num_bytes:,} bytes; {built} built now\n"
        assert told.endswith(expected)
    monkeypatch.setattr(GPTSamples, "_build", None)
    open_datasets(read_config(words).config)


def test_a_prefix_that_is_missing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--tokenizer-type bytes --micro-batch-size 1 --train-iters 5 --data-path none"
    assert main(["cache", *small(*flags.split())]) == 2
    assert "none.bin and none.idx do not exist" in capsys.readouterr().err


def test_made_up_data_have_no_index(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", *small("--mock-data", "--micro-batch-size", "1", "--train-iters", "5")]) == 2
    assert "mock_data reads no files and has no indices to build; leave it out" in capsys.readouterr().err


RUNS = {
    "epochs": "--train-iters 31 --split 60,30,10 --eval-iters 9 --eval-interval 30 --data-path {a}",
    "more to evaluate": "--train-iters 3 --eval-iters 5 --eval-global-batch-size 16 --split 60,40,0 --data-path {a}",
    "a blend of parts": "--train-iters 60 --train-data-path 0.9 {a}[0:0.3] 0.1 {b} --valid-data-path {b}",
    "a schedule": "--train-iters 40 --split 1,0,0 --blend-schedule 0:0.7|0.3;9:0|1;25:1|1 --data-path {a} {b}",
    "samples": "--train-samples 260 --rampup-batch-size 4 4 64 --split 80,20,0 --data-path {a}",
    "whole epochs": "--num-epochs 3 --split 1,0,0 --data-path {a}",
    "packed": "--train-iters 40 --packing best-fit --split 80,20,0 --data-path {a} {b}",
    "several to evaluate": "--train-iters 2 --eval-iters 20 --multiple-validation-sets --train-data-path {a} "
    "--valid-data-path {a} {b} --test-data-path {b}",
    "a store": "--train-iters 40 --split 80,20,0 --data-path file://{a} {b} --data-store-cache-path {cache}",
}


@pytest.mark.parametrize(
    "name",
    some_of(RUNS, ["epochs", "more to evaluate", "a schedule", "samples", "packed", "several to evaluate", "a store"]),
)
def test_a_run_writes_no_index_after_it(name: str, tmp_path: Path) -> None:
    places = {each: tmp_path / each for each in ("a", "b", "cache")}
    for seed, each in enumerate("ab"):
        write_tokens(places[each], seed=seed)
    flags = tiny(
        tmp_path / "run",
        "--num-layers 1 --global-batch-size 8 --micro-batch-size 4 --tokenizer-type null",
        data=RUNS[name].format(**places),
    )
    argv = [word.replace("|", " ") for word in flags]
    if "--train-iters" not in RUNS[name]:
        place = argv.index("--train-iters")
        del argv[place : place + 2]
    assert main(["cache", *argv]) == 0
    built = kept_in(tmp_path)
    assert len(built) > 1
    train_on_ranks(argv)
    assert kept_in(tmp_path) == built


def kept_in(folder: Path) -> dict[Path, int]:
    """Sample indices below a folder, and the times of their writing."""
    files = [*folder.rglob("*.epoch"), *folder.rglob("*.rows")]
    return {path: path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
def test_a_folder_that_cannot_be_written_ends_the_command(
    packing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(tmp_path / "a")
    (tmp_path / "file").write_text("")
    data = f"--tokenizer-type null --packing {packing} --data-path {tmp_path}/a --data-cache-path {tmp_path}/file"
    assert main(["cache", *tiny(tmp_path / "run", data=data)]) == 1
    told = capsys.readouterr().err
    assert f"error: the sample index {tmp_path}/file/" in told
    assert "is not kept; free space there, or name another folder with --data-cache-path" in told
