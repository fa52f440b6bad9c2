"""Tests of user errors: a sentence with value and remedy, and status 2; no traceback, no hang."""

import os
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from jobs import Finished, call_main, checkpoints_of, run_job, tiny, train_on_ranks, write_tokens
from sweeps import some_of

from megatronish.commands import exit_status
from megatronish.commands.pretrain import main
from megatronish.data import samples
from megatronish.optim.optimizer import Optimizer

CUT_AFTER = 2


def cut_under_way(folder: Path, pattern: str) -> None:
    """Planted in a job: after step 2 files of its data are cut down to one byte."""
    step = Optimizer.step

    def stepped(self: Optimizer, **options: object) -> None:
        step(self, **options)  # type: ignore[arg-type]
        if self.num_steps == CUT_AFTER:
            for path in folder.rglob(pattern):
                os.truncate(path, 1)

    Optimizer.step = stepped  # type: ignore[method-assign]
    samples.READ_WHOLE = 0  # else a small file of the cache is read at the start, and may be cut


OTHER_DATA = "--tokenizer-type null --data-path"


def assert_told(ended: Finished, *patterns: str, status: int = 2) -> None:
    """The sentence came once, on stderr."""
    assert ended.status == status, ended
    assert "Traceback" not in ended.output + ended.errors
    for pattern in patterns:
        assert len(re.findall(pattern, ended.errors)) == 1, f"{pattern!r} not once in: {ended.errors}"


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has saved."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    train_on_ranks(tiny(run_dir, "--train-iters 2"))
    return run_dir


# Flags and configs


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ("--hiden-size 8", r"--hiden-size.*--hidden-size"),
        ("--tp 5", r"num_attention_heads=12 must be divisible by tensor_model_parallel_size=5; use --tensor-model"),
        ("--pp 3", r"num_layers=2 is less than pipeline_model_parallel_size=3, .* use --pp 2 or fewer"),
        ("--dp 3", r"global_batch_size=4 .*3"),
        ("--load /nowhere/at/all", r"--load /nowhere/at/all holds no checkpoint; correct the path"),
        ("--ckpt-step 7", r"holds no checkpoint|ckpt_step=7"),
    ],
)
def test_a_wrong_flag_is_named_with_its_remedy(tmp_path: Path, flags: str, pattern: str) -> None:
    assert_told(call_main(tiny(tmp_path / "run", flags)), pattern)


def test_an_unknown_key_of_a_config_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[model]\nnum_layer = 2\n")
    assert_told(call_main(tiny(tmp_path / "run", f"--config {tmp_path / 'a.toml'}")), "num_layer .*num_layers")


