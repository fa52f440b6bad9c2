"""Rounds in which Muon's whole matrices are exchanged: how many matrices share a buffer, and how wide it is."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

MOST_AT_ONCE = 2**25


class RoundSize(NamedTuple):
    """Number of matrices of a round, and elements of a row of its buffer [ranks, width]."""

    number: int
    width: int


def round_sizes(largest_first: Sequence[int], *, num_ranks: int, most: int = MOST_AT_ONCE) -> Iterator[RoundSize]:
    """Rounds of at most `most` buffer elements (or one matrix a rank), of matrices with these numbers of elements."""
    # Sorted by size, num_ranks matrices in a row are nearly equal: one for each owner pads each row the least.
    number = width = 0
    for start in range(0, len(largest_first), num_ranks):
        of_one_size = largest_first[start : start + num_ranks]
        # The first is the largest, so it decides by how much every row of [num_ranks, width] grows.
        if number and num_ranks * (width + of_one_size[0]) > most:
            yield RoundSize(number, width)
            number = width = 0
        number, width = number + len(of_one_size), width + of_one_size[0]
    if number:
        yield RoundSize(number, width)
