"""Tests of the checkpoints folder: the checkpoint that a run resumes from, and which ones are kept."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from jobs import checkpoints_of, run_job, state_of, steps_of, tiny, train_on_ranks
from sweeps import further

from megatronish.checkpoint.folder import remove_old
from megatronish.checkpoint.storage import CheckpointReader
from megatronish.checkpoint.tensors import stored_shapes
from megatronish.config.read import read_config
from megatronish.core.errors import UserError


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process that saved at steps 2, 4 and 6."""
    run_dir = tmp_path_factory.mktemp("six") / "run"
    train_on_ranks(tiny(run_dir, "--save-interval 2"))
    return run_dir


@pytest.mark.parametrize("place", ["", further("checkpoints"), "checkpoints/step_00000004"])
def test_load_takes_a_run_folder_its_checkpoints_or_one_step(tmp_path: Path, six_steps: Path, place: str) -> None:
    step = "" if place.endswith("4") else "--ckpt-step 4"
    train_on_ranks(tiny(tmp_path / "run", f"--load {six_steps / place} {step}"))
    before = steps_of(six_steps)
    assert steps_of(tmp_path / "run") == {5: before[5], 6: before[6]}


def test_ckpt_step_goes_back_and_what_comes_after_is_written_anew(tmp_path: Path, six_steps: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(six_steps, run_dir)
    output = train_on_ranks(tiny(run_dir, "--ckpt-step 2 --save-interval 2 --exit-interval 4"))
    assert "continuing from" in output and "step_00000002" in output
    assert checkpoints_of(run_dir) == ["latest", "step_00000002", "step_00000004", "step_00000006"]
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_00000004\n"
    # The newest is the one saved last, not the farthest.
    assert "step_00000004" in train_on_ranks(tiny(run_dir))
    assert steps_of(run_dir) == steps_of(six_steps)


def test_the_runs_own_checkpoints_come_before_those_it_was_begun_from(tmp_path: Path, six_steps: Path) -> None:
    """A launch script that is killed and started again goes on."""
    for finetune in ("--finetune", ""):
        run_dir = tmp_path / f"run{finetune}"
        for part in range(2):
            load = f"--load {six_steps} --ckpt-step 4 {finetune}"
            output = train_on_ranks(tiny(run_dir, f"{load} --train-iters 8 --exit-interval 2"))
            assert (str(six_steps) in output) == (part == 0), output
        assert state_of(run_dir, 4 if finetune else 8)["step"] == (4 if finetune else 8)


def test_finetuning_takes_weights_alone_of_whatever_run_of_the_model(tmp_path: Path, six_steps: Path) -> None:
    output = train_on_ranks(tiny(tmp_path / "run", f"--load {six_steps} --finetune --seed 5 --train-iters 1"))
    assert f"took the weights of {six_steps}" in output
    state = state_of(tmp_path / "run", 1)
    assert (state["step"], state["consumed_samples"], state["optimizer_steps"]) == (1, 4, 1)
    train_on_ranks(tiny(tmp_path / "new", "--seed 5 --train-iters 1"))
    assert steps_of(tmp_path / "run")[1].loss < steps_of(tmp_path / "new")[1].loss


def test_an_optimizer_can_be_left_out(tmp_path: Path, six_steps: Path) -> None:
    run_dir = tmp_path / "run"
    train_on_ranks(tiny(run_dir, "--no-save-optim --exit-interval 3"))
    saved = run_dir / "checkpoints" / "step_00000003"
    assert not any(name.startswith("optimizer.") for name in stored_shapes(CheckpointReader(saved)))
    refused = run_job(tiny(run_dir), tmp_path)
    assert refused.status == 2
    assert "--no-load-optim" in refused.errors and "Traceback" not in refused.errors
    train_on_ranks(tiny(run_dir, "--no-load-optim"))
    assert state_of(run_dir, 6)["optimizer_steps"] == 3
    assert steps_of(run_dir)[4] == steps_of(six_steps)[4]  # the weights are the same,
    assert steps_of(run_dir)[6] != steps_of(six_steps)[6]  # momentum is not


# What stays


def kept(run_dir: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return [int(name.removeprefix("step_")) for name in checkpoints_of(run_dir) if name.startswith("step_")]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        further(("", [1, 2, 3, 4, 5, 6, 7])),
        further(("--keep-last 2", [6, 7])),
        further(("--keep-last 1", [7])),
        further(("--keep-last 100", [1, 2, 3, 4, 5, 6, 7])),
        ("--keep-every 3", [3, 6, 7]),
        further(("--save-retain-interval 3", [3, 6, 7])),
        ("--keep-last 2 --keep-every 2", [2, 4, 6, 7]),
        ("--keep-last 2 --async-save", [6, 7]),
    ],
)
def test_the_newest_and_every_so_many_steps_stay(tmp_path: Path, flags: str, steps: list[int]) -> None:
    train_on_ranks(tiny(tmp_path / "run", f"--train-iters 7 --save-interval 1 {flags}"))
    assert kept(tmp_path / "run") == steps
    assert checkpoints_of(tmp_path / "run") == ["latest", *(f"step_{step:08d}" for step in steps)]


