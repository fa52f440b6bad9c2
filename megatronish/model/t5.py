"""T5: an encoder and a decoder, or the chunks of both that a pipeline stage holds (arXiv:1910.10683).

A row of the model is one stream, [encoder | decoder]: the hidden states are [Se + Sd, B, D], of which layers of the
encoder change the first Se and layers of the decoder the last Sd, reading the first. So what pipeline stages send, and
every schedule, is that of a GPT; the encoder's output and its gradient are parts of it.

Sequence and context parallelism cut each side by itself: a rank holds a part of the encoder's rows and then a part of
the decoder's. Places along the stream name dropout masks, and tell a layer's scores of decoder with decoder from those
of decoder with encoder.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from megatronish.attention.all_to_all import for_each_rank, to_heads, to_places
from megatronish.attention.cached import KeyValueCache
from megatronish.attention.explicit import biased_attention
from megatronish.config.sections.model import ModelConfig
from megatronish.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatronish.layers.norm import Norm, residual_norm
from megatronish.layers.recompute import HasParts, recompute, recompute_module
from megatronish.layers.relative_bias import RelativeBias
from megatronish.layers.vocabulary import (
    PositionEmbedding,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from megatronish.model.attention import CoreAttention, KeyValueHeads
from megatronish.model.batch import MicroBatch
from megatronish.model.block import MakeBlock, restoring_norm
from megatronish.model.context import Context
from megatronish.model.gpt import GPT, Embedding, ModelChunk
from megatronish.model.mlp import MLP
from megatronish.model.routing import Tally
from megatronish.parallel.mesh import TensorParallel
from megatronish.parallel.ranges import ATTENTION, marked
from megatronish.specs.biased_attention import BiasedAttentionSpec
from megatronish.specs.layers import t5_layers


@dataclass(frozen=True)
class StreamContext(Context):
    """Context of a forward over a stream of two sides.

    `places` are those of each side along the whole stream, all ranks together; in generation those of the decoder count
    from its first token. `rows` are the rows of each side that
    the residual stream holds on this rank. `text` is bool [B, 1, 1, Se], False where the encoder's row is padded; None
    where none is. `biases` are the score biases of the two sides.
    """

    places: tuple[Tensor, Tensor] = ()  # type: ignore[assignment]
    rows: tuple[int, int] = (0, 0)
    text: Tensor | None = None
    biases: tuple[RelativeBias, RelativeBias] = ()  # type: ignore[assignment]
    stream: "StreamContext | None" = None  # of one side, that of both

    def of_side(self, side: int) -> "StreamContext":
        """What a sublayer on one side's rows is given: the positions of these rows."""
        dropout, tokens = self.dropout, self.batch.sides
        if dropout is not None and dropout.all_positions is not None:
            dropout = replace(dropout, all_positions=dropout.all_positions.split(tokens)[side])
        return replace(self, positions=self.positions.split(self.rows)[side], dropout=dropout, stream=self)


