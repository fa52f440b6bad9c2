"""Mutations of latent attention: each mistake that a layout could make fails the comparison with one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from comparison import aspects_that_differ, assert_same_training, serial
from problem import Problem, Spread
from ranks import run_ranks
from test_experts_mutations import Patch, no_mistake, planted_train
from torch import Tensor

from megatronish.attention import ring
from megatronish.attention.latent_blocks import gradients_of_block
from megatronish.config.sections.model import ModelConfig
from megatronish.core.layout import Layout
from megatronish.layers.linear import WholeLinear
from megatronish.layers.norm import Norm
from megatronish.model.context import Context
from megatronish.model.latent_attention import LatentAttention
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis
from megatronish.parallel.sharding import Sharding

PROBLEM = Problem(
    ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        multi_latent_attention=True,
        q_lora_rank=6,
        kv_lora_rank=6,
        qk_head_dim=4,
        qk_pos_emb_head_dim=2,
        v_head_dim=5,
        qk_layernorm=True,
        disable_bias_linear=True,
        position_embedding_type="rope",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        make_vocab_size_divisible_by=4,
    ),
    seq_length=16,
    global_batch_size=2,
)
RING, RING_OVER_TP = Spread(Layout(cp=2), 1), Spread(Layout(tp=2, cp=2), 1)
WHOLE, CUT = Spread(Layout(tp=2), 1), Spread(Layout(tp=2), 1, sequence_parallel=True)


def shared_key_not_summed(patch: Patch) -> None:
    """Each rank keeps the gradient of the shared key that its own heads give."""
    gather, copy = comm.gather_whole_sequence, comm.copy_to
    size = PROBLEM.model.qk_pos_emb_head_dim

    def gathered(x: Tensor, axis: Axis, *, sums: bool = False) -> Tensor:
        return gather(x, axis, sums=sums and x.shape[-1] != size)

    patch.setattr(comm, "gather_whole_sequence", gathered)
    patch.setattr(comm, "copy_to", lambda x, axis: x if x.shape[-1] == size else copy(x, axis))


def _not_partial(patch: Patch, kind: Any, *, size: int) -> None:
    """Layers of this kind and of so many features state that each rank has the whole gradient."""
    shardings = kind.shardings

    def planted(self: Any) -> dict[str, Sharding]:
        stated: dict[str, Sharding] = shardings(self)
        if size not in (getattr(self, "size", None), getattr(self, "in_features", None)):
            return stated
        return {name: replace(sharding, partial_over=frozenset()) for name, sharding in stated.items()}

    patch.setattr(kind, "shardings", planted)


def norm_not_summed(patch: Patch) -> None:
    """Each rank keeps the gradient that its own tokens give the norms of latents."""
    _not_partial(patch, Norm, size=PROBLEM.model.kv_lora_rank)


def way_down_not_summed(patch: Patch) -> None:
    """Each rank keeps the gradient that its own tokens give the ways down."""
    _not_partial(patch, WholeLinear, size=PROBLEM.model.hidden_size)


def front_of_heads_turned(patch: Patch) -> None:
    """RoPE turns the front of a query, where keys have what is not turned."""

    def planted(self: LatentAttention, low: Tensor, context: Context) -> Tensor:
        q = self.q_up(low).unflatten(-1, (-1, self.spec.head_size))
        front, rest = q[..., : self.spec.rotary_size], q[..., self.spec.rotary_size :]
        return torch.cat((self._rotated(front, context), rest), dim=-1)

    patch.setattr(LatentAttention, "queries", planted)


def filling_not_cut(patch: Patch) -> None:
    """The front of what the heads return is taken together, with zeros that values were filled up with."""
    through_core = LatentAttention._through_core

    def planted(self: LatentAttention, q: Tensor, k: Tensor, v: Tensor, context: Context, *others: Any) -> Tensor:
        attended, heads = through_core(self, q, k, v, context, *others), q.shape[2]
        size = self.spec.value_size
        flat = attended[..., : heads * size].unflatten(-1, (heads, size))
        return torch.nn.functional.pad(flat, (0, v.shape[-1] - size)).flatten(-2)

    patch.setattr(LatentAttention, "_through_core", planted)


def latents_not_summed(patch: Patch) -> None:
    """On a ring each rank of tp keeps the gradient of the latents that its own heads give."""
    copy, size = comm.copy_to, PROBLEM.model.kv_lora_rank
    patch.setattr(comm, "copy_to", lambda x, axis: x if x.shape[-1] == size else copy(x, axis))


def weight_of_one_block(patch: Patch) -> None:
    """On a ring the gradient of the way up has the terms of the first block that a rank sees, and of no other."""
    blocks = 0

    def planted(*given: Any) -> tuple[Tensor, Tensor]:
        nonlocal blocks
        block, weight = gradients_of_block(*given)
        blocks += 1
        return block, weight if blocks % 2 else torch.zeros_like(weight)

    patch.setattr(ring, "gradients_of_block", planted)


def shared_key_of_one_head(patch: Patch) -> None:
    """On a ring the shared key has the gradient of one head."""

    def planted(opened: Tensor, block: Tensor, up: Tensor, sizes: Any) -> tuple[Tensor, Tensor]:
        opened = opened.clone()
        opened[0, :, 1:, :, sizes.plain :] = 0
        return gradients_of_block(opened, block, up, sizes)

    patch.setattr(ring, "gradients_of_block", planted)


MUTATIONS = [
    (shared_key_not_summed, WHOLE, {"gradients", "norm"}),
    (shared_key_not_summed, CUT, {"gradients", "norm"}),
    (norm_not_summed, CUT, {"gradients"}),
    (way_down_not_summed, CUT, {"gradients", "norm"}),
    (front_of_heads_turned, CUT, {"metrics", "gradients"}),
    (filling_not_cut, WHOLE, {"metrics", "gradients"}),
    (latents_not_summed, RING_OVER_TP, {"gradients", "norm"}),
    (weight_of_one_block, RING, {"gradients", "norm"}),
    (shared_key_of_one_head, RING, {"gradients", "norm"}),
]


@pytest.mark.parametrize(
    ("plant", "spread", "shown_by"),
    MUTATIONS,
    ids=[f"{plant.__name__}-{'sp' if spread.sequence_parallel else 'whole'}" for plant, spread, _ in MUTATIONS],
)
def test_a_mistake_in_latent_attention_is_found(
    plant: Callable[[Patch], None], spread: Spread, shown_by: set[str]
) -> None:
    number = spread.layout.world_size
    assert_same_training(run_ranks(number, planted_train, PROBLEM, spread, no_mistake), serial(PROBLEM))
    found = aspects_that_differ(run_ranks(number, planted_train, PROBLEM, spread, plant), serial(PROBLEM))
    assert shown_by <= found, found
