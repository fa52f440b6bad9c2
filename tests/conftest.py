"""Settings of every test: one thread a process, and a skip reason for tests that this machine cannot run."""

import gc
import importlib.util
import os
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

# Before torch is imported: ranks share the cores, and two busy ranks with two threads each are fifty times slower.
os.environ["OMP_NUM_THREADS"] = "1"

# Ranks find a test's functions by the name of their module, and the package without being installed.
TESTS = Path(__file__).parent
for folder in (TESTS.parent, TESTS, *sorted({path.parent for path in TESTS.rglob("*.py")})):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

OBJECTS_A_LOOK = 20_000
"""New objects between two looks for garbage: at Python's 700 looks are about a tenth of what pytest's process takes."""

SLOW = ("processes", "long")
"""Marks of tests that --fast leaves out."""
PEERS = ("megatron.core", "transformers")


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session that all workers of xdist share: what one of them has computed, others may read."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of S3 on loopback, with one empty bucket: a `Store`; a skip where its packages are missing."""
    if any(importlib.util.find_spec(package) is None for package in ("moto", "s3fs")):
        pytest.skip("needs a server of S3: pip install s3fs 'moto[server]'")
    from object_stores import serving_s3  # late: few tests need it

    with serving_s3(tmp_path_factory.mktemp("s3") / "log") as store:
        yield store


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Any]:
    """An empty folder of a store in memory, a RemotePath."""
    yield from _empty_folder(f"memory://data/{tmp_path.name}")


@pytest.fixture(params=["memory", "s3"])
def store_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """An empty folder of a store of each kind, a RemotePath."""
    base = "memory://data" if request.param == "memory" else request.getfixturevalue("s3").url
    yield from _empty_folder(f"{base}/{tmp_path.name}")


def _empty_folder(url: str) -> Iterator[Any]:
    from megatronish.core.remote import RemotePath  # late, as above

    folder = RemotePath(url)
    yield folder
    folder.remove_tree()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test-all` (see test_parallel_equals_serial.py) and `make test-fast` (see support/processes.py)."""
    parser.addoption("--all-layouts", action="store_true", help="every layout with the product of its features")
    parser.addoption("--check-races", action="store_true", help="every layout under the check of happens_before.py")
    parser.addoption("--fast", action="store_true", help="leave out what starts processes or takes long")
    parser.addoption("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the tests, dealt by name")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a device or a library that is not here, and say so: `peers("transformers")` needs that one."""
    if not config.getoption("--all-layouts"):
        leave_out_sweeps(config, items)
    if config.getoption("--fast"):
        leave_out_processes(config, items)
    leave_out_other_parts(config, items)
    for item in items:
        if item.get_closest_marker("gpu") is not None and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none here"))
        peers = item.get_closest_marker("peers")
        absent = [name for name in peers.args or PEERS if not _importable(name)] if peers is not None else []
        if absent:
            reason = f"needs {', '.join(absent)}, which `make test-peers` installs in an environment of its own"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No look for garbage while modules and tests are made, which all stay; nor at them later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(OBJECTS_A_LOOK)
        gc.enable()


def leave_out_sweeps(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that are marked as further ones, unless they are asked for by their names."""
    if any("::" in word for word in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("sweep") is not None]
    items[:] = [item for item in items if item.get_closest_marker("sweep") is None]
    config.hook.pytest_deselected(items=left_out)


def leave_out_processes(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that start processes or take long, and let no other start a process."""
    import processes  # late: it is found by the path that is made above

    from megatronish.ops.native import SOURCES, native

    processes.mark_starters(items)
    left_out = [item for item in items if any(map(item.get_closest_marker, SLOW))]
    items[:] = [item for item in items if not any(map(item.get_closest_marker, SLOW))]
    config.hook.pytest_deselected(items=left_out)
    for name in SOURCES:
        native(name)  # compiled here if it is not yet, as no test may start the compiler
    processes.forbid_processes()


def leave_out_other_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all but the part of the tests that `--part` names: equal on every machine, and as good as random."""
    part, num_parts = map(int, config.getoption("--part").split("/"))
    left_out = [item for item in items if crc32(item.nodeid.encode()) % num_parts != part - 1]
    if left_out:
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % num_parts == part - 1]
        config.hook.pytest_deselected(items=left_out)


@cache
def _has_cuda() -> bool:
    import torch  # late: most test runs ask no such question, and --collect-only should be quick

    return torch.cuda.is_available()


@cache
def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package it would be in is missing too
        return False
