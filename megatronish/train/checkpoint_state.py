"""The checkpoint of a run: the tensors of a rank, the facts and the position in state.json, and their validity."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.checkpoint.folder import STATE, DamagedError, read_state
from megatronish.checkpoint.save import (
    ISLAND,
    MOMENTUM,
    global_tensors,
    model_tensors,
    optimizer_tensors,
    state_tensors,
)
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.core.remote import Location
from megatronish.engine.engine import Engine
from megatronish.model.adapters import is_adapter
from megatronish.optim.schedules import LearningRateSchedule, build_learning_rate_schedule
from megatronish.parallel import comm
from megatronish.parallel.disk import extremes_of

FACTS = ("config", "vocab_size", "data", "eod")
POSITION = ("step", "consumed_samples", "optimizer_steps")
LOSS_SCALE = {"scale", "growth_tracker", "hysteresis_tracker"}
LARGEST_COUNT = 2**62


def tensors_of(engine: Engine, *, with_optimizer: bool) -> dict[str, GlobalTensor]:
    """Tensors of this rank as a checkpoint has them, by name: of a model with adapters, those of the adapters.

    With an outer optimizer the outer parameters are the model, and what this rank's island has of its own comes with
    the optimizer: without it, islands start from the outer parameters (`OuterOptimizer.restart`).
    """
    tensors = _model_tensors(engine)
    if engine.stage.is_adapted:
        tensors = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
    if not with_optimizer:
        return tensors
    shardings, domains, outer, island = engine.stage.shardings, engine.mesh.domains, engine.outer, ""
    if outer is not None:
        island, shards = f"{ISLAND}{engine.mesh.islands.rank}.", engine.data_parallel.shards
        momenta = {name: momentum for name, (_, momentum) in outer.state.items()}
        tensors |= global_tensors(MOMENTUM, momenta, shards, shardings, domains)
        tensors |= global_tensors(f"{island}model", outer.masters, shards, shardings, domains, of_island=True)
    return tensors | optimizer_tensors(engine.optimizer, shardings, domains, island=island)


class FromIslands(NamedTuple):
    """Tensors of a rank under the names that a checkpoint of so many islands has them, and what is left to do.

    `restarts`: this rank's island is none of the checkpoint's, and starts from the outer parameters.
    """

    tensors: dict[str, GlobalTensor]
    restarts: bool


def from_islands(tensors: dict[str, GlobalTensor], engine: Engine, *, saved: int | None) -> FromIslands:
    """What this rank reads of a checkpoint of `saved` islands; None: of a run without an outer optimizer.

    An island that was there continues with what was its own. A new one starts from the outer parameters, with the
    optimizer states of one that was there: states of zeros would make Adam's first steps several times as long. A run
    without an outer optimizer takes the outer parameters, and the states of the first island.
    """
    if engine.outer is None:
        prefix = "" if saved is None else f"{ISLAND}0."
        named = {f"{prefix}{name}" if name.startswith("optimizer.") else name: each for name, each in tensors.items()}
        return FromIslands(named, restarts=False)
    number = engine.mesh.islands.rank
    own = f"{ISLAND}{number}."
    if saved is not None and number < saved:
        return FromIslands(tensors, restarts=False)
    prefix = "" if saved is None else f"{ISLAND}{number % saved}."
    island_tensors = {}
    for name, each in tensors.items():
        if name.startswith(f"{own}optimizer."):
            island_tensors[f"{prefix}{name.removeprefix(own)}"] = each
        elif not name.startswith(own) and not (saved is None and name.startswith(MOMENTUM)):
            island_tensors[name] = each
    return FromIslands(island_tensors, restarts=True)


def base_tensors_of(engine: Engine) -> dict[str, GlobalTensor]:
    """Tensors of the frozen model that adapters are for, as the model's own checkpoint has them."""
    return {name: tensor for name, tensor in _model_tensors(engine).items() if not is_adapter(name)}


