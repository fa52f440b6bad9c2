"""How do the weights of a Hugging Face folder become this rank's share of a model?"""

from collections.abc import Mapping
from pathlib import Path

from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.errors import UserError
from megatronish.formats.convert import check_model
from megatronish.formats.hf import tensors as hf
from megatronish.formats.weights import LazyTensor, Model, to_ours
from megatronish.sharding import Piece


def open_hf(load: Path) -> Model:
    """The model of a folder, under our names. Headers are read: UserError unless all of it is there, in its shapes."""
    description, theirs = hf.read(load)
    ours = to_ours(theirs, hf.rules(description))
    check_model(load, description, ours, allow_unmatched=False)
    return Model(description, ours.tensors)


def load_weights(tensors: Mapping[str, LazyTensor], into: Mapping[str, GlobalTensor], *, source: Path) -> None:
    """Fill this rank's pieces of `into`, named as in a checkpoint. A tensor of which it holds nothing is not read.

    One tensor at a time is whole in memory. UserError, before anything is changed, if one is missing or of another
    shape: `source` holds another model.
    """
    wanted = {name.removeprefix("model."): target for name, target in into.items()}
    for name, target in wanted.items():
        found = tensors[name].shape if name in tensors else None
        if found != target.shape:
            told = "is not" if found is None else f"is {list(found)}"
            raise UserError(
                f"{source} holds another model: {name} {told} there and {list(target.shape)} in this run; leave the "
                "flags of the model out"
            )
    for name, target in wanted.items():
        if target.pieces:
            whole = tensors[name].read()
            for piece in target.pieces:
                part = Piece(piece.global_offset, piece.global_offset, piece.sizes).view(whole)
                piece.view(target.local).copy_(part)
