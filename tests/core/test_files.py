"""Tests of files.py: a file that is replaced is the old one or the new one, and nothing else stays."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from megatronish.core.files import write_durably, write_quickly


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