def main_that_waits_less(argv: list[str]) -> int:
    """The main function, on a rank that leaves the word to rank 0 for a moment instead of seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exit_status, "SECONDS_OF_MAIN", 0.1)
        return main(argv)


def test_a_world_that_does_not_fit_is_told_by_rank_zero_alone(tmp_path: Path) -> None:
    environ = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ended = call_main(tiny(tmp_path / "run", "--tp 2"), RANK="0", **environ)
    assert_told(ended, "world size 3 must be divisible by tp 2 .*; start 2 processes or a multiple")
    assert call_main(tiny(tmp_path / "run", "--tp 2"), main=main_that_waits_less, RANK="1", **environ) == (2, "", "")


def test_a_folder_that_cannot_be_written_is_named_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_told(call_main(tiny(tmp_path / "file" / "run")), f"{tmp_path}/file/run.*choose another")
    for flag in ("--save", "--tensorboard-dir"):
        ended = call_main(tiny(tmp_path / "run", f"{flag} {tmp_path}/file/x"))
        assert_told(ended, f"{flag} {tmp_path}/file/x cannot be written: Not a directory; choose another")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# Data and tokenizers


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    ended = call_main(tiny(tmp_path / "run", data=f"{OTHER_DATA} {tmp_path}/none"))
    assert_told(ended, f"{tmp_path}/none.bin and {tmp_path}/none.idx do not exist; make them with")


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_a_truncated_data_file_is_named(tmp_path: Path, end: str) -> None:
    prefix = write_tokens(tmp_path / "data")
    path = prefix.with_suffix(f".{end}")
    os.truncate(path, path.stat().st_size - 10)
    ended = call_main(tiny(tmp_path / "run", data=f"{OTHER_DATA} {prefix}"))
    assert_told(ended, rf"{path} has \d+ bytes but .* truncated.*; make it anew|{path} has .*truncated")


@pytest.mark.parametrize(
    ("flags", "pattern"),
    some_of(product(("", "--dp 2"), ("data.bin", "*.epoch")), [("", "*.epoch"), ("--dp 2", "data.bin")]),
)
def test_a_file_that_is_cut_under_a_running_job_is_named(tmp_path: Path, pattern: str, flags: str) -> None:
    """Without a check the next read would be SIGBUS, or a whole file of zeros."""
    prefix = write_tokens(tmp_path / "data")
    argv = tiny(tmp_path / "run", f"{flags} --split 1,0,0 --save-interval 1", data=f"{OTHER_DATA} {prefix}")
    ended = run_job(argv, tmp_path, plant=cut_under_way, plant_args=(tmp_path, pattern))
    name = pattern.replace("*", r"\S*")
    told = rf"{name} has 1 bytes and had \d+ when this run opened it: another process has cut it short"
    assert ended.status == 1 and "Traceback" not in ended.errors, ended
    assert re.search(told, ended.errors), ended.errors
    assert checkpoints_of(tmp_path / "run")[-1].startswith("step_")


@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
@pytest.mark.parametrize("dry_run", ["", "--dry-run"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, kind: str, dry_run: str) -> None:
    prefix = write_tokens(tmp_path / "data")
    data = f"--tokenizer-type {kind} --data-path {prefix} --tokenizer-model"
    assert_told(call_main(tiny(tmp_path / "run", data=f"{data} {tmp_path}/none")), f"{tmp_path}/none does not exist")
    ended = call_main(tiny(tmp_path / "run", dry_run, data=f"{data} {prefix}.bin"))
    assert_told(ended, f"--tokenizer-model {prefix}.bin is not a")


def test_a_sample_prompt_that_is_no_text_is_told_before_training(tmp_path: Path) -> None:
    data = f"{OTHER_DATA} {write_tokens(tmp_path / 'data')} --split 1,0,0"
    ended = call_main(tiny(tmp_path / "run", "--sample-prompt hello", data=data))
    assert_told(ended, "the prompt 'hello' cannot be turned into tokens")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_data_of_another_tokenizer_is_told_before_training(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "data", vocab_size=200)
    assert_told(
        call_main(tiny(tmp_path / "run", data=f"{OTHER_DATA} {prefix}")),
        "holds token id 1.*, but the vocabulary has 101; train with",
    )


# A run that is not the one that was begun


def test_another_model_data_or_seed_is_refused_with_both_values(tmp_path: Path, two_steps: Path) -> None:
    others = {
        "--hidden-size 48": "model.hidden_size was 24 and is 48",
        "--seed 7": "training.seed was 1234 and is 7",
        "--seq-length 8": "training.seq_length was 16 and is 8",
        "--eod-mask-loss": "data.eod_mask_loss was False and is True",
        "--vocab-size 102": "the vocabulary was 101 and is 102",
    }
    for flags, sentence in others.items():
        ended = call_main(tiny(two_steps, flags))
        assert_told(ended, sentence, "choose another --run-dir")
        assert "files were changed" not in ended.errors
    prefix = write_tokens(tmp_path / "data")
    ended = call_main(tiny(two_steps, data=f"{OTHER_DATA} {prefix} --split 1,0,0"))
    assert_told(ended, rf"data.data_path was \[\] and is \['{prefix}'\]", "data.mock_data was True and is False")
    assert_told(call_main(tiny(tmp_path / "run", f"--load {two_steps} --seed 7")), "training.seed was 1234 and is 7")


def test_data_changed_under_the_same_name_are_refused(tmp_path: Path) -> None:
    data = f"{OTHER_DATA} {write_tokens(tmp_path / 'data')} --split 1,0,0"
    train_on_ranks(tiny(tmp_path / "run", "--exit-interval 2", data=data))
    write_tokens(tmp_path / "data", seed=1)
    ended = call_main(tiny(tmp_path / "run", data=data))
    assert_told(ended, "the training data's files were changed under the same name")


def test_weights_of_another_model_are_refused_by_their_shapes(tmp_path: Path, two_steps: Path) -> None:
    ended = call_main(tiny(tmp_path / "run", f"--load {two_steps} --finetune --hidden-size 48"))
    assert_told(ended, r"holds another model: .* is \[101, 24\] in the checkpoint and \[101, 48\] in this model")
    assert "--no-load-optim" not in ended.errors
    ended = call_main(tiny(tmp_path / "run", f"--load {two_steps} --finetune --num-layers 4"))
    assert_told(ended, r"model\.layers\.2\..* is not in the checkpoint")


# Checkpoints that are damaged


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "state.json is missing": lambda folder: (folder / "state.json").unlink(),
    r"state.json has \d+ bytes instead of \d+": lambda folder: cut(folder / "state.json"),
    "__0_0.distcp is missing": lambda folder: (folder / "__0_0.distcp").unlink(),
    r"__0_0.distcp has \d+ bytes instead of \d+": lambda folder: cut(folder / "__0_0.distcp"),
    r"\.metadata is missing": lambda folder: (folder / ".metadata").unlink(),
    r"\.metadata has \d+ bytes instead of \d+": lambda folder: cut(folder / ".metadata"),
    "checksums.json is missing": lambda folder: (folder / "checksums.json").unlink(),
    "checksums.json does not hold what was written": lambda folder: cut(folder / "checksums.json"),
}


@pytest.mark.parametrize("told", DAMAGES)
def test_a_damaged_checkpoint_is_named_with_its_file(tmp_path: Path, two_steps: Path, told: str) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(two_steps, run_dir)
    folder = run_dir / "checkpoints" / "step_00000002"
    DAMAGES[told](folder)
    for argv in (tiny(run_dir, "--train-iters 4"), tiny(tmp_path / "other", f"--load {folder}")):
        ended = call_main(argv)
        assert_told(ended, told, str(folder), "remove that folder")
    assert not checkpoints_of(tmp_path / "other")


def test_many_ranks_tell_a_damaged_checkpoint_once_and_end(tmp_path: Path, two_steps: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(two_steps, run_dir)
    cut(run_dir / "checkpoints" / "step_00000002" / "__0_0.distcp")
    ended = run_job(tiny(run_dir, "--train-iters 4 --tp 2"), tmp_path)
    assert_told(ended, "__0_0.distcp has", "remove that folder")


def test_garbage_inside_a_tensor_file_is_told(tmp_path: Path, two_steps: Path) -> None:
    """As long as it should be, so that only reading it shows."""
    run_dir = tmp_path / "run"
    shutil.copytree(two_steps, run_dir)
    file = run_dir / "checkpoints" / "step_00000002" / "__0_0.distcp"
    file.write_bytes(b"\0" * file.stat().st_size)
    told = "step_00000002 is damaged: __0_0.distcp does not hold what was written"
    assert_told(call_main(tiny(run_dir, "--train-iters 4")), told)
