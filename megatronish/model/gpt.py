"""What is a GPT, or the piece of one that a pipeline stage holds?

The options of `ModelConfig` cover GPT-2 (learned positions, LayerNorm, GELU, biases, tied embeddings), Llama (RoPE,
RMSNorm, SwiGLU, no biases, grouped queries, untied) and Mistral and Qwen (windows, qkv bias, qk-norm). Parameters
carry the names they have in the whole model, whatever piece they are in.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from torch import Tensor, nn

from megatronish.attention.cached import KeyValueCache
from megatronish.config.model import ModelConfig
from megatronish.config.training import AttentionBackend
from megatronish.layers.cross_entropy import vocab_parallel_cross_entropy
from megatronish.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from megatronish.layers.linear import deferrable_weights
from megatronish.layers.norm import Norm
from megatronish.layers.output import OutputLayer, TiedOutputLayer
from megatronish.mesh import Axis, TensorParallel
from megatronish.model.batch import MicroBatch
from megatronish.model.block import TransformerBlock
from megatronish.model.context import Context, make_context
from megatronish.model.recompute import Recompute, recompute

MakeBlock = Callable[..., nn.Module]


class Embedding(nn.Module):
    """[B, S] -> [S, B, D] (sequence parallel: [S/tp, B, D]): the tokens' vectors plus, if learned, their positions'."""

    def __init__(
        self, config: ModelConfig, *, tokens: VocabParallelEmbedding, positions: PositionEmbedding | None
    ) -> None:
        super().__init__()
        self.config = config
        self.tokens, self.positions = tokens, positions

    def forward(self, context: Context) -> Tensor:
        """See the class."""
        x = self.tokens(context.batch.tokens)
        if self.positions is not None:
            x = x + self.positions(context.batch.position_ids)
        return context.drop(x, layer=0, site="embedding")


class ModelChunk(NamedTuple):
    """Consecutive layers; with the embedding if they start the model, with the loss if they end it."""

    layers: Sequence[int]
    is_first: bool
    is_last: bool


class User(NamedTuple):
    """A chunk that uses a parameter: as the weight of a linear layer, whose gradient can be put off, or otherwise."""

    chunk: int
    is_linear: bool


class GPT(nn.Module):
    """The chunks of a GPT that one rank holds: by default one, the whole.

    Chunks that start and end the model on one rank share a tied embedding.

    `make_block(config, layer=…, tp=…)` makes one layer: a module (x [S, B, D], context) -> x.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        num_positions: int,
        tp: TensorParallel | None = None,
        cp: Axis | None = None,
        cp_comm_type: Literal["p2p", "a2a"] = "p2p",
        attention_backend: AttentionBackend = "auto",
        chunks: Sequence[ModelChunk] | None = None,
        seed: int = 0,
        recompute: Recompute | None = None,
        make_block: MakeBlock = TransformerBlock,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size, self.seed = config, vocab_size, seed
        self.tp = tp = tp or TensorParallel()
        self.cp, self.cp_comm_type = cp or Axis("cp"), cp_comm_type
        self.attention_backend = attention_backend
        self.recompute = recompute or Recompute()
        self.chunks = chunks or (ModelChunk(range(config.num_layers), True, True),)
        self.is_first, self.is_last = (any(ends) for ends in zip(*(chunk[1:] for chunk in self.chunks), strict=True))
        std = config.init_method_std
        padded = config.padded_vocab_size(vocab_size, tp.size)
        make_tokens = partial(
            VocabParallelEmbedding, vocab_size, padded, config.hidden_size, tp=tp, init_std=std, tied=config.tied
        )
        if self.is_first:
            learned = config.position_embedding_type == "learned_absolute"
            positions = PositionEmbedding(num_positions, config.hidden_size, tp=tp, init_std=std) if learned else None
            self.embedding = Embedding(config, tokens=make_tokens(), positions=positions)
        elif self.is_last and config.tied:
            self.embedding = Embedding(config, tokens=make_tokens(), positions=None)
        self.layers = nn.ModuleDict(
            {str(n): make_block(config, layer=n, tp=tp) for chunk in self.chunks for n in chunk.layers}
        )
        if self.is_last:
            self.final_norm = Norm(
                config.hidden_size,
                kind=config.normalization,
                epsilon=config.norm_epsilon,
                partial=tp.cuts_sequence,
                one_plus=config.apply_layernorm_1p,
            )
            self.head = (
                TiedOutputLayer(self.embedding.tokens)
                if config.tied
                else OutputLayer(config.hidden_size, vocab_size, padded, tp=tp, init_std=std)
            )

    def forward(self, x: Tensor | None, batch: MicroBatch, *, step: int | None, chunk: int = 0) -> Tensor:
        """x [S, B, D] from the chunk before (None for the first) -> [S, B, D], or the loss of the last chunk.

        The loss is the *sum* over the predictions that count, a scalar in fp32. `step` None means evaluation.
        """
        x = self.hidden(x, batch, step=step, chunk=chunk)
        if not self.chunks[chunk].is_last:
            return x
        losses = vocab_parallel_cross_entropy(
            self.logits(x), batch.labels.t().contiguous(), vocab_size=self.vocab_size, tp=self.tp.axis
        )
        return (losses * batch.loss_mask.t()).sum()

    def hidden(
        self,
        x: Tensor | None,
        batch: MicroBatch,
        *,
        step: int | None,
        chunk: int = 0,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Everything before the final norm; with a `cache` of what follows the tokens in it."""
        context = make_context(
            self.config,
            batch,
            tp=self.tp,
            cp=self.cp,
            cp_comm_type=self.cp_comm_type,
            attention_backend=self.attention_backend,
            recompute_attention=self.recompute.granularity == "selective",
            seed=self.seed,
            step=step,
            cache=cache,
        )
        if x is None:
            x = self.embedding(context)
        for layers, again in self.recompute.groups([str(n) for n in self.chunks[chunk].layers]):
            run = partial(self._through, layers, context)
            x = recompute(run, x, how=self.recompute) if again else run(x)
        return x

    def _through(self, layers: Sequence[str], context: Context, x: Tensor) -> Tensor:
        for layer in layers:
            x = self.layers[layer](x, context)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[S, B, D] (sequence parallel: [S/tp, B, D]) -> [S, B, V/tp], padding included."""
        return self.head(self.final_norm(x))

    def by_first_use(self) -> list[tuple[nn.Module, list[str]]]:
        """Modules in the order of a forward, each with the parameters that no module before it uses."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        found = []
        for part in (part for chunk in self.chunks for part in self._parts(chunk)):
            found.append((part, [names.pop(parameter) for parameter in _used_by(part) if parameter in names]))
        return found

    def users(self) -> dict[str, list[User]]:
        """Users of each parameter. A tied embedding has two: it looks up in one chunk and multiplies in another."""
        names = {parameter: name for name, parameter in self.named_parameters()}
        found: dict[str, list[User]] = {name: [] for name in names.values()}
        for number, chunk in enumerate(self.chunks):
            for part in self._parts(chunk):
                deferrable = deferrable_weights(part)
                for parameter in _used_by(part):
                    found[names[parameter]].append(User(number, parameter in deferrable))
        return found

    def _parts(self, chunk: ModelChunk) -> list[nn.Module]:
        """Modules that a forward of the chunk calls, in order."""
        before = [self.embedding] if chunk.is_first else []
        after = [self.final_norm, self.head] if chunk.is_last else []
        return [*before, *(self.layers[str(n)] for n in chunk.layers), *after]


def _used_by(part: nn.Module) -> list[nn.Parameter]:
    """Parameters of the module, and the one of another module that a tied output layer multiplies by."""
    return list(dict.fromkeys((*part.parameters(), *deferrable_weights(part))))
