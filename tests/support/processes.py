"""Detection of tests that start processes, by what their functions use: `pytest --fast` leaves these tests out.

A test starts processes if its function, a fixture of it, or a function of tests/ that one of these names, names in turn
something that does: the ranks of ranks.py, the jobs of jobs.py, `subprocess`, `multiprocessing`, the launcher. What is
not seen this way, because a part of the package starts them, is marked by hand: `@pytest.mark.processes`.
"""

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from megatronish.core.contained import Contained
from megatronish.tokenizer import trial

TESTS = Path(__file__).parents[1]
STARTERS = {
    ("ranks", "run_ranks"),
    ("ranks", "warm_context"),
    ("ranks", "is_running"),
    ("megatronish.launch.local", "launch"),
    ("megatronish.launch.local", "run_local_ranks"),
    ("megatronish.ops.build", "build_cuda"),
    ("megatronish.ops.build", "build_emulated"),
    ("megatronish.core.contained", "Contained"),
    ("megatronish.data.chat.template", "ChatTemplate"),
}
STARTING_MODULES = (subprocess, multiprocessing)


def mark_starters(items: list[pytest.Item]) -> None:
    """Mark the tests that start processes."""
    for item in items:
        if isinstance(item, pytest.Function) and any(map(starts_processes, _functions_of(item))):
            item.add_marker(pytest.mark.processes)


def forbid_processes() -> None:
    """From now on this process starts no other: a test that tries fails, and is to be marked."""
    trial.try_once = lambda *_: None  # what tests write as a tokenizer is safe
    Contained.start, Contained.ask = _answerer, _answered  # type: ignore[method-assign,assignment]  # and as a template
    sys.addaudithook(_refuse)


def _answerer(child: Contained) -> Callable[[Any], str]:
    """What the child would answer with, made in this process."""
    if "_here" not in vars(child):
        function, arguments = child._call
        module, _, name = function.partition(":")
        made = getattr(import_module(module), name)(*arguments)
        child._here = made  # type: ignore[attr-defined]
    return child._here  # type: ignore[attr-defined,no-any-return]


def _answered(child: Contained, question: Any) -> str:
    return _answerer(child)(question)


def _refuse(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"):
        raise RuntimeError(f"{event}: this test starts a process, so it needs @pytest.mark.processes")


def _functions_of(item: pytest.Function) -> Iterator[Callable[..., Any]]:
    yield item.function
    for fixtures in item._fixtureinfo.name2fixturedefs.values():
        yield from (fixture.func for fixture in fixtures)


@cache
def starts_processes(function: Callable[..., Any]) -> bool:
    """Whether a function, or what it names, starts processes."""
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if found in STARTING_MODULES or (getattr(found, "__module__", ""), getattr(found, "__name__", "")) in STARTERS:
            return True
        waiting += _named_by(found)
    return False


def _named_by(found: Any) -> list[Any]:
    """What a function or class of tests/ names, or a function wrapped by another."""
    if isinstance(found, type):
        own = getattr(sys.modules.get(found.__module__), "__file__", None)
        return [*vars(found).values()] if own and Path(own).is_relative_to(TESTS) else []
    if isinstance(found, property):
        return [found.fget]
    wrapped = getattr(found, "__wrapped__", None) or getattr(found, "__func__", None)
    if not isinstance(found, FunctionType) or not Path(found.__code__.co_filename).is_relative_to(TESTS):
        return [wrapped] if wrapped is not None else []
    names = set(_names_in(found.__code__))
    values = [found.__globals__[name] for name in names if name in found.__globals__]
    # `module.function` is two names: what one of ours is named with is looked up in it.
    inside = [getattr(module, name, None) for module in values if _is_ours(module) for name in names]
    return [each for each in (wrapped, *values, *inside) if each is not None]


def _is_ours(module: Any) -> bool:
    path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    return path is not None and Path(path).is_relative_to(TESTS.parent)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
