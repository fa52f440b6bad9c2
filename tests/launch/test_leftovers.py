"""Tests of what killed launchers leave in the temporary directory: the next one removes it, and nothing else."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import run_job, started, tiny
from ranks import wait_until

from megatronish.launch.cleanup import MEETING, RINGS, remove_leftovers
from megatronish.watch.shared_ring import SharedRing


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def use_temporary(folder: str) -> None:
    """Planted in a job: its temporary directory is another."""
    import tempfile

    tempfile.tempdir = folder


def test_the_next_launcher_removes_the_folder_of_a_killed_one(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    plant = {"plant": use_temporary, "plant_args": (str(temporary),)}
    with started(tiny(tmp_path / "a", "--dp 2 --train-iters 100000"), tmp_path, **plant) as job:
        assert wait_until(lambda: any(name.startswith(MEETING) for name in names(temporary)))
        in_use = names(temporary)
        remove_leftovers(temporary)
        assert names(temporary) == in_use  # its lock is held
        job.kill()
        assert job.is_gone()
    assert in_use <= names(temporary)
    assert run_job(tiny(tmp_path / "b", "--dp 2"), tmp_path, **plant).status == 0
    assert not [name for name in names(temporary) if name.startswith(MEETING)]


def test_other_folders_stay(tmp_path: Path) -> None:
    for name in ("megatronish-of-mine", f"{RINGS}{os.getpid()}", f"{MEETING}new", "others"):
        (tmp_path / name).mkdir()
    before = names(tmp_path)
    (tmp_path / f"{RINGS}999999999").mkdir()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == before


@pytest.mark.skipif(os.getuid() != 0, reason="another user's folder needs root to be made")
def test_folders_of_other_users_stay(tmp_path: Path) -> None:
    folder = tmp_path / f"{RINGS}999999999"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    remove_leftovers(tmp_path)
    assert folder.exists()


def test_a_folder_that_another_user_has_prepared_is_not_written_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    prepared = tmp_path / "megatronish-rings-1"
    prepared.mkdir(mode=0o777)
    prepared.chmod(0o777)
    (prepared / "ring_0").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        SharedRing(prepared / "ring_0")  # a link in a folder into which all could write
    assert stat.S_IMODE(prepared.stat().st_mode) == 0o755
    link = tmp_path / "megatronish-rings-2"
    link.symlink_to(tmp_path)
    for folder in (link, prepared):
        if folder is prepared:
            if os.getuid() != 0:
                continue
            os.chown(folder, 12345, 12345)
        with pytest.raises(PermissionError, match="another user has made it, or it is a link"):
            SharedRing(folder / "ring_1")
    assert victim.read_text() == "precious"
    SharedRing(tmp_path / "megatronish-rings-3" / "ring_0")
    assert stat.S_IMODE((tmp_path / "megatronish-rings-3").stat().st_mode) == 0o700


def test_a_folder_whose_maker_was_killed_before_it_locked_it_goes_at_once(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    of_the_dead, of_mine = tmp_path / f"{MEETING}{process.pid}-ab", tmp_path / f"{MEETING}{os.getpid()}-ab"
    for folder in (of_the_dead, of_mine):
        folder.mkdir()
        os.utime(folder, (time.time() - 2, time.time() - 2))
    remove_leftovers(tmp_path)
    assert names(tmp_path) == {of_mine.name}
