"""Tests of checkpoints on object storage: the promises of those on a disk, by files, in memory, on a server of S3."""

import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from jobs import call_main, run_job, steps_of, tiny, train_on_ranks
from object_stores import Store, names_in
from planted_kills import kill_after
from saved_runs import read_whole, save_value, saved_value

from megatronish.checkpoint.checksums import Checksums, DamagedError
from megatronish.checkpoint.folder import new_attempt, remove_incomplete, remove_old, saved_at, steps_in, whole_attempts
from megatronish.checkpoint.save import SaveError
from megatronish.core.errors import RunError, UserError
from megatronish.core.remote import RemotePath, is_outage, location, objects_below, refuse_unwritable
from megatronish.train.folder import RunMirror


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return Store((tmp_path / "store").as_uri(), {})
    server = request.getfixturevalue("s3")
    return Store(f"{server.url}/{tmp_path.name}/run", server.environ)


def reach(environ: dict[str, str], seconds: float | None = None, rank: int | None = None) -> None:
    """Planted in a job: the store's variables; then SIGKILL to all, or to a rank, so long after its first step."""
    os.environ.update(environ)
    if seconds is not None:
        kill_after(seconds, rank)


def test_a_run_resumes_from_a_store_in_another_layout_and_on_another_machine(tmp_path: Path, store: Store) -> None:
    flags = f"--micro-batch-size 2 --save {store.url} --save-interval 2 --keep-last 2"

    def train(folder: str, more: str) -> str:
        ended = run_job(tiny(tmp_path / folder, f"{flags} {more}"), tmp_path, plant=reach, plant_args=(store.environ,))
        assert ended.status == 0, ended
        return ended.output

    train("a", "--exit-interval 4 --tp 2")
    # Nothing of the first machine is there but the store.
    assert not (tmp_path / "a" / "checkpoints").exists()
    shutil.rmtree(tmp_path / "a")
    assert f"continuing from {store.url}/step_00000004" in train("b", "--dp 2 --zero-stage 1 --async-save")
    assert store.names() == ["latest", "step_00000004", "step_00000006"]
    (copied,) = [path for step, path in steps_in(RemotePath(store.url)).items() if step == 6]
    assert RemotePath(f"{store.url}/latest").read_text() == f"{copied.name}\n"
    train_on_ranks(tiny(tmp_path / "whole", "--micro-batch-size 2"))
    whole = steps_of(tmp_path / "whole")
    for step, seen in steps_of(tmp_path / "b").items():
        assert seen == pytest.approx(whole[step], rel=1e-5)
    # Another run takes it by --load, and a checkpoint that was copied to a disk is one there.
    copied.download(tmp_path / "copied" / "step_00000006")
    unnumbered = f"{store.url}/step_00000006"
    for load in (str(copied), unnumbered, str(tmp_path / "copied"), f"{store.url} --ckpt-step 6 --use-checkpoint-args"):
        argv = tiny(tmp_path / "other", f"--load {load} --dry-run")
        assert call_main(argv, **store.environ).status == 0
    ended = call_main(tiny(tmp_path / "other", f"--load {store.url} --train-iters 7"), **store.environ)
    assert f"continuing from {store.url}/step_00000006" in ended.output, ended
    assert list(steps_of(tmp_path / "other")) == [7]


