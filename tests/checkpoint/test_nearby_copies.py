"""Tests of copies nearby: runs that are killed between saves resume from memory of this host and the next."""

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hosts import killed_at, killed_in_step, train_on_hosts, without_room, without_room_for_fetched
from jobs import checkpoints_of, run_job, steps_of, tiny, train_on_ranks
from ranks import run_ranks
from sweeps import some_of

from megatronish.checkpoint.checksums import Checksums
from megatronish.checkpoint.folder import read_state
from megatronish.checkpoint.replicated.copies import FoundCopy, _moved, _remove, planned
from megatronish.checkpoint.replicated.folders import id_of
from megatronish.checkpoint.replicated.local import Hosts
from megatronish.checkpoint.replicated.write import Transfer
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.errors import RunError
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Mesh
from megatronish.train.hooks.nearby import CopyNearby
from megatronish.watch.record import RankRecord

INTERVAL = 3
STEPS = "--train-iters 8 --micro-batch-size 2"
COPIES = f"{STEPS} --save-replicated-interval {INTERVAL}"
# flags, ranks, ranks of a host
LAYOUTS = {
    "zero-1": ("--dp 2 --zero-stage 1", 2, 1),
    "zero-3": ("--dp 2 --zero-stage 3", 2, 1),
    "tp-pp": ("--tp 2 --pp 2", 4, 2),
}
KILLED_IN = 7


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of an undisturbed run in one of the layouts, which is made when it is asked for."""
    folder = tmp_path_factory.mktemp("whole")

    def made(name: str) -> Path:
        flags, world_size, _ = LAYOUTS[name]
        if not (folder / name).exists():
            train_on_ranks(tiny(folder / name, f"{STEPS} {flags}"), world_size=world_size)
        return folder / name

    return made


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run with ZeRO-1 on two hosts, with a checkpoint of step 2, leaves when all is killed in its step 7."""
    folder = tmp_path_factory.mktemp("killed")
    flags, _, per_host = LAYOUTS["zero-1"]
    argv = tiny(folder / "run", f"{COPIES} {flags} --save-interval 2")
    job = run_job(argv, folder, plant=killed_in_step, plant_args=(folder / "local", per_host, KILLED_IN))
    assert job.status == -signal.SIGKILL, job.errors
    for step in (4, 6):
        shutil.rmtree(folder / "run" / "checkpoints" / f"step_{step:08d}")
    return folder


def resumed_from(output: str) -> int:
    """Step of the copy or checkpoint that a run continued from."""
    found = re.search(r"continuing from \S+/step_(\d+)", output)
    assert found is not None, output
    return int(found[1])


def assert_nothing_is_left(folder: Path) -> None:
    """The run has ended: no copy, no name of one."""
    assert [path for path in (folder / "local").rglob("*") if not path.name.startswith("host_")] == []
    assert checkpoints_of(folder / "run")[-1].startswith("step_")
    assert ".copies" not in checkpoints_of(folder / "run")


@pytest.mark.parametrize("layout", some_of(LAYOUTS, ["tp-pp"]))
def test_a_lost_host_is_restored_from_its_neighbour(tmp_path: Path, whole: Callable[[str], Path], layout: str) -> None:
    flags, world_size, per_host = LAYOUTS[layout]
    argv = tiny(tmp_path / "run", f"{COPIES} {flags}")
    folder = tmp_path / "local"
    job = run_job(argv, tmp_path, plant=killed_in_step, plant_args=(folder, per_host, KILLED_IN))
    assert job.status == -signal.SIGKILL, job.errors
    assert checkpoints_of(tmp_path / "run") == [".copies"]
    shutil.rmtree(folder / ("host_0" if layout == "zero-3" else "host_1"))
    said = train_on_hosts(argv, folder, world_size=world_size, per_host=per_host)
    assert KILLED_IN - 1 - resumed_from(said.output) <= INTERVAL
    assert steps_of(tmp_path / "run") == steps_of(whole(layout))
    assert_nothing_is_left(tmp_path)


def copy_of(killed: Path, folder: Path) -> list[str]:
    """The killed run in a folder of its own; its command line there."""
    shutil.copytree(killed, folder, dirs_exist_ok=True)
    for copies in (folder / "local").glob("host_*/*"):  # of a folder that was copied they are not
        copies.rename(copies.with_name(id_of(folder / "run" / "checkpoints")))
    return tiny(folder / "run", f"{COPIES} --save-interval 100")


