"""Patterns of block-sparse attention, as data that needs no torch: which blocks of keys a block of queries sees.

Sequence and keys are cut into blocks of one size. Row r of a pattern are the blocks that the queries of block r see:
blocks before r, and r itself, in which attention is causal. A row is a function of its number, of the options and of
the seed alone. So it is the same in every layout; and a longer sequence has the same rows and more, which is why a
KV cache sees what training saw.

    sliding       local blocks: its own and those before it
    fixed         windows of local blocks, one after the other: the blocks of its own window, and the last ones of each
                  window before (Child et al. 2019, arXiv:1904.10509, section 4.3)
    longformer    local blocks, and global ones at the begin of the sequence (Beltagy et al. 2020, arXiv:2004.05150)
    bigbird       these, and random ones (Zaheer et al. 2020, arXiv:2007.14062)

A global token of the two papers also sees all tokens. A causal one sees what is before it, so there only its column is
global.

A new pattern is a function of a row and a line of `ROWS`, with its name and options in config/sections/pattern.py.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.pattern import READ_BY, AttentionPattern


@dataclass(frozen=True)
class BlockPattern:
    """A pattern with its options. Those that it does not read are 0, so that equal patterns are equal."""

    name: AttentionPattern
    block_size: int
    num_local: int
    num_global: int = 0
    num_random: int = 0
    seed: int = 0

    @classmethod
    def of(cls, model: ModelConfig) -> "BlockPattern | None":
        """The pattern that the options of a config describe; None for attention to all tokens before."""
        if model.attention_pattern == "none":
            return None
        options = ("block_size", "local_blocks", "global_blocks", "random_blocks", "pattern_seed")
        read = READ_BY[model.attention_pattern]
        names = [f"attention_{option}" for option in options]
        return cls(model.attention_pattern, *(getattr(model, name) if name in read else 0 for name in names))

    def row(self, number: int) -> tuple[int, ...]:
        """Blocks that the queries of a block see, in order; the last one is their own."""
        return _row(self, number)

    def num_rows(self, seq_length: int) -> int:
        """Blocks of a sequence; the last one may be ragged."""
        return -(-seq_length // self.block_size)

    def is_whole(self, seq_length: int) -> bool:
        """Whether every token of a sequence sees all tokens before it."""
        return _is_whole(self, seq_length)

    def runs_before(self, query: int) -> list[range]:
        """Places before `query` that a query there sees, as runs in order."""
        return self._joined(self.row(query // self.block_size), query)

    def _joined(self, blocks: Iterable[int], stop: int) -> list[range]:
        runs: list[range] = []
        for block in sorted(blocks):
            begin, end = block * self.block_size, min((block + 1) * self.block_size, stop)
            if runs and runs[-1].stop == begin:
                runs[-1] = range(runs[-1].start, end)
            elif begin < end:
                runs.append(range(begin, end))
        return runs

    def runs_of(self, queries: range) -> list[range]:
        """Places that one of a run of queries sees or more, as far as they are not after all of them, as runs."""
        rows = range(queries[0] // self.block_size, queries[-1] // self.block_size + 1)
        return self._joined({block for row in rows for block in self.row(row)}, queries.stop)

    def between(self, queries: range, keys: range) -> Literal["nothing", "some", "all"]:
        """How many of a run of keys, as far as they are not after it, each query of a run sees."""
        size, any_seen, all_seen = self.block_size, False, True
        first, last = keys[0] // size, keys[-1] // size
        for number in range(queries[0] // size, queries[-1] // size + 1):
            row, most = self.row(number), min(last, number)
            seen = bisect_left(row, most + 1) - bisect_left(row, first)
            any_seen |= seen > 0
            all_seen &= seen == max(0, most - first + 1)
        return "nothing" if not any_seen else "all" if all_seen else "some"

    def pieces(self, queries: range, keys: range) -> Iterator[tuple[range, range]]:
        """Queries and keys of the rectangles that are seen of a run of queries with one of keys.

        The runs are equal, or one is wholly before the other. In the rectangle with equal sides, which comes first for
        its queries, attention is causal; of the others all is seen.
        """
        begin = queries.start
        while begin < queries.stop:
            end = min((begin // self.block_size + 1) * self.block_size, queries.stop)
            here = range(begin, end)
            if queries == keys:
                yield here, here
            for run in self.runs_before(begin):
                clipped = range(max(run.start, keys.start), min(run.stop, keys.stop))
                if clipped:
                    yield here, clipped
            begin = end

    def keys(self, seq_length: int, mask: Literal["causal", "full"]) -> float:
        """Keys that the average token of a sequence sees; "full": those of all its blocks."""
        return _mean_keys(self, seq_length, mask)

    def longest_run(self, seq_length: int) -> int:
        """Most keys of one rectangle of `pieces`."""
        size = self.block_size
        starts = range(0, seq_length, size)
        return max((len(run) for start in starts for run in self.runs_before(start)), default=min(size, seq_length))


@cache
def _row(pattern: BlockPattern, number: int) -> tuple[int, ...]:
    return tuple(sorted(ROWS[pattern.name](pattern, number) | {number}))


@cache
def _is_whole(pattern: BlockPattern, seq_length: int) -> bool:
    return all(len(pattern.row(number)) == number + 1 for number in range(pattern.num_rows(seq_length)))


@cache
def _mean_keys(pattern: BlockPattern, seq_length: int, mask: Literal["causal", "full"]) -> float:
    size, pairs = pattern.block_size, 0.0
    for number in range(pattern.num_rows(seq_length)):
        queries = min(size, seq_length - number * size)
        before = (len(pattern.row(number)) - 1) * size
        pairs += queries * (before + (queries / 2 if mask == "causal" else queries))
    return pairs / seq_length


def _sliding(pattern: BlockPattern, number: int) -> set[int]:
    return set(range(max(0, number - pattern.num_local + 1), number + 1))


def _fixed(pattern: BlockPattern, number: int) -> set[int]:
    window = number // pattern.num_local * pattern.num_local
    ends = range(pattern.num_local, window + 1, pattern.num_local)
    summaries = {end - back for end in ends for back in range(1, pattern.num_global + 1)}
    return set(range(window, number + 1)) | summaries


def _longformer(pattern: BlockPattern, number: int) -> set[int]:
    return _sliding(pattern, number) | set(range(min(pattern.num_global, number + 1)))


def _bigbird(pattern: BlockPattern, number: int) -> set[int]:
    """Random blocks are those that nothing else shows, as many as there are."""
    row = _longformer(pattern, number)
    num_others = number - sum(block < number for block in row)
    for draw in range(min(pattern.num_random, num_others)):
        name = repr(("attention pattern", pattern.seed, number, draw)).encode()
        chosen = int.from_bytes(hashlib.sha256(name).digest()[:8], "little") % (num_others - draw)
        for block in sorted(row):  # so far the number among the blocks that are not shown
            chosen += block <= chosen
        row.add(chosen)
    return row


ROWS: dict[str, Callable[[BlockPattern, int], set[int]]] = {
    "sliding": _sliding,
    "fixed": _fixed,
    "longformer": _longformer,
    "bigbird": _bigbird,
}
"""Blocks that a row of each pattern sees."""
