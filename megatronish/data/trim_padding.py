"""Shorter rows: the samples of a micro-batch without the filler that none of them needs.

Chats that are not packed are a row each, which is filled up to the sequence length; most of it would be computed for
nothing. No loss reads filler and masks go by place, so rows of any length have the same losses and gradients, and it
does not matter which samples a layout puts into one micro-batch.
"""

import math
from collections.abc import Sequence

from megatronish.config.config import Config
from megatronish.data.sample import Sample

PLACES = 64
"""Lengths are multiples of it: few shapes, which kernels and the memory's allocator like."""


def places_together(config: Config) -> int | None:
    """Number of places of which the length of a row is a multiple; None where rows keep their length.

    They do where they are packed, where shapes are to be equal (CUDA graphs, compiled layers), and with experts, which
    balance all tokens. tp and cp cut rows: cp into two pieces for each rank.
    """
    keeps = config.chat.pack_samples or config.training.cuda_graph or config.training.compile
    if keeps or config.model.num_experts is not None:
        return None
    parallel = config.parallel
    return math.lcm(PLACES, 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size)


def shortened(samples: Sequence[Sample], *, multiple: int | None) -> list[Sample]:
    """Samples of one length, S + 1, cut to the longest without filler: s + 1 for a multiple s, at most S."""
    if multiple is None:
        return list(samples)
    longest = max(len(sample.tokens) - sample.num_filler for sample in samples) - 1
    length = multiple * max(1, math.ceil(longest / multiple)) + 1
    return [sample.until(length) if length < len(sample.tokens) else sample for sample in samples]
