"""What goes into a checkpoint, and when is it safe?

Tensors are stored in global names, as fp32 masters in the true vocabulary, so neither the layout nor the precision of
the run that saved them matters to the run that loads them:

    model.NAME                     the parameter
    optimizer.STATE.NAME           exp_avg, exp_avg_sq, ... of the same shape
"""

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from megatronish import comm
from megatronish.checkpoint.folder import name_of, partial_name_of, publish, remove_leftovers
from megatronish.checkpoint.tensors import GlobalTensor, write_tensors
from megatronish.errors import RunError
from megatronish.mesh.groups import Mesh
from megatronish.optim.optimizer import Optimizer
from megatronish.sharding import Sharding


def model_tensors(masters: dict[str, Tensor], shardings: dict[str, Sharding], mesh: Mesh) -> dict[str, GlobalTensor]:
    """The model's parameters as global tensors."""
    return _global_tensors("model", masters, shardings, mesh)


def optimizer_tensors(optimizer: Optimizer, shardings: dict[str, Sharding], mesh: Mesh) -> dict[str, GlobalTensor]:
    """The optimizer's tensors as global tensors."""
    found: dict[str, GlobalTensor] = {}
    for state in optimizer.state_names:
        tensors = {name: tensors[state] for name, tensors in optimizer.state().items()}
        found |= _global_tensors(f"optimizer.{state}", tensors, shardings, mesh)
    return found


def _global_tensors(
    prefix: str, tensors: dict[str, Tensor], shardings: dict[str, Sharding], mesh: Mesh
) -> dict[str, GlobalTensor]:
    """Of the ranks that hold the same, one writes; data ranks take turns, so that they share the work."""
    found = {}
    for number, (name, local) in enumerate(tensors.items()):
        sharding = shardings[name]
        first_holder = (sharding.dim is not None or mesh.tp.is_first) and (not sharding.tied or mesh.pp.is_first)
        found[f"{prefix}.{name}"] = GlobalTensor(
            shape=sharding.shape,
            pieces=tuple(sharding.pieces(mesh.tp)),
            local=local.detach(),
            writes=first_holder and number % mesh.data.size == mesh.data.rank,
        )
    return found


def save_checkpoint(
    folder: Path, *, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any], mesh: Mesh
) -> Path:
    """Write a checkpoint of step `step` into `folder`, whole or not at all. All ranks call this; returns its path.

    RunError if the disk is full or fails: what was written of it is removed, the checkpoints before it stay.
    """
    partial = folder / partial_name_of(step)
    if mesh.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        partial.mkdir()
    comm.barrier(mesh.world)
    try:
        write_tensors(partial, tensors, alone=mesh.world.size == 1)
        # dcp.save ends with a collective: when rank 0 returns, every rank's file is synced.
        if mesh.is_main:
            publish(partial, step=step, state=state)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(
            f"the checkpoint of step {step} could not be written to {folder}: {error.strerror or error}. Those before "
            "it are whole; make room there and start again, or name another place with --save"
        ) from error
    comm.barrier(mesh.world)
    return folder / name_of(step)
