"""Saving: what goes into a checkpoint, and the order in which it is written.

Tensors are stored in global names, as fp32 masters in the true vocabulary, so neither the layout nor the precision of
the run that saved them matters to the run that loads them:

    model.NAME                     the parameter
    optimizer.STATE.NAME           exp_avg, exp_avg_sq, ... of the same shape, those that step this parameter
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatronish.checkpoint.all_or_none import all_or_none
from megatronish.checkpoint.checksums import DamagedError
from megatronish.checkpoint.folder import name_of, partial_name_of, publish, remove_leftovers
from megatronish.checkpoint.tensors import GlobalTensor, write_tensors
from megatronish.errors import RunError
from megatronish.mesh import Domain, Mesh
from megatronish.optim.optimizer import Optimizer
from megatronish.sharding import Shard, Sharding


def model_tensors(
    shards: Mapping[str, Shard], shardings: Mapping[str, Sharding], domains: Mapping[str, Domain]
) -> dict[str, GlobalTensor]:
    """The parameters as global tensors. Ranks that hold replicas of a shard write in turn."""
    masters = {name: shard.master for name, shard in shards.items()}
    return _global_tensors("model", masters, shards, shardings, domains)


def optimizer_tensors(
    optimizer: Optimizer, shardings: Mapping[str, Sharding], domains: Mapping[str, Domain]
) -> dict[str, GlobalTensor]:
    """The optimizer's tensors as global tensors."""
    found: dict[str, GlobalTensor] = {}
    for state in dict.fromkeys(state for tensors in optimizer.state.values() for state in tensors):
        tensors = {name: tensors[state] for name, tensors in optimizer.state.items() if state in tensors}
        found |= _global_tensors(f"optimizer.{state}", tensors, optimizer.shards, shardings, domains)
    return found


def _global_tensors(
    prefix: str,
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, Shard],
    shardings: Mapping[str, Sharding],
    domains: Mapping[str, Domain],
) -> dict[str, GlobalTensor]:
    """Of the ranks that hold the same, one writes; replicas take turns, so that they share the work."""
    found = {}
    for number, (name, local) in enumerate(tensors.items()):
        sharding = shardings[name]
        domain = domains[sharding.domain]
        is_turn = number % domain.replicate.size == domain.replicate.rank
        found[f"{prefix}.{name}"] = GlobalTensor(
            shape=sharding.shape,
            pieces=shards[name].pieces,
            local=local.detach(),
            writes=sharding.is_counted(domain) and is_turn,
        )
    return found


class SaveError(RunError):
    """A checkpoint that could not be written. `what` happened, without what to do about it."""

    def __init__(self, what: str, remedy: str = "make room there") -> None:
        super().__init__(
            f"{what}. Those before it are whole; {remedy} and start again, or name another place with --save"
        )
        self.what, self.remedy = what, remedy

    def __reduce__(self) -> tuple[Any, ...]:
        """How it travels to another rank."""
        return SaveError, (self.what, self.remedy)


def save_checkpoint(
    folder: Path, *, step: int, tensors: dict[str, GlobalTensor], state: dict[str, Any], mesh: Mesh
) -> Path:
    """Write a checkpoint of step `step` into `folder`, whole or not at all. All ranks call this; returns its path.

    SaveError, on all of them, if the disk is full or fails: what was written of it is removed, the checkpoints before
    it stay. Ranks talk over `mesh.checkpoint_axis` alone, so a thread may do this while training uses the others.
    """
    partial = folder / partial_name_of(step)

    def on_main(work: Callable[[], Any]) -> None:
        all_or_none(mesh.checkpoint_axis, work if mesh.is_main else lambda: None)

    try:
        on_main(lambda: _begin(partial))
        write_tensors(partial, tensors, over=mesh.checkpoint_axis)
        on_main(lambda: publish(partial, step=step, state=state))
    except (OSError, DamagedError) as error:
        if mesh.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        what = f"the checkpoint of step {step} could not be written to {folder}"
        if isinstance(error, DamagedError):  # the main rank does not see what another has written
            raise SaveError(f"{what}: {error.why}", "let all ranks see one folder") from error
        raise SaveError(f"{what}: {error.strerror or error}") from error
    return folder / name_of(step)


def _begin(partial: Path) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(partial.parent)
    partial.mkdir()
