"""Attention of a T5: between parts of a stream that has the rows of both sides, with a learned bias of the scores."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Self

from megatronish.config.sections.model import ModelConfig
from megatronish.specs.attention import (
    AttentionRun,
    AttentionSpec,
    Exchange,
    ranks_of_a_head,
    sections_of,
    traded_heads,
)
from megatronish.specs.costs import AttentionCore, Count, LayerCost, LinearShape


@dataclass(frozen=True)
class BiasedAttentionSpec(AttentionSpec):
    """Attention of a T5, whose scores are not scaled and have a learned bias: its probabilities are explicit.

    Queries are the part `queries` of the rows of a stream, keys the part `keys`. Cross attention (`crosses`) has
    queries of the decoder, keys and values of the encoder, and no bias.
    """

    queries: Fraction | int = 1
    keys: Fraction | int = 1
    causal: bool = False
    crosses: bool = False

    @classmethod
    def of_side(
        cls, model: ModelConfig, *, queries: Fraction, keys: Fraction, causal: bool, crosses: bool = False
    ) -> Self:
        """Attention as the options of a config describe it, of one side or from one to the other."""
        return cls(
            num_heads=model.num_attention_heads,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            qkv_bias=model.qkv_bias,
            out_bias=model.attention_bias,
            rotary=False,
            queries=queries,
            keys=keys,
            causal=causal,
            crosses=crosses,
        )

    def cost(self, model: ModelConfig) -> LayerCost:
        """As of any attention; the projections of cross attention are of different rows."""
        hidden, sizes = model.hidden_size, self.sections
        name = "cross_attention" if self.crosses else "attention"
        parts = {"q": ("q",), "kv": ("k", "v")} if self.crosses else {"qkv": ("q", "k", "v")}
        linears = [
            LinearShape(
                hidden,
                sum(sizes[part] for part in names),
                "column",
                self.qkv_bias,
                name=f"{name}.{layer}",
                sections=tuple((part, sizes[part]) for part in names),
                share=self.keys if layer == "kv" else self.queries,
            )
            for layer, names in parts.items()
        ]
        out = LinearShape(
            sizes["q"], hidden, "row", self.out_bias, name=f"{name}.out", sections=(("o", hidden),), share=self.queries
        )
        core = AttentionCore(
            self.num_heads,
            self.head_size,
            self.head_size,
            causal=self.causal,
            queries=self.queries,
            keys_part=self.keys,
            num_kv_heads=self.num_kv_heads,
        )
        # A stream of T5 has rows of both sides; each projection keeps only the rows of its own.
        kept = int(sizes["q"] * self.queries + (sizes["k"] + sizes["v"]) * self.keys)
        return LayerCost(linears=(*linears, out), cores=(core,), kept=Count(split=kept))

    def bytes_per_score(self, run: AttentionRun) -> int:
        """Probabilities in fp32, dropout's mask, and what that left."""
        width = run.size.element
        return 4 + (1 + width if run.has_dropout else 2 if width == 2 else 0)

    def more_kept(self, run: AttentionRun) -> float:
        """Nothing is kept that the cost row has not."""
        return 0.0

    def kept_of_others(self, run: AttentionRun) -> float:
        """As of any attention, of the rows of keys; and of the bias the bucket of each pair, int64.

        Where scores are computed again, the bias itself is there, an input of theirs.
        """
        kept = super().kept_of_others(run) * float(self.keys)
        if self.crosses:
            return kept
        bias = run.size.element * self.num_heads / (run.size.tp * run.cp) if run.is_selective else 0.0
        return kept + float(self.queries * self.keys) * run.seq_length**2 * (8 + bias)

    def transients(self, run: AttentionRun) -> float:
        """Gradients of queries, keys and values, and of the scores."""
        sizes = self.num_heads * self.queries + 2 * self.heads_over(run.size.tp) * self.keys
        num_bytes = run.size.residual + run.size.feature * self.head_size * float(sizes)
        # Two tensors in fp32. In 16 bits the copy of the probabilities, 2, is free again when their gradient comes; and
        # where a stage has both sides, an encoder's layer works when a decoder's keep nothing any more: 5 is between.
        more = 8 if run.size.element == 4 or run.has_dropout else 5
        more += self.bytes_per_score(run) if run.is_selective else 0
        scores = run.tokens * run.seq_length * self.queries * self.keys * self.num_heads / run.size.tp
        return num_bytes + more * float(scores)

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
        """All-to-all of queries and the output, and of keys and values."""
        assert not is_ring or cp == 1, "scores with a learned bias go round no ring"
        exchanges = []
        if ranks_of_a_head(self.num_kv_heads, tp) > 1:
            shared = int(2 * tokens * self.head_size * width * self.keys)
            layer = "cross_attention.kv" if self.crosses else "attention.qkv"
            exchanges += [Exchange("tp", "all-to-all", shared, shared, False, sections_of(layer))]
        if cp == 1:
            return exchanges
        # Queries and the output have the rows of one side, keys and values those of the other.
        traded = traded_heads(self.num_heads, self.num_kv_heads, tp=tp, cp=cp) - 2 * self.num_heads
        heads = 2 * self.num_heads * self.queries + traded * self.keys
        size = int(tokens * self.head_size * width * heads) // tp
        return [*exchanges, Exchange("cp", "all-to-all", size, size)]
