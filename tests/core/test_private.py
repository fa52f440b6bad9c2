"""Tests of files in folders that other users can write into: nothing is written through a link that waits there."""

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from megatronish.checkpoint.replicated.folders import make_folder
from megatronish.core.errors import UserError
from megatronish.core.files import one_builder, write_durably, write_quickly
from megatronish.core.private import cache_folder, is_own, locked, opened_lock, private_folder, read_own
from megatronish.train.folder import locked as locked_folder

as_root = pytest.mark.skipif(os.getuid() != 0, reason="a file of another user needs root to be made")
OTHER = 12345


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of this user that links lead to."""
    (tmp_path / "home").mkdir()
    file = tmp_path / "home" / "precious"
    file.write_text("precious")
    return file


@pytest.mark.parametrize(("write", "name"), [(write_durably, "x.json.new"), (write_quickly, "x.new")])
def test_a_file_is_not_replaced_through_a_link_of_its_temporary_name(
    tmp_path: Path, precious: Path, write: Callable[[Path, str], None], name: str
) -> None:
    (tmp_path / name).symlink_to(precious)
    write(tmp_path / "x.json", "new")
    assert (tmp_path / "x.json").read_text() == "new" and not (tmp_path / "x.json").is_symlink()
    assert precious.read_text() == "precious"


def test_a_pipe_of_the_temporary_name_is_an_error_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.new")
    with pytest.raises(OSError, match="No such device or address"):
        write_quickly(tmp_path / "x.json", "new")


@pytest.mark.parametrize("target", ["precious", "missing"])
def test_a_lock_is_not_made_through_a_link(tmp_path: Path, precious: Path, target: str) -> None:
    linked = precious.with_name(target)
    (tmp_path / "x.lock").symlink_to(linked)
    with one_builder(tmp_path / "x"), locked(tmp_path / "x.lock"):
        pass
    with pytest.raises(OSError, match="symbolic links"):
        opened_lock(tmp_path / "x.lock")
    assert precious.read_text() == "precious" and {each.name for each in precious.parent.iterdir()} == {"precious"}


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    with locked(tmp_path / "x.lock"), opened_lock(tmp_path / "x.lock") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_run_empties_no_file_that_its_lock_leads_to(tmp_path: Path, precious: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").symlink_to(precious)
    with pytest.raises(UserError, match=r"\.lock is a link, and the run writes its \.lock there; move it away"):
        locked_folder(run, flag="--run-dir").__enter__()
    assert precious.read_text() == "precious"


def test_copies_are_not_kept_behind_a_link(tmp_path: Path, precious: Path) -> None:
    name = "0" * 32
    (tmp_path / name).symlink_to(precious.parent)
    with pytest.raises(PermissionError, match="it is a link"):
        make_folder(tmp_path / name)


def test_a_file_is_read_only_if_it_is_this_users(tmp_path: Path, precious: Path) -> None:
    assert read_own(precious, largest=100) == b"precious" and is_own(precious)
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe", "missing"):
        with pytest.raises(OSError, match=r"symbolic links|another user|No such file"):
            read_own(tmp_path / name, largest=100)
    with pytest.raises(PermissionError):
        read_own(precious, largest=7)
    assert not is_own(tmp_path / "missing")


@as_root
def test_a_file_of_another_user_is_not_read(precious: Path) -> None:
    os.chown(precious, OTHER, OTHER)
    assert not is_own(precious)
    with pytest.raises(PermissionError, match="another user has made it"):
        read_own(precious, largest=100)


def test_the_cache_is_a_folder_of_the_user_or_one_in_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / "cache" / "megatronish"
    other = tmp_path / f"megatronish-cache-{os.getuid()}"
    (tmp_path / "file").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "megatronish").symlink_to(tmp_path)
    for home in ("file", "linked"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        assert cache_folder() == other
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
    other.rmdir()
    other.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="another user has made it, or it is a link"):
        cache_folder()


def test_a_folder_that_others_may_write_into_is_closed_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o777)
    assert private_folder(folder) == folder and stat.S_IMODE(folder.stat().st_mode) == 0o755
