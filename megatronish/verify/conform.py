"""Conformance of another trainer: its gradients of one batch against those of the same weights in one process here.

A dump is a folder that the trainer wrote in one step (docs/CONFORM.md has the hooks):

    batch.safetensors   tokens int64 [B, S]; if they are not the usual ones, labels, loss_mask and position_ids [B, S]
    gradients/          a checkpoint of the trainer in which each weight is replaced by its gradient
    dump.json           what is known of it: {"loss": 2.5, "trainer": "...", "layout": "..."}

So the reader of a format reads gradients as it reads weights, merged from any layout, and our gradients are given its
names. The serial reference is fp32, and its loss is the mean over all predictions of the batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.core.foreign import read_json
from megatronish.formats.convert import FORMATS
from megatronish.formats.load_sharded import check_source
from megatronish.formats.prove import OurModel, build_model
from megatronish.formats.safetensors import read_file
from megatronish.formats.tensor_rule import TensorRule
from megatronish.formats.weights import Description, LazyTensor, from_ours, is_bias, to_ours
from megatronish.model.batch import MicroBatch

BATCH, GRADIENTS, ABOUT = "batch.safetensors", "gradients", "dump.json"
ROWS = ("tokens", "labels", "loss_mask", "position_ids")
NOISE = 1e-6
"""Of the largest gradient: below it rounding is all there is, as in the gradient of a key's bias without RoPE."""


class Dump(NamedTuple):
    """What another trainer wrote of one step: its batch, gradients by its names, and what it says of itself."""

    batch: MicroBatch
    gradients: dict[str, LazyTensor]
    loss: float | None
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Compared:
    """Gradient of one parameter, by the name of the other trainer and by `ours`: `theirs` and `expected`, in fp32."""

    name: str
    ours: str
    theirs: Tensor
    expected: Tensor
    largest: float  # norm of the largest gradient of the model

    @property
    def noise(self) -> float:
        """Norm of what rounding leaves of a gradient that is 0."""
        return NOISE * self.largest

    @cached_property
    def error(self) -> float:
        """Norm of the difference, relative to the expected norm, or to the largest where rounding is all there is.

        Infinite where there is a NaN.
        """
        return self._relative(self.expected)

    @cached_property
    def factor(self) -> float | None:
        """What theirs is a multiple of ours by, if it is one (to a tenth of the error that stands without it)."""
        square = float(self.expected.square().sum())
        factor = float((self.theirs * self.expected).sum()) / square if square > self.noise**2 else 1.0
        return factor if factor and self._relative(self.expected * factor) < 0.1 * self.error else None

    def _relative(self, expected: Tensor) -> float:
        norm = float(expected.norm())
        difference = float((self.theirs - expected).norm()) / ((norm if norm > self.noise else self.largest) or 1.0)
        return difference if difference == difference else float("inf")

    @property
    def is_absent(self) -> bool:
        """Whether no gradient came where one is expected."""
        return not self.theirs.any() and float(self.expected.norm()) > self.noise

    @property
    def is_finite(self) -> bool:
        """Whether theirs holds numbers alone."""
        return bool(self.theirs.isfinite().all())


class Conformance(NamedTuple):
    """Gradients in the order in which a backward pass makes them, and both losses."""

    gradients: list[Compared]
    loss: float | None
    expected_loss: float
    batch: MicroBatch

    def differing(self, tolerance: float) -> list[Compared]:
        """Gradients that differ, the first one of the backward pass first."""
        return [each for each in self.gradients if not each.error <= tolerance]

    @property
    def loss_error(self) -> float:
        """Relative difference of the losses; 0 where theirs is not known."""
        return 0.0 if self.loss is None else abs(self.loss - self.expected_loss) / max(abs(self.expected_loss), 1e-30)


