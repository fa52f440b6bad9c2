"""Tests of the guard around torch's compiler: it loads no library from a folder that another user has prepared."""

import getpass
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kernel_runs import needs_compiler
from paths import ROOT
from torch._inductor import config

from megatronish.attention import flash
from megatronish.model.compiled import compile_layers
from megatronish.ops.compiled import CACHE, HEADERS, compile_function, keep_graphs_private

NAME = f"torchinductor_{getpass.getuser()}"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of its own, and a user with a cache and without a word to the compiler."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_graphs_private()  # the first import of the compiler sets the variable
    headers = config.cpp_cache_precompile_headers
    for name in (CACHE, HEADERS):
        monkeypatch.delenv(name, raising=False)
    shutil.rmtree(tmp_path / "tmp" / NAME)
    yield tmp_path / "tmp"
    config.cpp_cache_precompile_headers = headers
    for name in (CACHE, HEADERS):  # monkeypatch knows nothing of what the guard has set
        os.environ.pop(name, None)


def test_a_folder_of_this_user_is_used(temporary: Path) -> None:
    keep_graphs_private()
    assert CACHE not in os.environ and HEADERS not in os.environ and config.cpp_cache_precompile_headers
    assert (temporary / NAME).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("is_named", [False, True], ids=["not asked for yet", "as torch names it"])
def test_a_link_in_its_place_is_not_used(temporary: Path, tmp_path: Path, is_named: bool) -> None:
    (temporary / NAME).symlink_to(tmp_path)
    if is_named:
        os.environ[CACHE] = str(temporary / NAME)
    keep_graphs_private()
    assert os.environ[CACHE] == str(tmp_path / "cache" / "megatronish" / "torchinductor")


@pytest.mark.skipif(os.getuid() != 0, reason="another user's folder needs root to be made")
def test_a_folder_of_another_user_is_not_used(temporary: Path, tmp_path: Path) -> None:
    (temporary / NAME).mkdir()
    os.chown(temporary / NAME, 12345, 12345)
    keep_graphs_private()
    assert os.environ[CACHE] == str(tmp_path / "cache" / "megatronish" / "torchinductor")


def test_without_any_cache_folder_it_is_a_new_one(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary / NAME).symlink_to(tmp_path)
    (temporary / f"megatronish-cache-{os.getuid()}").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_graphs_private()
    assert Path(os.environ[CACHE]).parent == temporary and not Path(os.environ[CACHE]).is_symlink()


def test_a_folder_that_the_user_names_is_the_users_choice(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "mine"))
    for link in (None, tmp_path):
        if link is not None:
            (temporary / NAME).rmdir()
            (temporary / NAME).symlink_to(link)
        keep_graphs_private()
        assert os.environ[CACHE] == str(tmp_path / "mine")
        assert config.cpp_cache_precompile_headers is (link is None), "they lie in the compiler's own folder"


WAYS: dict[str, Callable[[], object]] = {
    "layers": lambda: compile_layers([]),
    "FlexAttention": lambda: flash._compiled_flex.__wrapped__("eager"),
    "a function": lambda: compile_function(len, most_graphs=1, backend="eager"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WAYS)
def test_whatever_is_compiled_is_compiled_behind_the_guard(name: str, temporary: Path, tmp_path: Path) -> None:
    (temporary / NAME).symlink_to(tmp_path)
    WAYS[name]()
    assert os.environ[CACHE] == str(tmp_path / "cache" / "megatronish" / "torchinductor")


def test_nothing_else_of_the_package_calls_the_compiler() -> None:
    callers = [path for path in (ROOT / "megatronish").rglob("*.py") if "torch.compile(" in path.read_text()]
    assert callers == [ROOT / "megatronish" / "ops" / "compiled.py"]


@needs_compiler
@pytest.mark.processes
def test_a_prepared_folder_stays_empty_and_the_function_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "prepared").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / NAME).symlink_to(tmp_path / "prepared")
    code = """
import torch
from megatronish.ops.compiled import compile_function
twice = compile_function(lambda x: x.sin() * 2, most_graphs=1)
assert torch.allclose(twice(torch.ones(5)), torch.ones(5).sin() * 2)
"""
    environ = {name: value for name, value in os.environ.items() if name != CACHE}
    environ |= {"TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # no programs that find out which vectors this CPU has
    subprocess.run([sys.executable, "-c", code], env=environ, cwd=ROOT, check=True, timeout=300)
    assert not list((tmp_path / "prepared").iterdir())
    assert list((tmp_path / "cache" / "megatronish" / "torchinductor").rglob("*.so"))
