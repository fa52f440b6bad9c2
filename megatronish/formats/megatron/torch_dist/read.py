"""Reader of Megatron-LM checkpoints in its format `torch_dist`, whatever layout wrote them; tensors are lazy."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.formats.megatron.arguments import model_of, seq_length_of, vocab_size_of
from megatronish.formats.megatron.names import EMBEDDING, HEAD, cuts, refuse_encoder
from megatronish.formats.megatron.torch_dist.files import COMMON, DistributedFiles, check_backend, read_common
from megatronish.formats.megatron.torch_dist.names import TensorPart, parts_by_name, reason_to_leave_out
from megatronish.formats.weights import Description, LazyTensor, Model

OBJECT = "an object of Megatron-LM that is no weight"


def read(folder: Path, *, vocab_size: int | None = None) -> Model:
    """Model of one iteration's folder; see the reader of the format `torch` for `vocab_size`."""
    check_backend(folder)
    # 1. The model from the arguments, and the tensors of all ranks, unread.
    args = read_common(folder)
    try:
        model = model_of(args, before_core=False)
    except UserError as error:
        raise UserError(f"{folder / COMMON} cannot be converted: {error}") from error
    files = DistributedFiles(folder)
    left_out = {key: reason for key in files.tensors if (reason := reason_to_leave_out(key, model))}
    kept = {key: listed for key, listed in files.tensors.items() if key not in left_out}
    left_out |= {key: reason_to_leave_out(key, model) or OBJECT for key in files.objects}
    refuse_encoder(folder, kept)
    files.check(kept)
    # 2. Their parts by our names of Megatron-LM's tensors, and the shapes that the arguments ask for.
    try:
        parts = parts_by_name(kept, model)
    except UserError as error:
        raise UserError(f"{folder} cannot be converted: {error}") from error
    padded = next(iter(files.tensors[parts[EMBEDDING][0].key].shape), 0) if EMBEDDING in parts else 0
    if not padded:
        raise UserError(f"{folder} holds no {EMBEDDING}, so it holds no GPT; name another")
    vocab_size = vocab_size_of(args, vocab_size, padded=padded, path=folder / COMMON)
    description = Description(model=model, vocab_size=vocab_size, seq_length=seq_length_of(args), left_out=left_out)
    wanted = {name: cut.shape for name, cut in cuts(description, padded_vocab_size=padded).items()}
    # 3. Lazily: global tensors.
    tensors = {name: _lazy(files, name, of_name, wanted.get(name)) for name, of_name in parts.items()}
    return Model(description, tensors)


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
