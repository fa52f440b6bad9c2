"""Table of how long the suite takes, by folder, from what pytest printed: for docs/TESTS.md.

    python -m pytest --numprocesses 2 --dist worksteal --durations=0 --durations-min=0.1 > tests.log
    python tests/support/durations.py tests.log

Seconds are those of the workers together: two workers spend two in each second. What takes less than a tenth of a
second is not among them.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LINE = re.compile(r"\s*(?P<seconds>[\d.]+)s (?:call|setup|teardown)\s+tests/(?P<file>\S+?)::(?P<test>\w+)")
MOST_TESTS = 15


class Spent(NamedTuple):
    """Seconds by folder, and by the function of a test."""

    folders: dict[str, float]
    tests: dict[str, float]


def spent(lines: Iterable[str]) -> Spent:
    """Seconds of all lines of `--durations`."""
    found = Spent(defaultdict(float), defaultdict(float))
    for line in lines:
        if (match := LINE.match(line)) is not None:
            seconds, path = float(match["seconds"]), Path(match["file"])
            found.folders[path.parts[0] if len(path.parts) > 1 else path.name] += seconds
            found.tests[f"tests/{path}::{match['test']}"] += seconds
    return found


def table(title: str, seconds: dict[str, float], total: float, *, most: int) -> str:
    """Rows with the longest first, as Markdown."""
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:most]
    rows = [f"| `{name}` | {each:,.0f} | {100 * each / total:.1f} % |" for name, each in longest]
    return "\n".join([f"| {title} | seconds | share |", "| --- | ---: | ---: |", *rows])


def main() -> None:
    """Print both tables."""
    found = spent(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())
    total = sum(found.folders.values())
    print(f"{total:,.0f} seconds of the workers in all.\n")
    print(table("folder", found.folders, total, most=len(found.folders)), end="\n\n")
    print(table("test", found.tests, total, most=MOST_TESTS))


if __name__ == "__main__":
    main()
