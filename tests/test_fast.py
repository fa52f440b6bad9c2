"""Tests of `make test-fast`: tests that start processes are detected from the names that their functions use."""

import gc
import subprocess
import sys

import pytest
from paths import TESTS
from processes import starts_processes
from ranks import run_ranks

SUPPORT = TESTS / "support"


def direct() -> None:
    run_ranks(2, print)


def through_another() -> None:
    def inner() -> None:
        direct()

    inner()


def by_a_module() -> None:
    subprocess.run(["true"], check=True)


class Starter:
    """Starts a rank when it is called."""

    def __call__(self) -> None:
        through_another()


def through_a_class() -> None:
    Starter()()


def mentions() -> str:
    """Says run_ranks, and calls it not."""
    return f"run_ranks, {mentions.__name__}"


@pytest.mark.parametrize("function", [direct, through_another, by_a_module, through_a_class])
def test_what_starts_processes_is_found_through_functions_and_classes(function: object) -> None:
    assert starts_processes(function)


@pytest.mark.parametrize("function", [mentions, test_what_starts_processes_is_found_through_functions_and_classes])
def test_what_only_mentions_them_is_not(function: object) -> None:
    assert not starts_processes(function)


def test_a_fast_test_that_starts_a_process_fails() -> None:
    code = "import processes, subprocess; processes.forbid_processes(); subprocess.run(['true'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "subprocess.Popen: this test starts a process, so it needs @pytest.mark.processes" in done.stderr


def test_garbage_is_looked_for_while_tests_run() -> None:
    """Only while tests are collected it is not (conftest.py)."""
    assert gc.isenabled()
