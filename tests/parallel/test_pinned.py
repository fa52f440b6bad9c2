"""Tests of pinned memory: tensors share blocks that torch rounds up to little more than they take."""

import pytest
import torch

from megatronish.parallel import pinned
from megatronish.parallel.pinned import ALIGNMENT, Form, blocks_of, bytes_of_blocks, pinned_zeros, power_above

MB = 10**6


def taken(sizes: list[int]) -> int:
    """Bytes that torch pins for blocks of these sizes."""
    blocks = blocks_of(sizes)
    assert [size for block in blocks for size in block] == sizes
    return bytes_of_blocks(blocks)


@pytest.mark.parametrize(
    "sizes",
    [
        [160 * MB] * 63,  # buckets of 40,000,000 elements
        [160 * MB] * 63 + [3 * MB],
        [20 * MB + 12] * 25,
        [100 * MB, 700 * MB, 90 * MB] * 9,
        [2**20] * 64,
        [4, 0, 12, 2**15] * 50,
    ],
)
def test_many_tensors_take_little_more_than_their_bytes(sizes: list[int]) -> None:
    """Alone, buckets of 160 MB take 68 % more."""
    aligned = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    assert aligned <= taken(sizes) <= 1.13 * aligned


def test_no_sizes_take_more_than_each_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    for number in range(200):
        sizes = [int(2 ** (30 * x)) for x in torch.rand(1 + number % 40, generator=generator).tolist()]
        alone = sum(max(ALIGNMENT, power_above(size)) for size in sizes)
        assert taken(sizes) <= alone, sizes


def test_tensors_share_a_block_and_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(pinned.torch, "zeros", lambda size, dtype, **_: zeros(size, dtype=dtype))
    forms = [
        Form((3, 100), torch.float32),
        Form((150,), torch.int64),
        Form((0, 4), torch.bfloat16),
        Form((600,), torch.float16),
    ]
    found = pinned_zeros(forms)
    assert [(tuple(each.shape), each.dtype) for each in found] == forms
    assert len({each.untyped_storage().data_ptr() for each in found}) == 2
    assert all(each.data_ptr() % 16 == 0 for each in found if each.numel())
    for number, each in enumerate(found):
        each.fill_(number + 1)
    assert [each.unique().tolist() for each in found] == [[1], [2], [], [4]]