class BiasedAttention(nn.Module):
    """Attention of a T5 layer, [Sq, B, D], [Sk, B, D] -> [Sq, B, D] (sequence parallel: a part of each).

    Self-attention has keys and values of the rows that ask, and a score bias. Cross attention has those of the encoder.
    """

    qkv: ColumnParallelLinear  # of self-attention
    q: ColumnParallelLinear  # of cross attention, as is kv
    kv: ColumnParallelLinear

    def __init__(
        self,
        config: ModelConfig,
        spec: BiasedAttentionSpec,
        *,
        layer: int,
        tp: TensorParallel,
        core: CoreAttention,
        output_std: float,
    ) -> None:
        super().__init__()
        self.config, self.spec, self.layer, self.core = config, spec, layer, core
        self.num_local_heads = spec.num_heads // tp.size
        self.first_head = tp.axis.rank * self.num_local_heads
        parts = {"q": ("q",), "kv": ("k", "v")} if spec.crosses else {"qkv": ("q", "k", "v")}
        for name, names in parts.items():
            sections = {part: spec.sections[part] for part in names}
            size, std = sum(sections.values()), config.hidden_std
            linear = ColumnParallelLinear(
                config.hidden_size, size, tp=tp, bias=spec.qkv_bias, init_std=std, sections=sections
            )
            setattr(self, name, linear)
        self.local_sections = {part: size // tp.size for part, size in spec.sections.items()}
        self.key_value_heads = KeyValueHeads(spec.num_kv_heads, spec.head_size, tp=tp.axis)
        self.out = RowParallelLinear(
            spec.sections["q"], config.hidden_size, tp=tp, bias=spec.out_bias, init_std=output_std, section="o"
        )

    def forward(self, x: Tensor, context: StreamContext, *, side: int, memory: Tensor | None = None) -> Tensor:
        """[Sq, B, D], of cross attention with the encoder's rows as `memory` -> [Sq, B, D]."""
        cp, cache = self.core.cp, context.cache if side else None
        if memory is None:
            q, k, v = to_heads(self._heads(self.qkv(x, drop=context), "q", "k", "v"), cp)
            shown = context.places[side]
            k, v = (k, v) if cache is None else cache.extended(k, v, layer=self.layer)
        else:
            (q,) = to_heads(self._heads(self.q(x, drop=context), "q"), cp)
            assert context.stream is not None
            k, v = to_heads(self._heads(self.kv(memory, drop=context.stream.of_side(0)), "k", "v"), cp)
            shown = context.places[0]
            k, v = (k, v) if cache is None else cache.of_encoder(k, v, layer=self.layer)
        asked = context.places[side][-q.shape[0] :]  # in generation keys of tokens before are in the cache
        first = cp.rank * q.shape[2]
        bias = None
        if memory is None:
            bias = context.biases[side](asked, shown, slice(first, first + q.shape[2]))
        drop = None
        if (dropout := context.attention_dropout(rate=self.config.attention_dropout)) is not None:
            drop = partial(dropout.drop, first_head=self.first_head + first, queries=asked, keys=shown)
        seen = asked[:, None] >= shown if self.spec.causal else context.text
        run = partial(biased_attention, seen=seen, drop=drop)
        inputs = (q, k, v) if bias is None else (q, k, v, bias)
        with marked(ATTENTION):
            attended = recompute(run, *inputs) if self.core.recompute else run(*inputs)
        return self.out(to_places(attended, cp), drop=context)

    def _heads(self, x: Tensor, *parts: str) -> tuple[Tensor, ...]:
        """[S, B, ...] -> [S, B, n, H] each; keys and values come together, and last."""
        sizes = [self.local_sections[part] for part in parts]
        sections = dict(zip(parts, x.split(sizes, dim=-1), strict=True))
        queries = [sections["q"].unflatten(-1, (-1, self.spec.head_size))] if "q" in sections else []
        if "k" not in sections:
            return tuple(queries)
        k, v = self.key_value_heads(sections["k"], sections["v"])
        return *queries, *for_each_rank(k, v, heads=self.num_local_heads, cp=self.core.cp)


class SideBlock(HasParts):
    """Layer of the encoder or of the decoder, as its spec says, [Se + Sd, B, D] -> the same with one side changed."""

    def __init__(self, config: ModelConfig, *, layer: int, tp: TensorParallel, core: CoreAttention) -> None:
        super().__init__()
        self.config = config
        spec = t5_layers(config)[layer]
        self.side = int(spec.cross is not None)
        output_std = config.output_std
        make_attention = partial(BiasedAttention, config, layer=layer, tp=tp, core=core, output_std=output_std)
        self.attention_norm = residual_norm(config, tp=tp)
        self.attention = make_attention(spec.attention)
        if spec.cross is not None:
            self.cross_attention_norm = residual_norm(config, tp=tp)
            self.cross_attention = make_attention(spec.cross)
        self.mlp_norm = residual_norm(config, tp=tp)
        self.mlp = MLP(config, spec.mlp, tp=tp, output_std=output_std)
        self.final_norm = residual_norm(config, tp=tp) if spec.ends_encoder else None

    def forward(self, x: Tensor, context: StreamContext) -> Tensor:
        """x + sublayer(norm(x)) for each sublayer, on the rows of this layer's side."""
        if not context.rows[self.side]:  # in generation the encoder's rows are there once
            return x
        rate, sides = self.config.hidden_dropout, list(x.split(context.rows))
        mine, context = sides[self.side], context.of_side(self.side)
        with restoring_norm(self, normalised := self.attention_norm(mine), self.attention_norm, mine):
            y = self.attention(normalised, context, side=self.side)
        mine = context.drop(y, site="attention_output", rate=rate, residual=mine)
        if self.side:
            with restoring_norm(self, normalised := self.cross_attention_norm(mine), self.cross_attention_norm, mine):
                y = self.cross_attention(normalised, context, side=self.side, memory=sides[0])
            mine = context.drop(y, site="cross_attention_output", rate=rate, residual=mine)
        with restoring_norm(self, normalised := self.mlp_norm(mine), self.mlp_norm, mine):
            again = "mlp" in self.recomputed
            y = recompute_module(self.mlp, normalised, context) if again else self.mlp(normalised, context)
        mine = context.drop(y, site="mlp_output", rate=rate, residual=mine)
        if self.final_norm is not None:
            mine = self.final_norm(mine)
        sides[self.side] = mine
        return torch.cat(sides)


class StreamEmbedding(Embedding):
    """Input embedding of a stream, [B, Se + Sd] -> [Se + Sd, B, D] (sequence parallel: a part of each side)."""

    def __init__(self, config: ModelConfig, *, tokens: VocabParallelEmbedding, tp: TensorParallel) -> None:
        super().__init__(config, tokens=tokens, norm=None, positions=None)
        self.tp = tp

    def forward(self, context: Context) -> Tensor:
        """Embeddings of the micro-batch's tokens, with dropout."""
        tokens, sides = context.batch.tokens, context.batch.sides
        if self.tp.cuts_sequence:  # so that the part of a rank is a part of each side
            parts = [side.unflatten(1, (self.tp.size, -1)) for side in tokens.split(sides, dim=1)]
            tokens = torch.cat(parts, dim=2).flatten(1)
        return context.drop(self.tokens(tokens), site="embedding", rate=self.config.hidden_dropout)


class T5(GPT):
    """The chunks of a T5 that one rank holds: by default one, the whole."""

    def _make_shared(self) -> None:
        config = self.config
        make = partial(
            RelativeBias,
            config.relative_attention_num_buckets,
            config.num_attention_heads,
            max_distance=config.relative_attention_max_distance,
            tp=self.tp,
            init_std=config.init_method_std,
        )
        # The first of all parameters: their gradients are complete after those of all layers.
        self.encoder_bias, self.decoder_bias = make(looks_ahead=True), make(looks_ahead=False)

    def _make_block(self) -> MakeBlock:
        return SideBlock

    def _new_embedding(
        self, tokens: VocabParallelEmbedding, norm: Norm | None, positions: PositionEmbedding | None
    ) -> Embedding:
        assert norm is None and positions is None, "a T5 has a score bias in their place"
        return StreamEmbedding(self.config, tokens=tokens, tp=self.tp)

    def _parts(self, chunk: ModelChunk) -> list[nn.Module]:
        return [self.encoder_bias, self.decoder_bias, *super()._parts(chunk)]

    def _context(self, batch: MicroBatch, *, cache: KeyValueCache | None, tally: Tally | None) -> Context:
        context, cp = super()._context(batch, cache=cache, tally=tally), self.execution.cp
        device, encoder = batch.tokens.device, batch.encoder_length
        decoder = batch.tokens.shape[1] - encoder
        start = batch.starts(cp.size)[-1]
        places = [
            torch.arange(encoder * cp.size, device=device),
            torch.arange(start, start + decoder * cp.size, device=device),
        ]
        parts = self.tp.size if self.tp.cuts_sequence else 1
        ids = batch.document_ids
        text = None if ids is None else (ids[:, : encoder * cp.size] == 0)[:, None, None]
        if cache is not None:
            cache.text = text = text if encoder else cache.text
            places[1] = torch.arange(cache.num_columns + decoder, device=device)
        return StreamContext(
            **vars(context),
            places=(places[0], places[1]),
            rows=(encoder // parts, decoder // parts),
            text=text,
            biases=(self.encoder_bias, self.decoder_bias),
        )

    def logits(self, x: Tensor) -> Tensor:
        """[Sd, B, D] (sequence parallel: [Sd/tp, B, D]) -> [Sd, B, V/tp], padding included.

        A table that embeds, too, has larger values than the weight of an output layer: its input is made smaller.
        """
        x, config = self.final_norm(x), self.config
        return self.head(x * config.hidden_size**-0.5 if config.tied and not config.unscaled_logits else x)

    def predicting(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """[Se + Sd, B, D] -> [Sd, B, D]: the rows of the decoder."""
        return x[batch.encoder_length // (self.tp.size if self.tp.cuts_sequence else 1) :]

    def losses(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """[Se + Sd, B, D] from the last layer -> token losses [(Se + Sd)/cp, B], zeros for the encoder's."""
        encoder = batch.encoder_length
        labels = batch.labels[:, encoder:].t().contiguous()
        logits = self.logits(self.predicting(x, batch))
        losses = vocab_parallel_cross_entropy(logits, labels, vocab_size=self.vocab_size, tp=self.tp.axis)
        return torch.cat((losses.new_zeros(encoder, losses.shape[1]), losses))
