"""Curves of a run: metrics.jsonl as numbers, of which each look reads only the lines that are new.

A first look at a file of a million lines takes many seconds. Where a reader waits for it, it shows lines at equal
distances and the last ones, while a thread reads the whole file.
"""

import json
import math
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatronish.report.plot import thinned

QUICK_BYTES = 2**23
"""Bytes that are read at once: some tenths of a second."""
NUM_SAMPLES = 4000
LONGEST_SAMPLE, END_OF_SAMPLE = 2**14, 2**18
"""Bytes of a line of a sample, and of the last lines, which a sample has all."""


class Curves:
    """Metrics of a file of JSON lines, by step. A file that is shorter than before is read from its beginning.

    With `hurries` a look never reads more than QUICK_BYTES before it answers.
    """

    def __init__(self, path: Path, *, hurries: bool = False) -> None:
        self._path, self._hurries = path, hurries
        self._lock = threading.Lock()  # a page's server answers in several threads
        self._reader: threading.Thread | None = None
        self._sample: dict[str, list[list[Any]]] | None = None
        self._forget()

    def read(self) -> dict[str, list[list[Any]]]:
        """{metric: [steps, values]}, thinned; of a step that was repeated the last line counts."""
        if self.is_behind:
            # Once, and before the thread: with it each of thousands of small reads would wait for the interpreter.
            if self._sample is None or self._reader is None or not self._reader.is_alive():
                self._sample = self._sampled().curves()
                self._reader = threading.Thread(target=self._take_new_lines, daemon=True)
                self._reader.start()
            return self._sample
        self._sample = None
        self._take_new_lines()
        with self._lock:
            return self._table.curves()

    @property
    def is_behind(self) -> bool:
        """Whether the next look shows a sample: it hurries, and much of the file is not read yet."""
        return self._hurries and self._path.exists() and self._path.stat().st_size - self._offset > QUICK_BYTES

    def catch_up(self) -> None:
        """Read all there is, however long that takes."""
        self._take_new_lines()

    def _forget(self) -> None:
        self._offset = 0  # of the first byte that is not read yet
        self._table = _Table()

    def _take_new_lines(self) -> None:
        with self._lock:
            for line in self._new_lines():
                self._table.add(line)

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        """Objects after those of the last look. A line that is not finished is left for the next."""
        if not self._path.exists():
            return
        if self._path.stat().st_size < self._offset:
            self._forget()
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                record = _parsed(line)
                if record is None and not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if isinstance(record, dict):
                    yield record

    def _sampled(self) -> "_Table":
        """Lines at equal distances and the last ones. The first of each place is cut, so the one after it is taken."""
        table, size = _Table(), self._path.stat().st_size
        with self._path.open("rb") as file:
            for place in range(NUM_SAMPLES):
                file.seek(place * size // NUM_SAMPLES)
                if place:
                    file.readline(LONGEST_SAMPLE)
                table.add(_parsed(file.readline(LONGEST_SAMPLE)))
            file.seek(max(0, size - END_OF_SAMPLE))
            for line in file.read(END_OF_SAMPLE).splitlines()[1:]:
                table.add(_parsed(line))
        return table


class _Table:
    """Steps and numbers of lines, in the order of the file."""

    def __init__(self) -> None:
        self._steps: array[int] = array("q")  # of each line
        self._values: dict[str, array[float]] = {}  # of each line so far; those at the end may be missing

    def add(self, line: object) -> None:
        """Add a line, if it is one of a step."""
        if not isinstance(line, dict) or not is_step(line.get("step")):
            return
        for name, value in line.items():
            if name != "step" and is_number(value):
                values = self._values.setdefault(name, array("d"))
                values.extend([math.nan] * (len(self._steps) - len(values)))
                values.append(value)
        self._steps.append(line["step"])

    def curves(self) -> dict[str, list[list[Any]]]:
        """{metric: [steps, values]}, thinned; of a step that was repeated the last line counts."""
        steps = np.array(self._steps, dtype=np.int64)
        order = np.argsort(steps, kind="stable")
        is_last = np.append(np.diff(steps[order]) > 0, True)[: len(order)]
        order = order[is_last]
        return {name: pair(*thinned(steps[order], self._column(name)[order])) for name in self._values}

    def _column(self, name: str) -> np.ndarray:
        """Values of all lines; NaN where a line has none."""
        values = np.full(len(self._steps), math.nan)
        values[: len(self._values[name])] = self._values[name]
        return values


def _parsed(line: bytes) -> object:
    """The value of a line; None for what is no JSON, or is cut."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # also of what is no text
        return None


def pair(steps: np.ndarray, values: np.ndarray) -> list[list[Any]]:
    """Steps and values for JSON, which knows no NaN: a gap is null."""
    return [steps.tolist(), [float(f"{value:.7g}") if math.isfinite(value) else None for value in values.tolist()]]


def is_number(value: object) -> bool:
    """Whether a value of a file is a number that a float holds: Python's integers have no end."""
    return type(value) is float or is_step(value)


def is_step(value: object) -> bool:
    """Whether a value of a file is an integer that int64 holds."""
    return type(value) is int and -(2**63) <= value < 2**63
