"""Which tensors share a buffer: parameters in gradient buckets, matrices in rounds of Muon, moves of an outer step."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

MAX_PENDING = 2
"""Reductions of gradient buckets of ZeRO-2 in progress at most: the buffer of an older one is freed."""
MOST_AT_ONCE = 2**25
"""Elements of Muon's buffer in a round, if that is more than one matrix a rank."""


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


def cut_into_buckets(sizes: Sequence[int], bucket_size: int) -> Iterator[range]:
    """Ranges of parameters of these sizes: each bucket takes parameters until it has `bucket_size` elements."""
    start = total = 0
    for number, size in enumerate(sizes):
        total += size
        if total >= bucket_size:
            yield range(start, number + 1)
            start, total = number + 1, 0
    if start < len(sizes):
        yield range(start, len(sizes))


CODE_BLOCK = 128
"""Elements that share a scale where they are sent as codes; a multiple of 2, as a byte has two codes of 4 bits."""
WEIGHT_CODES = "int8"
"""The codes of weights (qwZ), in blocks of a size of their own."""
MOST_MOVED = 2**22
"""Elements that are exchanged together, or nearly twice as many: the device has little room after a step."""


def bytes_of_block(dtype: str, size: int = CODE_BLOCK) -> int:
    """Bytes of the codes of a block of so many elements, and of its scale."""
    return (size // 2 if dtype == "int4" else size) + 4


class MovedPart(NamedTuple):
    """Elements `begin` to `end` of what a rank keeps of a parameter."""

    name: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of its elements."""
        return self.end - self.begin


def moves_together(sizes: Mapping[str, int], tied: Collection[str], bucket_size: int) -> Iterator[list[MovedPart]]:
    """Parameters of a domain whose moves an outer step exchanges together, large ones in parts; a tied one is alone.

    With three islands or more the order of a sum may depend on the place in a buffer, and the two stages that hold a
    tied parameter must get the same bits.
    """
    most = rounded_up(min(bucket_size, MOST_MOVED), CODE_BLOCK)
    parts = [
        MovedPart(name, begin, min(begin + most, size))
        for name, size in sizes.items()
        for begin in range(0, size, most)
    ]
    yield from ([part] for part in parts if part.name in tied)
    others = [part for part in parts if part.name not in tied]
    for numbers in cut_into_buckets([part.size for part in others], most):
        yield [others[number] for number in numbers]


def num_code_blocks(sizes: Sequence[int], *, islands: int) -> int:
    """Blocks of moves of these sizes: each begins with one of its own, and every island has as many of them."""
    return rounded_up(sum(-(-size // CODE_BLOCK) for size in sizes), islands)


def offsets(sizes: Sequence[int], alignment: int) -> Iterator[int]:
    """Where each parameter begins, at a multiple of `alignment` elements, and at last where all end."""
    offset = 0
    for size in sizes:
        yield offset
        offset += rounded_up(size, alignment)
    yield offset


def padded_size(sizes: Sequence[int], *, alignment: int, ranks: int) -> int:
    """Elements of a bucket with these parameters, so that the part of each rank begins at such a multiple, too."""
    *_, end = offsets(sizes, alignment)
    return rounded_up(end, alignment * ranks)


def rounded_up(size: int, multiple: int) -> int:
    """The next multiple that is not smaller."""
    return -(-size // multiple) * multiple
