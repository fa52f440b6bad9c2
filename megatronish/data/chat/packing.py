"""Packing: samples of different lengths into rows of one length, so that little is left empty.

Best fit, the longest first: each sample goes into the fullest row that has place for it. The free spaces that rows have
are the bits of one number, so the row is found by a shift. The cost is O(n) shifts after a sort.

A plan is a function of the lengths, their order and the length of a row: it is global, so no layout changes it. Samples
are packed in windows of WINDOW, in the order of the epoch: so every epoch has rows of its own, and a window is large
enough to leave less than half a percent empty.
"""

from collections import defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW = 10_000


class Packs(NamedTuple):
    """Rows of samples: row r has the samples `members[bounds[r] : bounds[r + 1]]`."""

    members: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, number: int) -> NDArray[np.int64]:
        """The samples of one row."""
        return self.members[self.bounds[number] : self.bounds[number + 1]]


def packs_of(lengths: NDArray[np.int64], capacity: int) -> Packs:
    """Rows for samples of these lengths (each from 1 to `capacity`), named by their numbers in `lengths`."""
    rows: list[list[int]] = []
    for first in range(0, len(lengths), WINDOW):
        rows += [[first + member for member in row] for row in _best_fit(lengths[first : first + WINDOW], capacity)]
    return _of_rows(rows)


def single_rows(count: int) -> Packs:
    """A row for each of so many samples."""
    return Packs(np.arange(count), np.arange(count + 1))


def permuted(packs: Packs, order: NDArray[np.int64]) -> Packs:
    """The same rows in another order: the fullest ones come first out of packing."""
    return _of_rows([packs.row(number).tolist() for number in order.tolist()])


def _of_rows(rows: list[list[int]]) -> Packs:
    members = np.array([member for row in rows for member in row], np.int64)
    return Packs(members, np.cumsum([0, *map(len, rows)]))


def _best_fit(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    with_space: dict[int, list[list[int]]] = defaultdict(list)
    spaces = 0  # bit s is set where a row has s places left
    for member in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[member])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = with_space[space].pop()
            if not with_space[space]:
                spaces ^= 1 << space
        else:
            space, row = capacity, []
            rows.append(row)
        row.append(member)
        left = space - length
        if left:
            with_space[left].append(row)
            spaces |= 1 << left
    return rows
