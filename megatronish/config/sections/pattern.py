"""Options of block-sparse attention in section [model]: which blocks of keys a block of queries sees."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatronish.config.marks import at_least, at_most

AttentionPattern = Literal["none", "sliding", "fixed", "longformer", "bigbird"]

READ_BY: dict[AttentionPattern, tuple[str, ...]] = {
    "none": (),
    "sliding": ("attention_block_size", "attention_local_blocks"),
    "fixed": ("attention_block_size", "attention_local_blocks", "attention_global_blocks"),
    "longformer": ("attention_block_size", "attention_local_blocks", "attention_global_blocks"),
    "bigbird": (
        "attention_block_size",
        "attention_local_blocks",
        "attention_global_blocks",
        "attention_random_blocks",
        "attention_pattern_seed",
    ),
}
"""Options that each pattern reads."""


@dataclass(frozen=True)
class PatternOptions:
    """Block-sparse attention. A pattern is the same for all heads, and its rows do not depend on the layout."""

    attention_pattern: AttentionPattern = "none"
    """Blocks of keys that a token sees: local ones, and with all except sliding also global ones (BigBird: random)."""
    attention_block_size: Annotated[int, at_least(1), at_most(2**20)] = 128
    """Tokens of a block of an --attention-pattern."""
    attention_local_blocks: Annotated[int, at_least(1), at_most(2**20)] = 4
    """Local blocks: a token's own and those before it; of fixed, the blocks of one of its windows."""
    attention_global_blocks: Annotated[int, at_least(0), at_most(2**20)] = 1
    """Global blocks: the first of the sequence, which all see; of fixed, the last of each window before."""
    attention_random_blocks: Annotated[int, at_least(0), at_most(2**20)] = 1
    """Random blocks of each row of BigBird's pattern, in addition to the others."""
    attention_pattern_seed: Annotated[int, at_least(0), at_most(2**31 - 1)] = 0
    """Names the random blocks, together with the number of the row."""
