"""Tests of the folders of copies nearby: their names, whose they are, and the room that they need."""

import json
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jobs import call_main, tiny
from ranks import run_ranks

from megatronish.checkpoint.replicated import local
from megatronish.checkpoint.replicated.folders import LONG, OWNER, claim_folder, id_of, remove_folder
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.errors import UserError
from megatronish.core.remote import RemotePath
from megatronish.launch.place import Place
from megatronish.parallel.mesh import Axis, Mesh


def test_a_folder_of_copies_has_a_name_of_its_own(tmp_path: Path) -> None:
    """It is removed at the end of a run, so no content of the file leads elsewhere; a moved folder keeps its copies."""
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    first = id_of(run)
    assert re.fullmatch("[0-9a-f]{32}", first) and id_of(run) == first
    shutil.copytree(run, tmp_path / "copied")
    assert id_of(tmp_path / "copied") != first
    run.rename(moved)
    assert id_of(moved) == first
    run.mkdir()
    assert len({id_of(run), id_of(moved), id_of(tmp_path / "copied")}) == 3  # a new run at the old place
    for content in (
        b"",
        b"..",
        b"/tmp",
        b"\xff\xfe",
        b'{"name": "..", "place": "/"}',
        b'{"name": 3}',
        b"[[[[",
        b"1" * 32,
    ):
        (moved / ".copies").write_bytes(content)
        assert re.fullmatch("[0-9a-f]{32}", id_of(moved))


def test_the_name_does_not_depend_on_numbers_and_times_of_files(tmp_path: Path) -> None:
    """Which overlays and network file systems change, and hard links share."""
    run, elsewhere, linked = tmp_path / "run", tmp_path / "else\nwhere\udcff", tmp_path / "linked"
    run.mkdir()
    first = id_of(run)
    os.utime(run / ".copies", (1, 1))
    assert id_of(run) == first
    # Moved to another file system: a new file of a new time.
    shutil.copytree(run, elsewhere, copy_function=shutil.copyfile)
    shutil.rmtree(run)
    assert id_of(elsewhere) == first
    # A copy made of hard links is another run, and leaves the first one's name.
    linked.mkdir()
    os.link(elsewhere / ".copies", linked / ".copies")
    assert id_of(linked) != first
    assert id_of(elsewhere) == first
    # The same folder at another place is no copy of itself.
    (tmp_path / "mount").symlink_to(elsewhere)
    said = json.loads((elsewhere / ".copies").read_text())
    (elsewhere / ".copies").write_text(json.dumps(said | {"place": str(tmp_path / "mount")}))
    assert id_of(elsewhere) == first
    assert [path.name for path in elsewhere.iterdir()] == [".copies"]


def test_folders_that_no_run_needs_are_removed(tmp_path: Path) -> None:
    parent, saves = tmp_path / "local", tmp_path / "runs"

    def left_by(run: str, *, days: float = 0.0, save: Path | RemotePath | None = None) -> Path:
        """The folder of copies of a run that was killed so many days ago."""
        (saves / run).mkdir(parents=True)
        folder = parent / id_of(saves / run)
        (folder / "step_00000002").mkdir(parents=True)
        claim_folder(folder, saves / run if save is None else save).close()
        for path in (*folder.iterdir(), folder):
            os.utime(path, (time.time() - 86400 * days,) * 2)
        return folder

    old = LONG / 86400 + 1
    kept = [left_by("killed", days=old), left_by("elsewhere", save=Path("/nowhere/run"))]
    kept.append(left_by("store", save=RemotePath("s3://bucket/run")))
    living = left_by("living", days=old)
    with claim_folder(living, saves / "living"):
        (saves / "living" / ".copies").unlink()
        gone = [left_by("ended", days=2), left_by("anew", days=2), left_by("gone", days=old), left_by("left", days=old)]
        (saves / "ended" / ".copies").unlink()
        (saves / "anew" / ".copies").unlink()
        id_of(saves / "anew")
        shutil.rmtree(saves / "gone")
        (gone[3] / OWNER).unlink()
        os.utime(gone[3], (0, 0))
        (parent / "of_somebody_else").mkdir()
        mine = chosen(str(parent), id_of(saves / "killed"), needed=2)
        assert sorted(parent.iterdir()) == sorted([*kept, living, parent / "of_somebody_else"])
    assert mine == kept[0]
    for path in (living / OWNER, living):
        os.utime(path, (time.time() - 2 * 86400,) * 2)
    chosen(str(parent), mine.name, needed=2)
    assert not living.exists()


@pytest.mark.parametrize("there_now", ["another run", "nothing, as where a disk is not mounted"])
def test_copies_of_a_run_that_may_have_moved_stay_for_a_day(
    there_now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parent, save = tmp_path / "local", tmp_path / "run"
    save.mkdir()
    folder = parent / id_of(save)
    (folder / "step_00000002").mkdir(parents=True)
    (folder / "step_00000002" / "__0_0.distcp").write_bytes(bytes(90))
    claim_folder(folder, save).close()
    save.rename(tmp_path / "moved")
    save.mkdir()
    if there_now == "another run":
        assert id_of(save) != folder.name
    chosen(str(parent), "other", needed=2)
    assert id_of(tmp_path / "moved") == folder.name
    assert folder.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10 if folder.exists() else 100))
    with pytest.raises(UserError, match="copies of the state need"):
        chosen(str(parent), "too large", needed=10**6)  # with all of their room, too
    assert folder.exists() and capsys.readouterr().err == ""
    chosen(str(parent), "large", needed=50)
    assert not folder.exists()
    assert f"{folder} is removed for the room: copies of a run that was killed" in capsys.readouterr().err


