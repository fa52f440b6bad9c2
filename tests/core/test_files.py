"""Tests of files.py: a file that is replaced is the old one or the new one, and nothing else stays."""

import errno
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from megatronish.core.errors import RunError, UserError
from megatronish.core.files import AtomicFile, new_folder, refuse_input_as_output, write_durably, write_quickly


@pytest.mark.parametrize("write", [write_durably, write_quickly])
def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, write: Callable[[Path, str], None]
) -> None:
    path = tmp_path / "facts.json"
    write(path, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(path, "new" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [each.name for each in tmp_path.iterdir()] == ["facts.json"]
    assert path.read_text() == "old"


def test_a_full_disk_is_told_with_the_file_that_is_written(tmp_path: Path) -> None:
    """A write names no file, and a copy names the one that it reads."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match=r"model\.bin"), AtomicFile(tmp_path / "model.bin"):
        raise full
    copied = OSError(errno.ENOSPC, "No space left on device", "/somewhere/tokenizer.json", None, str(tmp_path / "c"))
    with pytest.raises(RunError, match=f"{tmp_path}/converted"), new_folder(tmp_path / "converted", decisive="a"):
        raise copied


def test_an_output_is_no_file_that_is_read_nor_one_in_a_folder_that_is(tmp_path: Path) -> None:
    """A new file may be written into such a folder."""
    folder, text = tmp_path / "step", tmp_path / "text"
    folder.mkdir()
    for path in (text, folder / "state.json"):
        path.write_text("{}")
    (tmp_path / "link").symlink_to(folder / "state.json")
    for output in (text, folder / "state.json", tmp_path / "link"):
        with pytest.raises(UserError, match=f"--output {output} is a file that is read; choose another"):
            refuse_input_as_output("--output", output, [None, str(text), folder])
    refuse_input_as_output("--output", folder / "new.json", [text, folder, "\0"])
    refuse_input_as_output("--output", None, [text])
    for url in ("s3://me:secret@bucket/x", "s3:", "file:///x", "abfs+x://a"):
        with pytest.raises(UserError, match=r"--output [a-z3+]+:\S* is a URL, and this is written") as told:
            refuse_input_as_output("--output", Path(url), [])
        assert "secret" not in str(told.value)
    for path in ("", "a:b/c", "/s3:/x", "./x", "s3"):
        refuse_input_as_output("--output", Path(path), [])
