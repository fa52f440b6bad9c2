"""Loading of Hugging Face weights into this rank's shards of a model.

Every rank reads the folder by itself: headers first, then the tensors of which it holds a part, one at a time. So the
ranks communicate nothing, and a rank needs memory for its shards and one whole tensor, or one expert of a stack.
"""

from collections.abc import Mapping
from pathlib import Path

from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.core.errors import UserError
from megatronish.formats.coverage import check_source
from megatronish.formats.hf import tensors as hf
from megatronish.formats.weights import LazyTensor, Model, to_ours
from megatronish.parallel.sharding import Piece


def open_hf(load: Path) -> Model:
    """Model of a Hugging Face folder under our names, lazy; UserError if a tensor is missing or of another shape."""
    description, theirs = hf.read(load)
    ours = to_ours(theirs, hf.rules(description), source=load)
    check_source(load, description, ours, allow_unmatched=False)
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
        return
    for piece in target.pieces:
        first, *others = piece.global_offset
        for row in range(piece.sizes[0]):
            expert = tensor.rows(first + row, first + row + 1)
            part = Piece((), (0, *others), (1, *piece.sizes[1:])).view(expert)
            piece.view(target.local)[row : row + 1].copy_(part)
