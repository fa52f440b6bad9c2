"""Theorem for products by pieces (--tp-comm-overlap): the model of one process, and each mistake of the ring is found.

Of the layouts of test_parallel_equals_serial.py and its like those have it, too, that cut the sequence over tp and mask
the loss of end tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from comparison import aspects_that_differ, assert_equal_to_serial, assert_same_training, serial
from problem import Problem, Spread
from ranks import run_ranks
from test_experts_mutations import Patch, no_mistake, planted_train
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import RecomputeConfig
from megatronish.core.layout import Layout
from megatronish.layers import ring_products
from megatronish.layers.ring_products import ScatteredProduct
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, TensorParallel

GPT = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=24,
    attention_dropout=0.0,
    hidden_dropout=0.1,
    init_method_std=0.2,
    make_vocab_size_divisible_by=4,
)
LLAMA = replace(
    GPT,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    disable_bias_linear=True,
    group_query_attention=True,
    num_query_groups=2,
    untie_embeddings_and_output_weights=True,
)
GEGLU = replace(GPT, quick_geglu=True, add_qkv_bias=True, group_query_attention=True, num_query_groups=4)
EXPERTS = replace(LLAMA, num_experts=4, moe_router_topk=2, moe_shared_expert_intermediate_size=12)
TP2, TP4 = (Spread(Layout(tp=tp), 1, sequence_parallel=True, by_pieces=True) for tp in (2, 4))
PROBLEM = Problem(GPT, seq_length=16, global_batch_size=2)
CASES = {
    "biases, tp 2": (GPT, TP2),
    "biases, tp 4": (GPT, TP4),
    "shared key/value heads and SwiGLU, tp 4": (LLAMA, TP4),
    "GeGLU, tp 2": (GEGLU, TP2),
    "all recomputed, tp 4": (LLAMA, replace(TP4, recompute=RecomputeConfig("full", "uniform", 1))),
    "selectively recomputed": (LLAMA, replace(TP2, recompute=RecomputeConfig("selective"))),
    "weight gradients later": (GPT, replace(TP2, layout=Layout(tp=2, pp=2), schedule="zb-h1")),
    "on a ring, ZeRO-2": (LLAMA, replace(TP2, layout=Layout(tp=2, cp=2), zero=2)),
    "ZeRO-3": (GPT, replace(TP2, layout=Layout(dp=2, tp=2), zero=3)),
    "shared experts": (EXPERTS, replace(TP2, ep=2, etp=1)),
}


@pytest.mark.parametrize("name", CASES)
def test_products_by_pieces_train_the_model_of_one_process(name: str) -> None:
    model, spread = CASES[name]
    assert_equal_to_serial(replace(PROBLEM, model=model), spread, is_checked=True)


def ring_reversed(patch: Patch) -> None:
    """Pieces are taken for those of the other direction."""
    patch.setattr(ring_products, "_owner", lambda axis, step: (axis.rank + step) % axis.size)


def a_piece_twice(patch: Patch) -> None:
    """The first piece is multiplied again where the second one should be."""
    start = comm.start_shift

    def planted(x: Tensor, axis: Axis, **options: Any) -> comm.Pending:
        start(x, axis, **options).wait()
        return comm.Pending(x)

    patch.setattr(comm, "start_shift", planted)


def last_term_lost(patch: Patch) -> None:
    """The sum of a piece has no term of the rank that it is for."""

    def planted(x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
        y = scattered(x, weight, tp)
        return y - torch.nn.functional.linear(x.chunk(tp.size)[tp.axis.rank], weight)

    scattered = ring_products.scattered_product
    patch.setattr(ring_products, "scattered_product", planted)


def weight_of_own_piece(patch: Patch) -> None:
    """The gradient of a row-parallel weight has this rank's piece of dy alone."""
    input_gradient = ScatteredProduct.input_gradient

    def planted(self: ScatteredProduct, dy: Tensor, weight: Tensor) -> Tensor:
        dx = input_gradient(self, dy, weight)
        axis, whole = self._axis, self._whole
        for rank, piece in enumerate(whole.chunk(axis.size)):
            piece.mul_(float(rank == axis.rank))
        return dx

    patch.setattr(ScatteredProduct, "input_gradient", planted)


MISTAKES = [
    (ring_reversed, TP4, {"metrics", "gradients"}),
    (a_piece_twice, TP2, {"metrics", "gradients"}),
    (last_term_lost, TP2, {"metrics", "gradients"}),
    (weight_of_own_piece, TP2, {"gradients"}),
]


@pytest.mark.parametrize(("plant", "spread", "shown_by"), MISTAKES, ids=[plant.__name__ for plant, *_ in MISTAKES])
def test_a_mistake_in_the_ring_is_found(plant: Callable[[Patch], None], spread: Spread, shown_by: set[str]) -> None:
    number = spread.layout.world_size
    assert_same_training(run_ranks(number, planted_train, PROBLEM, spread, no_mistake), serial(PROBLEM))
    differing = aspects_that_differ(run_ranks(number, planted_train, PROBLEM, spread, plant), serial(PROBLEM))
    assert shown_by <= differing, differing
