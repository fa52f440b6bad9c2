"""Weights of a model independent of their format: lazy tensors, their description, and rules between two formats.

A `Model` is a `Description` and lazy tensors, which are read when they are used, so a conversion has about one tensor
in memory. Each format has its own names and shapes of tensors, as a list of rules (tensor_rule.py).

The identity of a model is a checksum of its weights that no layout, no cut into files and no name of a folder changes:
SHA-256 over the sorted lines (name, shape, dtype, SHA-256 of the bytes) of all tensors, under our names. So a Hugging
Face folder and our checkpoint converted from it have one identity, as long as the conversion kept the precision.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.config.sections.data import DataConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.errors import UserError
from megatronish.formats.tensor_rule import TensorRule
from megatronish.parallel.all_or_none import from_all
from megatronish.parallel.mesh import Axis, Mesh
from megatronish.parallel.pipeline.stage import build_stage
from megatronish.parallel.sharding import Sharding
from megatronish.parallel.stages import Stages

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's states of a parameter, as torch calls them."""
OF_TWO_MODELS = "its config and its weights are of two models, fetch both again"


@dataclass(frozen=True)
class LazyTensor:
    """Tensor that is not read yet: its shape, its dtype, and the function that reads it.

    The result of `read` belongs to the caller, whose reference should be the only one: a conversion has about one
    tensor in memory. Where `part` is given, it reads the rows [start, stop) of the first dim alone, and the tensor
    (the experts of a layer) is taken row by row.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    part: Callable[[int, int], Tensor] | None = None

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the first dim."""
        return self.read()[start:stop] if self.part is None else self.part(start, stop)

    def mapped(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "LazyTensor":
        """Lazy tensor of the values that `function` makes of what is read, element by element."""
        part = self.part
        return LazyTensor(
            self.shape,
            dtype or self.dtype,
            lambda: function(self.read()),
            None if part is None else lambda start, stop: function(part(start, stop)),
        )

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
    there are more of them than `eod`. `plugins` are those of the run that the model comes from. `left_out` are tensors
    of the source that are no weights, or second copies of them, each with the reason.
    """

    model: ModelConfig
    vocab_size: int
    seq_length: int
    data: DataConfig = field(default_factory=DataConfig)
    eod: int | None = None
    tokenizer_files: Mapping[str, Path] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

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


@dataclass(frozen=True)
class Training:
    """State of the training of a model, whole, under our names: what a run needs beyond weights.

    `moments` has Adam's, a table of tensors for each of its states. `masters` are the weights in fp32, where those of
    the model are rounded, and empty where they are not. `names` are the tensors of the source that all this is read
    from, `num_updates` the number of Adam's steps. `optimizer` has the section of the config of a run of ours,
    `loss_scale` the state of a dynamic one (fp16), under the names that it has here and in Megatron-LM.
    """

    moments: Mapping[str, Mapping[str, LazyTensor]]
    masters: Mapping[str, LazyTensor]
    names: frozenset[str]
    num_updates: int
    iteration: int
    consumed_samples: int
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    loss_scale: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        kept = [*self.moments, *(["weights in fp32"] if self.masters else [])]
        kept += [f"a loss scale of {self.loss_scale['scale']:,.6g}"] if self.loss_scale else []
        return f"{', '.join(kept)} after {self.num_updates:,} steps, {self.consumed_samples:,} samples"


class Translated(NamedTuple):
    """Result of a translation: tensors by their new names, given ones without a rule, and missing ones."""

    tensors: dict[str, LazyTensor]
    left_over: tuple[str, ...]
    missing: tuple[str, ...]


def to_ours(theirs: Mapping[str, LazyTensor], rules: Sequence[TensorRule], *, source: Path | None = None) -> Translated:
    """Translation of a foreign format's tensors to our names; nothing is read. UserError names the `source`."""
    where = "" if source is None else f"{source}: "
    _check_rules(rules)
    tensors: dict[str, LazyTensor] = {}
    stacks: dict[str, list[LazyTensor]] = {}
    missing: list[str] = []
    used: set[str] = set()
    for rule in rules:
        absent = [name for name in rule.theirs if name not in theirs]
        missing += absent
        used.update(rule.theirs)
        if absent:
            continue
        joined = _joined([theirs[name] for name in rule.theirs], rule, where)
        if rule.row is None:
            tensors[rule.ours] = joined
        else:
            stacks.setdefault(rule.ours, []).append(joined)
    if not missing:
        tensors |= {name: _stacked(name, rows, where) for name, rows in stacks.items()}
    return Translated(tensors, tuple(name for name in theirs if name not in used), tuple(missing))


def from_ours(ours: Mapping[str, LazyTensor], rules: Sequence[TensorRule]) -> Translated:
    """Translation of our tensors to a foreign format's names; nothing is read.

    The parts of one tensor, or of one row, if they are read one after the other in the order of the rule, read it once.
    """
    _check_rules(rules)
    tensors: dict[str, LazyTensor] = {}
    missing: list[str] = []
    for rule in rules:
        if rule.ours in ours:
            tensors |= _split(ours[rule.ours], rule)
        else:
            missing.append(rule.ours)
    left_over = ours.keys() - {rule.ours for rule in rules}
    return Translated(tensors, tuple(name for name in ours if name in left_over), tuple(missing))


def _check_rules(rules: Sequence[TensorRule]) -> None:
    """Check that rules are one to one; UserError for a tensor that is written twice, or for rows in disorder."""
    numbers: dict[str, list[int | None]] = {}
    names = Counter(name for rule in rules for name in rule.theirs)
    for rule in rules:
        numbers.setdefault(rule.ours, []).append(rule.row)
    twice = [name for name, count in names.items() if count > 1]
    twice += [name for name, rows in numbers.items() if rows not in ([None], [*range(len(rows))])]
    if twice:
        raise UserError(
            f"the rules of the format do not make {twice[0]} exactly once, so weights would be lost; correct them"
        )


def _joined(parts: Sequence[LazyTensor], rule: TensorRule, where: str) -> LazyTensor:
    # The join of meta tensors gives shape and dtype of the result, and refuses shapes that do not fit.
    try:
        like = rule.join([part.like() for part in parts])
    except (RuntimeError, IndexError, ValueError) as error:  # torch's, of shapes that do not fit
        given = ", ".join(f"{name} {list(part.shape)}" for name, part in zip(rule.theirs, parts, strict=True))
        raise UserError(f"{where}{given} do not fit together into {rule.ours}; {OF_TWO_MODELS}") from error
    # A tensor under another name can still be read in parts.
    rows = parts[0].part if len(parts) == 1 and rule.join is TensorRule.join else None

    def joined_rows(start: int, stop: int) -> Tensor:
        return rule.join([part.rows(start, stop) for part in parts])

    rows = joined_rows if rule.by_row else rows
    return LazyTensor(tuple(like.shape), like.dtype, lambda: rule.join([part.read() for part in parts]), rows)


def _stacked(name: str, rows: Sequence[LazyTensor], where: str) -> LazyTensor:
    """Lazy tensor [len(rows), ...], of which each row is a tensor by itself."""
    shape, dtype = rows[0].shape, rows[0].dtype
    if any((row.shape, row.dtype) != (shape, dtype) for row in rows):
        raise UserError(f"{where}the experts of {name} differ in shape or in type; {OF_TWO_MODELS}")

    def part(start: int, stop: int) -> Tensor:
        values = torch.empty(stop - start, *shape, dtype=dtype)
        for place, row in zip(values, rows[start:stop], strict=True):
            place.copy_(row.read())
        return values

    return LazyTensor((len(rows), *shape), dtype, lambda: part(0, len(rows)), part)


def _split(whole: LazyTensor, rule: TensorRule) -> dict[str, LazyTensor]:
    # All parts of the tensor, from the first that is read until the last one is: the writer asks for them in order.
    held: list[Tensor] = []
    row = rule.row

    def read() -> Tensor:
        return whole.read() if row is None else whole.rows(row, row + 1)[0]

    def part(number: int) -> Tensor:
        if not held:
            held.extend(rule.split(read()))
        result = held[number]
        if number == len(rule.theirs) - 1:
            held.clear()
        return result

    likes = rule.split(whole.like() if row is None else whole.like()[row])

    def rows_of(number: int) -> Callable[[int, int], Tensor] | None:
        if rule.by_row:
            return lambda start, stop: rule.split(whole.rows(start, stop))[number]
        return whole.part if row is None and rule.split is TensorRule.split else None

    return {
        name: LazyTensor(tuple(like.shape), like.dtype, partial(part, number), rows_of(number))
        for number, (name, like) in enumerate(zip(rule.theirs, likes, strict=True))
    }


def identity_of(tensors: Mapping[str, LazyTensor], *, over: Axis) -> str:
    """Identity of these weights, 64 hexadecimal digits. Collective: each rank of `over` reads a part of the tensors."""
    names = sorted(tensors)[over.rank :: over.size]
    parts = from_all(over, lambda: [_line(name, tensors[name]) for name in names])
    lines = sorted(line for part in parts for line in part)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _line(name: str, tensor: LazyTensor) -> str:
    values = tensor.read().contiguous().flatten()
    digest = hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()
    return f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {digest}"
