"""Loading: this rank's shards of a model from a checkpoint of any layout, verified.

Every rank compares names and shapes of all its tensors with the checkpoint before any tensor changes. Bytes are
verified as they are read. If the checkpoint is damaged, the ranks verify the older checkpoints, each rank a part of the
files, and the error names the newest whole one with the flag that loads it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from megatronish.checkpoint.checksums import Checksums, DamagedError
from megatronish.checkpoint.folder import by_age, step_of
from megatronish.checkpoint.storage import CheckpointReader
from megatronish.checkpoint.tensors import GlobalTensor, read_tensors, stored_shapes
from megatronish.core.errors import UserError
from megatronish.core.remote import Location
from megatronish.parallel.all_or_none import all_or_none
from megatronish.parallel.mesh import Axis, Mesh


def load_tensors(folder: Location, tensors: dict[str, GlobalTensor], *, mesh: Mesh, is_shared: bool = True) -> None:
    """Fill `tensors` from the checkpoint in `folder`. All ranks call this.

    Of one that is not shared, a copy nearby, each rank sees its own host's files.

    UserError, before anything is changed, if a tensor is missing or has another shape there: the checkpoint is of
    another model. DamagedError, with a checkpoint to load instead, if a byte that a rank reads is not what was written.
    """
    with offering_another(mesh.checkpoint_axis):
        reader = all_or_none(
            mesh.checkpoint_axis, partial(open_checked, folder, tensors, checks_all=is_shared and mesh.is_main)
        )
        read_tensors(reader, tensors, over=mesh.checkpoint_axis)


def open_checked(folder: Location, tensors: dict[str, GlobalTensor], *, checks_all: bool) -> CheckpointReader:
    """Reader of a checkpoint that has `tensors`; UserError if one is missing or has another shape."""
    reader = CheckpointReader(folder, checks_all=checks_all)
    stored = stored_shapes(reader)
    problems = []
    for name, tensor in tensors.items():
        if name not in stored:
            problems.append(f"{name} is not in the checkpoint")
        elif stored[name] != tensor.shape:
            problems.append(f"{name} is {list(stored[name])} in the checkpoint and {list(tensor.shape)} in this model")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        remedy = "load one of this model, or set the model's flags to those it was trained with"
        if all(problem.startswith("optimizer.") for problem in problems):
            remedy = "start from its weights alone with --no-load-optim or --finetune"
        raise UserError(f"{folder} holds another model: {'; '.join(problems[:3])}{more}; {remedy}")
    return reader


@contextmanager
def offering_another(over: Axis) -> Iterator[None]:
    """Context that adds to a DamagedError the newest whole checkpoint before the damaged one, as the remedy.

    All ranks of the axis enter it and must fail together: they share the work of verifying the other checkpoints.
    """
    try:
        yield
    except DamagedError as error:
        whole = _newest_whole_before(error.folder, over)
        remedy = "no earlier one is whole: remove that folder to start from the beginning"
        if whole is not None:
            step = step_of(whole.name)
            remedy = (
                f"the newest whole checkpoint before it is {whole.name}; load it with --ckpt-step {step}, or remove "
                "that folder, and the run resumes from there"
            )
        raise DamagedError(error.folder, error.why, remedy) from error


def _newest_whole_before(damaged: Location, over: Axis) -> Location | None:
    """Newest checkpoint saved before `damaged` of which every byte is what was written; None if there is none."""

    # Each rank verifies every size-th file; all_or_none makes the damage that one rank finds known to all.
    def verify(checkpoint: Location) -> None:
        Checksums.read(checkpoint).verify(part=over.rank, parts=over.size)

    older = by_age(damaged.parent)
    names = [path.name for path in older]
    for checkpoint in reversed(older[: names.index(damaged.name)] if damaged.name in names else older):
        try:
            all_or_none(over, partial(verify, checkpoint))
        except DamagedError:
            continue
        return checkpoint
    return None
