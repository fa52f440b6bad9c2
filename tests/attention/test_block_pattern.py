"""Tests of patterns of block-sparse attention: which blocks a row sees, and what follows for runs and costs."""

import subprocess
import sys
from itertools import pairwise, product
from typing import get_args

import pytest

from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.pattern import READ_BY, AttentionPattern
from megatronish.specs.block_pattern import ROWS, BlockPattern
from megatronish.specs.costs import AttentionCore

PATTERNS = {
    "sliding": BlockPattern("sliding", 4, 2),
    "fixed": BlockPattern("fixed", 4, 3, 1),
    "fixed, two ends": BlockPattern("fixed", 3, 3, 2),
    "longformer": BlockPattern("longformer", 5, 1, 2),
    "bigbird": BlockPattern("bigbird", 4, 2, 1, 2, seed=5),
    "random alone": BlockPattern("bigbird", 2, 1, 0, 1),
}
LENGTHS = (1, 4, 21, 48)


def picture(pattern: BlockPattern, rows: int) -> list[str]:
    """Each row, # for a block that it sees."""
    return ["".join("#" if block in pattern.row(row) else "." for block in range(row + 1)) for row in range(rows)]


def test_rows_are_those_of_the_papers() -> None:
    assert picture(BlockPattern("sliding", 1, 3), 6) == ["#", "##", "###", ".###", "..###", "...###"]
    assert picture(BlockPattern("fixed", 1, 3, 1), 8) == [
        *("#", "##", "###"),
        *("..##", "..###", "..####"),
        *("..#..##", "..#..###"),
    ]
    assert picture(BlockPattern("longformer", 1, 2, 1), 6) == ["#", "##", "###", "#.##", "#..##", "#...##"]
    bigbird, plain = BlockPattern("bigbird", 1, 2, 1, 1), BlockPattern("longformer", 1, 2, 1)
    more = [set(bigbird.row(row)) - set(plain.row(row)) for row in range(40)]
    assert [len(blocks) for blocks in more] == [0, 0, 0, *[1] * 37]
    assert len({block for blocks in more for block in blocks}) > 10, "they are spread over the sequence"


def test_random_blocks_are_named_by_seed_and_row_alone() -> None:
    """In another process, asked in another order, with blocks of another size."""
    rows = [BlockPattern("bigbird", 8, 1, 1, 2, seed=9).row(row) for row in range(30)]
    code = (
        "from megatronish.specs.block_pattern import BlockPattern as P\n"
        "print([P('bigbird', 16, 1, 1, 2, seed=9).row(row) for row in reversed(range(30))][::-1])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(rows)
    assert rows != [BlockPattern("bigbird", 8, 1, 1, 2, seed=8).row(row) for row in range(30)]


@pytest.mark.parametrize("name", PATTERNS)
def test_a_row_is_in_order_and_ends_with_its_own_block(name: str) -> None:
    for number in range(40):
        row = PATTERNS[name].row(number)
        assert list(row) == sorted(set(row)) and row[-1] == number and row[0] >= 0


@pytest.mark.parametrize("name", PATTERNS)
def test_runs_and_rectangles_are_the_pattern_place_by_place(name: str) -> None:
    pattern, size = PATTERNS[name], PATTERNS[name].block_size

    def sees(query: int, key: int) -> bool:
        return key <= query and key // size in pattern.row(query // size)

    for length in LENGTHS:
        places = range(length)
        for query in places:
            before = [key for run in pattern.runs_before(query) for key in run]
            assert before == [key for key in range(query) if sees(query, key)]
        cuts = [0, length // 4, length // 2, length - length // 4, length]
        runs = [range(begin, end) for begin, end in pairwise(cuts) if begin < end]
        for queries in runs:
            seen = {key for query in queries for key in places if sees(query, key)}
            found = [key for run in pattern.runs_of(queries) for key in run]
            assert found == sorted(found) and seen <= set(found) <= set(range(queries.stop))
        for queries, keys in [*product(runs, repeat=2), (places, places)]:
            if queries != keys and keys.stop > queries.start:
                continue
            pairs = {(query, key) for query in queries for key in keys if sees(query, key)}
            covered = [
                (query, key)
                for rows, columns in pattern.pieces(queries, keys)
                for query, key in product(rows, columns)
                if rows != columns or key <= query
            ]
            assert len(covered) == len(pairs) and set(covered) == pairs
            shown = pattern.between(queries, keys)
            assert (shown == "nothing") == (not pairs)
            if shown == "all":
                assert pairs == {(query, key) for query in queries for key in keys if key <= query}


@pytest.mark.parametrize("name", PATTERNS)
def test_keys_of_the_average_token_are_counted(name: str) -> None:
    """Half of the own block, as costs count a causal square."""
    pattern, size = PATTERNS[name], PATTERNS[name].block_size
    for length in LENGTHS:
        pairs = 0.0
        for query in range(length):
            row = pattern.row(query // size)
            pairs += (len(row) - 1) * size + min(size, length - row[-1] * size) / 2
        assert pattern.keys(length, "causal") == pytest.approx(pairs / length)
        assert AttentionCore(2, 4, 4, None, pattern).keys(length, "causal") == pattern.keys(length, "causal")
        assert pattern.keys(length, "full") > pattern.keys(length, "causal")
    whole = BlockPattern("sliding", 4, 80)
    assert whole.is_whole(320) and not whole.is_whole(324)
    assert whole.keys(320, "causal") == pytest.approx(AttentionCore(1, 1, 1).keys(320, "causal"))


def test_a_config_has_the_pattern_of_its_options() -> None:
    model = ModelConfig(attention_pattern="fixed", attention_block_size=16, attention_random_blocks=3)
    assert BlockPattern.of(model) == BlockPattern("fixed", 16, 4, 1)
    assert BlockPattern.of(ModelConfig(attention_block_size=16)) is None
    assert {"none", *ROWS} == set(READ_BY) == set(get_args(AttentionPattern))
