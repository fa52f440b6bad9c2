"""Tests of who holds which tokens, and who sees which: head placement, zigzag, masks and tiles of a mask."""

import pytest
import torch
from documents import documents_of, sees

from megatronish.attention.all_to_all import num_repeats
from megatronish.attention.mask import AttentionMask
from megatronish.attention.ring import tiles_of
from megatronish.attention.zigzag import from_zigzag, places_of, to_zigzag
from megatronish.specs.block_pattern import BlockPattern

SIZES = [(12, 1), (12, 2), (12, 3), (24, 3), (32, 4), (70, 5)]  # S, cp
WINDOWS = (None, 1, 2, 3, 5, 8, 11, 12, 13, 100)  # S is 12 below
PATTERNS = [
    BlockPattern("sliding", 1, 2),
    BlockPattern("sliding", 5, 1),
    BlockPattern("fixed", 2, 2, 1),
    BlockPattern("longformer", 3, 1, 1),
    BlockPattern("bigbird", 2, 1, 0, 1),
]


# Who holds what


@pytest.mark.parametrize(("seq_length", "cp"), SIZES)
def test_every_place_is_held_once_and_the_work_of_all_ranks_is_equal(seq_length: int, cp: int) -> None:
    held = [places_of(seq_length, rank, cp) for rank in range(cp)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(seq_length))
    assert len({int((places + 1).sum()) for places in held}) == 1  # keys that its queries see
    assert all(torch.equal(places, places.sort().values) for places in held)


def test_one_rank_holds_all_in_order_whatever_their_number() -> None:
    assert torch.equal(places_of(7, 0, 1), torch.arange(7))


@pytest.mark.parametrize(("seq_length", "cp"), SIZES)
def test_the_order_of_the_sequence_is_restored_and_undone(seq_length: int, cp: int) -> None:
    held = torch.cat([places_of(seq_length, rank, cp) for rank in range(cp)])
    values = torch.stack((held, -held), dim=1)
    if cp > 1:
        assert torch.equal(from_zigzag(values, cp)[:, 0], torch.arange(seq_length))
        assert torch.equal(to_zigzag(from_zigzag(values, cp), cp), values)


def test_kv_heads_are_repeated_as_little_as_will_do() -> None:
    assert num_repeats(8, 8, 4) == 1
    assert num_repeats(8, 2, 4) == 2
    assert num_repeats(8, 1, 4) == 4
    assert num_repeats(12, 2, 3) == 3
    assert num_repeats(12, 4, 6) == 3
    for cp in range(1, 7):
        for kv_heads in range(1, 7):
            for group in range(1, 13):
                if kv_heads * group % cp == 0:
                    times = num_repeats(kv_heads * group, kv_heads, cp)
                    assert kv_heads * times % cp == 0
                    assert group % times == 0


# Who sees what


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_says_of_any_positions_what_the_definition_says(window: int | None, packed: bool) -> None:
    seq_length = 12
    documents = documents_of(seq_length) if packed else None
    mask = AttentionMask(seq_length, window, documents)
    queries, keys = torch.tensor([11, 3, 4, 0, 7]), torch.tensor([0, 10, 3, 4])
    dense = mask.dense(queries, keys)
    assert dense.shape == (2 if packed else 1, 1, 5, 4)
    for sample, rows in enumerate(dense[:, 0].tolist()):
        ids = None if documents is None else documents[sample]
        assert rows == [
            [sees(query, key, window=window, documents=ids) for key in keys.tolist()] for query in queries.tolist()
        ]
    places = torch.arange(seq_length)
    if mask.whole is None:
        assert mask.is_plain
        assert torch.equal(mask.dense(places, places)[0, 0], places[:, None] >= places)
    else:
        assert torch.equal(mask.whole, mask.dense(places, places))
        assert mask.whole is mask.whole


@pytest.mark.long
@pytest.mark.parametrize(
    ("window", "pattern"), [*((window, None) for window in WINDOWS), *((None, p) for p in PATTERNS)]
)
def test_what_runs_see_of_each_other_is_what_their_mask_says(window: int | None, pattern: BlockPattern | None) -> None:
    mask = AttentionMask(8, window, pattern=pattern)
    runs = [range(start, stop) for start in range(8) for stop in range(start + 1, 9)]
    for queries in runs:
        for keys in runs:
            dense = mask.dense(torch.tensor(queries), torch.tensor(keys))[0, 0]
            match mask.between(queries, keys):
                case "nothing":
                    assert not dense.any()
                case "everything":
                    assert dense.all()
                case "causal":
                    assert torch.equal(dense, torch.ones_like(dense).tril())
                case "dense":
                    assert not dense.all()
                    assert pattern is None or dense.any()
    assert AttentionMask(8, window, documents_of(8)).between(range(4, 8), range(4)) in ("dense", "nothing")


@pytest.mark.parametrize(("seq_length", "cp"), [size for size in SIZES if size[1] > 1])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("by_chunks", [False, True])
def test_tiles_together_are_the_mask_and_each_token_comes_to_itself_first(
    seq_length: int, cp: int, window: int | None, by_chunks: bool
) -> None:
    check_tiles(AttentionMask(seq_length, window), cp, by_chunks=by_chunks)


@pytest.mark.parametrize(("seq_length", "cp"), [size for size in SIZES if size[1] > 1])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: f"{pattern.name} of {pattern.block_size}")
def test_tiles_of_a_pattern_are_what_it_shows_and_chunks_that_it_hides_are_left_out(
    seq_length: int, cp: int, pattern: BlockPattern
) -> None:
    mask = AttentionMask(seq_length, pattern=pattern)
    for by_chunks in (False, True):
        check_tiles(mask, cp, by_chunks=by_chunks)
    if not mask.is_plain:  # no dense mask is needed: a tile is seen whole, or is a causal square
        ranks = range(cp)
        tiles = [
            each
            for rank in ranks
            for source in ranks
            for each in tiles_of(rank, source, cp_size=cp, mask=mask, by_chunks=False)
        ]
        assert {each.block_mask for each in tiles} <= {"causal", "everything"}


def check_tiles(mask: AttentionMask, cp: int, *, by_chunks: bool) -> None:
    """All tiles of all ranks, place by place."""
    seq_length = mask.seq_length
    places = torch.arange(seq_length)
    found, computed = torch.zeros(seq_length, seq_length, dtype=torch.bool), []
    for rank in range(cp):
        mine, begun = places_of(seq_length, rank, cp), torch.zeros(seq_length, dtype=torch.bool)
        for step in range(cp):
            source = (rank - step) % cp
            theirs = places_of(seq_length, source, cp)
            area = 0
            for each in tiles_of(rank, source, cp_size=cp, mask=mask, by_chunks=by_chunks):
                queries, keys = mine[each.queries], theirs[each.keys]
                seen = mask.dense(queries, keys)[0, 0]
                assert seen.any()
                assert each.block_mask != "everything" or seen.all()
                assert each.block_mask != "causal" or torch.equal(seen, torch.ones_like(seen).tril())
                assert not found[queries[:, None], keys].any()
                found[queries[:, None], keys] = seen
                new = queries[~begun[queries]]
                assert torch.isin(new, keys).all()
                begun[queries] = True
                area += seen.numel()
            computed.append(area)
    assert torch.equal(found, mask.dense(places, places)[0, 0])
    if mask.is_plain and not by_chunks:
        square = (seq_length // cp) ** 2
        assert computed == [square, *[square // 2] * (cp - 1)] * cp
