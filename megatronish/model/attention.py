"""Self-attention of a transformer layer: qkv projection, rotary embedding, core attention, output projection.

Core attention is computed by one rank alone, or over the ranks of cp: by ring ("p2p") or all-to-all ("a2a") attention.

"p2p": keys and values go around the ranks of cp (ring.py). "a2a": for the time of attention each rank holds the
whole sequence of some heads (all_to_all.py). Ring attention sends more bytes but overlaps them with computation, and
can cut the sequence over more ranks than there are heads. All-to-all attention sends less and waits for it. On one rank
both are plain attention.

Where a rank computes whole sequences there is a choice of backends (flash.py). Ring attention merges blocks of keys by
their log-sum-exp, which the softmax of a whole row does not return, and has operations of its own (tile.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatronish.attention.all_to_all import all_to_all_attention
from megatronish.attention.flash import attend_alone
from megatronish.attention.largest_logits import LargestLogits
from megatronish.attention.latent_blocks import LatentSizes
from megatronish.attention.mask import AttentionMask, alibi_slopes
from megatronish.attention.ring import ring_attention, ring_of_latents
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import EXPLICIT, AttentionBackend
from megatronish.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatronish.layers.norm import AllHeadsNorm, EachHeadNorm, Norm
from megatronish.layers.recompute import HasParts, recompute
from megatronish.model.context import Context
from megatronish.model.rope import rotate
from megatronish.ops.dropout import ProbabilityDropout
from megatronish.ops.softcap import soft_capped
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, TensorParallel
from megatronish.parallel.ranges import ATTENTION, marked
from megatronish.parallel.sharding import Cut, Init, Sharding
from megatronish.specs.attention import AttentionSpec, Temperature, ranks_of_a_head


@dataclass(frozen=True)
class CoreAttention:
    """Core attention, softmax(q k^T / sqrt(H)) v, with the settings that all layers of a model share.

    `cp` is the axis over which the sequence is cut, `method` how a rank reaches the rest of it (`attend`), `backend`
    what computes a whole sequence (flash.py). `recompute`: the backward computes it again from q, k and v (selective
    recomputation).
    """

    cp: Axis = field(default_factory=partial(Axis, "cp"))
    method: Literal["p2p", "a2a"] = "p2p"
    backend: AttentionBackend = "auto"
    recompute: bool = False
    sends_latents: bool = False
    """Whether latents go round the ring in the place of keys and values, where layers have them."""

    @property
    def wants_one_size(self) -> bool:
        """Whether values must be as wide as keys: explicit probabilities on one rank alone take others."""
        return self.cp.size > 1 or self.backend in ("auto", "flash")

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        first_head: int,
        dropout: ProbabilityDropout | None,
        sinks: Tensor | None = None,
        score_mod: Callable[[Tensor], Tensor] | None = None,
        latents: LatentSizes | None = None,
    ) -> Tensor:
        """[S/cp, B, n, H], [S/cp, B, k, H], [S/cp, B, k, H] -> [S/cp, B, n H], for heads from `first_head` on.

        With `latents`, k and v are what `ring_of_latents` takes.
        """
        run = partial(
            _attend,
            cp=self.cp,
            method=self.method,
            mask=mask,
            backend=self.backend,
            first_head=first_head,
            dropout=dropout,
            score_mod=score_mod,
            latents=latents,
        )
        inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
        return recompute(run, *inputs) if self.recompute else run(*inputs)


def _attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, /, **how: Any) -> Tensor:
    """`attend` with all its tensors in order, as recomputation saves them."""
    return attend(q, k, v, sinks=sinks, **how)


class KeyValueHeads(nn.Module):
    """A rank's heads of keys and values, whole, from what it has projected, of K heads of size H.

    [S, B, K H / tp] each -> [S, B, K / tp, H] each, or with K < tp [S, B, 1, H]: the head that its queries share.

    The projection of keys and values is cut over tp by features, however few heads there are: with fewer than ranks
    each projects a part of one. So no parameter has copies, and gradients, norms, optimizer states and checkpoints are
    those of any layer that is cut. Neighbouring ranks whose query heads share a head send each other their parts of it,
    and in the backward each adds up the gradients of its part from all of them.
    """

    def __init__(self, heads: int, size: int, *, tp: Axis) -> None:
        super().__init__()
        self.size, self.tp, self.sharers = size, tp, ranks_of_a_head(heads, tp.size)

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """[S, B, K H / tp] each -> [S, B, k, H] each."""
        if self.sharers == 1:
            return k.unflatten(-1, (-1, self.size)), v.unflatten(-1, (-1, self.size))
        parts = torch.stack((k, v), dim=2)  # [S, B, 2, H / sharers]
        gathered = comm.gather_from_neighbours(parts.unsqueeze(0), self.tp, self.sharers)
        keys, values = gathered.movedim(0, 3).flatten(3).split(1, dim=2)
        return keys, values


class SelfAttention(HasParts):
    """Self-attention of a layer, of some kind: [S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]).

    A rank has N/tp heads, from `first_head` on. `slopes` are those of ALiBi, of the rank's heads.
    """

    def __init__(
        self, config: ModelConfig, spec: AttentionSpec, *, layer: int, tp: TensorParallel, core: CoreAttention
    ) -> None:
        super().__init__()
        self.config, self.spec, self.layer, self.tp, self.core = config, spec, layer, tp, core
        self.largest: LargestLogits | None = None  # to which a run that wants them adds its own: engine/qk_clip.py
        self.is_windowed = spec.is_windowed
        self.first_head = tp.axis.rank * (spec.num_heads // tp.size)
        self.slopes: tuple[float, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether it sends nothing itself: what its linear layers and its core send is theirs."""
        return True

    def row_factors(self, shares: Tensor, *, alpha: float) -> dict[str, Tensor]:
        """Factors of the rows of whole weights, by the layer's name, where heads keep these shares [N] of logits."""
        raise NotImplementedError