def read_dump(folder: Path, *, source: str) -> Dump:
    """Dump in a folder, whose gradients are a checkpoint of the format `source`; UserError for what is missing."""
    path = folder / BATCH
    if not path.is_file() or not (folder / GRADIENTS).is_dir():
        raise UserError(
            f"{folder} is not a dump of gradients: it must hold {BATCH} and {GRADIENTS}/, as the hooks of "
            "docs/CONFORM.md write them"
        )
    rows = {name: tensor.read() for name, tensor in read_file(path).items()}
    about = _about(folder / ABOUT)
    return Dump(batch_of(rows, path), FORMATS[source].read(folder / GRADIENTS).tensors, about.get("loss"), about)


def _about(path: Path) -> dict[str, Any]:
    """What a dump says of itself, nothing without the file; UserError for another file than one of the hooks'."""
    try:
        about = read_json(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); write it as the hooks of docs/CONFORM.md do") from error
    if not isinstance(about, dict):
        raise UserError(f'{path} must hold an object, as {{"loss": 2.5}}; leave the file out if nothing is known')
    loss = about.get("loss")
    if loss is not None and (type(loss) not in (int, float) or not math.isfinite(loss)):
        raise UserError(f"{path}: loss is {loss!r} and must be a number; leave it out if it is not known")
    return about


def batch_of(rows: Mapping[str, Tensor], path: Path) -> MicroBatch:
    """Micro-batch of a dump's rows. Without labels each token predicts the next one of its row."""
    tokens = rows.get("tokens")
    if tokens is None or tokens.dim() != 2 or tokens.is_floating_point():
        raise UserError(f"{path} must hold `tokens`, whole numbers [B, S]; it holds {', '.join(rows) or 'nothing'}")
    if unknown := [name for name, row in rows.items() if name not in ROWS or row.shape != tokens.shape]:
        raise UserError(
            f"{path} holds {unknown[0]} {list(rows[unknown[0]].shape)}; it may hold {', '.join(ROWS)}, each "
            f"{list(tokens.shape)} like tokens"
        )
    if broken := [name for name in ("labels", "position_ids") if name in rows and rows[name].is_floating_point()]:
        raise UserError(f"{path} holds {broken[0]} of type {rows[broken[0]].dtype}; they must be whole numbers")
    tokens = tokens.long()
    mask = rows.get("loss_mask", torch.ones_like(tokens))
    if not ((mask == 0) | (mask == 1)).all():
        raise UserError(f"{path} holds a loss_mask of other numbers than 0 and 1; predictions count alike here")
    mask, labels = mask.bool(), rows.get("labels")
    if labels is None:
        labels, mask = tokens.roll(-1, dims=1), mask.clone()
        mask[:, -1:] = False
    positions = rows.get("position_ids", torch.arange(tokens.shape[1]).expand_as(tokens)).long()
    labels, mask = labels.long(), mask & (labels >= 0)  # -100 and the like: no prediction
    if not mask.any():
        raise UserError(f"{path} predicts nothing: its loss_mask is 0, or its labels are negative, everywhere")
    return MicroBatch(tokens, labels.clamp(min=0), mask, positions.contiguous(), torch.arange(len(tokens)))


def compare(load: Path, dump: Dump, *, source: str, loss_of: str = "predictions") -> Conformance:
    """Conformance of a dump with the serial reference of the weights in `load`; UserError where the two do not fit.

    `loss_of` is a name in LOSSES.
    """
    description, theirs = FORMATS[source].read(load)
    _refuse_unknown(description, dump.batch)
    rules = FORMATS[source].rules(description)
    ours = to_ours(theirs, rules, source=load)
    check_source(load, description, ours, allow_unmatched=False)
    gradients = serial_gradients(build_model(description, ours.tensors, source=load), dump.batch, LOSSES[loss_of])
    expected = from_ours(gradients.by_name(description), rules).tensors
    unread = {name for rule in rules if is_bias(rule.ours) for name in rule.theirs}
    if strangers := sorted((expected.keys() ^ dump.gradients.keys()) - unread):
        raise UserError(
            f"{strangers[0]} is in one of {load} and the dump alone; both must be of one model, with a tensor for each "
            "parameter (zeros where there is no gradient)"
        )
    largest = max(float(each.read().norm()) for each in expected.values())
    compared = [
        _compared(name, rule, dump.gradients[name], expected[name].read().float(), largest)
        for rule in _backward_order(rules, description)
        for name in rule.theirs
        if not is_bias(rule.ours)  # what no gradient changes
    ]
    return Conformance(compared, dump.loss, gradients.loss, dump.batch)


