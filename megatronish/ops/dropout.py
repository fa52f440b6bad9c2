"""Fused dropout: of hidden states with the residual addition, and of attention probabilities with their softmax.

    dropout_add        residual + where(keep, x / (1 - rate), 0)
    softmax_dropout    where(keep, softmax(logits) / (1 - rate), 0), logits = scale * scores + ALiBi over the keys seen

An element's mask is a hash of its global place (`keep_mask` of streams.py), which the kernels compute where they need
it: no mask is in memory, and nothing but the keys of the hash is saved for the backward, which draws the same mask
again. The keys are a tensor, so no value of a step is copied to the host.

`softmax_dropout` and its backward work in place on the scores of a tile of attention, queries times keys in fp32
(attention/dropout_attention.py). Which keys a query sees follows from positions, window and documents: no dense mask. A
tile that is not `causal` has no window: a query sees the keys after it, too.

On the CPU they run in C++ where it could be built (native.py); there `dropout_add` has its reference's bits.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.ops import native as cpp
from megatronish.ops.library import Operator, OperatorFamily, define
from megatronish.parallel.streams import drop_threshold, keep_mask


class ProbabilityDropout(NamedTuple):
    """Dropout of a layer's attention probabilities: each is dropped, or kept and scaled up, by its global place alone.

    `keys` [2] are those of the stream (streams.py); `sample_ids` int64 [B].
    """

    keys: Tensor
    sample_ids: Tensor
    rate: float

    def drop(self, probabilities: Tensor, *, first_head: int, queries: Tensor, keys: Tensor) -> Tensor:
        """[B, n, q, k] -> [B, n, q, k]: n heads from `first_head` on, positions `queries` [q] and `keys` [k]."""
        heads = torch.arange(first_head, first_head + probabilities.shape[1], device=probabilities.device)
        places = (self.sample_ids[:, None, None], heads[:, None], queries)
        keep = keep_mask(self.keys, places=places, columns=keys, rate=self.rate)
        return torch.where(keep, probabilities * _factor(self.rate), 0.0)


class DroppedTile(NamedTuple):
    """A tile of attention with dropout: runs of heads, queries and keys, and who sees whom.

    `documents` int64 [B, S], `slopes` fp32 [n].
    """

    dropout: ProbabilityDropout
    first_head: int
    first_query: int
    first_key: int
    window_size: int | None = None
    documents: Tensor | None = None
    slopes: Tensor | None = None
    causal: bool = True

    def softmax_(self, scores: Tensor, *, scale: float) -> Tensor:
        """Turn scores [B, n, q, k] into dropped probabilities; return their log-sum-exp [B, n, q], -inf over no key."""
        lse = scores.new_empty(scores.shape[:-1])
        torch.ops.megatronish.softmax_dropout(scores, lse, *self.arguments(scale))
        return lse

    def softmax_backward_(self, scores: Tensor, grads: Tensor, lse: Tensor, means: Tensor, *, scale: float) -> None:
        """Turn scores into dropped probabilities, and gradients of the latter into those of q k^T, all [B, n, q, k].

        `lse` and `means`, the sums of dout * out, are [B, n, q], over all keys of the sequence.
        """
        torch.ops.megatronish.softmax_dropout_backward(scores, grads, lse, means, *self.arguments(scale))

    def arguments(self, scale: float) -> tuple[Any, ...]:
        """The operators' arguments after the tensors of scores."""
        firsts = (self.first_head, self.first_query, self.first_key)
        tensors = (self.dropout.keys, self.dropout.sample_ids, self.documents, self.slopes)
        return (*tensors, *firsts, self.window_size, self.causal, scale, self.dropout.rate)


def dropout_add(
    x: Tensor, residual: Tensor | None, *, keys: Tensor, sample_ids: Tensor, positions: Tensor, rate: float
) -> Tensor:
    """[s, B, D], [s, B, D], keys int32 [2], int64 [B] and [s] -> residual + dropout(x), or the latter alone."""
    return torch.ops.megatronish.dropout_add(x, residual, keys, sample_ids, positions, rate)


def _factor(rate: float) -> float:
    return 1.0 / (1.0 - rate)


# References, and what runs on the CPU


def _add_reference(
    x: Tensor, residual: Tensor | None, keys: Tensor, samples: Tensor, positions: Tensor, rate: float
) -> Tensor:
    columns = torch.arange(x.shape[-1], device=x.device)
    keep = keep_mask(keys, places=(samples, positions.unsqueeze(-1)), columns=columns, rate=rate)
    kept = torch.where(keep, x * _factor(rate), 0.0)
    return (kept if residual is None else kept + residual).contiguous()


