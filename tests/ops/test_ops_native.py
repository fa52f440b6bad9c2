"""Tests of the C++ library's build: once for all processes, without a compiler, and where nothing can be written."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_runs import needs_compiler

from megatronish.core.private import cache_folder
from megatronish.ops import native as module
from megatronish.ops.native import native

pytestmark = pytest.mark.processes  # of the compiler


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A user without a library; what this process has loaded is forgotten, before and after."""
    monkeypatch.delenv("MEGATRONISH_KERNELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.cache_clear()
    yield tmp_path / "megatronish"
    native.cache_clear()


def compiler_that(folder: Path, script: str) -> str:
    """The path of a compiler that does what the lines of sh say."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@needs_compiler
def test_it_is_built_once_and_found_again(empty_cache: Path) -> None:
    assert native().reason is None
    (library,) = empty_cache.glob("*.so")
    built = library.stat().st_mtime_ns
    native.cache_clear()
    assert native().reason is None and library.stat().st_mtime_ns == built
    assert {path.suffix for path in empty_cache.iterdir()} == {".so", ".lock"}


@needs_compiler
def test_of_processes_that_start_together_one_builds(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("CXX", compiler_that(tmp_path, f'echo called >> {calls}; sleep 0.5; exec g++ "$@"'))
    code = "from megatronish.ops.native import native; n = native(); assert n.library is not None, n.reason"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [each.wait(120) for each in running] == [0, 0]
    assert calls.read_text().splitlines() == ["called"]
    assert len(list(empty_cache.glob("*.so"))) == 1


def test_no_compiler_is_no_error(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert native() == (None, "there is no C++ compiler here: install g++, or name one in CXX")
    assert not empty_cache.exists()


def test_a_compiler_that_fails_is_no_error(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_that(tmp_path, "echo 'it is broken' >&2; echo more >&2; exit 1")
    monkeypatch.setenv("CXX", compiler)
    assert native() == (None, f"{compiler} does not compile dropout.cpp: it is broken")
    assert not list(empty_cache.glob("*.so"))


@needs_compiler
def test_a_compiler_that_knows_few_flags_does_with_these(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'for each in "$@"; do case $each in -march*|-fopenmp) exit 1;; esac; done; exec g++ "$@"'
    monkeypatch.setenv("CXX", compiler_that(tmp_path, script))
    assert native().reason is None and len(list(empty_cache.glob("*.so"))) == 1


def test_a_library_that_does_not_load_is_no_error(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'while [ "$1" != -o ]; do shift; done; echo "no library" > "$2"'
    monkeypatch.setenv("CXX", compiler_that(tmp_path, script))
    found = native()
    assert (found.library is None and "file too short" in str(found.reason)) or "invalid ELF" in str(found.reason)
    assert empty_cache.exists()


@needs_compiler
def test_a_cache_that_cannot_be_written_is_no_error(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native().reason is None
    assert not empty_cache.exists()


@pytest.mark.usefixtures("empty_cache")
def test_the_references_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRONISH_KERNELS", "0")
    assert native() == (None, "MEGATRONISH_KERNELS is 0")


@needs_compiler
def test_threads_are_those_of_torch() -> None:
    """Two libraries of threads in one process would compete for its cores."""
    assert native().library is not None and torch.get_num_threads() >= 1
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux lists the libraries of a process")
    files = {line.split()[-1] for line in maps.read_text().splitlines() if line.endswith("/libgomp.so.1")}
    assert len(files) <= 1


def test_the_sources_lie_in_the_package() -> None:
    assert all(path.is_file() and path.parent.name == "ops" for path, *_ in module.SOURCES.values())


@needs_compiler
def test_without_a_writable_cache_folder_a_start_builds_once_and_leaves_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in a file
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    code = "from megatronish.ops.native import native; n = native(); assert n.library is not None, n.reason"
    assert [subprocess.run([sys.executable, "-c", code], check=False).returncode for _ in range(2)] == [0, 0]
    (folder,) = (tmp_path / "temporary").glob("megatronish-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and len(list(folder.glob("*.so"))) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="a file of another user needs root to be made")
@needs_compiler
def test_a_library_of_another_user_is_not_loaded(empty_cache: Path) -> None:
    assert native().reason is None
    (library,) = empty_cache.glob("*.so")
    os.chown(library, 12345, 12345)
    native.cache_clear()
    assert native().reason is None and library.stat().st_uid == 0


def test_a_library_in_a_folder_of_another_user_is_not_loaded(empty_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    empty_cache.symlink_to(tmp_path / "elsewhere")
    assert cache_folder() != empty_cache