def test_fewer_ranks_continue_from_what_the_other_hosts_kept(
    tmp_path: Path, killed: Path, whole: Callable[[str], Path]
) -> None:
    argv = copy_of(killed, tmp_path)
    shutil.rmtree(tmp_path / "local" / "host_0")
    (tmp_path / "local" / "host_1").rename(tmp_path / "local" / "host_0")
    said = train_on_hosts(argv, tmp_path / "local", world_size=1, per_host=1)
    assert resumed_from(said.output) >= KILLED_IN - 1 - INTERVAL
    for step, seen in steps_of(whole("zero-1")).items():
        assert steps_of(tmp_path / "run")[step] == pytest.approx(seen, rel=1e-5)
    assert_nothing_is_left(tmp_path)


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def shards(folder: Path, name: str) -> list[Path]:
    """The files of a name in the folders of all hosts."""
    return sorted((folder / "local").glob(f"host_*/*/step_*/{name}"))


def test_a_damaged_copy_is_refused_and_the_next_one_used(
    tmp_path: Path, killed: Path, whole: Callable[[str], Path]
) -> None:
    flags = LAYOUTS["zero-1"][0].split()
    # One of the two files that hold rank 0's part: the other is used.
    argv = [*copy_of(killed, tmp_path / "one"), *flags]
    held = shards(tmp_path / "one", "__0_0.distcp")
    assert len(held) == 2
    flip_bit(held[0])
    said = train_on_hosts(argv, tmp_path / "one" / "local", world_size=2, per_host=1)
    assert f"{held[0].parent}: __0_0.distcp does not hold what was written (on the host of rank 0)" in said.errors
    assert resumed_from(said.output) > 2
    assert steps_of(tmp_path / "one" / "run") == steps_of(whole("zero-1"))
    # Both: the copy is not whole, and the checkpoint on the shared disk is the newest state. Nor is one without sums.
    for number, name in enumerate(("__0_0.distcp", "checksums.json")):
        argv = [*copy_of(killed, tmp_path / f"both_{number}"), *flags]
        for path in shards(tmp_path / f"both_{number}", name):
            flip_bit(path)
        said = train_on_hosts(argv, tmp_path / f"both_{number}" / "local", world_size=2, per_host=1)
        assert said.errors.count(f"{name} does not hold what was written") == 2
        assert resumed_from(said.output) == 2
        assert steps_of(tmp_path / f"both_{number}" / "run") == steps_of(whole("zero-1"))


def test_a_copy_of_another_model_is_refused_in_a_sentence(tmp_path: Path, killed: Path) -> None:
    argv = [*copy_of(killed, tmp_path), *LAYOUTS["zero-1"][0].split(), "--num-layers", "6"]
    with pytest.raises(Exception, match="holds another model"):
        train_on_hosts(argv, tmp_path / "local", world_size=2, per_host=1)


def with_times(checkpoint: Path, **times: float) -> None:
    """Give the state of a checkpoint other times."""
    sums, state = Checksums.read(checkpoint), json.loads((checkpoint / "state.json").read_text())
    text = json.dumps(state | times)
    (checkpoint / "state.json").write_text(text)
    sums.with_text("state.json", text).write()


def test_the_later_state_counts_whenever_it_was_published(tmp_path: Path, killed: Path) -> None:
    """A checkpoint whose upload was slow is there later than copies of the steps after it; not so one of a later state.

    The clock of the next start may be behind: its states come after those that it found all the same.
    """
    flags, ahead = LAYOUTS["zero-1"][0].split(), time.time() + 1e6
    argv = [*copy_of(killed, tmp_path), *flags, "--save-interval", "1", "--train-iters", "7"]
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000002"
    with_times(checkpoint, saved_at=ahead)
    shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}_other", dirs_exist_ok=True)
    assert resumed_from(train_on_hosts(argv, tmp_path / "local", world_size=2, per_host=1).output) > 2
    written = read_state(tmp_path / "run" / "checkpoints" / "step_00000007")
    assert written["saved_at"] >= written["taken_at"] > ahead
    argv = [*copy_of(tmp_path.parent / f"{tmp_path.name}_other", tmp_path / "later"), *flags]
    with_times(tmp_path / "later" / "run" / "checkpoints" / "step_00000002", taken_at=ahead, saved_at=ahead)
    assert resumed_from(train_on_hosts(argv, tmp_path / "later" / "local", world_size=2, per_host=1).output) == 2


