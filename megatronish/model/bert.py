"""BERT: the encoder whose tokens see both sides, or the chunks of it that a pipeline stage holds (arXiv:1810.04805).

Its layers are those of a GPT with a bidirectional mask, normalised after each sublayer. What is its own stands before
and after them: an embedding of words, positions and token types under one norm, a dense layer before the output layer,
whose bias is that of the vocabulary, and a head that tells whether two sentences are in order, from the first token of
a row alone. Padding is a document of its own, which no other token sees.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatronish.config.sections.model import ModelConfig
from megatronish.layers.linear import WholeLinear
from megatronish.layers.norm import Norm, residual_norm
from megatronish.layers.vocabulary import PositionEmbedding, VocabParallelEmbedding
from megatronish.model.batch import MicroBatch
from megatronish.model.context import Context
from megatronish.model.gpt import GPT, Embedding
from megatronish.ops.activation import bias_gelu
from megatronish.ops.library import accumulation_dtype
from megatronish.parallel import comm
from megatronish.parallel.mesh import TensorParallel


class BertEmbedding(Embedding):
    """Input embedding of BERT, [B, S] -> [S, B, D] (sequence parallel: [S/tp, B, D]): the norm of a sum of tables."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tokens: VocabParallelEmbedding,
        norm: Norm | None,
        positions: PositionEmbedding | None,
        types: PositionEmbedding | None,
    ) -> None:
        super().__init__(config, tokens=tokens, norm=norm, positions=positions)
        self.types = types

    def forward(self, context: Context) -> Tensor:
        """Embeddings of the micro-batch's tokens, normalised, with dropout. Without sentences all are of type 0."""
        assert self.types is not None and self.norm is not None, "a stage that starts the model has all tables"
        batch = context.batch
        types = torch.zeros_like(batch.tokens) if batch.sentences is None else batch.sentences.token_types
        x = self.tokens(batch.tokens) + self.types(types)
        if self.positions is not None:
            x = x + self.positions(batch.position_ids)
        return context.drop(self.norm(x), site="embedding", rate=self.config.hidden_dropout)


class MaskedTokenTransform(nn.Module):
    """What comes before the output layer, [S, B, D] -> [S, B, D]: norm(gelu(W x + b))."""

    def __init__(self, config: ModelConfig, *, tp: TensorParallel, norm: Norm) -> None:
        super().__init__()
        self.has_tanh = config.openai_gelu
        self.dense = WholeLinear(config.hidden_size, config.hidden_size, tp=tp, init_std=config.init_method_std)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, D] -> [S, B, D] (sequence parallel: [S/tp, B, D])."""
        return self.norm(bias_gelu(self.dense(x), None, approximate="tanh" if self.has_tanh else "none"))


class SentenceHead(nn.Module):
    """Head that tells whether two sentences are swapped, from the first token of each row: D -> D, tanh, D -> 2."""

    def __init__(self, config: ModelConfig, *, tp: TensorParallel) -> None:
        super().__init__()
        std = config.init_method_std
        self.pooler = WholeLinear(config.hidden_size, config.hidden_size, tp=tp, init_std=std)
        self.classifier = WholeLinear(config.hidden_size, 2, tp=tp, init_std=std)

    def forward(self, first: Tensor) -> Tensor:
        """[1, B, D], hidden states of the first tokens -> logits [B, 2]: in order, swapped."""
        return self.classifier(torch.tanh(self.pooler(first)))[0]


class BertLosses(NamedTuple):
    """Losses of tokens [S/cp, B], and of the order of each pair of sentences [B]: zeros but on the first rank of cp."""

    tokens: Tensor
    sentences: Tensor


class Bert(GPT):
    """The chunks of a BERT that one rank holds: by default one, the whole."""

    def _new_embedding(
        self, tokens: VocabParallelEmbedding, norm: Norm | None, positions: PositionEmbedding | None
    ) -> Embedding:
        config, types = self.config, None
        if self.is_first:
            std = config.init_method_std
            types = PositionEmbedding(config.num_token_types, config.hidden_size, tp=self.tp, init_std=std)
            norm = residual_norm(self.config, tp=self.tp)
        return BertEmbedding(config, tokens=tokens, norm=norm, positions=positions, types=types)

    def _make_end(self) -> None:
        self.transform = MaskedTokenTransform(self.config, tp=self.tp, norm=residual_norm(self.config, tp=self.tp))
        self.head = self._make_output_layer(bias=True)
        self.sentence = SentenceHead(self.config, tp=self.tp) if self.config.has_binary_head else None

    def _end(self) -> list[nn.Module]:
        sentence = [] if self.sentence is None else [self.sentence]
        return [self.transform, self.head, *sentence]

    def logits(self, x: Tensor) -> Tensor:
        """[S, B, D] (sequence parallel: [S/tp, B, D]) -> [S, B, V/tp], padding included."""
        return self.head(self.transform(x))

    def losses(self, x: Tensor, batch: MicroBatch) -> Tensor | BertLosses:  # type: ignore[override]
        """[S, B, D] from the last layer -> token losses [S/cp, B], with those of sentences if there is a head."""
        of_tokens = super().losses(x, batch)
        return of_tokens if self.sentence is None else BertLosses(of_tokens, self.sentence_losses(x, batch))

    def sentence_losses(self, x: Tensor, batch: MicroBatch) -> Tensor:
        """[S, B, D] from the last layer -> cross entropy of the order of each pair, fp32 [B].

        Only one rank of a cut sequence has the first token. The others of cp have no loss, so that sums over cp are
        right. Those of tp have the same loss and no gradient: theirs is partial over tp.
        """
        assert self.sentence is not None and batch.sentences is not None
        logits = self.sentence(x[:1])
        losses = F.cross_entropy(
            logits.to(accumulation_dtype(logits.dtype)), batch.sentences.is_swapped.long(), reduction="none"
        )
        losses = losses * float(self.execution.cp.rank == 0)
        if self.tp.cuts_sequence:
            losses = comm.reduce_from(losses * float(self.tp.axis.rank == 0), self.tp.axis)
        return losses