def _model_tensors(engine: Engine) -> dict[str, GlobalTensor]:
    shardings, domains = engine.stage.shardings, engine.mesh.domains
    shards, outer = engine.data_parallel.shards, engine.outer
    if outer is not None:
        shards = {
            name: replace(shard, master=outer.state[name].parameter) if name in outer.state else shard
            for name, shard in shards.items()
        }
    tensors = model_tensors(shards, shardings, domains)
    return tensors | state_tensors(engine.stage.model.state(), domains["dense"])


def num_not_finite(engine: Engine) -> int:
    """Number of master tensors, over all ranks, with an element that is infinite or not a number.

    Collective. Each rank reads its masters once, a third of what a checkpoint with Adam has of it, at the speed of
    memory, and one number is summed over the world. Replicas are counted too.
    """
    own = [each.local for each in tensors_of(engine, with_optimizer=False).values()]
    own += [] if engine.outer is None else list(engine.outer.masters.values())
    # NaN goes through a minimum and a maximum, and both take no memory, other than torch.isfinite of a whole tensor.
    # Masters that are offloaded lie on the CPU, what no optimizer updates (the biases of routers) on the device.
    extremes: dict[torch.device, list[Tensor]] = {}
    for tensor in own:
        if tensor.numel():
            extremes.setdefault(tensor.device, []).append(extremes_of(tensor.contiguous()))
    number = sum(int((~torch.isfinite(torch.stack(each))).any(dim=1).sum()) for each in extremes.values())
    return int(comm.all_reduce(torch.tensor(number), engine.mesh.world))


def read_run(checkpoint: Location) -> dict[str, Any]:
    """Contents of state.json of a run's checkpoint; DamagedError if a run did not write it."""
    state = read_state(checkpoint)
    missing = [name for name in (*FACTS, *POSITION) if name not in state]
    if missing:
        raise DamagedError(checkpoint, f"{STATE} lacks {', '.join(missing)}")
    if not _is_valid(state):
        raise DamagedError(checkpoint, f"{STATE} is not that of a run")
    return state


def saved_schedule(state: dict[str, Any]) -> LearningRateSchedule:
    """Schedule of learning rate and weight decay of the run that wrote `state`.

    A state of an older version has no schedule: there it follows from the config.
    """
    if "schedule" in state:
        saved = state["schedule"]
        return LearningRateSchedule(**saved | {"config": _config_of(saved["config"]).optimizer})
    config = _config_of({name: value for section in state["config"].values() for name, value in section.items()})
    return build_learning_rate_schedule(config.optimizer, config.training, global_batch_size=config.global_batch_size)


def _config_of(saved: dict[str, Any]) -> Config:
    """Config with the fields of a state.json, without those of other versions."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    return Config().with_fields(**{name: value for name, value in values.items() if name in FIELDS})


def _is_valid(state: dict[str, Any]) -> bool:
    """Whether every entry that a run resumes with has its type, and every number a plausible size."""
    config, scale = state["config"], state.get("loss_scale", {})
    counts = [state.get(name, 0) for name in (*POSITION, "skipped_steps", "skipped_samples")]
    return (
        isinstance(config, dict)
        and all(isinstance(section, dict) for section in config.values())
        and "model" in config
        and type(config.get("training", {}).get("seq_length")) is int
        and all(type(count) is int and 0 <= count < LARGEST_COUNT for count in counts)
        and _is_count(state.get("islands"))
        and isinstance(scale, dict)
        and (not scale or scale.keys() >= LOSS_SCALE)
        and all(type(number) in (int, float) and abs(number) < LARGEST_COUNT**2 for number in scale.values())
        and isinstance(state.get("origin", {}), dict)
        and _are_hook_states(state.get("hooks", {}))
    )


def _is_count(islands: Any) -> bool:
    """Whether there are so many islands, or none."""
    return islands is None or (type(islands) is int and 0 < islands < LARGEST_COUNT)


def _are_hook_states(states: Any) -> bool:
    """Whether `states` are objects by the names of hooks."""
    return isinstance(states, dict) and all(isinstance(state, dict) for state in states.values())
