"""Copies of one tensor in the files of several ranks: one is taken, and all must be equal."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.formats.torch_file.archive import memory_of
from megatronish.formats.weights import LazyTensor


@dataclass(frozen=True)
class RankTensor(LazyTensor):
    """Lazy tensor of a rank's file, which an error names."""

    path: Path = Path()


def one_of(name: str, copies: Sequence[RankTensor]) -> RankTensor:
    """The first of several copies, lazy; UserError, when it is read, if another one differs."""
    first = copies[0]
    if len(copies) == 1:
        return first
    return RankTensor(first.shape, first.dtype, partial(_read_equal, name, copies), path=first.path)


def _read_equal(name: str, copies: Sequence[RankTensor]) -> Tensor:
    # The first is read last: each is read once, and one is in memory at a time.
    first, *others = copies
    sums = [zlib.crc32(memory_of(copy.read())) for copy in others]
    tensor = first.read()
    expected = zlib.crc32(memory_of(tensor))
    for copy, found in zip(others, sums, strict=True):
        if found != expected:
            raise UserError(
                f"{name} differs between {first.path} and {copy.path}, which hold copies of it; the files are of two "
                "checkpoints, fetch them again"
            )
    return tensor