class Attention(SelfAttention):
    """Self-attention, [S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]).

    A rank has N/tp query heads and K/tp key/value heads, or with K < tp the one that its queries share
    (`KeyValueHeads`).
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: AttentionSpec,
        *,
        layer: int,
        tp: TensorParallel,
        core: CoreAttention,
        output_std: float,
    ) -> None:
        super().__init__(config, spec, layer=layer, tp=tp, core=core)
        self.local_sections = tuple(section // tp.size for section in spec.sections.values())
        num_local_heads = spec.num_heads // tp.size
        if config.position_embedding_type == "alibi":
            self.slopes = alibi_slopes(spec.num_heads)[self.first_head : self.first_head + num_local_heads]
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            sum(spec.sections.values()),
            tp=tp,
            bias=spec.qkv_bias,
            init_std=config.hidden_std,
            sections=spec.sections,
        )
        self.key_value_heads = KeyValueHeads(spec.num_kv_heads, spec.head_size, tp=tp.axis)
        self.out = RowParallelLinear(
            spec.sections["q"], config.hidden_size, tp=tp, bias=spec.out_bias, init_std=output_std, section="o"
        )
        if spec.qk_norm:
            sections = spec.sections
            self.q_norm, self.k_norm = (self._make_norm(size, tp) for size in (sections["q"], sections["k"]))
        self.score_mod = None if spec.cap is None else partial(soft_capped, cap=spec.cap)
        self.sinks = nn.Parameter(torch.empty(num_local_heads)) if spec.softmax == "learnable" else None

    def _make_norm(self, size: int, tp: TensorParallel) -> Norm | AllHeadsNorm | EachHeadNorm:
        """Norm of the queries, or of the keys, with `size` features in all heads."""
        config = self.config
        if self.spec.norm_across_heads:
            return AllHeadsNorm(size, epsilon=config.norm_epsilon, tp=tp.axis)
        if self.spec.norm_by_head:
            head = self.spec.head_size
            return EachHeadNorm(size // head, head, kind=config.normalization, epsilon=config.norm_epsilon, tp=tp.axis)
        # Each tp rank normalises heads of its own with the shared weight; of a head that several ranks share, each has
        # the gradient that comes through its own queries.
        return Norm(
            self.spec.head_size,
            kind="RMSNorm" if self.spec.norm_plain else config.normalization,
            epsilon=config.norm_epsilon,
            partial=tp.size > 1,
            one_plus=self.spec.norm_one_plus,
            of_heads=True,
            learned="none" if self.spec.norm_plain else config.norm_parameters,
        )

    def shardings(self) -> dict[str, Sharding]:
        """Sinks are cut over tp with the heads; projections and norms state their own."""
        if self.sinks is None:
            return {}
        return {"sinks": Sharding((self.spec.num_heads,), (Cut(0, "tp"),), init=Init(self.config.init_method_std))}

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[S, B, D] -> [S, B, D]; with a cache, the new queries attend to the keys and values of all tokens so far."""
        q, k, v = self.queries_keys_values(x, context)
        if context.cache is not None:
            k, v = context.cache.extended(k, v, layer=self.layer)
        mask = context.mask(self.spec.window, self.slopes, self.spec.pattern)
        if self.largest is not None:
            self.largest.see(q, k, layer=self.layer, first_head=self.first_head, mask=mask, cp=self.core.cp)
        dropout = context.attention_dropout(rate=self.config.attention_dropout)
        sinks = q.new_zeros(q.shape[2]) if self.spec.softmax == "off-by-one" else self.sinks
        attended = self.core(
            q, k, v, mask=mask, first_head=self.first_head, dropout=dropout, sinks=sinks, score_mod=self.score_mod
        )
        return self.out(attended, drop=context)

    def queries_keys_values(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """[S, B, D] -> [S, B, N/tp, H], [S, B, k, H], [S, B, k, H], normalised, clipped, rotated and scaled."""
        size, of_heads = self.spec.head_size, self.spec.qk_norm and not self.spec.norm_across_heads
        q, k, v = self.qkv(x, drop=context).split(self.local_sections, dim=-1)
        if self.spec.qk_norm and self.spec.norm_across_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (-1, size))
        k, v = self.key_value_heads(k, v)
        if of_heads and not self.spec.norm_after_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if (bound := self.spec.clip) is not None:
            q, k, v = (part.clamp(-bound, bound) for part in (q, k, v))
        if context.rotations is not None and self.spec.rotary:
            rotation = context.rotations.windowed if self.is_windowed else context.rotations.everywhere
            q, k = (rotate(part, rotation, interleaved=self.config.rotary_interleaved) for part in (q, k))
        if of_heads and self.spec.norm_after_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.spec.temperature is not None:
            q = (q * _factors(self.spec.temperature, context.batch.position_ids)).to(q.dtype)
        # Every operation of core attention divides scores by the root of the size of a head.
        return q if self.spec.factor is None else q * self.spec.factor, k, v

    def row_factors(self, shares: Tensor, *, alpha: float) -> dict[str, Tensor]:
        """Factors of the rows of whole weights, by the layer's name, where heads keep these shares [N] of logits."""
        size, heads, groups = self.spec.head_size, self.spec.num_heads, self.spec.num_kv_heads
        of_groups = shares.unflatten(0, (groups, -1)).amin(1)
        q = of_groups.pow(alpha).repeat_interleave(heads // groups * size)
        k = of_groups.pow(1 - alpha).repeat_interleave(size)
        return {"qkv": torch.cat((q, k, torch.ones_like(k)))}


def _factors(temperature: Temperature, positions: Tensor) -> Tensor:
    """int64 [B, S/cp] -> what queries there are multiplied by, fp32 [S/cp, B, 1, 1]."""
    steps = torch.div(positions.t() + 1, temperature.floor, rounding_mode="floor")
    return (1 + temperature.scale * steps.float().log1p())[..., None, None]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cp: Axis,
    method: Literal["p2p", "a2a"],
    mask: AttentionMask,
    backend: AttentionBackend = "auto",
    first_head: int = 0,
    dropout: ProbabilityDropout | None = None,
    sinks: Tensor | None = None,
    score_mod: Callable[[Tensor], Tensor] | None = None,
    latents: LatentSizes | None = None,
) -> Tensor:
    """[S/cp, B, n, H], [S/cp, B, k, H], [S/cp, B, k, H] -> [S/cp, B, n H] of the places that zigzag.py says.

    n / k query heads share a key/value head. `first_head` is the number of this tp rank's first head among all heads.
    The mask's slopes and `sinks` [n] are those of this tp rank's heads. `score_mod` changes each score.
    """
    with marked(ATTENTION):
        if cp.size > 1 and method == "p2p":
            is_explicit = backend in EXPLICIT or score_mod is not None
            assert not is_explicit, "a rank of a ring sees no whole row of probabilities"
            if latents is not None:
                return ring_of_latents(q, k, v, latents, cp=cp, mask=mask, first_head=first_head, dropout=dropout)
            return ring_attention(q, k, v, cp=cp, mask=mask, first_head=first_head, dropout=dropout, sinks=sinks)
        over_cp = attend_alone if cp.size == 1 else partial(all_to_all_attention, cp=cp)
        return over_cp(
            q,
            k,
            v,
            mask=mask,
            backend=backend,
            first_head=first_head,
            dropout=dropout,
            sinks=sinks,
            score_mod=score_mod,
        )
