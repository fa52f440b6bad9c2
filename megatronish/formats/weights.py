"""What is a model's weights, whatever format they are kept in, and how does one format become another?

A `Model` is a description and lazy tensors: nothing is read before somebody asks for it, so a conversion holds about
one tensor at a time. A format names its tensors in its own way, and a `TensorRule` says which of them make one of ours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.config.data import DataConfig
from megatronish.config.model import ModelConfig
from megatronish.config.parallel import ParallelConfig
from megatronish.errors import UserError
from megatronish.mesh import Mesh
from megatronish.pipeline.stage import build_stage
from megatronish.pipeline.stages import Stages
from megatronish.sharding import Sharding


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is not read yet: its shape, its dtype, and how to read it.

    What `read` returns belongs to the caller alone, who may free it: a conversion holds about one tensor at a time.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def like(self) -> Tensor:
        """Shape and dtype alone."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Description:
    """Which model it is, beside its weights.

    `seq_length` is the longest sequence it was made for. `data` says how text becomes its tokens, as far as that is
    known; `tokenizer_files` are to be carried along, under the names that are their keys. `eod` ends a document.
    `origin` is what another format said of it, {"hf": config.json's, "megatron": ...}, given back when the model
    returns to that format; runs carry it on. Its "stops" are the ids that end what the model writes, if there are more
    than `eod`.
    """

    model: ModelConfig
    vocab_size: int
    seq_length: int
    data: DataConfig = field(default_factory=DataConfig)
    eod: int | None = None
    tokenizer_files: Mapping[str, Path] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)

    def shardings(self) -> dict[str, Sharding]:
        """The true shape of every parameter of this model, and how it is cut, by megatronish's names."""
        stages = Stages.of(ParallelConfig(), self.model, vocab_size=self.vocab_size, seq_length=self.seq_length)
        stage = build_stage(
            self.model,
            stages,
            Mesh.start(),
            vocab_size=self.vocab_size,
            num_positions=self.num_positions,
            device=torch.device("meta"),
        )
        return stage.shardings

    @property
    def stops(self) -> frozenset[int]:
        """The ids that end what the model writes, `eod` among them."""
        eod = () if self.eod is None else (self.eod,)
        return frozenset((*self.origin.get("stops", ()), *eod))

    @property
    def num_positions(self) -> int:
        """Rows of a learned position table."""
        return self.model.max_position_embeddings or self.seq_length


class Model(NamedTuple):
    """A description and tensors, under the names of one format."""

    description: Description
    tensors: dict[str, LazyTensor]


class Translated(NamedTuple):
    """Tensors under other names, and what found no counterpart: given ones left over, wanted ones not there."""

    tensors: dict[str, LazyTensor]
    left_over: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class TensorRule:
    """Tensors of a foreign format that make one of ours: `join` makes it of theirs, `split` theirs of it."""

    ours: str
    theirs: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor] = lambda parts: parts[0]
    split: Callable[[Tensor], Sequence[Tensor]] = lambda whole: (whole,)


def to_ours(theirs: Mapping[str, LazyTensor], rules: Sequence[TensorRule]) -> Translated:
    """A foreign format's tensors under our names."""
    found: dict[str, LazyTensor] = {}
    missing: list[str] = []
    used: set[str] = set()
    for rule in rules:
        absent = [name for name in rule.theirs if name not in theirs]
        missing += absent
        if not absent:
            used.update(rule.theirs)
            found[rule.ours] = _joined([theirs[name] for name in rule.theirs], rule)
    return Translated(found, tuple(name for name in theirs if name not in used), tuple(missing))


def from_ours(ours: Mapping[str, LazyTensor], rules: Sequence[TensorRule]) -> Translated:
    """Our tensors under a foreign format's names. Parts of one tensor, read one after the other, read it once."""
    found: dict[str, LazyTensor] = {}
    missing: list[str] = []
    for rule in rules:
        if rule.ours in ours:
            found |= _split(ours[rule.ours], rule)
        else:
            missing.append(rule.ours)
    left_over = ours.keys() - {rule.ours for rule in rules}
    return Translated(found, tuple(name for name in ours if name in left_over), tuple(missing))


def _joined(parts: Sequence[LazyTensor], rule: TensorRule) -> LazyTensor:
    try:
        like = rule.join([part.like() for part in parts])
    except (RuntimeError, IndexError, ValueError) as error:  # torch's, of shapes that do not fit
        told = ", ".join(f"{name} {list(part.shape)}" for name, part in zip(rule.theirs, parts, strict=True))
        raise UserError(f"{told} do not fit together into {rule.ours}: they are of no such model") from error
    return LazyTensor(tuple(like.shape), like.dtype, lambda: rule.join([part.read() for part in parts]))


def _split(whole: LazyTensor, rule: TensorRule) -> dict[str, LazyTensor]:
    held: list[Tensor] = []

    def part(number: int) -> Tensor:
        if not held:
            held.extend(rule.split(whole.read()))
        wanted = held[number]
        if number == len(rule.theirs) - 1:
            held.clear()
        return wanted

    likes = rule.split(whole.like())
    return {
        name: LazyTensor(tuple(like.shape), like.dtype, partial(part, number))
        for number, (name, like) in enumerate(zip(rule.theirs, likes, strict=True))
    }
