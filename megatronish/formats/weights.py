"""Weights of a model independent of their format: lazy tensors, their description, and rules between two formats.

A `Model` is a `Description` and lazy tensors, which are read when they are used, so a conversion has about one tensor
in memory. Each format has its own names and shapes of tensors: a `TensorRule` lists the tensors of a format that make
one tensor of ours, with the function that joins them and the one that splits ours.
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
    """Tensor that is not read yet: its shape, its dtype, and the function that reads it.

    The result of `read` belongs to the caller, whose reference should be the only one: a conversion has about one
    tensor in memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    def like(self) -> Tensor:
        """Tensor of this shape and dtype on the meta device, without elements."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def is_bias(name: str) -> bool:
    """Whether our tensor is the bias of a router, which stays in fp32 whatever the precision of a model."""
    return name.endswith(".router.bias")


@dataclass(frozen=True)
class Description:
    """All that describes a model except its weights.

    `seq_length` is the longest sequence of the model, and `eod` the id of the end-of-document token. `data` has the
    tokenizer's fields, as far as they are known; `tokenizer_files` are copied with the model, under the names that are
    their keys. `origin` keeps what another format says of the model ({"hf": content of config.json}), which is written
    again when the model returns to that format; runs pass it on. Its "stops" are the ids that end a generated text, if
    there are more of them than `eod`. `plugins` are those of the run that the model comes from.
    """

    model: ModelConfig
    vocab_size: int
    seq_length: int
    data: DataConfig = field(default_factory=DataConfig)
    eod: int | None = None
    tokenizer_files: Mapping[str, Path] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()

    def shardings(self) -> dict[str, Sharding]:
        """Shardings of all parameters, by our names: their global shapes without padding, and how they are cut.

        The biases of routers are among them: no gradient changes them, and what a router chooses depends on them.
        """
        stages = Stages.of(ParallelConfig(), self.model, vocab_size=self.vocab_size, seq_length=self.seq_length)
        stage = build_stage(
            self.model,
            stages,
            Mesh.start(),
            vocab_size=self.vocab_size,
            num_positions=self.num_positions,
            device=torch.device("meta"),
        )
        biases = {name: Sharding(tuple(state.shape)) for name, state in stage.model.state().items() if is_bias(name)}
        return stage.shardings | biases

    @property
    def stops(self) -> frozenset[int]:
        """Ids of the tokens that end a generated text, `eod` among them."""
        eod = () if self.eod is None else (self.eod,)
        return frozenset((*self.origin.get("stops", ()), *eod))

    @property
    def num_positions(self) -> int:
        """Number of rows of a learned position embedding."""
        return self.model.max_position_embeddings or self.seq_length


class Model(NamedTuple):
    """Model: a description, and lazy tensors under the names of one format."""

    description: Description
    tensors: dict[str, LazyTensor]


class Translated(NamedTuple):
    """Result of a translation: tensors by their new names, given ones without a rule, and missing ones."""

    tensors: dict[str, LazyTensor]
    left_over: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class TensorRule:
    """Rule: tensors `theirs` of a foreign format make the tensor `ours`, by `join`; `split` is the inverse."""

    ours: str
    theirs: tuple[str, ...]
    join: Callable[[Sequence[Tensor]], Tensor] = lambda parts: parts[0]
    split: Callable[[Tensor], Sequence[Tensor]] = lambda whole: (whole,)


def to_ours(theirs: Mapping[str, LazyTensor], rules: Sequence[TensorRule]) -> Translated:
    """Translation of a foreign format's tensors to our names; nothing is read."""
    tensors: dict[str, LazyTensor] = {}
    missing: list[str] = []
    used: set[str] = set()
    for rule in rules:
        absent = [name for name in rule.theirs if name not in theirs]
        missing += absent
        if not absent:
            used.update(rule.theirs)
            tensors[rule.ours] = _joined([theirs[name] for name in rule.theirs], rule)
    return Translated(tensors, tuple(name for name in theirs if name not in used), tuple(missing))


def from_ours(ours: Mapping[str, LazyTensor], rules: Sequence[TensorRule]) -> Translated:
    """Translation of our tensors to a foreign format's names; nothing is read.

    The parts of one tensor, if they are read one after the other in the order of the rule, read it once.
    """
    tensors: dict[str, LazyTensor] = {}
    missing: list[str] = []
    for rule in rules:
        if rule.ours in ours:
            tensors |= _split(ours[rule.ours], rule)
        else:
            missing.append(rule.ours)
    left_over = ours.keys() - {rule.ours for rule in rules}
    return Translated(tensors, tuple(name for name in ours if name in left_over), tuple(missing))


def _joined(parts: Sequence[LazyTensor], rule: TensorRule) -> LazyTensor:
    # The join of meta tensors gives shape and dtype of the result, and refuses shapes that do not fit.
    try:
        like = rule.join([part.like() for part in parts])
    except (RuntimeError, IndexError, ValueError) as error:  # torch's, of shapes that do not fit
        given = ", ".join(f"{name} {list(part.shape)}" for name, part in zip(rule.theirs, parts, strict=True))
        raise UserError(f"{given} do not fit together into {rule.ours}: they are of no such model") from error
    return LazyTensor(tuple(like.shape), like.dtype, lambda: rule.join([part.read() for part in parts]))


def _split(whole: LazyTensor, rule: TensorRule) -> dict[str, LazyTensor]:
    # All parts of the tensor, from the first that is read until the last one is: the writer asks for them in order.
    held: list[Tensor] = []

    def part(number: int) -> Tensor:
        if not held:
            held.extend(rule.split(whole.read()))
        result = held[number]
        if number == len(rule.theirs) - 1:
            held.clear()
        return result

    likes = rule.split(whole.like())
    return {
        name: LazyTensor(tuple(like.shape), like.dtype, partial(part, number))
        for number, (name, like) in enumerate(zip(rule.theirs, likes, strict=True))
    }
