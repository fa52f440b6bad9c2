"""Tests of the benchmark of sparse attention, at sizes of a test: every way computes the same, and has a row."""

import pytest
import torch

from benchmarks import sparse_attention
from benchmarks.sparse_attention import by_blocks, by_sdpa, density, masks_of


def test_every_way_of_a_mask_computes_the_same() -> None:
    q, k, v = (torch.randn(48, 1, 2, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    for mask in masks_of(48, window=16, block=4).values():
        torch.testing.assert_close(by_blocks(mask)(q, k, v), by_sdpa(mask)(q, k, v))
        places = torch.arange(48)
        assert density(mask) == pytest.approx((int(mask.dense(places, places).sum()) - 24) / (48 * 24), rel=0.05)


def test_a_run_prints_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    sparse_attention.main(["--lengths", "64", "--window", "16", "--block", "4", "--heads", "2", "--rounds", "1"])
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    names = ["causal", "window 16", "sliding 4", "fixed 4", "longformer 4", "bigbird 4", "window 16, dense"]
    assert [line.partition("  ")[2].strip().split("  ")[0] for line in lines[1:]] == names
    assert sum("of 1 / density" in line for line in lines) == 5