def test_a_copied_run_resumes_from_its_own_checkpoint(tmp_path: Path, killed: Path) -> None:
    """And not from a copy nearby that the run has made from which it was copied, or that run from one of the other."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    argv = tiny(tmp_path / "run", f"{COPIES} {LAYOUTS['zero-1'][0]} --save-interval 100")
    assert resumed_from(train_on_hosts(argv, tmp_path / "local", world_size=2, per_host=1).output) == 2


def test_a_step_that_is_asked_for_comes_before_any_copy(tmp_path: Path, killed: Path) -> None:
    argv = [*copy_of(killed, tmp_path), *LAYOUTS["zero-1"][0].split(), "--ckpt-step", "2", "--train-iters", "3"]
    said = train_on_hosts(argv, tmp_path / "local", world_size=2, per_host=1)
    assert resumed_from(said.output) == 2


# moment of the kill -> event and path, and the steps that may be continued from. With N = 1 every step is copied.
MOMENTS = {
    "while-tensors-are-written": ("open", ".step_00000003.partial/__1_0.distcp", {2}),
    "while-the-neighbour-receives": ("open", "host_1/NAME/.step_00000003.partial/__0_0.distcp", {2}),
    "before-all-have-renamed": ("os.rename", "host_1/NAME/.step_00000003.partial", {2, 3}),
    "while-the-one-before-is-removed": ("shutil.rmtree", "step_00000002", {3}),
    "before-the-last-checkpoint": ("open", "checkpoints/.step_00000008.partial", {8}),
}


@pytest.mark.parametrize("moment", some_of(MOMENTS, ["before-all-have-renamed"]))
def test_a_copy_counts_whole_or_not_at_all(tmp_path: Path, whole: Callable[[str], Path], moment: str) -> None:
    event, text, expected = MOMENTS[moment]
    flags, _, per_host = LAYOUTS["zero-1"]
    argv = tiny(tmp_path / "run", f"{STEPS} --save-replicated-interval 1 {flags}")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    text = text.replace("NAME", id_of(tmp_path / "run" / "checkpoints"))
    job = run_job(argv, tmp_path, plant=killed_at, plant_args=(tmp_path / "local", per_host, event, text))
    assert job.status == -signal.SIGKILL, job.errors
    said = train_on_hosts(argv, tmp_path / "local", world_size=2, per_host=1)
    assert said.errors == ""
    assert resumed_from(said.output) in expected
    assert steps_of(tmp_path / "run") == steps_of(whole("zero-1"))
    assert_nothing_is_left(tmp_path)


def test_a_copy_without_room_is_a_sentence_and_training_continues(tmp_path: Path, whole: Callable[[str], Path]) -> None:
    flags, _, per_host = LAYOUTS["zero-1"]
    argv = tiny(tmp_path / "run", f"{COPIES} {flags}")
    job = run_job(argv, tmp_path, plant=without_room, plant_args=(tmp_path / "local", per_host, 3))
    assert job.status == 0, job.errors
    (line,) = [each for each in job.errors.splitlines() if not each.startswith("TensorBoard is off")]
    assert re.fullmatch(
        r"the state of step \d+ was not copied to \S+: No space left on device\. The copy before it stays, training "
        r"continues, and it is tried again soon",
        line,
    )
    assert re.search(r"copied \d+ times to \S+; training paused for", job.output)
    assert steps_of(tmp_path / "run") == steps_of(whole("zero-1"))
    assert_nothing_is_left(tmp_path)


def copying(write: Callable[[int], None], *, interval: int) -> CopyNearby:
    """The hook, with `write` in the place of the writing of a step's copy, and without a rank."""
    copies = SimpleNamespace(write=lambda step, _tensors, _state: write(step))
    mesh = SimpleNamespace(record=RankRecord(), is_main=True)
    save = SimpleNamespace(mesh=mesh, run_state=lambda _trainer: {})
    return CopyNearby(copies, interval=interval, save=save, check=None)  # type: ignore[arg-type]


def test_a_copy_that_fails_is_tried_again_ever_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[int] = []

    def write(step: int) -> None:
        tried.append(step)
        if step < 20:
            raise RunError("full")

    monkeypatch.setattr("megatronish.train.hooks.nearby.tensors_of", lambda *_, **__: {})
    hook, trainer = copying(write, interval=8), SimpleNamespace(engine=None, progress=SimpleNamespace(step=0))
    hook.start(trainer)
    for step in range(1, 31):
        trainer.progress.step = step
        hook.after_step(trainer, SimpleNamespace(step=step))
        if hook._pending is not None:
            wait([hook._pending.future])
    # Waited for at the step of which it had to be whole, and from then on in the step in which it starts.
    assert tried == [7, 9, 11, 15, 23, 29]
    # Not a line for each: for the first, the second, the fourth, and so on.
    assert capsys.readouterr().err.splitlines() == [
        "full. The copy before it stays, training continues, and it is tried again soon",
        *(
            f"full. {number} copies in a row have failed, and none is newer than step 0: make room there, or start "
            "again with another --local-save"
            for number in (2, 4)
        ),
        "the copy nearby of step 23 is whole again, after 4 that failed",
    ]


