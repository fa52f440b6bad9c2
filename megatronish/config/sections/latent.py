"""Options of multi-head latent attention (MLA) in section [model] (DeepSeek-V2, arXiv:2405.04434).

Keys and values of all heads come from one small vector of a token, its latent. Names and meanings are Megatron-LM's.
"""

from dataclasses import dataclass
from typing import Annotated

from megatronish.config.marks import at_least, at_most, greater_than

MOST_FEATURES = 2**31 - 1
SIZES = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "latent_norm_epsilon",
)
"""Fields that only latent attention reads, besides those of a stretched RoPE, which are refused without it."""


@dataclass(frozen=True)
class LatentOptions:
    """Sizes of latents and of the parts of a head, and what a stretched RoPE does to scores."""

    multi_latent_attention: bool = False
    """Multi-head latent attention: keys and values come from a small latent of each token (DeepSeek-V3, Kimi K2)."""
    q_lora_rank: Annotated[int | None, at_least(1), at_most(MOST_FEATURES)] = None
    """Size of the latent of the queries. Without it they are projected from the hidden states at once."""
    kv_lora_rank: Annotated[int, at_least(1), at_most(MOST_FEATURES)] = 512
    """Size of the latent of keys and values."""
    qk_head_dim: Annotated[int, at_least(1), at_most(MOST_FEATURES)] = 128
    """Part of a head's query and key that RoPE leaves alone."""
    qk_pos_emb_head_dim: Annotated[int, at_least(2), at_most(MOST_FEATURES)] = 64
    """Part that RoPE turns; that of the keys is one for all heads."""
    v_head_dim: Annotated[int, at_least(1), at_most(MOST_FEATURES)] = 128
    """Size of a head's value."""
    latent_norm_epsilon: Annotated[float | None, greater_than(0)] = None
    """Added under the root in the norms of latents. Derived: --norm-epsilon; Hugging Face's models have 1e-6."""
    rope_mscale: Annotated[float, at_least(0)] = 1.0
    """yarn: factor m of 0.1 m ln(--rope-scaling-factor) + 1, by which the turned parts of query and key grow."""
    rope_mscale_all_dim: Annotated[float, at_least(0)] = 0.0
    """yarn: the same of whole queries and keys; the turned parts grow by the ratio of both."""
