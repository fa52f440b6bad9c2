"""Context of one forward pass: positions, rotation, masks, dropout streams and the KV cache, for all its layers."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatronish.attention.cached import KeyValueCache
from megatronish.attention.mask import AttentionMask, BidirectionalMask
from megatronish.attention.zigzag import places_on
from megatronish.layers.dropout import Dropout, LayerDropout
from megatronish.model.batch import MicroBatch
from megatronish.model.rope import RotaryEmbedding, Rotations
from megatronish.model.routing import RoutingRecord, Tally
from megatronish.ops.dropout import ProbabilityDropout
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, TensorParallel
from megatronish.specs.block_pattern import BlockPattern


@dataclass(frozen=True)
class Context:
    """What one forward pass makes, once, and all its layers read.

    `positions` [s] are the places along the whole sequence that the residual stream holds on this rank: a part of them
    under context or sequence parallelism. `causal_mask` is that of the model before windows and ALiBi: of BERT it is
    bidirectional. With a `cache` the batch continues where the forward before it ended:
    document ids are of all tokens so far, the rest is of the new ones. `dropout` is that of the layer at work
    (`of_layer`), None in evaluation.
    """

    batch: MicroBatch
    positions: Tensor
    rotations: Rotations | None
    causal_mask: AttentionMask
    dropout: LayerDropout | None = None
    cache: KeyValueCache | None = None
    routing: RoutingRecord = field(default_factory=RoutingRecord)

    def of_layer(self, layer: int, dropout: Dropout | None) -> "Context":
        """What a layer is given: the same, with the layer's own dropout."""
        return self if dropout is None else replace(self, dropout=dropout.of_layer(layer))

    def mask(
        self, window_size: int | None, slopes: tuple[float, ...] = (), pattern: BlockPattern | None = None
    ) -> AttentionMask:
        """Mask of a layer with this sliding window, slopes of ALiBi and pattern; layers that are alike share it."""
        return self.causal_mask.variant(window_size, slopes, pattern)

    def drop(self, x: Tensor, *, site: str, rate: float, residual: Tensor | None = None) -> Tensor:
        """[s, B, D] -> [s, B, D]: dropout on the residual stream, and `residual` added to what it leaves of x."""
        if self.dropout is None or rate == 0.0:
            return x if residual is None else residual + x
        return self.dropout.hidden(x, site=site, positions=self.positions, rate=rate, residual=residual)

    def of_input(self, x: Tensor, *, site: str, rate: float, first_column: int = 0, is_whole: bool = False) -> Tensor:
        """[s, B, in] -> [s, B, in]: dropout on the input of an adapter (layers/linear.py)."""
        if self.dropout is None:
            return x
        positions = self.dropout.all_positions if is_whole else self.positions
        assert positions is not None, "an input that no tp rank holds in part has the positions of all"
        if first_column == 0:
            return self.dropout.hidden(x, site=site, positions=positions, rate=rate)
        return self.dropout.columns_of(x, site=site, positions=positions, rate=rate, first_column=first_column)

    def attention_dropout(self, *, rate: float) -> ProbabilityDropout | None:
        """Dropout on the layer's attention probabilities; None where nothing is dropped."""
        if self.dropout is None or rate == 0.0:
            return None
        return self.dropout.attention(rate)


class Masks:
    """Attention masks of a model's forwards, causal or not. Without documents all forwards share one.

    With it they share all that is made of it: a window's dense mask and ALiBi's biases are made once for all
    micro-batches, and held once.
    """

    def __init__(self, *, is_causal: bool = True) -> None:
        self._make = AttentionMask if is_causal else BidirectionalMask
        self._last: AttentionMask | None = None

    def of(self, batch: MicroBatch, *, seq_length: int, cache: KeyValueCache | None) -> AttentionMask:
        """Mask of a forward over `seq_length` new tokens, after those in a KV cache."""
        num_cached = None if cache is None else cache.num_columns
        length, device = (num_cached or 0) + seq_length, batch.tokens.device
        if batch.document_ids is not None or cache is not None:
            return self._make(length, document_ids=batch.document_ids, device=device, num_cached=num_cached)
        if self._last is None or (self._last.seq_length, self._last.device) != (length, device):
            self._last = self._make(length, device=device)
        return self._last


def make_context(
    batch: MicroBatch,
    *,
    tp: TensorParallel,
    cp: Axis,
    rotary: RotaryEmbedding | None,
    masks: Masks,
    cache: KeyValueCache | None = None,
    tally: Tally | None = None,
) -> Context:
    """Context of a micro-batch, of which this rank holds [B, S/cp]."""
    assert cache is None or (cp.size == 1 and not tp.cuts_sequence), "a cache holds whole sequences"
    device = batch.tokens.device
    sides = batch.sides
    seq_length = sum(sides) * cp.size
    length = seq_length if batch.text_lengths is None else batch.text_lengths
    positions = places_on([side * cp.size for side in sides], cp, starts=batch.starts(cp.size), device=device)
    return Context(
        batch=batch,
        positions=torch.cat([comm.piece_of(side, tp.sequence_axis) for side in positions.split(sides)]),
        rotations=None if rotary is None else rotary(batch.position_ids, length),
        causal_mask=masks.of(batch, seq_length=seq_length, cache=cache),
        cache=cache,
        routing=RoutingRecord(cp, tally),
    )
