"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434): keys and values of all heads from a small latent.

    q = [q_n | RoPE(q_r)]         of each head, from q_up(norm(q_down(x))), or from q(x)
    [c | k_r] = kv_down(x)        of each token: the latent, and a key that all heads share
    [k_n | v] = kv_up(norm(c))    of each head
    out(softmax([k_n | RoPE(k_r)]^T q) v)

The norms are there with --qk-layernorm, as in Megatron-LM.

Over tp the ways up are cut by heads, and the ways down are whole on every rank. Under sequence parallelism a rank
computes the latents of its own tokens, and the latents are gathered, which are smaller than the hidden states. The
shared key is read by the heads of all ranks, so its gradient is a sum over them.

A KV cache has [norm(c) | RoPE(k_r)] of each token, and nothing of any head. What is generated after the first forward
reads it as it is: the weights of `kv_up` join the query before the core and the output after it (absorption), so that
attention has one key of all heads, the cached vector, whose front is its value.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.attention.cached import KeyValueCache
from megatronish.attention.latent_blocks import LatentSizes
from megatronish.config.sections.model import ModelConfig
from megatronish.layers.linear import ColumnParallelLinear, RowParallelLinear, WholeLinear
from megatronish.layers.norm import Norm
from megatronish.layers.product import DENSE
from megatronish.layers.recompute import restoring
from megatronish.model.attention import CoreAttention, SelfAttention
from megatronish.model.context import Context
from megatronish.model.rope import rotate
from megatronish.parallel import comm
from megatronish.parallel.mesh import TensorParallel
from megatronish.specs.latent_attention import LatentAttentionSpec


