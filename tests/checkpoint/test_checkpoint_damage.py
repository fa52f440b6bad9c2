"""Tests of damaged checkpoints: the error names the damaged file and offers an older, complete checkpoint."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import call_main, checkpoints_of, run_job, steps_of, tiny, train_on_ranks
from ranks import RankError, run_ranks
from saved_runs import alone, read_whole, save_value, saved_value
from sweeps import some_of

from megatronish.checkpoint.checksums import Checksums, DamagedError, SummingStream
from megatronish.checkpoint.folder import read_state
from megatronish.checkpoint.save import SaveError, save_checkpoint
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.core.errors import UserError
from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.parallel.all_or_none import all_or_none
from megatronish.parallel.mesh import Mesh, leave

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "state.json")


def flip(path: Path, offset: int, bits: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


def cut(path: Path, left: float = 0.5) -> None:
    os.truncate(path, int(path.stat().st_size * left))


def save_on_two(place: Place, folder: Path, step: int) -> None:
    """A checkpoint of two files."""
    mesh = Mesh.start(Layout(dp=2), rank=place.rank, init_method=place.rendezvous)
    torch.manual_seed(step)
    tensors = {
        f"model.{name}": GlobalTensor(each.shape, each.pieces, each.local, writes=number % 2 == place.rank)
        for number, name in enumerate("abcd")
        for each in [alone(torch.randn(7, 5))]
    }
    state = {"large": list(range(500))}
    save_checkpoint(folder, step=step, tensors=tensors, state=state, mesh=mesh)
    leave()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_ranks(2, save_on_two, folder, 3)
    return folder / "step_00000003"


def read_all(folder: Path) -> None:
    """As a run would, and as `verify` does; both say the same."""
    said = []
    for read in (lambda: (read_state(folder), read_whole(folder)), lambda: Checksums.read(folder).verify()):
        try:
            read()
        except DamagedError as error:
            said.append(error)
    if said:
        assert len(said) == 2, said
        raise said[0]


def test_every_file_of_a_checkpoint_is_summed(checkpoint: Path) -> None:
    assert sorted(path.name for path in checkpoint.iterdir()) == list(FILES)
    sums = Checksums.read(checkpoint)
    assert sorted([*sums.files, "checksums.json"]) == list(FILES)
    assert [len(sums.files[f"__{rank}_0.distcp"]) for rank in (0, 1)] == [2, 2]  # a span for each tensor
    read_all(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_named(tmp_path: Path, checkpoint: Path, name: str) -> None:
    numbers = random.Random(name)
    size = (checkpoint / name).stat().st_size
    damaged = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, damaged)
    for offset in {0, size - 1, *numbers.sample(range(size), 40)}:
        bits = numbers.randrange(1, 256)
        flip(damaged / name, offset, bits)
        with pytest.raises(DamagedError, match=f"{damaged} is damaged: {name} does not hold what was written"):
            read_all(damaged)
        flip(damaged / name, offset, bits)
    read_all(damaged)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_truncated_file_is_named(tmp_path: Path, checkpoint: Path, name: str) -> None:
    shorter = r"(has \d+ bytes instead of \d+|does not hold what was written)"
    damages: list[tuple[str, Callable[[Path], object]]] = [
        ("is missing", Path.unlink),
        (shorter, cut),
        (shorter, lambda path: cut(path, 0)),
        (shorter, lambda path: path.write_bytes(path.read_bytes() + b"\n")),
        ("is no file", lambda path: (path.unlink(), path.mkdir())),
        ("is no file", lambda path: (path.unlink(), os.mkfifo(path))),
    ]
    for number, (told, damage) in enumerate(damages):
        damaged = tmp_path / str(number) / checkpoint.name
        shutil.copytree(checkpoint, damaged)
        damage(damaged / name)
        with pytest.raises(DamagedError, match=f"is damaged: {name} {told}"):
            read_all(damaged)


def test_files_of_two_checkpoints_do_not_make_one(tmp_path: Path, checkpoint: Path) -> None:
    """They have the same lengths, and each is whole by itself."""
    run_ranks(2, save_on_two, tmp_path, 4)
    mixed = tmp_path / "step_00000004"
    shutil.copy(checkpoint / "__1_0.distcp", mixed)
    with pytest.raises(DamagedError, match=r"__1_0.distcp does not hold what was written"):
        read_all(mixed)


def test_sums_of_a_stream_are_those_of_its_spans(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file, SummingStream(file) as stream:
        places = []
        for text in (b"one", b"", b"three" * 1000):
            places.append(stream.tell())
            stream.write(text[:2])
            stream.write(memoryview(text[2:]))
    assert places == [0, 3, 3] and [span.length for span in stream.spans] == [3, 5000]
    sums = Checksums(tmp_path, {"a": stream.spans})
    sums.verify()
    assert sums.read_file("a") == b"one" + b"three" * 1000
    with sums.opened("a") as opened:
        assert (opened.read(3, 5000), opened.read(0, 3)) == (b"three" * 1000, b"one")
        assert opened.stream(3, 5000).read() == b"three" * 1000
        opened.verify(3, 5000)
        for use in (opened.read, opened.verify):
            with pytest.raises(DamagedError, match="does not know the 2 bytes at 3 of a"):
                use(3, 2)


def save_where_the_other_does_not_look(place: Place, folder: Path) -> str:
    """As where each node has a disk of its own under the same name; what the save says."""
    try:
        save_on_two(place, folder / str(place.rank), 3)
    except SaveError as error:
        leave()
        return str(error)
    raise AssertionError


def test_ranks_that_do_not_see_one_folder_publish_nothing(tmp_path: Path) -> None:
    for rank, told in enumerate(run_ranks(2, save_where_the_other_does_not_look, tmp_path)):
        begins = f"the checkpoint of step 3 could not be written to {tmp_path / str(rank)}: __1_0.distcp is missing"
        assert told.startswith(begins) and "; let all ranks see one folder and start again" in told
        assert list((tmp_path / str(rank)).glob("[!.]*")) == []
    assert list((tmp_path / "0").iterdir()) == []


def fail_on_one(place: Place, kind: type[Exception]) -> str:
    """What each rank raises when one fails."""
    mesh = Mesh.start(Layout(dp=2), rank=place.rank, init_method=place.rendezvous)

    def work() -> None:
        if place.rank == 1:
            raise kind("no way")

    try:
        all_or_none(mesh.checkpoint_axis, work)
    except (RuntimeError, kind) as error:
        leave()
        return f"{type(error).__name__}: {error}"
    raise AssertionError


def test_what_fails_on_one_rank_fails_on_all() -> None:
    assert run_ranks(2, fail_on_one, UserError) == ["UserError: no way"] * 2
    other, own = run_ranks(2, fail_on_one, ValueError)
    assert other.startswith("RuntimeError: rank 1: Traceback") and "ValueError: no way" in other
    assert own == "ValueError: no way"


def save_and_watch(place: Place, folder: Path) -> dict[str, int]:
    """The files that a rank makes sure are on the disk, and how much of them."""
    synced, sync = {}, os.fsync

    def watched(descriptor: int) -> None:
        synced[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] = os.fstat(descriptor).st_size
        sync(descriptor)

    os.fsync = watched  # type: ignore[assignment]
    try:
        save_on_two(place, folder, 3)
    finally:
        os.fsync = sync
    return synced


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux, which tells the names of open files")
def test_all_of_every_file_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path: Path) -> None:
    main, other = run_ranks(2, save_and_watch, tmp_path)
    synced = {name.removesuffix(".new").removesuffix(".tmp"): size for name, size in (main | other).items()}
    assert "__0_0.distcp" in main and "__1_0.distcp" in other
    for path in (tmp_path / "step_00000003").iterdir():
        assert synced[path.name] == path.stat().st_size, path


# What a run says of it


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("six") / "run"
    train_on_ranks(tiny(run_dir, "--save-interval 2"))
    return run_dir


def step(run_dir: Path, number: int) -> Path:
    return run_dir / "checkpoints" / f"step_{number:08d}"


@pytest.mark.parametrize("name", some_of(["__0_0.distcp", ".metadata", "state.json", "checksums.json"], ["state.json"]))
def test_the_newest_whole_checkpoint_before_a_damaged_one_is_offered(
    tmp_path: Path, six_steps: Path, name: str
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(six_steps, run_dir)
    flip(step(run_dir, 6) / name, (step(run_dir, 6) / name).stat().st_size // 2)
    argv = tiny(run_dir, "--train-iters 7 --save-interval 2")
    offer = "the newest whole checkpoint before it is step_00000004; load it with --ckpt-step 4, or remove that folder"
    ended = call_main(argv)
    assert ended.status == 2 and "Traceback" not in ended.errors
    assert f"{step(run_dir, 6)} is damaged: {name} does not hold what was written; {offer}" in ended.errors
    # One that is damaged itself is not offered, wherever its damage is.
    flip(step(run_dir, 4) / "__0_0.distcp", step(run_dir, 4).joinpath("__0_0.distcp").stat().st_size - 1)
    assert "--ckpt-step 2" in call_main(argv).errors
    # Both ways lead to where they should.
    other = tmp_path / "other"
    shutil.copytree(run_dir, other)
    assert call_main([*tiny(other, "--train-iters 7"), "--ckpt-step", "2"]).status == 0
    for number in (4, 6):
        shutil.rmtree(step(run_dir, number))
    assert call_main(argv).status == 0
    assert steps_of(other) == steps_of(run_dir)
    assert checkpoints_of(run_dir)[-1] == "step_00000007"


def test_what_was_saved_after_a_damaged_one_is_not_offered(tmp_path: Path, six_steps: Path) -> None:
    """Whoever asks for step 4 wants what was before step 5."""
    run_dir = tmp_path / "run"
    shutil.copytree(six_steps, run_dir)
    flip(step(run_dir, 4) / "__0_0.distcp", 300)
    ended = call_main(tiny(run_dir, "--ckpt-step 4"))
    assert f"{step(run_dir, 4)} is damaged" in ended.errors and "load it with --ckpt-step 2" in ended.errors


def test_where_no_checkpoint_is_whole_that_is_said(tmp_path: Path, six_steps: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(six_steps, run_dir)
    for number in (2, 4, 6):
        (step(run_dir, number) / "__0_0.distcp").unlink()
    told = f"{step(run_dir, 6)} is damaged: __0_0.distcp is missing; no earlier one is whole: remove that folder"
    assert told in call_main(tiny(run_dir)).errors
    # What is loaded from elsewhere is told of, too, and nothing is written where the run would live.
    assert "no earlier one is whole" in call_main(tiny(tmp_path / "new", f"--load {run_dir} --ckpt-step 2")).errors
    assert checkpoints_of(tmp_path / "new") == []


@pytest.mark.parametrize("name", some_of(["__1_0.distcp", "state.json"], ["__1_0.distcp"]))
def test_many_ranks_tell_it_once(tmp_path: Path, name: str) -> None:
    """Of one rank's file as of everybody's: all learn of it, and the main rank speaks."""
    run_dir = tmp_path / "run"
    argv = tiny(run_dir, "--tp 2 --save-interval 1 --train-iters 2")
    train_on_ranks(argv, world_size=2)
    flip(step(run_dir, 2) / name, 300)
    ended = run_job([*argv, "--train-iters", "2"], tmp_path)
    assert ended.status == 2
    assert ended.errors.count("is damaged") == 1 and "--ckpt-step 1" in ended.errors, ended.errors
    with pytest.raises(RankError, match=f"{name} does not hold what was written; the newest .* --ckpt-step 1"):
        train_on_ranks(argv, world_size=2)


def test_a_damaged_old_checkpoint_is_in_nobodys_way(tmp_path: Path, six_steps: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(six_steps, run_dir)
    (step(run_dir, 2) / "state.json").write_text("{")
    os.utime(step(run_dir, 2) / "state.json", (0, 0))
    (step(run_dir, 4) / "checksums.json").unlink()
    train_on_ranks(tiny(run_dir, "--train-iters 7"))
    assert steps_of(run_dir)[7]


def test_the_newest_is_the_newest_though_a_clock_went_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_value(tmp_path, 1.0)
    (tmp_path / "step_00000004").rename(tmp_path / "step_00000009")
    monkeypatch.setattr("time.time", lambda: 1000.0)
    save_value(tmp_path, 2.0)
    assert saved_value(tmp_path) == 2.0
