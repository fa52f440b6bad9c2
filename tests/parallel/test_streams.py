"""Tests of named random streams: their statistics, and independence of how a tensor is cut."""

import math
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from megatronish.layers.dropout import Dropout
from megatronish.parallel.streams import (
    TILE,
    keep_mask,
    mask_keys,
    normal_rectangle,
    numpy_stream,
    seed_of,
    torch_stream,
)

ROWS = torch.arange(512)
GOLDEN_SEED = 2803926141705728152
GOLDEN_INTEGERS = [152, 913, 694, 618]
GOLDEN_MASK = ["01100011", "11100110", "11101111", "01101110"]


def keys_of(*names: str | int) -> Tensor:
    return mask_keys([names])[0]


def mask(*names: str | int, rate: float = 0.5, width: int = 512) -> Tensor:
    return keep_mask(keys_of(*names), places=(ROWS,), columns=torch.arange(width), rate=rate)


def agreement(a: Tensor, b: Tensor) -> float:
    """How far the share of equal elements is from one half, in standard deviations of independent fair bits."""
    return abs((a == b).double().mean().item() - 0.5) * 2 * math.sqrt(a.numel())


def test_a_seed_depends_on_every_name_and_on_their_order() -> None:
    names: list[tuple[str | int, ...]] = [
        (1,),
        (2,),
        ("1",),
        (1, 1),
        (1, "a", "b"),
        (1, "b", "a"),
        (1, "ab"),
        (1, "a,b"),
        (1, "a", "b", 0),
    ]
    assert len({seed_of(*each) for each in names}) == len(names)
    assert all(0 <= seed_of(*each) < 2**63 for each in names)


def test_streams_stay_what_they_are() -> None:
    """A change here would give every resumed run other masks, other weights and another order of its data."""
    assert seed_of(1234, "init", "layers.0.mlp.fc1.weight", 0, 0) == GOLDEN_SEED
    assert numpy_stream(1, "order").integers(0, 1000, 4).tolist() == GOLDEN_INTEGERS
    bits = keep_mask(keys_of(1234, "dropout", 7, 0, "x"), places=(torch.arange(4),), columns=torch.arange(8), rate=0.5)
    assert ["".join(map(str, row)) for row in bits.int().tolist()] == GOLDEN_MASK


def test_generators_of_equal_names_agree_and_of_others_do_not() -> None:
    assert torch.equal(torch.rand(9, generator=torch_stream(1, "a")), torch.rand(9, generator=torch_stream(1, "a")))
    assert not torch.equal(torch.rand(9, generator=torch_stream(1, "a")), torch.rand(9, generator=torch_stream(2, "a")))
    assert np.array_equal(numpy_stream(1, "a").random(9), numpy_stream(1, "a").random(9))


def test_a_rectangle_is_a_part_of_the_whole_wherever_it_is_cut() -> None:
    shape = (2 * TILE + 77, TILE + 130)
    whole = normal_rectangle(shape, (0, 0), shape, names=(1, "w"))
    for top, left, height, width in [
        (0, 0, 1, 1),
        (TILE - 1, TILE - 1, 2, 2),
        (TILE, 0, TILE, TILE),
        (3, 500, 2 * TILE, 100),
        (2 * TILE + 76, 0, 1, shape[1]),
        (0, shape[1] - 1, shape[0], 1),
    ]:
        part = normal_rectangle(shape, (top, left), (height, width), names=(1, "w"))
        assert torch.equal(part, whole[top : top + height, left : left + width])


def test_values_are_standard_normal_and_tiles_and_names_independent() -> None:
    shape = (2 * TILE, 2 * TILE)
    values = normal_rectangle(shape, (0, 0), shape, names=(1, "w")).double()
    n = values.numel()
    assert abs(values.mean().item()) < 4 / math.sqrt(n)
    assert abs(values.var().item() - 1) < 4 * math.sqrt(2 / n)
    assert abs((values**4).mean().item() - 3) < 4 * math.sqrt(96 / n)
    other = normal_rectangle(shape, (0, 0), shape, names=(2, "w")).double()
    tiles = [*(half for part in values.chunk(2) for half in part.chunk(2, 1)), other[:TILE, :TILE]]
    for a, b in combinations(tiles, 2):
        assert abs((a * b).mean().item()) < 4.5 / TILE


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_the_rate_says(rate: float) -> None:
    dropped = 1 - mask(1, "rate", rate=rate).double()
    deviation = math.sqrt(rate * (1 - rate))
    assert abs(dropped.mean().item() - rate) < 4 * deviation / 512
    for dim in (0, 1):  # no row and no column is special: 5 deviations among 512 of them
        assert (dropped.mean(dim) - rate).abs().max().item() < 5 * deviation / math.sqrt(512) + 0.01


def test_a_smaller_rate_keeps_more() -> None:
    assert bool((mask(1, "x", rate=0.1) | ~mask(1, "x", rate=0.3)).all())
    assert bool(mask(1, "x", rate=0.0).all())


