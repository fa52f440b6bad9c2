"""Tests of attention in a dry run: few blocks have the peak and the FLOPs of all, and what skipped blocks save."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from sweeps import some_of
from torch._subclasses.fake_tensor import FakeTensorMode

from megatronish.attention import dropout_attention
from megatronish.attention.mask import BLOCK, AttentionMask
from megatronish.dry_run.gpu import Reference, computed_scores, dropped_references
from megatronish.dry_run.recorder import StepRecorder
from megatronish.specs.block_pattern import BlockPattern


def all_references() -> dict[Any, Reference]:
    return {
        getattr(torch.ops.megatronish, each.name): Reference(each.reference)
        for each in dropout_attention.FAMILY.operators
    }


def peak_and_flops(references: Mapping[Any, Reference], *, length: int, window: int | None) -> tuple[int, Counter[str]]:
    """Of a forward and a backward of attention with dropout, three samples, four heads of which two share one."""
    recorder = StepRecorder("cpu", number=1, references=references)
    with FakeTensorMode(), recorder.watching():
        q = torch.empty(length, 3, 4, 32, requires_grad=True)
        k, v = (torch.empty(length, 3, 2, 32, requires_grad=True) for _ in range(2))
        keys, samples = torch.zeros(2, dtype=torch.int32), torch.arange(3)
        out, _ = torch.ops.megatronish.dropped_attention(q, k, v, None, keys, samples, None, None, 0, window, True, 0.1)
        out.sum().backward()
    return recorder.ledger.peak, recorder.parts["build"].flops


@pytest.mark.long
@pytest.mark.parametrize(
    ("length", "window"),
    some_of([(512, None), (1000, None), (1000, 100), (40, None)], [(1000, 100), (40, None)]),
)
def test_few_blocks_of_attention_with_dropout_have_the_peak_and_the_flops_of_all(
    length: int, window: int | None
) -> None:
    every = peak_and_flops(all_references(), length=length, window=window)
    few = peak_and_flops(dropped_references(), length=length, window=window)
    assert few == every and every[1].total() > 0


@pytest.mark.parametrize(("length", "window"), [(512, None), (512, 128), (500, 200), (100, 300)])
def test_scores_of_flex_attention_are_those_of_blocks_in_which_a_query_sees_a_key(
    length: int, window: int | None
) -> None:
    places = torch.arange(length)
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (window or length))
    expected = 0
    for rows in places.split(BLOCK):
        for columns in places.split(BLOCK):
            expected += len(rows) * len(columns) * bool(seen[rows][:, columns].any())
    assert computed_scores(length, window) == expected


@pytest.mark.parametrize("size", [16, 128, 200])
def test_scores_of_flex_attention_with_a_pattern_are_those_of_its_block_mask(size: int) -> None:
    pattern = BlockPattern("bigbird", size, 2, 1, 1)
    blocks = AttentionMask(1000, pattern=pattern).blocks.to_dense()[0, 0].bool()
    sizes = torch.tensor([BLOCK] * 7 + [1000 - 7 * BLOCK])
    assert computed_scores(1000, None, pattern) == int((blocks * sizes[:, None] * sizes).sum())
