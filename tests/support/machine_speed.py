"""Seconds of the processor in units of a fixed loop, for bars that hold on slow and on busy machines."""

import time
from collections.abc import Callable


def seconds_of_a_million_entries() -> float:
    """What this machine needs, now, for as many updates of a small dict: the unit, 0.17 s on a busy slow core."""
    start, counts = time.process_time(), dict[int, int]()
    for number in range(1_000_000):
        counts[number % 1000] = counts.get(number % 1000, 0) + number * number
    return time.process_time() - start


def units_of(work: Callable[[], object]) -> float:
    """Time of the processor that some work takes, in units measured before and after it."""
    before = seconds_of_a_million_entries()
    start = time.process_time()
    work()
    seconds = time.process_time() - start
    return 2 * seconds / (before + seconds_of_a_million_entries())
