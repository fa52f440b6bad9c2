"""Cases of a test of which `make test` takes some: the others are marked as a sweep, which is left to --all-layouts.

docs/TESTS.md names, for each such test, which other test has the same in `make test`.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_of(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The values of a test's cases, one or a tuple of several for each; `kept` are those that are no sweep."""
    found = list(cases)
    unknown = [case for case in kept if case not in found]
    assert not unknown, f"no cases of this test: {unknown}"
    return [case if case in kept else further(case) for case in found]


def further(case: Any) -> Any:
    """A case that is left to --all-layouts."""
    return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.sweep)
