"""How does a checkpoint of any layout become this rank's share of the model, and what if it is damaged?"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from megatronish.checkpoint.all_or_none import all_or_none
from megatronish.checkpoint.checksums import Checksums, DamagedError
from megatronish.checkpoint.folder import by_age
from megatronish.checkpoint.storage import Reader
from megatronish.checkpoint.tensors import GlobalTensor, read_tensors, stored_shapes
from megatronish.errors import UserError
from megatronish.mesh import Axis, Mesh


def load_tensors(folder: Path, tensors: dict[str, GlobalTensor], *, mesh: Mesh) -> None:
    """Fill `tensors` from a checkpoint. All ranks call this.

    UserError, before anything is changed, if a tensor is missing or has another shape there: it is another model's.
    DamagedError, with one to load instead, if a byte that a rank reads is not what was written.
    """
    with offering_another(mesh.checkpoint_axis):
        reader = all_or_none(mesh.checkpoint_axis, partial(_open, folder, tensors, checks_all=mesh.is_main))
        read_tensors(reader, tensors, over=mesh.checkpoint_axis)


def _open(folder: Path, tensors: dict[str, GlobalTensor], *, checks_all: bool) -> Reader:
    reader = Reader(folder, checks_all=checks_all)
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
    """If a checkpoint that is read here turns out to be damaged, look for one to load instead, and say which.

    All ranks of the axis enter this, and must fail together; they share the work of reading the others.
    """
    try:
        yield
    except DamagedError as error:
        whole = _newest_whole_before(error.folder, over)
        remedy = "none before it is whole: remove that folder to start anew"
        if whole is not None:
            step = int(whole.name.removeprefix("step_"))
            remedy = (
                f"the newest whole one before it is {whole.name}; load it with --ckpt-step {step}, or remove that "
                "folder, and the run goes on from there"
            )
        raise DamagedError(error.folder, error.why, remedy) from error


def _newest_whole_before(damaged: Path, over: Axis) -> Path | None:
    """The newest checkpoint saved before this one of which every byte is what was written."""

    def verify(checkpoint: Path) -> None:
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
