"""Completeness of a conversion: each tensor of the source is used or left out for a reason, each of the target made.

The rules of a format are one to one (weights.py refuses others), so what is neither missing nor left over on either
side is written exactly once.
"""

from pathlib import Path

from megatronish.core.errors import UserError
from megatronish.formats.weights import Description, Translated


def check_source(load: Path, description: Description, ours: Translated, *, allow_unmatched: bool) -> None:
    """Check that the tensors are exactly the parameters of the model, in their shapes; UserError if not."""
    shardings = description.shardings()
    missing = ours.missing or tuple(name for name in shardings if name not in ours.tensors)
    if missing:
        raise UserError(f"{load} lacks {list_names(missing)}, which its model has; fetch it again, whole")
    if ours.left_over and not allow_unmatched:
        raise UserError(
            f"{load} holds {list_names(ours.left_over)}, of which the model knows nothing; megatronish convert "
            "--allow-unmatched leaves that out"
        )
    for name, tensor in ours.tensors.items():
        if tensor.shape != shardings[name].shape:
            raise UserError(
                f"{load}: {name} would be {list(tensor.shape)}, and its model says {list(shardings[name].shape)}; its "
                "config and its weights are of two models, fetch both again"
            )


def check_target(target: str, converted: Translated, *, allow_unmatched: bool) -> None:
    """Check that all our tensors go into the target, and that all of the target are there; UserError if not."""
    if converted.left_over and not allow_unmatched:
        raise UserError(
            f"{target} has no place for {list_names(converted.left_over)}; --allow-unmatched leaves that out"
        )
    if converted.missing:
        raise UserError(
            f"{target} needs {list_names(converted.missing)}, which the model does not have; it is of another family"
        )


def list_names(names: tuple[str, ...]) -> str:
    """At most three names, and how many more there are."""
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
