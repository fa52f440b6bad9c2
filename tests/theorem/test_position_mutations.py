"""Mutations of the positions that RoPE turns by, where cp alone cuts the sequence: each fails the comparison.

An offset that all ranks share is no mistake, as RoPE's scores know differences alone. One that the ranks do not share
turns queries against the keys of other ranks, and no loss on a single rank shows it.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from comparison import aspects_that_differ, assert_same_training, serial
from models import TWO_LAYERS
from problem import Problem, Spread
from ranks import run_ranks
from sweeps import some_of
from test_experts_mutations import Patch, no_mistake, planted_train
from torch import Tensor

from megatronish.core.layout import Layout
from megatronish.model import gpt
from megatronish.model.batch import MicroBatch
from megatronish.model.context import Context, make_context
from megatronish.parallel.mesh import Axis

PROBLEM = Problem(TWO_LAYERS, seq_length=16, global_batch_size=2)


def change_positions(patch: Patch, change: Callable[[Tensor, Axis], Tensor]) -> None:
    """RoPE is computed at other positions [B, S/cp]; nothing else reads them."""

    def planted(batch: MicroBatch, *, cp: Axis, **options: object) -> Context:
        moved = replace(batch, position_ids=change(batch.position_ids, cp))
        return make_context(moved, cp=cp, **options)  # type: ignore[arg-type]

    patch.setattr(gpt, "make_context", planted)


def one_further_on_the_second_rank(patch: Patch) -> None:
    """The offset of a rank that counts from one."""
    change_positions(patch, lambda positions, cp: positions + (cp.rank == 1))


def from_zero_on_every_rank(patch: Patch) -> None:
    """Each rank counts what it holds."""
    change_positions(patch, lambda positions, _cp: torch.arange(positions.shape[1]).expand_as(positions))


def in_one_piece(patch: Patch) -> None:
    """Rank r has the r-th piece of the sequence, and not a front and a back chunk of it."""
    size = PROBLEM.seq_length // 2
    change_positions(patch, lambda positions, cp: torch.arange(size).expand_as(positions) + size * cp.rank)


@pytest.mark.parametrize("cp_comm_type", some_of(["p2p", "a2a"], ["p2p"]))
def test_positions_that_cp_ranks_get_wrong_are_found(cp_comm_type: str) -> None:
    spread = Spread(Layout(cp=2), 1, cp_comm_type=cp_comm_type)
    assert_same_training(run_ranks(2, planted_train, PROBLEM, spread, no_mistake), serial(PROBLEM))
    for plant in (one_further_on_the_second_rank, from_zero_on_every_rank, in_one_piece):
        found = aspects_that_differ(run_ranks(2, planted_train, PROBLEM, spread, plant), serial(PROBLEM))
        assert {"gradients", "norm"} <= found, (plant.__name__, found)
