"""CPU seconds of tests, of pytest and all processes that they start; a load of other programs changes them little.

    python tests/support/cpu_seconds.py tests/theorem tests/dry_run/test_dry_runs.py

Arguments are pytest's. Without workers: a test has what was spent from the end of the test before to its own. Linux
alone, as it reads /proc.
"""

import ctypes
import os
import sys
from collections import defaultdict

import pytest
from durations import MOST_TESTS, table

PR_SET_CHILD_SUBREAPER = 36
TICKS = os.sysconf("SC_CLK_TCK")


def spent_here() -> float:
    """CPU seconds of this process, of those that descend from it, and of those of them that were reaped."""
    parents, seconds = {}, {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(name)] = int(fields[1])
        seconds[int(name)] = sum(map(int, fields[11:15])) / TICKS
    total, left = 0.0, [os.getpid()]
    while left:
        parent = left.pop()
        total += seconds.get(parent, 0.0)
        left += [child for child, its_parent in parents.items() if its_parent == parent]
    return total


class Meter:
    """Plug-in of pytest that notes what each test has spent."""

    def __init__(self) -> None:
        self.files: dict[str, float] = defaultdict(float)
        self.tests: dict[str, float] = defaultdict(float)
        self._last = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What was spent so far is the collection's."""
        self._note("collection")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """The end of a test, its fixtures included."""
        self._note(nodeid)

    def _note(self, name: str) -> None:
        now = spent_here()
        self.files[name.partition("::")[0]] += now - self._last
        self.tests[name.partition("[")[0]] += now - self._last
        self._last = now


def main() -> int:
    """Run pytest, and print both tables; its exit status."""
    # A process whose parent has ended becomes a child of this one, and stays among what is counted.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    meter = Meter()
    status = pytest.main(sys.argv[1:], plugins=[meter])
    total = sum(meter.files.values())
    print(f"\n{total:,.1f} CPU seconds in all.\n")
    print(table("file", meter.files, total, most=len(meter.files)), end="\n\n")
    print(table("test", meter.tests, total, most=MOST_TESTS))
    return status


if __name__ == "__main__":
    sys.exit(main())
