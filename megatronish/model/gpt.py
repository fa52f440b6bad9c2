"""GPT: the decoder-only language model, or the chunks of it that a pipeline stage holds.

The options of `ModelConfig` cover GPT-2 (learned positions, LayerNorm, GELU, biases, tied embeddings), Llama (RoPE,
RMSNorm, SwiGLU, no biases, grouped queries, untied), Mistral and Qwen (windows, qkv bias, qk-norm), BLOOM (ALiBi, a
norm after the embedding), the dense parts of gpt-oss (sinks, windows in some layers, quick GEGLU), norms after
sublayers or around them, attention and MLP side by side, factors and soft caps (OLMo 2, Gemma, GPT-NeoX, Granite), and
experts (Mixtral, Qwen-MoE, OLMoE). Parameters carry the names they have in the whole model, whatever chunk they are in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from megatronish.attention.cached import KeyValueCache
from megatronish.attention.zigzag import places_on
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import AttentionBackend
from megatronish.layers.dropout import Dropout
from megatronish.layers.linear import deferrable_weights
from megatronish.layers.norm import Norm, residual_norm
from megatronish.layers.recompute import Recompute, recompute, recompute_parts
from megatronish.layers.router import Balance, Router
from megatronish.layers.vocabulary import (
    OutputLayer,
    PositionEmbedding,
    TiedOutputLayer,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from megatronish.model.attention import CoreAttention
from megatronish.model.batch import MicroBatch
from megatronish.model.block import MakeBlock, PredictionBlock, make_block_of
from megatronish.model.context import Context, Masks, make_context
from megatronish.model.experts import MixtureOfExperts
from megatronish.model.rope import RotaryEmbedding
from megatronish.model.routing import Tally
from megatronish.ops.softcap import soft_capped
from megatronish.parallel.mesh import Axis, TensorParallel
from megatronish.watch.record import RankRecord


@dataclass(frozen=True)
class Execution:
    """How forward and backward of a GPT are computed: context parallelism, attention backend, recomputation, dropout.

    `cp_comm_type` and `attention_backend` are the options of these names; `dropout_seed` is the seed of dropout masks.
    """

    cp: Axis = field(default_factory=partial(Axis, "cp"))
    cp_comm_type: Literal["p2p", "a2a"] = "p2p"
    attention_backend: AttentionBackend = "auto"
    recompute: Recompute = field(default_factory=Recompute)
    dropout_seed: int = 0
    sends_latents: bool = False
    """Whether latents go round a ring, and not keys and values."""

    def core_attention(self) -> CoreAttention:
        """Core attention with these settings, for every layer."""
        return CoreAttention(
            self.cp,
            self.cp_comm_type,
            self.attention_backend,
            recompute="core_attn" in self.recompute.config.recomputed,
            sends_latents=self.sends_latents,
        )


class Embedding(nn.Module):
    """Input embedding, [B, S] -> [S, B, D] (sequence parallel: [S/tp, B, D]): tokens, and positions if learned.

    The `norm` of --embed-layernorm is that of the tokens' embeddings, which --embedding-multiplier multiplies before.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tokens: VocabParallelEmbedding,
        norm: Norm | None,
        positions: PositionEmbedding | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.tokens, self.norm, self.positions = tokens, norm, positions

    def forward(self, context: Context) -> Tensor:
        """Embeddings of the micro-batch's tokens, with dropout."""
        x, config = self.words(context.batch.tokens), self.config
        if self.norm is not None:
            x = self.norm(x)
        if self.positions is not None:
            ids = context.batch.position_ids
            x = x + self.positions(ids + config.position_offset if config.position_offset else ids)
        return context.drop(x, site="embedding", rate=self.config.hidden_dropout)

    def words(self, tokens: Tensor) -> Tensor:
        """Rows of tokens [B, S] from the table of words, times the factor that the model has."""
        x, factor = self.tokens(tokens), self.config.embedding_multiplier
        # As a tensor, and not as a number of Python: Gemma has learned with the factor rounded to the dtype.
        return x if factor == 1.0 else x * torch.full((), factor, dtype=x.dtype, device=x.device)


class ModelChunk(NamedTuple):
    """Consecutive layers; with the embedding if they start the model, with the output layer if they end it.

    The last ones are followed by those of multi-token prediction.
    """

    layers: Sequence[int]
    is_first: bool
    is_last: bool


class User(NamedTuple):
    """A chunk that uses a parameter: as the weight of a linear layer, whose gradient can be deferred, or otherwise."""

    chunk: int
    is_linear: bool


