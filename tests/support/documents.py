"""Documents of samples in tests, and which of their tokens see each other by definition."""

import torch
from torch import Tensor

from megatronish.specs.block_pattern import BlockPattern


def documents_of(seq_length: int) -> Tensor:
    """[2, S]: documents of growing length, and one that ends after a token."""
    places = torch.arange(seq_length)
    return torch.stack([places.double().sqrt().long(), (places > 0).long()])


def sees(
    query: int, key: int, *, window: int | None, documents: Tensor | None, pattern: BlockPattern | None = None
) -> bool:
    """Token by token, from the definition."""
    near = window is None or query - key < window
    if pattern is not None:
        near = near and key // pattern.block_size in pattern.row(query // pattern.block_size)
    return key <= query and near and (documents is None or bool(documents[query] == documents[key]))
