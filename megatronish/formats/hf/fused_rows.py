"""Rows of a fused projection that lie by head there: the queries of a key/value head, its key and its value."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.tensor_rule import TensorRule, concatenate

if TYPE_CHECKING:
    from torch import Tensor


def rules_by_head(model: ModelConfig, ours: str, theirs: str) -> Iterator[TensorRule]:
    """Rules of such a projection, and of its bias."""
    heads, groups = model.num_attention_heads, model.num_kv_heads
    join = partial(sections_of_heads, heads=heads, groups=groups)
    split = partial(heads_of_sections, heads=heads, groups=groups)
    for kind in ("weight", "bias")[: 1 + model.qkv_bias]:
        yield TensorRule(f"{ours}.{kind}", (f"{theirs}.{kind}",), join, split)


def sections_of_heads(parts: "Sequence[Tensor]", *, heads: int, groups: int) -> "Tensor":
    """Rows [K, N/K + 2, H] of each key/value head -> rows of all queries, all keys, all values."""
    shared = heads // groups
    by_head = parts[0].unflatten(0, (groups, shared + 2, -1))
    return concatenate([part.flatten(0, 2) for part in by_head.split((shared, 1, 1), dim=1)])


def heads_of_sections(whole: "Tensor", *, heads: int, groups: int) -> "tuple[Tensor]":
    """Rows of all queries, all keys, all values -> those of each key/value head."""
    size = len(whole) // (heads + 2 * groups)
    sections = whole.split((heads * size, groups * size, groups * size))
    by_head = concatenate([part.unflatten(0, (groups, -1)).transpose(0, 1) for part in sections])
    return (by_head.transpose(0, 1).flatten(0, 1),)