@pytest.mark.long
def test_a_run_that_fails_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has called train_rank may go on, and a thread would write and communicate beside it."""
    done = []

    def write(_step: int) -> None:
        time.sleep(0.5)
        done.append(True)

    monkeypatch.setattr("megatronish.train.hooks.nearby.tensors_of", lambda *_, **__: {})
    trainer = SimpleNamespace(engine=None, progress=SimpleNamespace(step=1))
    for error, waits in ((KeyboardInterrupt(), False), (RuntimeError(), True)):
        hook = copying(write, interval=8)
        hook._begin(trainer)
        hook.on_error(trainer, error)
        assert bool(done) is waits


@pytest.mark.parametrize("has_checkpoint", some_of([True, False], [True]))
def test_a_host_without_room_for_the_files_of_a_lost_one_resumes_from_the_checkpoint(
    tmp_path: Path, killed: Path, whole: Callable[[str], Path], has_checkpoint: bool
) -> None:
    """With a warning; without a checkpoint it is a sentence, for the state would be lost by a start from nothing."""
    argv = [*copy_of(killed, tmp_path), *LAYOUTS["zero-1"][0].split()]
    shutil.rmtree(tmp_path / "local" / "host_0")
    if not has_checkpoint:
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000002")
    held = shards(tmp_path, "__*.distcp")
    job = run_job(argv, tmp_path, plant=without_room_for_fetched, plant_args=(tmp_path / "local", 1, 0))
    why = r"the copy nearby \S+/step_\d+ cannot be put together: No space left on device"
    if has_checkpoint:
        assert job.status == 0, job.errors
        assert len(re.findall(rf"{why}. The run resumes from \S+/step_00000002, an older state\n", job.errors)) == 1
        assert resumed_from(job.output) == 2
        assert steps_of(tmp_path / "run") == steps_of(whole("zero-1"))
        assert_nothing_is_left(tmp_path)
    else:
        assert job.status == 2
        assert re.search(rf"{why}; the run has no checkpoint: make room on the host that lacks it, or", job.errors)
        assert shards(tmp_path, "__*.distcp") == held


def test_hosts_get_the_files_that_they_read_and_each_file_has_a_second_host() -> None:
    hosts = Hosts.of("abc", rank=1)
    names = {"__0_0.distcp": (0, 1), "__1_0.distcp": (1,), "__2_0.distcp": (1,)}
    copy = FoundCopy("key", "step_00000001", 0.0, names)
    transfers = planned(hosts, copy, [["__0_0.distcp"], ["__1_0.distcp"], ["__2_0.distcp"]], dict.fromkeys(names, 5))
    assert transfers == ([Transfer("__2_0.distcp", 5, 1, 2)], [Transfer("__1_0.distcp", 5, 1, 2)])


def _move_round(place: Place, folder: Path) -> list[Transfer]:
    """Each rank sends its file to the next one; the transfers that failed."""
    axis = Mesh.of(ParallelConfig(data_parallel_size=3), place, device=torch.device("cpu"), backend="gloo").world
    transfers = [Transfer(f"__{rank}_0.distcp", 10**6, rank, (rank + 1) % 3) for rank in range(3)]
    own = folder / f"host_{place.rank}"
    failed = _moved(transfers, own, axis)
    _remove(failed, own, axis)
    return list(failed)


def test_a_second_copy_that_fails_leaves_those_of_other_hosts(tmp_path: Path) -> None:
    """Here one host cannot write, and another one has lost what it should send."""
    for rank in range(3):
        (tmp_path / f"host_{rank}").mkdir()
        (tmp_path / f"host_{rank}" / f"__{rank}_0.distcp").write_bytes(bytes([rank]) * 10**6)
    (tmp_path / "host_1" / "__0_0.distcp").mkdir()
    failed = [Transfer("__0_0.distcp", 10**6, 0, 1)]
    assert run_ranks(3, _move_round, tmp_path) == [failed] * 3
    assert (tmp_path / "host_2" / "__1_0.distcp").read_bytes() == b"\1" * 10**6
    assert (tmp_path / "host_0" / "__2_0.distcp").read_bytes() == b"\2" * 10**6
    (tmp_path / "host_1" / "__1_0.distcp").unlink()
    failed.append(Transfer("__1_0.distcp", 10**6, 1, 2))
    assert [sorted(of_rank) for of_rank in run_ranks(3, _move_round, tmp_path)] == [failed] * 3
    assert not (tmp_path / "host_2" / "__1_0.distcp").exists()


def test_the_neighbour_of_a_rank_is_on_the_next_host() -> None:
    assert [Hosts.of("aabbcc", rank=0).keeper_of(rank) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    assert [Hosts.of("aaabb", rank=0).keeper_of(rank) for rank in range(5)] == [3, 4, 3, 0, 1]
    assert Hosts.of("aa", rank=1).keeper_of(1) is None
    assert Hosts.of("abab", rank=3).own == (1, 3)
