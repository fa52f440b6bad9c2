"""What may a layer ask about the forward pass it is part of?"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from megatronish import comm
from megatronish.attention.attend import attend
from megatronish.attention.cached import KeyValueCache
from megatronish.attention.mask import AttentionMask
from megatronish.attention.zigzag import places_of
from megatronish.config.model import ModelConfig
from megatronish.config.training import AttentionBackend
from megatronish.layers.dropout import Dropout
from megatronish.mesh import Axis, TensorParallel
from megatronish.model.batch import MicroBatch
from megatronish.model.recompute import recompute
from megatronish.model.rope import Rotation, rotation


@dataclass(frozen=True)
class Context:
    """Made once for a forward pass and read by all its layers.

    `positions` [s] are the places along the whole sequence that the residual stream holds on this rank: a part of them
    under context or sequence parallelism. `dropout` is None in evaluation. With a `cache` the batch goes on where the
    forward before it ended: document ids are of all tokens so far, the rest is of the new ones.
    """

    config: ModelConfig
    batch: MicroBatch
    positions: Tensor
    rotation: Rotation | None
    visibility: AttentionMask
    dropout: Dropout | None
    cp: Axis
    cp_comm_type: Literal["p2p", "a2a"]
    attention_backend: AttentionBackend
    recompute_attention: bool
    cache: KeyValueCache | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, first_head: int) -> Tensor:
        """[S/cp, B, n, H], [S/cp, B, k, H], [S/cp, B, k, H] -> [S/cp, B, n H], for heads from `first_head` on."""
        if self.cache is not None:
            k, v = self.cache.extended(k, v, layer=layer)
        drop = None
        if self.dropout is not None and self.config.attention_dropout > 0:
            drop = partial(self.dropout.attention, layer=layer, rate=self.config.attention_dropout)
        run = partial(
            attend,
            cp=self.cp,
            method=self.cp_comm_type,
            visibility=self.visibility,
            backend=self.attention_backend,
            first_head=first_head,
            dropout=drop,
        )
        return recompute(run, q, k, v) if self.recompute_attention else run(q, k, v)

    def drop(self, x: Tensor, *, layer: int, site: str) -> Tensor:
        """[s, B, D] -> [s, B, D]: dropout on the residual stream."""
        if self.dropout is None:
            return x
        rate = self.config.hidden_dropout
        return self.dropout.hidden(x, layer=layer, site=site, positions=self.positions, rate=rate)


def make_context(
    config: ModelConfig,
    batch: MicroBatch,
    *,
    tp: TensorParallel,
    cp: Axis,
    cp_comm_type: Literal["p2p", "a2a"],
    attention_backend: AttentionBackend,
    recompute_attention: bool,
    seed: int,
    step: int | None,
    cache: KeyValueCache | None = None,
) -> Context:
    """The context of a micro-batch; `step` None means evaluation, without dropout."""
    assert cache is None or (step is None and cp.size == 1 and not tp.cuts_sequence), "a cache holds whole sequences"
    device = batch.tokens.device
    num_cached = 0 if cache is None else cache.num_columns
    seq_length = batch.tokens.shape[1] * cp.size
    positions = places_of(seq_length, cp.rank, cp.size, device=device)
    dropping = step is not None and (config.hidden_dropout > 0 or config.attention_dropout > 0)
    return Context(
        config=config,
        batch=batch,
        positions=comm.piece_of(positions, tp.sequence_axis),
        rotation=rotation(config, batch.position_ids) if config.position_embedding_type == "rope" else None,
        visibility=AttentionMask(
            num_cached + seq_length, config.window_size, batch.document_ids, device, first_query=num_cached
        ),
        dropout=Dropout(seed, step or 0, batch.sample_ids) if dropping else None,
        cp=cp,
        cp_comm_type=cp_comm_type,
        attention_backend=attention_backend,
        recompute_attention=recompute_attention,
        cache=cache,
    )
