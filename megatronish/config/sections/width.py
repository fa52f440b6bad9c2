"""Options of muP in section [model]: hyperparameters of a narrow model that hold for a wide one.

Maximal update parameterization, Yang et al. 2022, arXiv:2203.03466, in the form of table 8, which a tied output layer
fits, too. Names and meanings are Megatron-LM's.
"""

from dataclasses import dataclass
from typing import Annotated

from megatronish.config.marks import at_least, at_most, greater_than

OF_MUP = (
    "use_mup",
    "mup_base_hidden_size",
    "mup_width_mult",
    "mup_base_head_dim",
    "mup_embedding_mult",
    "mup_output_mult",
    "mup_attn_scale_power",
)
"""Fields that only muP reads."""


@dataclass(frozen=True)
class WidthOptions:
    """Whether widths are compared with a base model's, and with which; factors that are tuned on that model."""

    use_mup: bool = False
    """muP: learning rate, initial weights and factors of a base width, for this width (tune narrow, train wide)."""
    mup_base_hidden_size: Annotated[int | None, at_least(1), at_most(2**31 - 1)] = None
    """muP: the base model's --hidden-size. w is --hidden-size over this. Derived: --hidden-size."""
    mup_width_mult: Annotated[float, greater_than(0)] = 1.0
    """muP: w itself, in the place of a base model's width."""
    mup_base_head_dim: Annotated[float | None, greater_than(0)] = None
    """muP: size of the base model's heads, whose root multiplies the scores of attention. Derived: 1."""
    mup_embedding_mult: Annotated[float, greater_than(0)] = 1.0
    """muP: factor of the tokens' embeddings, for any width."""
    mup_output_mult: Annotated[float, greater_than(0)] = 1.0
    """muP: factor of the logits, which are divided by w."""
    mup_attn_scale_power: Annotated[float, at_least(0), at_most(16)] = 1.0
    """muP: scores of attention are divided by the size of a head to this power; 0.5 without muP."""