def test_newest_is_what_was_saved_last(tmp_path: Path, six_steps: Path) -> None:
    """After a run has gone back, steps beyond are the older ones."""
    run_dir = tmp_path / "run"
    shutil.copytree(six_steps, run_dir)
    train_on_ranks(tiny(run_dir, "--ckpt-step 2 --save-interval 1 --exit-interval 3 --keep-last 2"))
    assert kept(run_dir) == [3, 6]
    train_on_ranks(tiny(run_dir, "--save-interval 1 --exit-interval 4 --keep-last 2"))
    assert kept(run_dir) == [3, 4]


def test_nothing_is_removed_that_a_run_did_not_write(tmp_path: Path) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    train_on_ranks(tiny(run_dir, "--train-iters 4 --save-interval 1"))
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "step_00000002").rename(elsewhere)
    (checkpoints / "step_00000002").symlink_to(elsewhere)
    (checkpoints / "step_00000003" / "checksums.json").unlink()  # it may be anything
    (checkpoints / "step_1").mkdir()
    os.utime(checkpoints / "step_1", (0, 0))
    (checkpoints / "step_00000000").write_text("mine")
    (checkpoints / "best").mkdir()
    train_on_ranks(tiny(run_dir, "--train-iters 6 --save-interval 1 --keep-last 1"))
    left = ["best", "latest", "step_00000000", "step_00000002", "step_00000003", "step_00000006", "step_1"]
    assert checkpoints_of(run_dir) == left
    assert len(list(elsewhere.iterdir())) == 4


def test_what_cannot_be_removed_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ended = run_job(tiny(run_dir, "--train-iters 4 --save-interval 1 --keep-last 2"), tmp_path, plant=fail_to_remove)
    assert ended.status == 0 and "Traceback" not in ended.errors, ended
    old = run_dir / "checkpoints" / "step_00000001"
    assert f"the old checkpoint {old} could not be removed: Operation not permitted\n" in ended.errors
    assert kept(run_dir) == [3, 4]


@pytest.mark.parametrize("flags", [further(""), "--async-save --tp 2"])
def test_what_cannot_be_looked_at_is_told_and_all_ranks_go_on(tmp_path: Path, flags: str) -> None:
    """It is one rank that looks, and what fails for it alone must not be in the others' way."""
    run_dir = tmp_path / "run"
    argv = tiny(run_dir, f"--train-iters 3 --save-interval 1 --keep-last 1 {flags}")
    ended = run_job(argv, tmp_path, plant=fail_to_look)
    assert ended.status == 0 and "Traceback" not in ended.errors, ended
    old = run_dir / "checkpoints" / "step_00000001"
    assert f"the old checkpoint {old} could not be removed: Input/output error\n" in ended.errors
    assert kept(run_dir) == [1, 3]


def fail_to_look() -> None:
    """Planted in a job: the disk does not tell what the sums of the first checkpoint are."""
    is_file = Path.is_file

    def is_file_or_fail(path: Path) -> bool:
        if str(path).endswith("step_00000001/checksums.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return is_file(path)

    Path.is_file = is_file_or_fail  # type: ignore[method-assign]


def test_a_folder_that_cannot_be_looked_into_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_age(_: Path) -> list[Path]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("megatronish.checkpoint.folder.by_age", by_age)
    told = [f"old checkpoints in {tmp_path} could not be removed: Permission denied"]
    assert remove_old(tmp_path, keep_last=1, keep_every=None) == told


def fail_to_remove() -> None:
    """Planted in a job: the system does not let it remove the first folder that it tries to."""
    remove, left = shutil.rmtree, [1]

    def rmtree(path: Path, **options: object) -> None:
        if path.name.endswith(".removed") and left:
            left.clear()
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        remove(path, **options)

    shutil.rmtree = rmtree  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--keep-every 3 --save-interval 2",
            "keep_every=3 must be divisible by save_interval=2, .* use --keep-every 4",
        ),
        ("--keep-every 3", "keep_every=3 keeps none .* add --save-interval"),
        ("--keep-last 0", "keep_last=0 must be at least 1"),
        ("--non-persistent-save-interval 5", "use --save-replicated-interval N, with --local-save DIR if need be"),
    ],
)
def test_what_cannot_be_kept_is_refused(tmp_path: Path, flags: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        read_config(tiny(tmp_path / "run", flags))