def test_masks_of_other_names_places_and_channels_are_independent() -> None:
    base = mask(1, "dropout", 5, 0, "mlp_output")
    others = [
        mask(2, "dropout", 5, 0, "mlp_output"),
        mask(1, "dropout", 6, 0, "mlp_output"),
        mask(1, "dropout", 5, 1, "mlp_output"),
        mask(1, "dropout", 5, 0, "attention_output"),
        base.roll(1, 0),
        base.roll(1, 1),
        base.roll((1, 1), (0, 1)),
        base.roll((1, -1), (0, 1)),
        base.roll(256, 0),
        keep_mask(keys_of(1, "dropout", 5, 0, "mlp_output"), places=(ROWS + 512,), columns=torch.arange(512), rate=0.5),
    ]
    assert max(agreement(base, other) for other in others) < 4


def test_sample_3_at_position_5_is_not_sample_5_at_position_3() -> None:
    bits = keep_mask(
        keys_of(1, "x"), places=(torch.arange(64)[:, None], torch.arange(64)), columns=torch.arange(64), rate=0.5
    )
    above = torch.ones(64, 64).triu(1).bool()
    assert agreement(bits[above], bits.transpose(0, 1)[above]) < 4


def test_a_mask_is_a_function_of_the_global_place() -> None:
    samples, heads, positions = torch.arange(10), torch.arange(6), torch.arange(12)

    def cut(s: slice, h: slice, p: slice) -> Tensor:
        places = (samples[s, None, None], heads[h, None], positions[p])
        return keep_mask(keys_of(1, "x"), places=places, columns=torch.arange(9), rate=0.3)

    everything = slice(None)
    whole = cut(everything, everything, everything)
    assert whole.shape == (10, 6, 12, 9)
    for s, h, p in [(slice(3, 7), everything, everything), (slice(9, 10), slice(2, 4), slice(5, 8))]:
        assert torch.equal(cut(s, h, p), whole[s, h, p])


def test_places_far_into_a_run_are_as_good() -> None:
    late = keep_mask(keys_of(1, "x"), places=(ROWS + 2**31 - 512,), columns=torch.arange(512), rate=0.5)
    assert agreement(late, mask(1, "x")) < 4
    assert abs(late.double().mean().item() - 0.5) < 4 * 0.5 / 512


def test_dropout_keeps_the_mean_and_ranks_hold_parts_of_one_mask() -> None:
    dropout = Dropout(1, 5, torch.arange(40, 44), layers=(2,)).of_layer(2)
    ones = torch.ones(64, 4, 128)
    whole = dropout.hidden(ones, site="mlp_output", positions=torch.arange(64), rate=0.1)
    assert whole.unique().tolist() == pytest.approx([0.0, 1 / 0.9])
    assert whole.mean().item() == pytest.approx(1, abs=4 * (0.1 / 0.9 / ones.numel()) ** 0.5)
    part = dropout.hidden(ones[:16], site="mlp_output", positions=torch.arange(16, 32), rate=0.1)
    assert torch.equal(part, whole[16:32])
    probabilities, places = torch.ones(4, 6, 64, 64), torch.arange(64)
    drop = dropout.attention(0.1).drop
    heads = drop(probabilities, first_head=0, queries=places, keys=places)
    assert torch.equal(drop(probabilities[:, :2], first_head=4, queries=places, keys=places), heads[:, 4:])
    rows, columns = torch.tensor([3, 60, 17]), torch.tensor([63, 0, 5, 6])
    block = drop(probabilities[..., :3, :4], first_head=0, queries=rows, keys=columns)
    assert torch.equal(block, heads[:, :, rows][..., columns])
    one_sample = Dropout(1, 5, torch.tensor([42]), layers=(2,)).of_layer(2).attention(0.1).drop
    assert torch.equal(one_sample(probabilities[:1], first_head=0, queries=places, keys=places), heads[2:3])


def test_a_site_that_only_a_block_knows_has_a_stream_of_its_own() -> None:
    dropout, ones = Dropout(1, 5, torch.arange(4), layers=(0, 2)), torch.ones(512, 4, 16)
    dropped = dropout.of_layer(2).hidden(ones, site="of its own", positions=ROWS, rate=0.5)
    places = (torch.arange(4), ROWS[:, None])
    keep = keep_mask(keys_of(1, "dropout", 5, 2, "of its own"), places=places, columns=torch.arange(16), rate=0.5)
    assert torch.equal(dropped, keep * 2.0)


@pytest.mark.parametrize("width", [16, 20])
def test_a_compiled_mask_is_the_mask(width: int) -> None:
    """Of a width that is a multiple of a vector register's, and of one that is not."""
    dropout = Dropout(1, 5, torch.arange(3), layers=(2,)).of_layer(2)
    x = torch.randn(12, 3, width, generator=torch.Generator().manual_seed(0))
    drop = partial(dropout.hidden, site="mlp_output", positions=torch.arange(12), rate=0.5)
    assert torch.equal(torch.compile(drop)(x), drop(x))
