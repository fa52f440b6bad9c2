"""Words of --step-batch-size-schedule: batch sizes from numbers of tokens on."""

import re
from collections.abc import Sequence
from itertools import pairwise

SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
LONGEST = 40  # digits of a number
_EXAMPLE = "for example 0:384 200B:768 400B:1152"


def parse_batch_sizes(words: Sequence[str], *, seq_length: int) -> tuple[tuple[int, int], ...]:
    """TOKENS:BATCH_SIZE ... -> ((samples, batch size from there on), ...); ValueError, a sentence.

    As Megatron-LM reads it: thresholds in tokens, with K, M, B or T, rounded down to whole samples. The words may be
    one text, and commas stand for spaces.
    """
    text = " ".join(words)
    steps = []
    for word in text.replace(",", " ").split():
        tokens, _, size = word.partition(":")
        steps.append((_count(tokens, text) // seq_length, _count(size, text)))
    if not steps or steps[0][0] != 0:
        raise ValueError(f"{text!r} must begin with 0:BATCH_SIZE; {_EXAMPLE}")
    for (before, _), (after, _) in pairwise(steps):
        if after <= before:
            raise ValueError(
                f"{text!r} must have thresholds that grow by a sample of {seq_length} tokens or more; {_EXAMPLE}"
            )
    if not all(size >= 1 for _, size in steps):
        raise ValueError(f"{text!r} must have batch sizes of at least 1; {_EXAMPLE}")
    return tuple(steps)


def _count(word: str, text: str) -> int:
    """Number of a word with a suffix, "2.4B" -> 2400000000."""
    found = re.fullmatch(r"(\d+(?:_\d+)*(?:\.\d+)?)([KMBT]?)", word.upper())
    if found is None:
        raise ValueError(f"{text!r} must be TOKENS:BATCH_SIZE ..., tokens with K, M, B or T; {_EXAMPLE}")
    if len(found[1]) > LONGEST:
        raise ValueError(f"{text[:80]!r}... has a number of {len(found[1]):,} digits; {_EXAMPLE}")
    return round(float(found[1]) * SUFFIXES[found[2]])
