"""Layers cut by the vocabulary over tp: token embedding, output layer, cross-entropy; and learned positions."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatronish.layers.linear import ColumnParallelLinear, LinearLayer
from megatronish.layers.weight_gradients import AddsInPlace, SumOf
from megatronish.ops.cross_entropy import cross_entropy_gradient_, cross_entropy_statistics
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, TensorParallel
from megatronish.parallel.sharding import Cut, Init, Sharding


class VocabParallelEmbedding(AddsInPlace):
    """Token embedding, [B, S] -> [S, B, D] (sequence parallel: [S/tp, B, D]).

    Each rank holds padded_vocab_size / tp rows of the table. `tied`: the stage that ends the model has the same
    table, to multiply by or to look up in. With `sum_of` the backward adds to the sum of gradients itself.
    """

    def __init__(
        self,
        vocab_size: int,
        padded_vocab_size: int,
        hidden_size: int,
        *,
        tp: TensorParallel,
        init_std: float,
        tied: bool = False,
    ) -> None:
        super().__init__()
        assert padded_vocab_size % tp.size == 0 and vocab_size <= padded_vocab_size
        self.tp, self.init_std, self.tied = tp, init_std, tied
        self.vocab_size, self.padded_vocab_size, self.hidden_size = vocab_size, padded_vocab_size, hidden_size
        self.weight = nn.Parameter(torch.empty(padded_vocab_size // tp.size, hidden_size))

    def shardings(self) -> dict[str, Sharding]:
        """Rows are cut over tp; padding is not part of the global tensor."""
        return {
            "weight": Sharding(
                (self.vocab_size, self.hidden_size),
                (Cut(0, "tp", (self.padded_vocab_size,)),),
                role="embedding",
                tied="ends" if self.tied else None,
                init=Init(self.init_std),
            )
        }

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the tokens whose rows this rank holds, zero elsewhere; the sum over tp completes the result."""
        tokens = tokens.t().contiguous()
        if self.tp.size == 1:
            return self._rows(tokens)
        rows = self.weight.shape[0]
        local = tokens - self.tp.axis.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        embedded = self._rows(local.masked_fill(elsewhere, 0))
        embedded = embedded.masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.tp.cuts_sequence:
            return comm.reduce_scatter_to_sequence(embedded, self.tp.axis)
        return comm.reduce_from(embedded, self.tp.axis)

    def _rows(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D]. On a GPU rows added by index come in any order, so autograd's own gradient is taken."""
        if self.sum_of is None or self.weight.is_cuda or not self.weight.requires_grad:
            return F.embedding(tokens, self.weight)
        return _Rows.apply(tokens, self.weight, self.sum_of)


class OutputLayer(ColumnParallelLinear):
    """Output layer with a weight of its own, [S, B, D] (sequence parallel: [S/tp, B, D]) -> [S, B, V/tp].

    Padding of the vocabulary is not part of the weight's global tensor.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        padded_vocab_size: int,
        *,
        tp: TensorParallel,
        init_std: float,
        bias: bool = False,
    ) -> None:
        super().__init__(hidden_size, padded_vocab_size, tp=tp, bias=bias, init_std=init_std)
        self.vocab_size = vocab_size

    def shardings(self) -> dict[str, Sharding]:
        """Rows are cut over tp, like the embedding's."""
        shape, cuts = (self.vocab_size, self.in_features), (Cut(0, "tp", self.sections),)
        shardings = {"weight": Sharding(shape, cuts, role="head", init=Init(self.init_std))}
        if self.bias is not None:
            shardings["bias"] = Sharding((self.vocab_size,), cuts)
        return shardings


class TiedOutputLayer(LinearLayer):
    """Output layer that multiplies by the token embedding (Press & Wolf 2017, arXiv:1608.05859).

    [S, B, D] (sequence parallel: [S/tp, B, D]) -> [S, B, V/tp]. Of parameters it owns a bias at most.
    """

    def __init__(self, embedding: VocabParallelEmbedding, *, bias: bool = False) -> None:
        super().__init__()
        # A module inside a tuple is not a submodule: the weight has one name, the embedding's. It is looked up at each
        # use, for wrappers replace parameters.
        self._embedding = (embedding,)
        self.bias = nn.Parameter(torch.empty(embedding.weight.shape[0])) if bias else None

    def shardings(self) -> dict[str, Sharding]:
        """The bias is cut over tp, like the rows of the embedding."""
        embedding = self._embedding[0]
        cuts = (Cut(0, "tp", (embedding.padded_vocab_size,)),)
        return {} if self.bias is None else {"bias": Sharding((embedding.vocab_size,), cuts)}

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]  # read alone: the embedding owns it
        """The embedding's table, [V/tp, D]."""
        return self._embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, D] (sequence parallel: [S/tp, B, D]) -> [S, B, V/tp], padding included."""
        return self.multiply(x, self.bias, tp=self._embedding[0].tp)


class _Rows(torch.autograd.Function):
    """Rows of a table, [...], [V, D] -> [..., D], whose gradients are added to the rows of the table's sum."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: nn.Parameter, sum_of: SumOf) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.parameter, ctx.sum_of = weight, sum_of
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (tokens,) = ctx.saved_tensors
        total = ctx.sum_of(ctx.parameter).filled()
        total.index_add_(0, tokens.flatten(), grads[0].flatten(0, -2).to(total.dtype))
        return None, None, None