def test_a_memory_limit_counts_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(local, "MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(local, "bytes_within_limits", lambda: 100)
    assert chosen(None, "small", needed=100).parents[1] == memory
    assert chosen(None, "large", needed=102).parents[1] == disk


def test_a_host_needs_room_for_what_it_keeps_also_if_its_ranks_write_less() -> None:
    one, other, disk = local.Shared(0, 0), local.Shared(1, 0), local.Shared(0, 1)
    assert local._needed([([one, disk], 100), ([other, disk], 0)]) == {one: 200, other: 200, disk: 200}


def _choose_in_container(place: Place, folder: Path) -> tuple[Path, tuple[tuple[int, ...], ...]]:
    """Two ranks of each of two containers that have one name, one path for their memory, and not the same memory."""
    axis = Mesh.of(ParallelConfig(data_parallel_size=4), place, device=torch.device("cpu"), backend="gloo").world
    before = Path.cwd()
    os.chdir(folder / f"container_{place.rank // 2}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "MEMORY", Path("/proc/self/cwd/memory"))
        patch.setattr(tempfile, "tempdir", "/proc/self/cwd/disk")
        patch.setattr(
            shutil,
            "disk_usage",
            lambda path: SimpleNamespace(free=10**9 if "disk" in str(path) or "container_0" in os.getcwd() else 100),
        )
        found, hosts = local.choose_folder(None, "name", written=100, axis=axis)
        found = found.resolve()
    os.chdir(before)
    return found.relative_to(folder), hosts.ranks


def test_containers_of_one_name_choose_each_for_itself(tmp_path: Path) -> None:
    for container in range(2):
        for kind in ("memory", "disk"):
            (tmp_path / f"container_{container}" / kind).mkdir(parents=True)
    found = run_ranks(4, _choose_in_container, tmp_path)
    assert [str(path).rpartition("/megatronish-")[0] for path, _ in found] == [
        *["container_0/memory"] * 2,
        *["container_1/disk"] * 2,
    ]
    assert {hosts for _, hosts in found} == {((0, 1), (2, 3))}
    left = {path.name for path in tmp_path.rglob("*") if not path.name.startswith(("container_", "megatronish-"))}
    assert left == {"memory", "disk", "name"}
    assert len(list(tmp_path.rglob("name"))) == 2


def chosen(local_save: str | None, run: str, *, needed: int) -> Path:
    """The folder for a run of one rank, of which a copy and the one before it need so many bytes."""
    return local.choose_folder(local_save, run, written=needed // 2, axis=Axis("copies"))[0]


def test_a_folder_without_room_is_refused(tmp_path: Path) -> None:
    told = "copies of the state need 8000000 MB on each host, .*; name a folder with room by --local-save"
    with pytest.raises(UserError, match=told):
        chosen(str(tmp_path / "copies"), "name", needed=8 * 10**12)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file cannot be written: (Not a directory|File exists)"):
        chosen(str(tmp_path / "file"), "name", needed=2)
    ended = call_main(tiny(tmp_path / "run", "--local-save copies"))
    assert ended.status == 2
    assert "local_save names a folder for copies, and none are made; add --save-replicated-interval" in ended.errors
    ended = call_main([*tiny(tmp_path / "run", "--save-replicated-interval 2"), "--local-save", ""])
    assert (ended.status, "local_save is empty; name a folder" in ended.errors) == (2, True), ended


def test_a_need_of_little_room_is_told_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(total=10**12, used=10**12 - 100, free=100)
    monkeypatch.setattr(local.shutil, "disk_usage", lambda _folder: free)
    with pytest.raises(UserError, match=r"need 5,000 bytes on each host, .* has 100 bytes free"):
        chosen(str(tmp_path / "copies"), "name", needed=5_000)


def test_copies_lie_in_memory_unless_they_are_elsewhere_or_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    free = {memory: 100, disk: 1000}
    monkeypatch.setattr(local, "MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(
        shutil,
        "disk_usage",
        lambda path: SimpleNamespace(free=free[next(each for each in free if path.is_relative_to(each))]),
    )
    assert chosen(None, "small", needed=100).parents[1] == memory
    folder = chosen(None, "large", needed=102)
    assert folder.parents[1] == disk
    claim_folder(folder, tmp_path).close()
    free[memory] = 1000
    assert chosen(None, "large", needed=102) == folder  # where it is already
    (memory / folder.parent.name / "large" / "step_00000002").mkdir(parents=True)
    assert chosen(None, "large", needed=102).parents[1] == memory  # where its copies are
    assert chosen(None, "large", needed=10**6).parents[1] == memory
    remove_folder(memory / folder.parent.name / "large")
    remove_folder(folder)
    assert list(disk.iterdir()) == []
