"""Tests of IA3 of experts: rows that are no choice's have any values, and no gradient reads them."""

import torch

from megatronish.layers.experts import StackedLinear
from megatronish.layers.ia3 import GroupedIA3
from megatronish.ops.grouped_mm import Groups
from megatronish.parallel.mesh import ExpertParallel


def test_rows_behind_the_last_expert_reach_no_gradient() -> None:
    down = StackedLinear((2, 3, 4), parallel=ExpertParallel(), cut_dim=2, init_std=0.1, sections=("down",))
    adapter, groups = GroupedIA3(down), Groups.of((2, 3), torch.device("cpu"))
    torch.nn.init.ones_(adapter.down.l)
    x, dy = torch.randn(7, 4), torch.randn(7, 4)
    x[5:], dy[5:] = torch.inf, torch.nan  # two choices that were dropped
    adapter.scaled_input(x, groups).backward(dy)
    products = x * dy
    expected = torch.stack([products[:2].sum(0), products[2:5].sum(0)])
    torch.testing.assert_close(adapter.down.l.grad, expected)