def _compared(name: str, rule: TensorRule, theirs: LazyTensor, expected: Tensor, largest: float) -> Compared:
    if theirs.shape != tuple(expected.shape):
        raise UserError(
            f"the dump's gradient of {name} has shape {list(theirs.shape)} and the weight {list(expected.shape)}; "
            "both must be of one model"
        )
    return Compared(name, rule.ours, theirs.read().float(), expected, largest)


def _backward_order(rules: list[TensorRule], description: Description) -> Iterator[TensorRule]:
    """Rules in the order in which a backward pass ends with their tensors: embeddings last."""
    order = {name: number for number, name in enumerate(description.shardings())}
    yield from sorted(rules, key=lambda rule: -order.get(rule.ours, -1))


def _refuse_unknown(description: Description, batch: MicroBatch) -> None:
    """UserError for a model, or a batch, that the reference does not compute."""
    model = description.model
    if not model.is_causal:
        raise UserError(f"the model is model_type={model.model_type}; gradients of a GPT alone are compared")
    if model.mtp_num_layers:
        raise UserError(
            f"the model has mtp_num_layers={model.mtp_num_layers}, whose loss is not compared; dump a model without"
        )
    largest = int(max(batch.tokens.max(), batch.labels.max()))
    if largest >= description.vocab_size or int(batch.tokens.min()) < 0:
        raise UserError(f"the batch holds token {largest}; the model knows 0 to {description.vocab_size - 1}")
    first, last = int(batch.position_ids.min()), int(batch.position_ids.max())
    most = description.num_positions - 1 if model.position_embedding_type == "learned_absolute" else last
    if first < 0 or last > most:
        raise UserError(f"the batch holds positions {first} to {last}; the model knows 0 to {most}")


def _mean(losses: Tensor, mask: Tensor) -> Tensor:
    return losses[mask].mean()


def _mean_of_means(losses: Tensor, mask: Tensor) -> Tensor:
    counts = mask.sum(0)
    return ((losses * mask).sum(0)[counts > 0] / counts[counts > 0]).mean()


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"predictions": _mean, "samples": _mean_of_means}
"""What the loss is a mean of, by token losses [S, B] and their mask: all predictions alike, or all samples alike."""


class Gradients(NamedTuple):
    """Gradients of one batch by our names, with padding, and the loss that they are of."""

    tensors: dict[str, Tensor]
    loss: float

    def by_name(self, description: Description) -> dict[str, LazyTensor]:
        """The gradients without padding, as a checkpoint's tensors. What learns by no gradient has zeros."""
        shapes = {name: sharding.shape for name, sharding in description.shardings().items()}
        exact = {
            name: self.tensors[name][tuple(map(slice, shape))] if name in self.tensors else torch.zeros(shape)
            for name, shape in shapes.items()
        }
        return {name: LazyTensor(tuple(each.shape), each.dtype, each.clone) for name, each in exact.items()}


def serial_gradients(built: OurModel, batch: MicroBatch, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Gradients:
    """Gradients of the loss of a batch, in this process, without dropout and without losses of routers."""
    model = built.model.requires_grad_()
    loss = loss_of(model(None, batch, step=None), batch.loss_mask.t())
    loss.backward()
    tensors = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return Gradients(tensors, float(loss.detach()))