class GPT(nn.Module):
    """The chunks of a GPT that one rank holds: by default one, the whole.

    Chunks that start and end the model on one rank share a tied embedding. `num_positions` is the number of rows of a
    learned position embedding.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        num_positions: int,
        tp: TensorParallel | None = None,
        chunks: Sequence[ModelChunk] | None = None,
        execution: Execution | None = None,
        make_block: MakeBlock | None = None,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.num_depths = config.num_depths  # of multi-token prediction, which each step asks for
        self.tp, self.execution = tp or TensorParallel(), execution or Execution()
        self.balance: Balance | None = None  # of the step at work: engine/balancing.py sets it
        self.record: RankRecord | None = None  # of this rank, which is shown the layer at work: engine/build.py sets it
        self.chunks = chunks or (ModelChunk(range(config.num_all_layers), True, True),)
        self.is_first, self.is_last = (any(ends) for ends in zip(*(chunk[1:] for chunk in self.chunks), strict=True))
        self.rotary = RotaryEmbedding(config) if config.position_embedding_type == "rope" else None
        self.masks = Masks(is_causal=config.is_causal)
        self.adapter_sites: tuple[str, ...] = ()  # at which adapters drop their inputs: adapters.py adds them
        self._make_shared()
        if self.is_first or (self.is_last and config.embeds_at_end):
            self.embedding = self._make_embedding(num_positions)
        core = self.execution.core_attention()
        make_layer: MakeBlock = make_block or self._make_block()
        self.layers = nn.ModuleDict(
            {
                str(n): (make_layer if n < config.num_layers else PredictionBlock)(
                    config, layer=n, tp=self.tp, core=core
                )
                for chunk in self.chunks
                for n in chunk.layers
            }
        )
        recompute_parts(self, self.execution.recompute.config.recomputed)
        groups = self.execution.recompute.config.groups
        self.layer_groups = [groups([str(n) for n in chunk.layers if n < config.num_layers]) for chunk in self.chunks]
        if self.is_last:
            self._make_end()

    def _make_block(self) -> MakeBlock:
        """The maker of layers, where none is given."""
        return make_block_of(self.config)

    def _make_shared(self) -> None:
        """What all stages hold and several layers read: nothing, in a GPT."""

    def _make_end(self) -> None:
        """What follows the last layer."""
        self.final_norm = residual_norm(self.config, tp=self.tp)
        self.head = self._make_output_layer(bias=self.config.add_output_bias)

    def _make_embedding(self, num_positions: int) -> Embedding:
        """Input embedding; on a stage that only ends the model, the table of words alone."""
        config, tp, std = self.config, self.tp, self.config.init_method_std
        padded = config.padded_vocab_size(self.vocab_size, tp.size)
        tokens = VocabParallelEmbedding(
            self.vocab_size, padded, config.hidden_size, tp=tp, init_std=std, tied=config.embeds_at_end
        )
        positions = None
        if self.is_first and config.position_embedding_type == "learned_absolute":
            rows = config.position_offset + num_positions
            positions = PositionEmbedding(rows, config.hidden_size, tp=tp, init_std=std)
        norm = residual_norm(config, tp=tp) if self.is_first and config.embed_layernorm else None
        return self._new_embedding(tokens, norm, positions)

    def _new_embedding(
        self, tokens: VocabParallelEmbedding, norm: Norm | None, positions: PositionEmbedding | None
    ) -> Embedding:
        return Embedding(self.config, tokens=tokens, norm=norm, positions=positions)

    def _make_output_layer(self, *, bias: bool = False) -> OutputLayer | TiedOutputLayer:
        config, tp, std = self.config, self.tp, self.config.init_method_std
        if config.tied:
            return TiedOutputLayer(self.embedding.tokens, bias=bias)
        padded = config.padded_vocab_size(self.vocab_size, tp.size)
        return OutputLayer(config.hidden_size, self.vocab_size, padded, tp=tp, init_std=std, bias=bias)

    def forward(
        self,
        x: Tensor | None,
        batch: MicroBatch,
        *,
        step: int | None,
        chunk: int = 0,
        tally: Tally | None = None,
    ) -> Tensor:
        """x [S, B, D] from the chunk before (None for the first) -> [S, B, D], or token losses [S/cp, B] of the last.

        Losses are in fp32, one for each position, whether it counts or not (`batch.loss_mask`). They are the same on
        all ranks of tp. `step` None means evaluation. Under sequence parallelism x is [S/tp, B, D]. Of a
        micro-batch with tokens ahead it is [1 + M, S/cp, B]: the losses of multi-token prediction follow.
        """
        context, dropout = self._begin(batch, step=step, chunk=chunk, tally=tally)
        x = self._through_chunk(x, context, dropout, chunk)
        if not self.chunks[chunk].is_last:
            return x
        return self.losses(x, batch) if batch.ahead is None else self._losses_ahead(x, context, dropout)

    def losses(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """[S, B, D] from the last layer -> token losses [S/cp, B]."""
        return self._losses_of(self.logits(x), batch.labels)

    def _losses_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """[S, B, V/tp], [B, S] -> [S, B]."""
        return vocab_parallel_cross_entropy(
            logits, labels.t().contiguous(), vocab_size=self.vocab_size, tp=self.tp.axis
        )

    def _losses_ahead(self, x: Tensor, context: Context, dropout: Dropout | None) -> Tensor:
        """[S, B, D] from the last layer -> [1 + M, S/cp, B]: its losses, and those of multi-token prediction.

        The first layer of this reads what the output layer reads, each other one what the one before has made of it.
        All are one tensor, whose gradient arrives at once: torch's `fully_shard` gathers for each that it sees arrive.
        """
        batch, config, how = context.batch, self.config, self.execution.recompute
        assert batch.ahead is not None, "the micro-batch has no tokens ahead"
        x = self.final_norm(x)
        losses = [self._losses_of(self._output(x), batch.labels)]
        layers = [str(number) for number in range(config.num_layers, config.num_all_layers)]
        for layer, tokens, labels in zip(layers, batch.ahead.tokens, batch.ahead.labels, strict=True):
            own = context.of_layer(int(layer), dropout)
            # Outside of what is recomputed: the table has one gradient in a backward, of all that look up in it.
            embedded = own.drop(self.embedding.words(tokens), site="embedding", rate=config.hidden_dropout)
            run = partial(_predicted, self.layers[layer], own)
            if how.config.is_uniform:
                x = recompute(run, x, embedded, how=how, learns=self._learns([layer]))
            else:
                x = run(x, embedded)
            losses.append(self._losses_of(self._output(x), labels))
        return torch.stack(losses)

    def hidden(
        self,
        x: Tensor | None,
        batch: MicroBatch,
        *,
        step: int | None,
        chunk: int = 0,
        cache: KeyValueCache | None = None,
        tally: Tally | None = None,
    ) -> Tensor:
        """[S, B, D] -> [S, B, D], before the final norm; with a `cache`, of the tokens that follow those in it.

        Routers add what they count to the `tally`.
        """
        context, dropout = self._begin(batch, step=step, chunk=chunk, cache=cache, tally=tally)
        return self._through_chunk(x, context, dropout, chunk)

    def _begin(
        self,
        batch: MicroBatch,
        *,
        step: int | None,
        chunk: int,
        cache: KeyValueCache | None = None,
        tally: Tally | None = None,
    ) -> tuple[Context, Dropout | None]:
        """What the layers of a forward read, and their dropout."""
        context = self._context(batch, cache=cache, tally=tally)
        return context, None if step is None or not self._draws() else self._dropout(step, batch, chunk)

    def _through_chunk(self, x: Tensor | None, context: Context, dropout: Dropout | None, chunk: int) -> Tensor:
        if x is None:
            x = self.embedding(context.of_layer(0, dropout))
        for layers, again in self.layer_groups[chunk]:
            run = partial(self._through, layers, context, dropout)
            if again:
                learns = x.requires_grad or self._learns(layers)
                x = recompute(run, x, how=self.execution.recompute, learns=learns)
            else:
                x = run(x)
        return x

    def _context(self, batch: MicroBatch, *, cache: KeyValueCache | None, tally: Tally | None) -> Context:
        """What the layers of a forward read."""
        return make_context(
            batch,
            tp=self.tp,
            cp=self.execution.cp,
            rotary=self.rotary,
            masks=self.masks,
            cache=cache,
            tally=tally,
        )

    def _draws(self) -> bool:
        """Whether a pass of training draws random numbers: for dropout, also of adapters, or in a router."""
        config = self.config
        rates = (config.hidden_dropout, config.attention_dropout, config.moe_input_jitter_eps)
        return any(rates) or config.moe_router_force_load_balancing or bool(self.adapter_sites)

    def _dropout(self, step: int, batch: MicroBatch, chunk: int) -> Dropout:
        """Dropout of the chunk's layers, and of the embedding, which layer 0 names."""
        layers, cp = sorted({0, *self.chunks[chunk].layers}), self.execution.cp
        lengths, device = [side * cp.size for side in batch.sides], batch.tokens.device
        positions = places_on(lengths, cp, starts=batch.starts(cp.size), device=device)
        seed = self.execution.dropout_seed
        return Dropout(
            seed, step, batch.sample_ids, layers=layers, all_positions=positions, more_sites=self.adapter_sites
        )

    def _learns(self, layers: Sequence[str]) -> bool:
        return any(parameter.requires_grad for layer in layers for parameter in self.layers[layer].parameters())

    def _through(self, layers: Sequence[str], context: Context, dropout: Dropout | None, x: Tensor) -> Tensor:
        for layer in layers:
            if self.record is not None:
                self.record.layer = int(layer)
            x = self.layers[layer](x, context.of_layer(int(layer), dropout))
        if self.record is not None:
            self.record.layer = None
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[S, B, D] (sequence parallel: [S/tp, B, D]) -> [S, B, V/tp], padding included."""
        return self._output(self.final_norm(x))

    def _output(self, x: Tensor) -> Tensor:
        """[S, B, D], normalised -> [S, B, V/tp]."""
        config = self.config
        if config.logits_multiplier != 1.0:  # of the input of the output layer, which is smaller than the logits
            x = x * config.logits_multiplier
        logits = self.head(x)
        cap = config.final_logit_softcapping
        return logits if cap is None else soft_capped(logits, cap)

    def predicting(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """[S, B, D] from the last layer -> the rows of which there are logits: all."""
        return x

    def new_tally(self) -> Tally | None:
        """An empty tally for a forward of a step; None in evaluation, and for a dense model."""
        return None if self.balance is None else Tally(self.balance, (self.execution.cp, self.tp.axis))

    def routers(self) -> dict[int, Router]:
        """Routers of this rank's layers, by the number of the layer."""
        mlps = {int(number): getattr(layer, "mlp", None) for number, layer in self.layers.items()}
        return {number: mlp.router for number, mlp in mlps.items() if isinstance(mlp, MixtureOfExperts)}

    def state(self) -> dict[str, Tensor]:
        """State of this rank's routers that no gradient changes, fp32, by name."""
        return {
            f"layers.{number}.mlp.router.{name}": tensor
            for number, router in self.routers().items()
            for name, tensor in router.state.items()
        }

    def by_first_use(self) -> list[tuple[nn.Module, list[str]]]:
        """Modules in the order of a forward, each with the parameters that no module before it uses."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        modules = []
        for part in (part for chunk in self.chunks for part in self._parts(chunk)):
            modules.append((part, [names.pop(parameter) for parameter in _used_by(part) if parameter in names]))
        return modules

    def users(self) -> dict[str, list[User]]:
        """Users of each parameter. A tied embedding has two: it looks up in one chunk and multiplies in another."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        users_by_name: dict[str, list[User]] = {name: [] for name in names.values()}
        for number, chunk in enumerate(self.chunks):
            for part in self._parts(chunk):
                deferrable = deferrable_weights(part)
                for parameter in _used_by(part):
                    users_by_name[names[parameter]].append(User(number, parameter in deferrable))
        return users_by_name

    def _parts(self, chunk: ModelChunk) -> list[nn.Module]:
        """Modules that a forward of the chunk calls, in order."""
        number = self.config.num_layers
        before = [self.embedding] if chunk.is_first else []
        after = self._end() if chunk.is_last else []
        ahead = [self.layers[str(n)] for n in chunk.layers if n >= number]
        if ahead:
            ahead = [self.embedding.tokens, *ahead]
        return [*before, *(self.layers[str(n)] for n in chunk.layers if n < number), *after, *ahead]

    def _end(self) -> list[nn.Module]:
        """Modules that follow the last layer, in order."""
        return [self.final_norm, self.head]


def _predicted(layer: nn.Module, context: Context, hidden: Tensor, embedded: Tensor) -> Tensor:
    """Output of a layer of multi-token prediction."""
    predicted: Tensor = layer(hidden, embedded, context)
    return predicted


def _used_by(part: nn.Module) -> list[nn.Parameter]:
    """Parameters of the module, and the one of another module that a tied output layer multiplies by."""
    return list(dict.fromkeys((*part.parameters(), *deferrable_weights(part))))