def test_two_ranks_killed_at_random_moments_of_uploads_end_as_if_nothing_had_been(tmp_path: Path, store: Store) -> None:
    """Something is being written to the store all the time."""
    numbers = random.Random(7)
    flags = "--num-layers 1 --train-iters 10 --micro-batch-size 2 --dp 2 --zero-stage 1"
    argv = tiny(tmp_path / "run", f"{flags} --save {store.url} --save-interval 1 --async-save --keep-last 2")
    kills = 0
    for rank in (None, 1, None, 0, 1, None) if store.environ else (None, 1):
        ended = run_job(argv, tmp_path, plant=reach, plant_args=(store.environ, numbers.uniform(0.2, 0.8), rank))
        if ended.status == 0:
            break
        assert ended.status == (-signal.SIGKILL if rank is None else 1), ended
        kills += 1
        for checkpoint in whole_attempts(RemotePath(store.url)).values():
            Checksums.read(checkpoint).verify()  # what says that it is whole is whole
    assert kills >= 1
    ended = run_job(argv, tmp_path, plant=reach, plant_args=(store.environ,))
    assert ended.status == 0, ended
    train_on_ranks(tiny(tmp_path / "whole", flags), world_size=2)
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole")
    assert store.names() == ["latest", "step_00000009", "step_00000010"]


# ---- what a store holds at any moment


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RemotePath]:
    """A folder of objects in memory."""
    folder = RemotePath(f"memory://{tmp_path.name}/checkpoints")
    yield folder
    folder.remove_tree()


def test_a_checkpoint_without_its_last_object_is_none(folder: RemotePath) -> None:
    for step in (2, 4):
        save_value(folder, float(step), step=step)
    cut = steps_in(folder)[4]
    (cut / "state.json").unlink()
    assert list(steps_in(folder)) == [2] and saved_value(folder) == 2.0
    # The next save removes it, and does not write where a process that was taken for dead may still write.
    save_value(folder, 5.0)
    assert names_in(folder) == ["latest", "step_00000002", "step_00000004"] and not cut.exists()
    assert steps_in(folder)[4].name > cut.name and saved_value(folder) == 5.0


def test_a_step_is_replaced_by_a_later_attempt_and_never_overwritten(folder: RemotePath) -> None:
    for value in (1.0, 2.0, 3.0):
        before = steps_in(folder)
        save_value(folder, value)
        assert steps_in(folder)[4] not in before.values() and saved_value(folder) == value
    # A name is given once, also where its first object is not there yet; whatever the clock says, the last is highest.
    first = new_attempt(folder, 4)
    assert first != new_attempt(folder, 4) and not first.exists()
    later = folder / "step_00000004.99999999999999999999"
    with (later / "state.json").open("wb") as file:
        file.write(b"{}")
    assert new_attempt(folder, 4).name == "step_00000004.100000000000000000000"
    later.remove_tree()


def test_of_two_whole_attempts_the_later_counts(folder: RemotePath) -> None:
    """A kill after the last object, before the earlier attempt is removed."""
    save_value(folder, 1.0)
    earlier = {name: (folder / name).read_bytes() for name in folder.sizes()}
    save_value(folder, 2.0)
    whole = steps_in(folder)[4]
    for name, content in earlier.items():
        with (folder / name).open("wb") as file:
            file.write(content)
    assert saved_value(folder) == 2.0
    remove_incomplete(folder)
    assert names_in(folder) == ["latest", "step_00000004"] and steps_in(folder) == {4: whole}