class LatentAttention(SelfAttention):
    """Multi-head latent attention, [S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D]); a rank has N/tp heads."""

    spec: LatentAttentionSpec

    def __init__(
        self,
        config: ModelConfig,
        spec: LatentAttentionSpec,
        *,
        layer: int,
        tp: TensorParallel,
        core: CoreAttention,
        output_std: float,
    ) -> None:
        super().__init__(config, spec, layer=layer, tp=tp, core=core)
        self.takes_any_sizes = not core.wants_one_size  # a core that is compiled by itself does not say
        self.sends_latents = core.sends_latents
        if spec.q_rank is None:
            self.q = self._up(config.hidden_size, spec.num_heads * spec.head_size, section="q")
        else:
            self.q_down = self._down(spec.q_rank, section="q_down")
            self.q_norm = self._norm(spec.q_rank) if spec.qk_norm else None
            self.q_up = self._up(spec.q_rank, spec.num_heads * spec.head_size, section="q")
        self.kv_down = self._down(spec.kv_rank + spec.rotary_size, section="kv_down")
        self.kv_norm = self._norm(spec.kv_rank) if spec.qk_norm else None
        self.kv_up = self._up(spec.kv_rank, spec.up_size, section="kv_up")
        values = spec.num_heads * spec.value_size
        self.out = RowParallelLinear(
            values, config.hidden_size, tp=tp, bias=spec.out_bias, init_std=output_std, section="o"
        )

    def _down(self, features: int, *, section: str) -> WholeLinear:
        """The way down to a latent of a rank's own tokens."""
        std, hidden = self.config.hidden_std, self.config.hidden_size
        return WholeLinear(hidden, features, tp=self.tp, init_std=std, bias=False, role="matrix", section=section)

    def _norm(self, size: int) -> Norm:
        """Norm of a latent, of which a rank has the tokens that it has of the hidden states."""
        config = self.config
        return Norm(
            size,
            kind=config.normalization,
            epsilon=config.latent_epsilon,
            partial=self.tp.cuts_sequence,
            one_plus=config.apply_layernorm_1p,
            learned=config.norm_parameters,
        )

    def _up(self, latent: int, features: int, *, section: str) -> ColumnParallelLinear:
        """The way up to all heads, one head after the other."""
        std = self.config.hidden_std
        return ColumnParallelLinear(
            latent, features, tp=self.tp, bias=False, init_std=std, sections={section: features}
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[S, B, D] -> [S, B, D]; with a cache, the new queries attend to the latents of all tokens so far."""
        low = self.query_latent(x, context)
        latent, key = self.latents(x, context)
        cache = context.cache
        if cache is None:
            return self.out(self._attended(low, latent, key, context), drop=context)
        is_first = cache.num_columns == 0
        cached = self._cached(latent, key, cache)
        if not is_first and self._absorbs:
            return self.out(self._absorbed(self.queries(low, context), cached, context), drop=context)
        latent, key = cached.squeeze(2).split((self.spec.kv_rank, self.spec.rotary_size), dim=-1)
        return self.out(self._attended(low, latent, key, context), drop=context)

    # Queries, latents, keys and values

    def query_latent(self, x: Tensor, context: Context) -> Tensor:
        """[S, B, D] -> the latent of queries [S, B, rq] (sequence parallel: a part), normalised; without one, x."""
        if self.spec.q_rank is None:
            return x
        low = self.q_down(x, drop=context)
        return low if self.q_norm is None else self.q_norm(low)

    def queries(self, low: Tensor, context: Context) -> Tensor:
        """[S, B, rq] -> [S, B, N/tp, H], the last part of a head turned, and all scaled."""
        q = (self.q if self.spec.q_rank is None else self.q_up)(low, drop=context)
        plain, turned = q.unflatten(-1, (-1, self.spec.head_size)).split(self._parts, dim=-1)
        q = torch.cat((plain, self._rotated(turned, context)), dim=-1)
        return q if self.spec.factor is None else q * self.spec.factor

    def latents(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """[S, B, D] -> the latent [S, B, r] (sequence parallel: [S/tp, B, r]), normalised; the shared key [S, B, dr].

        The key is turned, and of all tokens. A rank's gradient of it is the part that comes through its own heads.
        """
        latent, key = self.kv_down(x, drop=context).split((self.spec.kv_rank, self.spec.rotary_size), dim=-1)
        if self.tp.cuts_sequence:
            key = comm.gather_whole_sequence(key, self.tp.axis, sums=True)
        else:
            key = comm.copy_to(key, self.tp.axis)
        latent = latent if self.kv_norm is None else self.kv_norm(latent)
        return latent, self._rotated(key.unsqueeze(2), context).squeeze(2)

    def keys_values(self, latent: Tensor, key: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """[S, B, r], [S, B, dr] -> keys [S, B, N/tp, H] and values [S, B, N/tp, V]."""
        spec = self.spec
        up = self.kv_up(latent, drop=context).unflatten(-1, (-1, spec.plain_size + spec.value_size))
        plain, v = up.split((spec.plain_size, spec.value_size), dim=-1)
        shared = key.unsqueeze(2).expand(*plain.shape[:-1], spec.rotary_size)
        return torch.cat((plain, shared), dim=-1), v

    @property
    def _parts(self) -> tuple[int, int]:
        return self.spec.plain_size, self.spec.rotary_size

    def _rotated(self, x: Tensor, context: Context) -> Tensor:
        """[S, B, n, dr] -> [S, B, n, dr]."""
        if context.rotations is None or not self.spec.rotary:
            return x
        rotation = context.rotations.windowed if self.is_windowed else context.rotations.everywhere
        return rotate(x, rotation, interleaved=self.config.rotary_interleaved)

    # The core

    def _attended(self, low: Tensor, latent: Tensor, key: Tensor, context: Context) -> Tensor:
        """The latents of queries, and of keys and values, and the shared key -> [S, B, n V]."""
        if self.sends_latents and context.cache is None:
            return self._on_ring(low, latent, key, context)
        run = partial(self._of_heads, low, latent, key, context)
        q, k, v = run()
        if self.largest is not None:
            mask, layer = context.mask(self.spec.window, (), self.spec.pattern), self.layer
            self.largest.see(q, k, layer=layer, first_head=self.first_head, mask=mask, cp=self.core.cp)
        with restoring((q, k, v), run, really="mla_up_proj" in self.recomputed):
            attended = self._through_core(q, k, v, context)
        size = self.spec.value_size
        return attended if v.shape[-1] == size else attended.unflatten(-1, (-1, v.shape[-1]))[..., :size].flatten(-2)

    def _on_ring(self, low: Tensor, latent: Tensor, key: Tensor, context: Context) -> Tensor:
        """The same over cp, where latents go round: each rank applies `kv_up` to what arrives (ring_of_latents)."""
        # As the input of `kv_up` over tp: the heads of all ranks read all latents, so their gradients are summed.
        if self.tp.cuts_sequence:
            latent = comm.gather_whole_sequence(latent, self.tp.axis, sums=True)
        else:
            latent = comm.copy_to(latent, self.tp.axis)
        sent, spec = torch.cat((latent, key), dim=-1), self.spec
        sizes = LatentSizes(spec.kv_rank, spec.plain_size, spec.rotary_size, spec.value_size)
        q = self.queries(low, context)
        again = "mla_up_proj" in self.recomputed
        with restoring((q,), lambda: (self.queries(low, context),), really=again):
            attended = self._through_core(q, sent, self.kv_up.weight, context, sizes)
        return attended.unflatten(-1, (-1, spec.head_size))[..., : spec.value_size].flatten(-2)

    def _of_heads(self, low: Tensor, latent: Tensor, key: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the heads, as the core takes them."""
        q = self.queries(low, context)
        k, v = self.keys_values(latent, key, context)
        missing = k.shape[-1] - v.shape[-1]
        # Flash attention, a ring and an all-to-all want values as wide as keys.
        return q, k, v if missing == 0 or self.takes_any_sizes else F.pad(v, (0, missing))

    def _through_core(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, latents: LatentSizes | None = None
    ) -> Tensor:
        dropout = context.attention_dropout(rate=self.config.attention_dropout)
        mask = context.mask(self.spec.window, (), self.spec.pattern)
        return self.core(q, k, v, mask=mask, first_head=self.first_head, dropout=dropout, latents=latents)

    @property
    def is_local(self) -> bool:
        """Whether all of it is on this rank: the sums of its latents, and the key that heads share, go over tp."""
        return self.tp.size == 1

    def row_factors(self, shares: Tensor, *, alpha: float) -> dict[str, Tensor]:
        """Factors of the rows of whole weights, by the layer's name, where heads keep these shares [N] of logits."""
        spec = self.spec
        plain, heads = spec.plain_size, shares[:, None]
        q = torch.cat((heads.pow(alpha).expand(-1, plain), heads.expand(-1, spec.rotary_size)), dim=1)
        keys = heads.pow(1 - alpha).expand(-1, plain)
        up = torch.cat((keys, torch.ones_like(heads).expand(-1, spec.value_size)), dim=1)
        return {"q" if spec.q_rank is None else "q_up": q.flatten(), "kv_up": up.flatten()}

    # Generation

    def _cached(self, latent: Tensor, key: Tensor, cache: KeyValueCache) -> Tensor:
        """[s, B, r], [s, B, dr] of the newest tokens -> [S, B, 1, r + dr], latents and shared keys of all so far."""
        newest = torch.cat((latent, key), dim=-1).unsqueeze(2)
        cached, _ = cache.extended(newest, newest[..., :0], layer=self.layer)
        return cached

    @property
    def _absorbs(self) -> bool:
        """Whether the weight of `kv_up` is all there is to it, and can be read as numbers."""
        return self.kv_up.adapter is None and self.kv_up.product is DENSE

    def _absorbed(self, q: Tensor, cached: Tensor, context: Context) -> Tensor:
        """[s, B, n, H], [S, B, 1, r + dr] -> [s, B, n V]: attention over the latents themselves."""
        spec = self.spec
        up = self.kv_up.weight.unflatten(0, (-1, spec.plain_size + spec.value_size))  # [n, dn + V, r]
        of_keys, of_values = up.split((spec.plain_size, spec.value_size), dim=1)
        plain, turned = q.split(self._parts, dim=-1)
        q = torch.cat((torch.einsum("sbnd,ndr->sbnr", plain, of_keys), turned), dim=-1)
        # The core divides by the root of the size that it sees.
        q = q * (q.shape[-1] / spec.head_size) ** 0.5
        mixed = self._through_core(q, cached, cached, context).unflatten(-1, (-1, cached.shape[-1]))
        return torch.einsum("sbnr,nvr->sbnv", mixed[..., : spec.kv_rank], of_values).flatten(-2)
