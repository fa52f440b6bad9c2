"""Ranks of Megatron-LM that save a model, by stage: which (tensor rank, expert rank) there are, and their folders.

Rank r of a stage has tensor rank r % tp, expert tensor rank r % etp and expert rank r // etp % ep. Where etp is tp, as
by default, a stage has a file for every pair; where etp is smaller, only for the pairs that occur.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.formats.torch_file.archive import memory_of
from megatronish.formats.weights import LazyTensor
from megatronish.parallel.mesh import Axis

# Copies of one tensor in the files of several ranks: one is taken, and all must be equal.


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
    for copy, checksum in zip(others, sums, strict=True):
        if checksum != expected:
            raise UserError(
                f"{name} differs between {first.path} and {copy.path}, which hold copies of it; the files are of two "
                "checkpoints, fetch them again"
            )
    return tensor


class RankGrid(NamedTuple):
    """Sizes of tensor, pipeline, expert and expert tensor parallelism; `etp` divides `tp`."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def ranks(self) -> Iterator[tuple[int, int]]:
        """(tensor rank, expert rank) of every file of a stage, lazily and each once."""
        seen = set()
        for rank in range(lcm(self.tp, self.etp * self.ep)):
            pair = rank % self.tp, rank // self.etp % self.ep
            if pair not in seen:
                seen.add(pair)
                yield pair

    def folder(self, tp: int, pp: int, ep: int) -> str:
        """Name of the folder with a rank's file: mp_rank_TT, with _PPP where pp > 1, with _EEE where ep > 1."""
        return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if self.pp > 1 else "") + (f"_{ep:03d}" if self.ep > 1 else "")

    def dense_axis(self, tp: int) -> Axis:
        """Axis that cuts a tensor outside of experts, at a tensor rank."""
        return Axis("tp", self.tp, tp)

    def expert_axis(self, tp: int) -> Axis:
        """Axis that cuts a tensor of an expert, at a tensor rank."""
        return Axis("etp", self.etp, tp % self.etp)
