"""Settings of a model's execution: everything that changes memory, speed or dropout masks, and no parameter."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from megatronish.config.sections.training import AttentionBackend
from megatronish.model.attention import CoreAttention
from megatronish.model.recompute import Recompute
from megatronish.parallel.mesh import Axis


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

    def core_attention(self) -> CoreAttention:
        """Core attention with these settings, for every layer."""
        return CoreAttention(
            self.cp, self.cp_comm_type, self.attention_backend, recompute=self.recompute.granularity == "selective"
        )
