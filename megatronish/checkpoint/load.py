"""How does a checkpoint of any layout become this rank's share of the model?"""

from pathlib import Path

from megatronish.checkpoint.tensors import GlobalTensor, read_tensors, stored_shapes
from megatronish.errors import UserError
from megatronish.mesh.groups import Mesh


def load_tensors(folder: Path, tensors: dict[str, GlobalTensor], *, mesh: Mesh) -> None:
    """Fill `tensors` from a checkpoint. All ranks call this.

    UserError, before anything is changed, if a tensor is missing or has another shape there: it is another model's.
    """
    stored = stored_shapes(folder)
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
    read_tensors(folder, tensors, alone=mesh.world.size == 1)