def _logits(scores: Tensor, tile: DroppedTile, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, -inf where nothing is seen, and the positions of queries and keys."""
    queries, keys = (
        torch.arange(first, first + size, device=scores.device)
        for first, size in zip((tile.first_query, tile.first_key), scores.shape[-2:], strict=True)
    )
    distance = queries[:, None] - keys
    visible = distance >= 0 if tile.causal else torch.ones_like(distance, dtype=torch.bool)
    if tile.window_size is not None:
        visible = visible & (distance < tile.window_size)
    if tile.documents is not None:
        visible = visible & (tile.documents[:, None, queries, None] == tile.documents[:, None, None, keys])
    logits = scores * scale
    if tile.slopes is not None:
        logits = logits - tile.slopes[:, None, None] * distance
    return logits.masked_fill(~visible, -torch.inf), queries, keys


def _tile(arguments: tuple[Any, ...]) -> tuple[DroppedTile, float]:
    """The inverse of `DroppedTile.arguments`."""
    keys, samples, documents, slopes, first_head, first_query, first_key, window_size, causal, scale, rate = arguments
    dropout = ProbabilityDropout(keys, samples, rate)
    return DroppedTile(dropout, first_head, first_query, first_key, window_size, documents, slopes, causal), scale


def _softmax_reference(scores: Tensor, lse: Tensor, *arguments: Any) -> None:
    tile, scale = _tile(arguments)
    logits, queries, keys = _logits(scores, tile, scale)
    lse.copy_(logits.logsumexp(-1))
    probabilities = (logits - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    scores.copy_(tile.dropout.drop(probabilities, first_head=tile.first_head, queries=queries, keys=keys))


def _softmax_backward_reference(scores: Tensor, grads: Tensor, lse: Tensor, means: Tensor, *arguments: Any) -> None:
    tile, scale = _tile(arguments)
    logits, queries, keys = _logits(scores, tile, scale)
    probabilities = (logits - lse.unsqueeze(-1)).exp()
    drop = partial(tile.dropout.drop, first_head=tile.first_head, queries=queries, keys=keys)
    grads.copy_(probabilities * (drop(grads) - means.unsqueeze(-1)) * scale)
    scores.copy_(drop(probabilities))


def _add_on_cpu(
    x: Tensor, residual: Tensor | None, keys: Tensor, samples: Tensor, positions: Tensor, rate: float
) -> Tensor:
    if not cpp.can_add(x, residual):
        return _add_reference(x, residual, keys, samples, positions, rate)
    return cpp.dropout_add(x, residual, (keys, samples, positions), drop_threshold(rate), _factor(rate))


def _softmax_on_cpu(scores: Tensor, lse: Tensor, *arguments: Any) -> None:
    *place, rate = arguments
    if cpp.can_softmax(scores):
        cpp.softmax_dropout(scores, (lse,), place, drop_threshold(rate), _factor(rate))
    else:
        _softmax_reference(scores, lse, *arguments)


def _softmax_backward_on_cpu(scores: Tensor, grads: Tensor, lse: Tensor, means: Tensor, *arguments: Any) -> None:
    *place, rate = arguments
    if cpp.can_softmax(scores):
        cpp.softmax_dropout(scores, (grads, lse, means), place, drop_threshold(rate), _factor(rate))
    else:
        _softmax_backward_reference(scores, grads, lse, means, *arguments)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001 torch gives it by name
    _, residual, keys, samples, positions, ctx.rate = inputs
    ctx.save_for_backward(keys, samples, positions)
    ctx.adds = residual is not None


def _add_backward(ops: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return ops.dropout_add(grad, None, *ctx.saved_tensors, ctx.rate), grad if ctx.adds else None, *[None] * 4


def _nothing(*_: Any) -> None:
    """Fake of an operator that works in place."""


_PLACE = (
    "Tensor keys, Tensor samples, Tensor? documents, Tensor? slopes, int first_head, int first_query, int first_key, "
    "int? window_size, bool causal, float scale, float rate"
)
FAMILY = OperatorFamily(
    "dropout",
    (
        Operator(
            "dropout_add(Tensor x, Tensor? residual, Tensor keys, Tensor samples, Tensor positions, float rate)"
            " -> Tensor",
            reference=_add_reference,
            on_cpu=_add_on_cpu,
            triton="dropout.dropout_add",
            setup_context=_save,
            backward=_add_backward,
        ),
        Operator(
            f"softmax_dropout(Tensor(a!) scores, Tensor(b!) lse, {_PLACE}) -> ()",
            reference=_softmax_reference,
            on_cpu=_softmax_on_cpu,
            triton="dropout.softmax",
            fake=_nothing,
        ),
        Operator(
            f"softmax_dropout_backward(Tensor(a!) scores, Tensor(b!) grads, Tensor lse, Tensor means, {_PLACE}) -> ()",
            reference=_softmax_backward_reference,
            on_cpu=_softmax_backward_on_cpu,
            triton="dropout.softmax_backward",
            fake=_nothing,
        ),
    ),
    why_not_on_cpu=cpp.why_not,
)
define(FAMILY)
