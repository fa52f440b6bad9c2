"""Loading of Hugging Face weights into this rank's shards of a model.

Every rank reads the folder by itself: headers first, then the tensors of which it holds a part, one at a time. So the
ranks communicate nothing, and a rank needs memory for its shards and one whole tensor, or one expert of a stack.

Loading is complete: each tensor of the source is used or left out for a reason, each of the target made. The rules of a
format are one to one (weights.py refuses others), so what is neither missing nor left over on either side is written
exactly once.

With --quantize-base linear weights are quantised as they are read. A weight is read whole, or expert by expert,
quantised, and forgotten: no rank holds the model in its own precision. The scales of the second level, which are asked
for after the weight, are kept until then, so that each is read once.

With --upcycle the weights of a dense model become those of one with experts, each a copy of the dense MLP. Routers are
not among them: they keep the initial values that a run draws for them by name. Where the weights of a token's experts
sum to one, the first output is that of the dense model (Komatsuzaki et al. 2023, arXiv:2212.05055).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.hf import tensors as hf
from megatronish.formats.weights import Description, LazyTensor, Model, Translated, to_ours
from megatronish.layers.quantised import QuantisedWeight
from megatronish.parallel.disk import release
from megatronish.parallel.sharding import Piece


def open_hf(load: Path, *, allow_unmatched: "Allowed" = False) -> Model:
    """Model of a Hugging Face folder under our names, lazy; UserError if a tensor is missing or of another shape.

    `allow_unmatched` are tensors that the folder may have and the model knows nothing of.
    """
    description, theirs = hf.read(load)
    ours = to_ours(theirs, hf.rules(description), source=load)
    check_source(load, description, ours, allow_unmatched=allow_unmatched)
    return Model(description, ours.tensors)


def load_weights(tensors: Mapping[str, LazyTensor], into: Mapping[str, GlobalTensor], *, source: Path) -> None:
    """Fill this rank's pieces of `into`, named as in a checkpoint. Tensors without a piece on this rank are not read.

    One tensor at a time is whole in memory. UserError, before anything is changed, if a tensor is missing or of another
    shape: `source` holds another model.
    """
    wanted = {name.removeprefix("model."): target for name, target in into.items()}
    for name, target in wanted.items():
        shape = tensors[name].shape if name in tensors else None
        if shape != target.shape:
            given = "is not" if shape is None else f"is {list(shape)}"
            raise UserError(
                f"{source} holds another model: {name} {given} there and {list(target.shape)} in this run; leave the "
                "flags of the model out"
            )
    for name, target in wanted.items():
        if target.pieces:
            _fill(target, tensors[name])


def _fill(target: GlobalTensor, tensor: LazyTensor) -> None:
    """Copy each piece [*sizes] from its place in the global tensor to its place in the local one.

    A stack of experts is read expert by expert, and only those of which this rank holds a part.
    """
    if tensor.part is None:
        whole = tensor.read()
        for piece in target.pieces:
            piece.view(target.local).copy_(Piece((), piece.global_offset, piece.sizes).view(whole))
        release(target.local)
        return
    for piece in target.pieces:
        first, *others = piece.global_offset
        for row in range(piece.sizes[0]):
            expert = tensor.rows(first + row, first + row + 1)
            part = Piece((), (0, *others), (1, *piece.sizes[1:])).view(expert)
            piece.view(target.local)[row : row + 1].copy_(part)
        release(target.local)


Allowed = bool | Sequence[str]
"""Whether tensors without a counterpart may be left out; or the names of those that may, or patterns like *.bias."""


def refused_of(left_over: Sequence[str], allowed: Allowed) -> list[str]:
    """Tensors that are left over and may not be."""
    patterns = ("*" if allowed else "",) if isinstance(allowed, bool) else allowed
    return [name for name in left_over if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def check_source(load: Path, description: Description, ours: Translated, *, allow_unmatched: Allowed) -> None:
    """Check that the tensors are exactly the parameters of the model, in their shapes; UserError if not."""
    shardings = description.shardings()
    missing = ours.missing or tuple(name for name in shardings if name not in ours.tensors)
    if missing:
        raise UserError(f"{load} lacks {list_names(missing)}, which its model has; fetch it again, whole")
    if refused := refused_of(ours.left_over, allow_unmatched):
        raise UserError(
            f"{load} holds {list_names(refused)}, of which the model knows nothing; megatronish convert "
            "--allow-unmatched leaves that out"
        )
    for name, tensor in ours.tensors.items():
        if tensor.shape != shardings[name].shape:
            raise UserError(
                f"{load}: {name} would be {list(tensor.shape)}, and its model says {list(shardings[name].shape)}; its "
                "config and its weights are of two models, fetch both again"
            )


def check_target(target: str, converted: Translated, *, allow_unmatched: Allowed) -> None:
    """Check that all our tensors go into the target, and that all of the target are there; UserError if not."""
    if refused := refused_of(converted.left_over, allow_unmatched):
        raise UserError(f"{target} has no place for {list_names(refused)}; --allow-unmatched leaves that out")
    if converted.missing:
        raise UserError(
            f"{target} needs {list_names(converted.missing)}, which the model does not have; it is of another family"
        )


def list_names(names: Sequence[str]) -> str:
    """At most three names, and how many more there are."""
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def quantised(
    tensors: Mapping[str, LazyTensor], weights: Iterable[tuple[str, str, QuantisedWeight]], *, device: torch.device
) -> dict[str, LazyTensor]:
    """The tensors, of which these `weights`, (name, name of the scales, form), are quantised on the device."""
    converted = dict(tensors)
    for name, scales, held in weights:
        if name in tensors:
            packed = _Packed(tensors[name], held, device)
            converted[name] = packed.weight()
            if held.scales is not None:
                converted[scales] = packed.scales()
    return converted


class _Packed:
    """Quantisation of one weight; `_kept` are scales that are not asked for yet, by expert (0 where there is one)."""

    def __init__(self, source: LazyTensor, held: QuantisedWeight, device: torch.device) -> None:
        self.source, self.held, self.device = source, held, device
        self.is_stack = held.num_experts is not None
        self._kept: dict[int, Tensor] = {}

    def weight(self) -> LazyTensor:
        shape = self.held.stored_shape(self.source.shape)
        if not self.is_stack:
            return LazyTensor(shape, torch.uint8, partial(self._weight, 0))
        return self._stack(shape, self._weight)

    def scales(self) -> LazyTensor:
        width = self.held.form.scale_bytes
        if not self.is_stack:
            return LazyTensor((width,), torch.uint8, partial(self._scales, 0))
        return self._stack((self.source.shape[0], width), self._scales)

    def _stack(self, shape: tuple[int, ...], read: Callable[[int], Tensor]) -> LazyTensor:
        def part(start: int, stop: int) -> Tensor:
            return torch.stack([read(expert) for expert in range(start, stop)])

        return LazyTensor(shape, torch.uint8, lambda: part(0, shape[0]), part)

    def _weight(self, expert: int) -> Tensor:
        stored, self._kept[expert] = self._read(expert)
        return stored

    def _scales(self, expert: int) -> Tensor:
        if expert not in self._kept:
            _, self._kept[expert] = self._read(expert)
        return self._kept.pop(expert)

    def _read(self, expert: int) -> tuple[Tensor, Tensor]:
        values = self.source.rows(expert, expert + 1)[0] if self.is_stack else self.source.read()
        stored, scales = self.held.form.pack(values.to(self.device).flatten(0, -2))
        return stored.unflatten(0, values.shape[:-1]), scales


def upcycled(dense: Mapping[str, LazyTensor], model: ModelConfig) -> dict[str, LazyTensor]:
    """Lazy tensors of `model`, by our names, from those of a dense model of the same sizes; routers are left out.

    UserError, when they are loaded, if the dense model has other shapes.
    """
    tensors = dict(dense)
    sections = 2 if model.is_gated else 1
    for layer in (n for n, has_experts in enumerate(model.expert_layers) if has_experts):
        mlp = f"layers.{layer}.mlp"
        for dense_name, name, shape in (
            ("fc1", "gate_up", (sections, model.ffn_size, model.hidden_size)),
            ("fc2", "down", (model.hidden_size, model.ffn_size)),
        ):
            if (matrix := tensors.pop(f"{mlp}.{dense_name}.weight", None)) is not None:
                tensors[f"{mlp}.experts.{name}.weight"] = _copies(matrix, model.num_experts or 0, shape)
    return tensors


def _copies(matrix: LazyTensor, number: int, shape: tuple[int, ...]) -> LazyTensor:
    """Stack [number, *shape] of one matrix, of whose rows gate and up-projection are halves."""
    fits = matrix.like().numel() == torch.Size(shape).numel()
    shape = shape if fits else matrix.shape

    def part(start: int, stop: int) -> Tensor:
        return matrix.read().view(shape).expand(stop - start, *shape)

    return LazyTensor((number, *shape), matrix.dtype, lambda: part(0, number), part)