def test_the_newest_is_the_one_saved_last_and_old_ones_are_removed(folder: RemotePath) -> None:
    for step in (2, 8, 4, 6):
        save_value(folder, float(step), step=step)
    assert saved_value(folder) == 6.0
    assert remove_old(folder, keep_last=2, keep_every=8) == []
    assert list(steps_in(folder)) == [4, 6, 8]
    assert remove_old(folder, keep_last=1, keep_every=None) == []
    assert names_in(folder) == ["latest", "step_00000006"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json", "checksums.json"])
def test_a_changed_byte_is_found(folder: RemotePath, name: str) -> None:
    save_value(folder, 1.0)
    checkpoint = steps_in(folder)[4]
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 1
    with (checkpoint / name).open("wb") as file:
        file.write(content)
    with pytest.raises(DamagedError, match=re.escape(f"{checkpoint} is damaged: {name}")):
        Checksums.read(checkpoint).verify()
    (checkpoint / name).unlink()
    with pytest.raises(DamagedError, match=f"{re.escape(name)} is missing"):
        Checksums.read(checkpoint).check_lengths()


def test_an_upload_that_fails_leaves_what_was_there(folder: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    save_value(folder, 1.0, step=2)
    write = RemotePath.write_text

    def fail(self: RemotePath, text: str) -> None:
        if self.name == "state.json":
            raise ConnectionResetError(104, "Connection reset by peer")
        write(self, text)

    monkeypatch.setattr(RemotePath, "write_text", fail)
    with pytest.raises(SaveError, match=r"step 4 could not be written to memory://.*Connection reset by peer"):
        save_value(folder, 2.0)
    assert names_in(folder) == ["latest", "step_00000002"]
    assert saved_value(folder) == 1.0


def test_a_store_that_does_not_answer_is_no_damage(folder: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage, after which a start finds what was there, is told apart from what a user or a save has done wrong."""
    save_value(folder, 1.0)
    checkpoint = steps_in(folder)[4]

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "read_bytes", refuse)
        with pytest.raises(OSError, match=r"Connection refused.*checksums\.json"):
            saved_value(folder)
        with pytest.raises(OSError, match="Connection refused"):
            saved_at(checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "info", refuse)
        # No answer is not a no.
        for question in (folder.is_dir, (checkpoint / "state.json").is_file, (folder / ".copies").exists):
            with pytest.raises(OSError, match="Connection refused"):
                question()
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "write_text", refuse)
        with pytest.raises(RunError, match=r"--save memory://.* cannot be written: Connection refused; the store"):
            refuse_unwritable(folder, flag="--save")
        with pytest.raises(SaveError, match="Connection refused"):
            save_value(folder, 2.0)
    for error, is_mistake in {
        PermissionError(13, "Forbidden"): True,
        FileNotFoundError(2, "no such bucket"): True,
        ValueError("Protocol not known"): True,
        NotImplementedError(""): True,
        NoCredentialsError("Unable to locate credentials"): True,
        TimeoutError(110, "timed out"): False,
        RuntimeError("503"): False,
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, "pipe_file", Mock(side_effect=error))
            with pytest.raises(UserError if is_mistake else RunError):
                refuse_unwritable(folder, flag="--save")
    assert saved_value(folder) == 1.0


@pytest.mark.parametrize(
    ("status", "raised"),
    [(404, FileNotFoundError), (403, PermissionError), (503, OSError), (None, OSError)],
)
def test_a_web_server_that_does_not_answer_is_no_missing_object(
    monkeypatch: pytest.MonkeyPatch, status: int | None, raised: type[OSError]
) -> None:
    """fsspec has FileNotFoundError for all of them."""
    gone = FileNotFoundError("https://host/x")
    gone.__cause__ = RuntimeError("Cannot connect to host")
    if status is not None:
        gone.__cause__.status = status  # type: ignore[attr-defined]
    monkeypatch.setattr(RemotePath, "_opened", lambda _: (Mock(info=Mock(side_effect=gone)), "x"))
    sentence = "there is no such object" if status == 404 else "RuntimeError: Cannot connect to host"
    with pytest.raises(raised, match=sentence) as told:
        RemotePath("https://host/x").stat()
    assert type(told.value) is raised
    assert is_outage(told.value) == (status in (503, None))


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the store's, nor one in it: a checkpoint whose files are not listed would look unfinished."""
    inside, folder = f"{tmp_path}/run/step_00000004", RemotePath(f"{tmp_path.as_uri()}/run")
    wrapper = DirFileSystem(f"{tmp_path}/run", LocalFileSystem())
    assert folder.sizes() == {}
    Path(inside).mkdir(parents=True)
    Path(inside, "state.json").write_text("{}")
    assert folder.sizes() == {"step_00000004/state.json": 2}
    assert list(objects_below(wrapper, "")) == ["step_00000004/state.json"]
    listed = LocalFileSystem.ls

    def failing(unreadable: str, error: OSError) -> Callable[..., Any]:
        def ls(self: LocalFileSystem, path: str, *args: Any, **options: Any) -> Any:
            if str(path).rstrip("/") == unreadable:
                raise error
            return listed(self, path, *args, **options)

        return ls

    for unreadable in (f"{tmp_path}/run", inside):
        with monkeypatch.context() as patch:
            patch.setattr(LocalFileSystem, "ls", failing(unreadable, OSError(5, "Input/output error")))
            with pytest.raises(OSError, match="Input/output error"):
                steps_in(folder)
            with pytest.raises(OSError, match="Input/output error"):
                objects_below(wrapper, "")
        with monkeypatch.context() as patch:  # removed by another process meanwhile
            patch.setattr(LocalFileSystem, "ls", failing(unreadable, FileNotFoundError(2, "gone")))
            assert folder.sizes() == {}


class NoCredentialsError(Exception):
    """Named as botocore's."""


def test_a_checkpoint_that_is_whole_stays_when_what_follows_fails(
    folder: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_value(folder, 1.0, step=2)
    write = RemotePath.write_text

    def fail(self: RemotePath, text: str) -> None:
        if self.name == "latest":
            raise ConnectionResetError(104, "Connection reset by peer")
        write(self, text)

    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "write_text", fail)
        save_value(folder, 2.0)
    assert saved_value(folder) == 2.0


def test_a_rank_reads_the_ranges_that_it_needs(folder: RemotePath) -> None:
    save_value(folder, 3.0)
    checkpoint = steps_in(folder)[4]
    sums = Checksums.read(checkpoint)
    with sums.opened("__0_0.distcp") as opened:
        first = sums.files["__0_0.distcp"][0]
        assert len(opened.read(0, first.length)) == first.length
    assert read_whole(checkpoint)["model.weight"].tolist() == [3.0] * 64


def test_names_and_parts_of_a_url() -> None:
    path = location("s3://bucket/run/")
    assert isinstance(path, RemotePath) and str(path / "step_1") == "s3://bucket/run/step_1"
    assert (path.name, str(path.parent), str(path.parent.parent)) == ("run", "s3://bucket", "s3://bucket")
    assert location("runs/a") == Path("runs/a")
    assert json.loads(json.dumps(str(path))) == "s3://bucket/run"


# ---- mistakes


def started_in(folder: Path, environ: dict[str, str]) -> None:
    """Planted in a job: the store's variables, and the working directory of a machine."""
    folder.mkdir(parents=True)
    os.chdir(folder)
    os.environ.update(environ)


def test_a_run_folder_in_a_store_is_continued_on_another_machine(tmp_path: Path, store: Store) -> None:
    def train(machine: str, more: str) -> str:
        argv = tiny(Path("run"), f"--micro-batch-size 2 --save-interval 2 {more}")
        argv[argv.index("--run-dir") + 1] = store.url
        ended = run_job(argv, tmp_path, plant=started_in, plant_args=(tmp_path / machine, store.environ))
        assert ended.status == 0, ended
        return ended.output

    assert f"copied to {store.url}" in train("first", "--exit-interval 4")
    shutil.rmtree(tmp_path / "first")  # a machine that is lost with all that it has
    assert f"continuing from {store.url}/checkpoints/step_00000004." in train("second", "--dp 2")
    copied = RemotePath(store.url)
    lines = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {"loss.png", "config.toml", "goodput.json", "metrics.jsonl"} <= set(store.names())
    (local,) = (tmp_path / "second" / "runs").rglob("metrics.jsonl")
    assert not (local.parent / "checkpoints").exists()
    assert (copied / "config.toml").read_text() == (local.parent / "config.toml").read_text()


def test_files_of_a_run_are_copied_when_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, place = tmp_path / "run", RemotePath((tmp_path / "store").as_uri())
    for name in ("metrics.jsonl", "logs/rank_0.txt", "checkpoints/latest", ".lock"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("1")
    mirror, sent = RunMirror(folder, place), []
    upload = RemotePath.upload
    monkeypatch.setattr(RemotePath, "upload", lambda self, file: (sent.append(file.name), upload(self, file)))
    mirror.copy()
    assert sorted(place.sizes()) == ["logs/rank_0.txt", "metrics.jsonl"]
    (folder / "metrics.jsonl").write_text("1, 2")
    mirror.copy()
    assert sent == ["rank_0.txt", "metrics.jsonl", "metrics.jsonl"]
    # A store that fails is a line, and the file is copied the next time.
    (folder / "metrics.jsonl").write_text("1, 2, 3")
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "upload", lambda *_: (_ for _ in ()).throw(OSError(5, "no answer")))
        mirror.copy()
    assert "no answer; it is tried again before the next checkpoint" in capsys.readouterr().err
    mirror.copy()
    assert (place / "metrics.jsonl").read_text() == "1, 2, 3"
    # A machine that is not that of rank 0 any more leaves its old files where they are.
    (folder / "metrics.jsonl").write_text("old")
    former = RunMirror(folder, place)
    former.keep_back()
    former.copy()
    assert (place / "metrics.jsonl").read_text() == "1, 2, 3"
    other = tmp_path / "other"
    RunMirror(other, place).fetch()
    assert sorted(path.name for path in other.rglob("*")) == ["logs", "metrics.jsonl", "rank_0.txt"]
    # Lines that go on after the store's stay, for a run may resume from a copy nearby; those of another past do not.
    for lines, kept in {"1, 2, 3\n4": "1, 2, 3\n4", "1, 2": "1, 2, 3", "1, 7, 3\n4": "1, 2, 3"}.items():
        (other / "metrics.jsonl").write_text(lines)
        RunMirror(other, place).fetch()
        assert (other / "metrics.jsonl").read_text() == kept
    # A log that this start has just opened is younger than the store's, and does not take its place.
    (place / "logs" / "rank_1.log").write_text("first start\n")
    (other / "logs" / "rank_1.log").touch()
    RunMirror(other, place).fetch()
    assert (other / "logs" / "rank_1.log").read_text() == "first start\n"
    (other / "logs" / "rank_0.txt").write_text("later")
    RunMirror(other, place).fetch()
    assert (other / "logs" / "rank_0.txt").read_text() == "later"
    os.utime(other / "logs" / "rank_0.txt", (0, 0))
    RunMirror(other, place).fetch()
    assert (other / "logs" / "rank_0.txt").read_text() == "1"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--save nowhere://bucket/run", r"nowhere://bucket/run.*cannot be written: .*nowhere"),
        ("--save file:///proc/run", r"--save file:///proc/run cannot be written: .*; check its name"),
        ("--save memory://run", "save=memory://run is in the memory of one process and ends with it"),
        ("--save-replicated-interval 2 --local-save file:///tmp/x", "local_save=file:///tmp/x is a URL"),
        ("--load file:///nowhere/run", "--load file:///nowhere/run holds no checkpoint"),
        ("--load file:///nowhere/run --adapter-type lora", "on object storage.*copy that checkpoint to one"),
        ("--run-dir nowhere://bucket/run --save here", r"--run-dir nowhere://bucket/run cannot be written: .*nowhere"),
    ],
)
def test_a_mistake_is_a_sentence(tmp_path: Path, flags: str, sentence: str) -> None:
    ended = call_main(tiny(tmp_path / "run", flags))
    assert ended.status == 2 and "Traceback" not in ended.errors, ended
    assert re.search(sentence, ended.errors), ended.errors


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    registry = import_module("fsspec.registry")  # fsspec.registry itself is a mapping
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    with pytest.raises(Exception, match=re.escape("pip install 'megatronish[s3]'")):
        RemotePath("s3://bucket/run").exists()
