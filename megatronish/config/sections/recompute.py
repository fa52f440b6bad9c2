"""Section [recompute] of a config: which activations the backward computes again."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatronish.config.marks import at_least, at_most


@dataclass(frozen=True)
class RecomputeConfig:
    """Recomputation of activations, which trades time for memory."""

    recompute_granularity: Literal["selective", "full"] | None = None
    """selective: attention's core is computed again; full: whole layers are."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Of full. uniform: all layers, in groups that keep one input each; block: the first layers of each chunk."""
    recompute_num_layers: Annotated[int, at_least(1), at_most(100_000)] = 1
    """Layers of a group (uniform), or computed again in each chunk (block)."""
    distribute_saved_activations: bool = False
    """The kept inputs of full recomputation are shared by the ranks of tp."""
    offload_saved_activations: bool = False
    """The kept inputs of full recomputation wait in the CPU's memory."""
