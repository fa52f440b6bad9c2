"""Reader of Megatron-LM checkpoints in its format `torch_dist`, whatever layout wrote them; tensors are lazy."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.megatron.arguments import model_of, seq_length_of, vocab_size_of
from megatronish.formats.megatron.names import EMBEDDING, HEAD, cuts, refuse_encoder, rules
from megatronish.formats.megatron.torch_dist.files import (
    COMMON,
    Common,
    DistributedFiles,
    check_backend,
    count_of,
    read_common,
)
from megatronish.formats.megatron.torch_dist.moments import OPTIMIZER, States, find_states, reason_against
from megatronish.formats.megatron.torch_dist.names import TensorPart, parts_by_name, reason_to_leave_out
from megatronish.formats.weights import Description, LazyTensor, Model, Training, is_bias, to_ours

OBJECT = "an object of Megatron-LM that is no weight"


def read(folder: Path, *, vocab_size: int | None = None) -> Model:
    """Model of one iteration's folder; see the reader of the format `torch` for `vocab_size`."""
    opened = _open(folder, vocab_size)
    return Model(opened.description, {name: opened.lazy(name) for name in opened.parts})


def read_training(folder: Path, description: Description) -> Training | None:
    """State of the training of the model in one iteration's folder; None where it is not whole there."""
    opened = _open(folder, description.vocab_size)
    args, iteration, num_updates, loss_scale = opened.common
    if opened.states is None or num_updates is None:
        return None

    def of_state(keys: Mapping[str, str], *, of_moments: bool) -> dict[str, LazyTensor]:
        theirs = {
            name: opened.lazy(name, keys)
            for name, parts in opened.parts.items()
            if all(key in keys for key, _ in parts)
        }
        by_rule = [rule for rule in rules(description, of_moments=of_moments) if not is_bias(rule.ours)]
        return to_ours(theirs, by_rule, source=folder).tensors

    moments, masters = opened.states
    return Training(
        moments={state: of_state(keys, of_moments=True) for state, keys in moments.items()},
        masters=of_state(masters, of_moments=False) if masters else {},
        names=frozenset(opened.states.keys()),
        num_updates=num_updates,
        iteration=iteration,
        consumed_samples=count_of(args.get("consumed_train_samples")) or 0,
        loss_scale=loss_scale,
    )


class _Opened(NamedTuple):
    """Folder whose headers are read: parts of every tensor by our names of Megatron-LM's, and its optimizer's states.

    `wanted` are the shapes that the arguments ask for.
    """

    files: DistributedFiles
    common: Common
    description: Description
    parts: dict[str, list[TensorPart]]
    wanted: dict[str, tuple[int, ...]]
    states: States | None

    def lazy(self, name: str, keys: Mapping[str, str] | None = None) -> LazyTensor:
        """Lazy tensor, or its state of an optimizer, of which `keys` are the names in the files."""
        parts = [part if keys is None else part._replace(key=keys[part.key]) for part in self.parts[name]]
        return _lazy(self.files, name, parts, self.wanted.get(name))


def _open(folder: Path, vocab_size: int | None) -> _Opened:
    check_backend(folder)
    # 1. The model from the arguments, and the tensors of all ranks, unread.
    common = read_common(folder)
    try:
        model = model_of(common.args, before_core=False)
    except UserError as error:
        raise UserError(f"{folder / COMMON} cannot be converted: {error}") from error
    files = DistributedFiles(folder)
    kept = {key: listed for key, listed in files.tensors.items() if reason_to_leave_out(key, model) is None}
    refuse_encoder(folder, kept)
    files.check(kept)
    states = find_states(files.tensors, kept)
    files.check(() if states is None else states.keys())
    # 2. Their parts by our names of Megatron-LM's tensors, and the shapes that the arguments ask for.
    try:
        parts = parts_by_name(kept, model)
    except UserError as error:
        raise UserError(f"{folder} cannot be converted: {error}") from error
    padded = next(iter(files.tensors[parts[EMBEDDING][0].key].shape), 0) if EMBEDDING in parts else 0
    if not padded:
        raise UserError(f"{folder} holds no {EMBEDDING}, so it holds no GPT; name another")
    vocab_size = vocab_size_of(common.args, vocab_size, padded=padded, path=folder / COMMON)
    description = Description(
        model=model,
        vocab_size=vocab_size,
        seq_length=seq_length_of(common.args),
        left_out=_left_out(files, model, states, common),
    )
    wanted = {name: cut.shape for name, cut in cuts(description, padded_vocab_size=padded).items()}
    return _Opened(files, common, description, parts, wanted, states)


def _left_out(files: DistributedFiles, model: ModelConfig, states: States | None, common: Common) -> dict[str, str]:
    """Tensors and objects that are no weights, each with the reason."""
    left_out = {key: reason for key in files.tensors if (reason := reason_to_leave_out(key, model))}
    left_out |= {key: reason_to_leave_out(key, model) or OBJECT for key in files.objects}
    of_optimizer = reason_against(has_states=states is not None, num_updates=common.num_updates)
    return {key: of_optimizer if reason == OPTIMIZER else reason for key, reason in left_out.items()}


def _lazy(
    files: DistributedFiles, name: str, parts: Sequence[TensorPart], wanted: tuple[int, ...] | None
) -> LazyTensor:
    """Lazy tensor of the parts' rows; UserError unless its shape is `wanted`, or has more rows of a vocabulary."""
    forms = [(files.tensors[part.key].shape[len(part.at) :], files.tensors[part.key].dtype) for part in parts]
    shape, dtype = forms[0]
    if len(parts) > 1 and shape:
        shape = (len(parts) * shape[0], *shape[1:])
    # Rows of a vocabulary after the true ones are padding, and are not read.
    is_vocabulary = name in (EMBEDDING, HEAD) and len(shape) == 2
    kept = wanted if wanted and is_vocabulary and shape[0] >= wanted[0] and shape[1:] == wanted[1:] else shape
    if kept != (wanted or kept) or len(set(forms)) > 1:
        raise UserError(
            f"{files.folder}: {name} is {list(shape)}, and its arguments ask for {list(wanted or ())}; its weights and "
            "its arguments are of two models"
        )
    return LazyTensor(kept, dtype, partial(_read, files, parts, kept, dtype))


def _read(files: DistributedFiles, parts: Sequence[TensorPart], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    if len(parts) == 1:
        files.fill(whole, *parts[0])
        return whole
    for place, part in zip(whole.chunk(len(parts)), parts, strict=True):
        files.fill(place, *part)
    return whole
