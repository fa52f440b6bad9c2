"""Sizes of gradient buckets: which parameters fill one together, and the padding that vector loads and shares need."""

from collections.abc import Iterator, Sequence


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
