"""What may a layer ask about the forward pass it is part of?"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatronish import comm
from megatronish.attention.core import visibility
from megatronish.config.model import ModelConfig
from megatronish.layers.dropout import Dropout
from megatronish.mesh.groups import Axis
from megatronish.model.batch import MicroBatch
from megatronish.model.rope import Rotation, rotation


@dataclass(frozen=True)
class Context:
    """Made once for a forward pass and read by all its layers.

    `positions` [s] are the places along the sequence that the residual stream holds on this rank. `visible` is None
    where attention is plain causal. `dropout` is None in evaluation.
    """

    batch: MicroBatch
    positions: Tensor
    recompute_attention: bool
    rotation: Rotation | None
    visible: Tensor | None
    dropout: Dropout | None


def make_context(
    config: ModelConfig,
    batch: MicroBatch,
    *,
    tp: Axis,
    cp: Axis,
    cp_comm_type: Literal["p2p", "a2a"],
    sequence_parallel: bool,
    recompute_attention: bool,
    seed: int,
    step: int | None,
) -> Context:
    """The context of a micro-batch; `step` None means evaluation, without dropout."""
    device = batch.tokens.device
    seq_length = batch.tokens.shape[1]
    positions = torch.arange(seq_length, device=device)
    dropping = step is not None and (config.hidden_dropout > 0 or config.attention_dropout > 0)
    windowed = config.window_size is not None and config.window_size < seq_length
    masked = windowed or batch.document_ids is not None
    return Context(
        batch=batch,
        recompute_attention=recompute_attention,
        positions=comm.piece_of(positions, tp) if sequence_parallel else positions,
        rotation=rotation(config, batch.position_ids) if config.position_embedding_type == "rope" else None,
        visible=visibility(seq_length, window_size=config.window_size, document_ids=batch.document_ids, device=device)
        if masked
        else None,
        dropout=Dropout(seed, step or 0, batch.sample_ids, positions) if dropping else None,
    )