class PositionEmbedding(nn.Module):
    """Learned embedding of positions, or of token types, [B, S] -> [S, B, D] (sequence parallel: [S/tp, B, D])."""

    def __init__(self, num_positions: int, hidden_size: int, *, tp: TensorParallel, init_std: float) -> None:
        super().__init__()
        self.tp, self.init_std = tp, init_std
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))

    def shardings(self) -> dict[str, Sharding]:
        """Whole on every rank; each sees only its part of a cut sequence, so its gradient is partial."""
        shape = tuple(self.weight.shape)
        return {
            "weight": Sharding(shape, partial_over=self.tp.partial_over, role="positions", init=Init(self.init_std))
        }

    def forward(self, position_ids: Tensor) -> Tensor:
        """Rows of this rank's positions: [B, S] -> [S, B, D], or [S/tp, B, D] of a cut sequence."""
        return F.embedding(comm.piece_of(position_ids.t(), self.tp.sequence_axis), self.weight)


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, *, vocab_size: int, tp: Axis) -> Tensor:
    """[S, B, V/tp], [S, B] -> [S, B] in fp32: -log softmax of each label, over the true vocabulary.

    The logits are used up: the forward may overwrite them, and the backward hands their memory on as their gradient, to
    which it then belongs.
    """
    return _CrossEntropy.apply(logits, labels, vocab_size, tp)[0]


class LossesAndNormalizers(NamedTuple):
    """[S, B] in fp32: the loss of each token, and the log of the sum of exponentials of its logits."""

    losses: Tensor
    log_normalizers: Tensor


class VocabParallelLogits(NamedTuple):
    """Logits [S, B, V/tp] of all tokens: this tp rank's rows of the vocabulary, of which the last ones may be padding.

    `vocab_size` is the true vocabulary.
    """

    values: Tensor
    vocab_size: int
    tp: Axis

    def losses_and_normalizers(self, labels: Tensor) -> LossesAndNormalizers:
        """[S, B] -> the cross entropy of each label, and the log-normaliser. Both can be differentiated.

        The logits are used up, as in `vocab_parallel_cross_entropy`.
        """
        return LossesAndNormalizers(*_CrossEntropy.apply(self.values, labels, self.vocab_size, self.tp))


class _CrossEntropy(torch.autograd.Function):
    """Softmax and negative log-likelihood in one pass. All tensors but the logits hold one number a token, [S B]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, tp: Axis) -> tuple[Tensor, Tensor]:
        # This rank's rows of the vocabulary, of which the last ones may be padding. The kernel may overwrite the logits
        # [S B, V/tp]; `mark_dirty` is not needed, as nothing else reads them.
        flat, flat_labels = logits.detach().flatten(0, -2).contiguous(), labels.flatten()
        rows = flat.shape[-1]
        first = tp.rank * rows
        num_true = min(max(vocab_size - first, 0), rows)
        mine, total, target = cross_entropy_statistics(flat, flat_labels, first=first, num_true=num_true)
        # The maximum over the whole vocabulary comes first. Each rank's sum of exponentials is relative to the maximum
        # of its own rows, and is scaled to the common one before the sums over tp.
        maximum = comm.all_reduce(mine.clone(), tp, "max")
        total, target = comm.all_reduce(torch.stack((total * (mine - maximum).exp_(), target)), tp).unbind()
        ctx.save_for_backward(flat, flat_labels, mine, total * (maximum - mine).exp_())
        ctx.shape, ctx.first, ctx.num_true = logits.shape, first, num_true
        ctx.set_materialize_grads(False)
        logs = total.log()
        return (logs - (target - maximum)).view_as(labels), (logs + maximum).view_as(labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        # The gradient of a loss is softmax - one-hot, that of a log-normaliser softmax: each times what comes in, and
        # written over the logits: [S B, V/tp]. The total was scaled back to this rank's maximum in the forward, so that
        # the kernel needs no other.
        flat, labels, maximum, total = ctx.saved_tensors
        of_losses, of_normalizers = grads  # None for an output that nothing was computed from
        on_label = (torch.zeros_like(of_normalizers) if of_losses is None else of_losses).flatten()
        on_softmax = on_label if of_normalizers is None else on_label + of_normalizers.flatten()
        cross_entropy_gradient_(
            flat, labels, maximum, on_softmax / total, on_label, first=ctx.first, num_true=ctx.num_true
        )
        torch.autograd.graph.increment_version(flat)  # for a second backward to find out: kernels do not
        return flat.view(ctx.shape), None, None, None
