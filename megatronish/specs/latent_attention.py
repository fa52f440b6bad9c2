"""Spec of multi-head latent attention: sizes, and what follows from them in parameters, memory and exchange.

Keys and values are as wide as queries where the core is computed by SDPA or over ranks of cp: values are filled up with
zeros (model/latent_attention.py). Model FLOPs count values of their own size, and so do hardware FLOPs, which are too
low by the filling: (query size - value size) / (query size + value size) of the core.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.specs.attention import AttentionRun, AttentionSpec, Exchange, RingBytes
from megatronish.specs.block_pattern import BlockPattern
from megatronish.specs.costs import AttentionCore, Count, LayerCost, LinearShape, NormShape


@dataclass(frozen=True)
class LatentAttentionSpec(AttentionSpec):
    """Latent attention of N heads, whose query and key have `head_size` features, the last `rotary_size` turned."""

    kind: ClassVar[str] = "latent"
    kv_rank: int = 0
    """Size of the latent of keys and values."""
    rotary_size: int = 0
    value_size: int = 0
    q_rank: int | None = None
    """Size of the latent of the queries; None: they are projected at once."""

    @classmethod
    def of(cls, model: ModelConfig, *, windowed: bool = True, rotary: bool = True) -> Self:
        """Latent attention as the options of a config describe it."""
        return cls(
            num_heads=model.num_attention_heads,
            num_kv_heads=model.num_attention_heads,
            head_size=model.head_size,
            window=model.window_size if windowed else None,
            pattern=BlockPattern.of(model) if windowed else None,
            qk_norm=model.qk_layernorm,
            qkv_bias=False,
            out_bias=model.attention_bias,
            rotary=rotary,
            factor=model.score_factor,
            kv_rank=model.kv_lora_rank,
            rotary_size=model.qk_pos_emb_head_dim,
            value_size=model.v_head_dim,
            q_rank=model.q_lora_rank,
        )

    @property
    def plain_size(self) -> int:
        """Features of a head's query and key that are not turned."""
        return self.head_size - self.rotary_size

    @property
    def up_size(self) -> int:
        """Features of all heads that come from the latent: plain keys and values."""
        return self.num_heads * (self.plain_size + self.value_size)

    def cost(self, model: ModelConfig) -> LayerCost:
        """Kept besides the inputs of linear layers and norms: queries, keys and values; the hidden states once."""
        hidden, queries = model.hidden_size, self.num_heads * self.head_size
        down = self.kv_rank + self.rotary_size
        if self.q_rank is None:
            of_queries = [_up(hidden, queries, "q", "q")]
        else:
            of_queries = [_down(hidden, self.q_rank, "q_down"), _up(self.q_rank, queries, "q_up", "q")]
        of_keys = [_down(hidden, down, "kv_down"), _up(self.kv_rank, self.up_size, "kv_up", "kv_up")]
        values = self.num_heads * self.value_size
        out = LinearShape(values, hidden, "row", self.out_bias, name="attention.out", sections=(("o", hidden),))
        sizes = {"attention.kv_norm": self.kv_rank}
        if self.q_rank is not None:
            sizes = {"attention.q_norm": self.q_rank} | sizes
        norms = [
            NormShape(
                model.normalization, size, one_plus=model.apply_layernorm_1p, name=name, learned=model.norm_parameters
            )
            for name, size in sizes.items()
        ]
        return LayerCost(
            linears=(*of_queries, *of_keys, out),
            norms=tuple(norms) if self.qk_norm else (),
            cores=(
                AttentionCore(
                    self.num_heads, self.head_size, self.value_size, self.window, self.pattern, model.is_causal
                ),
            ),
            kept=Count(split=2 * queries + values, whole=-hidden),
        )

    def fills_values(self, run: AttentionRun) -> bool:
        """Whether values are filled up with zeros to the size of the keys."""
        return self.value_size < self.head_size and (run.cp > 1 or not self.is_explicit(run.backend))

    def projected(self, run: AttentionRun) -> float:
        """Bytes of queries, keys and values as the core reads them; of a ring of latents, of the queries alone."""
        others = 0 if run.sends_latents else self.head_size + self.value_size
        return run.size.feature * self.num_heads * (self.head_size + others)

    def transients(self, run: AttentionRun) -> float:
        """Bytes that the backward needs besides what was kept."""
        if not run.sends_latents:
            return super().transients(run)
        # Keys and values of a block, their gradients of a tile and of the block, in fp32, and those of the way up.
        heads, of_fp32 = self.num_heads * self.head_size, 4 * run.tokens / run.size.tp
        return run.size.residual + run.size.feature * 4 * heads + of_fp32 * (5 * heads + self.up_size)

    def more_kept(self, run: AttentionRun) -> float:
        """Bytes that a GPU keeps more than the cost row says."""
        size, heads = run.size, self.num_heads * self.head_size
        # The norm's input is a part of what else came down: the key that all heads share stays with it.
        kept = size.residual / size.hidden_size * self.rotary_size if self.qk_norm else 0.0
        if run.sends_latents:  # the latents of all tokens, and no keys and values; the output as wide as keys
            of_token = size.hidden / size.hidden_size
            kept += of_token * (self.kv_rank + self.rotary_size) - size.residual / size.hidden_size * self.kv_rank
            kept -= size.feature * self.num_heads * (self.head_size + self.value_size)
            return kept + (0.0 if run.is_selective else size.feature * heads)
        if self.fills_values(run):
            kept += size.feature * self.num_heads * (self.head_size - self.value_size)
            if not run.is_selective:  # the output as wide as the values were
                kept += size.feature * heads
        elif run.cp > 1 or (run.micro_batch_size > 1 and not run.has_dropout and not self.is_flex(run)):
            kept += size.feature * heads
        if run.cp == 1 and not self.fills_values(run):  # values are a part of what came up
            kept += size.feature * self.num_heads * self.plain_size
        if self.has_dense_mask(run) and not run.is_selective:
            kept += size.element * run.masked_pairs
        return kept

    def kept_for_adapters(
        self, run: AttentionRun, linears: Sequence[tuple[LinearShape, int]], adapter: AdapterConfig
    ) -> float:
        """Bytes that are kept more, or fewer, because its weights are frozen; of each linear layer its adapters."""
        size, is_lora, rank = run.size, adapter.adapter_type == "lora", adapter.lora_rank
        own, drops, of_all = size.residual / size.hidden_size, adapter.lora_dropout > 0, run.tokens * size.element
        kept, of_hidden = 0.0, []
        for linear, number in linears[:-1]:
            if not is_lora:  # IA3 scales outputs
                kept += size.feature * linear.out_features * number - own * linear.in_features
                continue
            kept += (number - 1) * own * linear.in_features if drops or not number else 0.0
            kept += rank * number * (own if linear.cut == "none" else of_all)
            if linear.in_features == size.hidden_size:
                of_hidden.append(number)
        if not is_lora or drops or not all(of_hidden):  # the row has the hidden states once, and each left them out
            kept += size.residual
        out, is_adapted = linears[-1][0], linears[-1][1] > 0
        kept += of_all * rank * is_adapted if is_lora else 0.0
        output = size.feature * out.in_features
        if self.fills_values(run):  # what the values were filled up with is cut off
            return kept - (0.0 if is_adapted else output)
        return kept + (output if is_adapted and drops else 0.0)

    def exchanges(
        self,
        tokens: int,
        *,
        width: int,
        tp: int,
        cp: int,
        is_ring: bool,
        cuts_sequence: bool = False,
        sends_latents: bool = False,
    ) -> list[Exchange]:
        """As of any attention, of values as wide as keys; and the key that all heads share, or its gradient.

        Round a ring of latents (model/latent_attention.py) go these, whole on every rank of tp.
        """
        key, sections = tokens * self.rotary_size * width, ("attention.kv_down.kv_down",)
        if cuts_sequence:
            shared = [
                Exchange("tp", "all-gather", key, 0, in_core=False),
                Exchange("tp", "reduce-scatter", 0, key, False, sections),
            ]
        else:
            shared = [Exchange("tp", "all-reduce", 0, key, False, sections)]
        if sends_latents:
            ring = RingBytes.of(tokens * (self.kv_rank + self.rotary_size), cp=cp, width=width)
            return shared + [Exchange("cp", way, ring.forward, ring.backward) for way in ("send", "receive")]
        return shared + super().exchanges(
            tokens, width=width, tp=tp, cp=cp, is_ring=is_ring, cuts_sequence=cuts_sequence
        )


def _up(latent: int, features: int, name: str, section: str) -> LinearShape:
    return LinearShape(latent, features, "column", name=f"attention.{name}", sections=((section, features),))


def _down(hidden: int, latent: int, name: str) -> LinearShape:
    return LinearShape(hidden, latent, "none", name=f"attention.{name}", sections=((name, latent),))
