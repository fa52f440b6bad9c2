"""Tests of the norm over all heads on ranks: outputs and gradients are those of one process, however heads are cut."""

from typing import NamedTuple

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.layers.norm import AllHeadsNorm
from megatronish.parallel.mesh import Mesh

HEADS, SIZE, EPSILON = 4, 6, 1e-3


class Normalised(NamedTuple):
    """Output of this rank's heads, and the gradients of what it holds."""

    y: Tensor
    dx: Tensor
    dweight: Tensor


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """x [5, 2, HEADS * SIZE], the gradient of y, and the weight [HEADS * SIZE]."""
    made = torch.Generator().manual_seed(3)
    shapes = ((5, 2, HEADS * SIZE), (5, 2, HEADS * SIZE), (HEADS * SIZE,))
    x, dy, weight = (torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes)
    return x, dy, weight


def on_a_rank(place: Place) -> Normalised:
    tp = Mesh.start(Layout(tp=place.world_size), rank=place.rank, init_method=place.rendezvous).tp
    norm = AllHeadsNorm(HEADS * SIZE, epsilon=EPSILON, tp=tp).double()
    x, dy, weight = inputs()
    mine = x.chunk(tp.size, dim=2)[tp.rank].clone().requires_grad_()
    with torch.no_grad():
        norm.weight.copy_(weight.chunk(tp.size)[tp.rank])
    y = norm(mine)
    y.backward(dy.chunk(tp.size, dim=2)[tp.rank])
    assert mine.grad is not None and norm.weight.grad is not None
    return Normalised(y.detach(), mine.grad, norm.weight.grad)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_norm_over_all_heads_is_the_same_however_heads_are_cut(size: int) -> None:
    x, dy, weight = inputs()
    x.requires_grad_()
    weight.requires_grad_()
    y = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight
    y.backward(dy)
    found = run_ranks(size, on_a_rank)
    assert x.grad is not None
    torch.testing.assert_close(torch.cat([part.y for part in found], dim=2), y.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.cat([part.dx for part in found], dim=2), x.grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.cat([part.dweight for part in found]), weight.grad, rtol=0, atol=1e-13)
