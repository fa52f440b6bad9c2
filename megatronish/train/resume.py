"""The start of a run: its own newest checkpoint, that of --load, a Hugging Face model, or initial weights."""

import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatronish.checkpoint.checksums import DamagedError
from megatronish.checkpoint.folder import (
    by_age,
    find_checkpoint,
    folder_of,
    read_state,
    remove_leftovers,
    saved_at,
    steps_in,
)
from megatronish.checkpoint.load import load_tensors, offering_another
from megatronish.checkpoint.replicated.copies import NearbyCopies
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.config.portable import TOKENIZER_PATHS, with_copies
from megatronish.config.sections.run import CheckpointConfig
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown
from megatronish.core.remote import Location, RemotePath, is_url, location
from megatronish.engine.engine import Engine
from megatronish.formats import native
from megatronish.formats.load_sharded import load_weights, open_hf, upcycled
from megatronish.formats.start import of_another_format
from megatronish.optim.schedules import LearningRateSchedule
from megatronish.parallel.all_or_none import all_or_none, from_one, same_on_all
from megatronish.parallel.mesh import Axis
from megatronish.train.base_model import Base, load_base, refuse_adapters, refuse_other_base, refuse_other_reference
from megatronish.train.checkpoint_state import FromIslands, from_islands, read_run, saved_schedule, tensors_of
from megatronish.train.folder import differences, refuse_other_function, refuse_other_run
from megatronish.train.own_files import other_tokenizer
from megatronish.train.setup import TrainingJob
from megatronish.train.trainer import Progress

FROM_THE_START = "step, optimizer and data order start from the beginning"


class Begun(NamedTuple):
    """Start of a run: its progress, and what is kept in addition to the weights.

    `origin` is the description that came with weights of another format (Hugging Face's config.json).
    `hook_states` are those of the resumed run, by name: see `Hook.state`. `base` says which frozen model the run's
    adapters are for. `is_on_disk` is False for a copy nearby, which is removed at the end of the run. `taken_after` is
    the time of the newest state of the run: those that it will take come after it.
    """

    progress: Progress
    origin: dict[str, Any]
    hook_states: dict[str, dict[str, Any]]
    schedule: LearningRateSchedule
    base: Base | None = None
    is_on_disk: bool = True
    taken_after: float = 0.0


# The start of a run, in an order that matters:
#
# 1. On a disk one rank removes what a killed save has left, before any rank looks: a replaced checkpoint may get its
#    name back.
# 2. The frozen model of adapters is loaded. --load and --load-hf named it, so they say nothing of where adapters start.
# 3. All ranks look for checkpoints and copies together: if two chose differently, each would wait in another load.
# 4. The state of the checkpoint is read before its tensors. It says whether this is a resume or a start from weights,
#    which may change more (all except the function of the model), and refuses before a tensor has changed.
# 5. Schedule and hooks continue with a resume. A start from weights has its own.


def begin(
    job: TrainingJob,
    engine: Engine,
    say: Callable[[str], None],
    *,
    reference: Base | None = None,
    copies: NearbyCopies | None = None,
    launch: str = "",
) -> Begun:
    """Fill the engine with the weights, and the optimizer states, that the run starts from. Collective.

    `reference` is the model that a resume must have again. A newer one of `copies` comes before checkpoints. What
    `launch` has saved, or copied, comes before a step that its flags go back to: it went back in an earlier attempt.
    """
    keep, own = job.config.checkpoint, location(job.config.save_place)
    axis = engine.mesh.checkpoint_axis
    all_or_none(axis, lambda: remove_leftovers(own) if engine.mesh.is_main and isinstance(own, Path) else None)
    base = None
    if engine.stage.is_adapted:
        base = load_base(job, engine)
        say(f"adapters of the frozen model {base.source}")
        keep = _without_base(keep)
    seen = _look_together(keep, own, axis, launch)
    copy = _copy(keep, own, engine, copies, seen, launch)
    has_begun, checkpoint = seen.has_begun or copy is not None, copy or seen.checkpoint
    # Its own state comes before every flag about a start: a run that is started again with the same flags resumes.
    if keep.moe_use_upcycling and not has_begun:
        return _upcycled(job, engine, checkpoint, say)
    if keep.load_hf is not None and keep.ckpt_step is None and not has_begun:
        return _from_hf(job, engine, Path(keep.load_hf), say)
    if checkpoint is None:
        return Begun(Progress(), {} if base is None else base.origin, {}, job.schedule, base)
    with offering_another(axis):
        saved = all_or_none(axis, partial(read_run, checkpoint))
    # --finetune is for the first start. Flags say the data and the schedule of a training that began elsewhere, too.
    weights_only = saved.get("weights_only", False) or (keep.finetune and not has_begun)

    def check(state: dict[str, Any]) -> None:
        if weights_only or state.get(native.BEGAN_ELSEWHERE):
            refuse_adapters(state, keep.load or checkpoint)
            refuse_other_function(state["config"], job.facts["config"], source=checkpoint)
            return
        refuse_other_base(state.get("base"), base, checkpoint)
        refuse_other_reference(state.get("reference"), reference, checkpoint)
        refuse_other_run(state, job.facts)
        _say_changes(state, job, checkpoint, say)

    progress = resume(
        engine,
        checkpoint=checkpoint,
        weights_only=weights_only,
        with_optimizer=not keep.no_load_optim,
        check=check,
        is_shared=copy is None,
    )
    say(f"took the weights of {checkpoint}: {FROM_THE_START}" if weights_only else f"continuing from {checkpoint}")
    schedule = job.schedule if weights_only else _schedule(job, saved, checkpoint, say)
    hooks = {} if weights_only else saved.get("hooks", {})
    newest = max(seen.saved_last, 0.0 if copies is None else copies.newest_time())
    return Begun(progress, saved.get("origin", {}), hooks, schedule, base, copy is None, newest)


def _say_islands(saved: int | None, number: int, say: Callable[[str], None]) -> None:
    """Print what becomes of islands that are new, or no longer there."""
    new, lost = number - (saved or 0), (saved or 0) - number
    if new > 0:
        say(f"{new} of {number} islands are new, and start from the outer parameters")
    if lost > 0:
        say(f"{lost} of {saved} islands are left out, and what they have learned since the last outer step with them")


def _say_changes(state: dict[str, Any], job: TrainingJob, checkpoint: Location, say: Callable[[str], None]) -> None:
    """Print in what the config, and the tokenizer, differ from those of the checkpoint."""
    facts, names = job.facts, [f"data.{name}" for name in TOKENIZER_PATHS]
    changed = differences(state["config"], facts["config"])
    if state.get("tokenizer") is not None and state["tokenizer"] == facts["tokenizer"]:  # the same, read from elsewhere
        changed = {name: values for name, values in changed.items() if name not in names}
    if changed:
        say("changed since: " + "; ".join(f"{name} {a} -> {b}" for name, (a, b) in changed.items()))
    before = with_copies(state, checkpoint)["data"] if isinstance(checkpoint, Path) else state["config"]["data"]
    paths = [next(filter(None, map(data.get, TOKENIZER_PATHS)), None) for data in (before, facts["config"]["data"])]
    if job.config.parallel.outer_optimizer is not None:
        _say_islands(state.get("islands"), job.config.parallel.num_islands, say)
    if told := other_tokenizer(state, facts, before=paths[0], given=paths[1]):
        say(told)


def _schedule(
    job: TrainingJob, saved: dict[str, Any], checkpoint: Location, say: Callable[[str], None]
) -> LearningRateSchedule:
    """Schedule of a run that continues: its flags', or that of the checkpoint if they ask for it."""
    if not job.config.checkpoint.use_checkpoint_opt_param_scheduler or saved.get(native.BEGAN_ELSEWHERE):
        return job.schedule
    schedule = saved_schedule(saved)
    say(f"learning rate and weight decay follow the schedule of {checkpoint}: lr {schedule.lr}")
    return schedule


def _without_base(keep: CheckpointConfig) -> CheckpointConfig:
    """Where the adapters of a run come from. --ckpt-step is a step of --load, and else of the run itself."""
    return replace(keep, load=None, load_hf=None, ckpt_step=keep.ckpt_step if keep.load is None else None)


def resume(
    engine: Engine,
    *,
    checkpoint: Location,
    weights_only: bool,
    with_optimizer: bool,
    check: Callable[[dict[str, Any]], None],
    is_shared: bool = True,
) -> Progress:
    """Load this rank's part of a checkpoint of any layout; returns the progress of the run. Collective.

    `check` is shown the checkpoint's state before anything is changed, and raises UserError if it will not do.
    """
    # 1. The state, before anything is loaded. The checks need no agreement: all ranks have read the same.
    mesh, optimizer = engine.mesh, engine.optimizer
    with_optimizer = with_optimizer and not weights_only
    with offering_another(mesh.checkpoint_axis):
        state = all_or_none(mesh.checkpoint_axis, partial(read_run, checkpoint))
    check(state)
    if with_optimizer:
        _refuse_other_optimizer(checkpoint, state["config"].get("optimizer", {}).get("optimizer"), engine)
    # 2. Tensors of this rank's layout, in place.
    tensors, restarts = _named(engine, state, with_optimizer=with_optimizer)
    if weights_only or state.get(native.BEGAN_ELSEWHERE):  # routers count their choices again; converted ones have none
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(native.LOAD)}
    load_tensors(checkpoint, tensors, mesh=mesh, is_shared=is_shared)
    # 3. Masters were loaded: the parameters that forwards read, frozen ones included, are copies of them.
    _take_loaded(engine, restarts=restarts)
    if weights_only:
        return Progress()
    # 4. Counters that belong to the tensors: without them Adam's bias correction would begin again.
    if with_optimizer:
        optimizer.num_steps = state["optimizer_steps"]
    engine.rule.loss_scale.load(state.get("loss_scale", {}))
    engine.rule.spikes.load(state.get("loss_spikes", {}))
    return Progress(
        state["step"], state["consumed_samples"], state.get("skipped_steps", 0), state.get("skipped_samples", 0)
    )


def _named(engine: Engine, state: dict[str, Any], *, with_optimizer: bool) -> FromIslands:
    """Tensors of this rank, named as in the checkpoint of this state."""
    tensors = tensors_of(engine, with_optimizer=with_optimizer)
    if not with_optimizer:
        return FromIslands(tensors, restarts=True)
    return from_islands(tensors, engine, saved=state.get("islands"))


def _refuse_other_optimizer(checkpoint: Location, saved: str | None, engine: Engine) -> None:
    """UserError if the checkpoint's optimizer states are those of another optimizer."""
    now = engine.optimizer.name
    if saved not in (None, now):
        raise UserError(
            f"{checkpoint} was written with optimizer={shown(saved)}, and this run has optimizer={now}; resume with "
            f"--optimizer {shlex.quote(shown(saved))}, or add --no-load-optim, which keeps the weights and resets "
            "the optimizer"
        )


class Seen(NamedTuple):
    """Whether a run has checkpoints of its own, the checkpoint to load, and when its own newest one was saved.

    `is_back`: flags that go back to a step have done so before.
    """

    has_begun: bool
    checkpoint: Location | None
    saved_last: float
    is_back: bool


def _look_together(keep: CheckpointConfig, own: Location, axis: Axis, launch: str) -> Seen:
    """What `_look` returns, on all ranks. A store shows all ranks the same: one of them asks it."""
    look = partial(_look, keep, own, launch)
    # If --load is a folder on disks, the ranks may see different ones: then all must look.
    if isinstance(own, RemotePath) and (keep.load is None or is_url(keep.load)):
        return from_one(axis, look)
    return same_on_all(axis, look, what=f"in {own}")


def _look(keep: CheckpointConfig, own: Location, launch: str) -> Seen:
    """What there is to start from."""
    # 1. A launch that starts again still has its flag for a step: the run went back in the first attempt, so what it
    # has saved since comes first.
    steps = steps_in(own)
    is_back = bool(launch) and _names_step(keep, own) and _has_saved(launch, own)
    keep = _without_step(keep) if is_back else keep
    # 2. A run without own checkpoints takes what the flags name; with them it continues.
    has_begun, saved_last = bool(steps), max(map(saved_at, steps.values()), default=0.0)
    from_hf = keep.load_hf is not None and keep.ckpt_step is None and not has_begun
    return Seen(has_begun, None if from_hf else _find(keep, own, has_begun=has_begun), saved_last, is_back)


def _without_step(keep: CheckpointConfig) -> CheckpointConfig:
    """The flags of a start from the newest state."""
    return replace(keep, ckpt_step=None, load=None)


def _has_saved(launch: str, own: Location) -> bool:
    """Whether the newest checkpoint was saved by an attempt of this launch. One that is damaged says nothing."""
    # The newest that can be read decides; damage is reported where it is loaded.
    for checkpoint in reversed(by_age(own)):
        with suppress(DamagedError):
            return read_state(checkpoint).get("launch") == launch
    return False


def _name(folder: Location) -> str:
    """Name of a folder, without links; links that go round in a circle are no error here."""
    return os.path.realpath(folder) if isinstance(folder, Path) else str(folder.resolve())


def _find(keep: CheckpointConfig, own: Location, *, has_begun: bool) -> Location | None:
    """Newest checkpoint of the run itself, or else of --load; UserError if a flag asks for one that does not exist."""
    # Four cases: nothing named, another run's folder (only for the first start), its own folder by another path, or one
    # step in it. --load with the folder of --save, as Megatron-LM's scripts have it, is no error at the first start.
    source, step = own, keep.ckpt_step
    load = None if keep.load is None else location(keep.load)
    is_own = load is None or _name(folder_of(load)) == _name(own)
    if load is not None:
        source, step = (load, step) if is_own or not has_begun else (own, None)
    checkpoint = find_checkpoint(source, step=step) if source.is_dir() else None
    if checkpoint is None and (not is_own or _names_step(keep, own) or keep.exit_on_missing_checkpoint):
        told = (
            f"--load {source} holds no checkpoint; correct the path, or leave --load out to start from initial weights"
        )
        raise UserError((isinstance(source, Path) and of_another_format(source)) or told)
    return checkpoint


def _copy(
    keep: CheckpointConfig, own: Location, engine: Engine, copies: NearbyCopies | None, seen: Seen, launch: str
) -> Path | None:
    """Folder of a copy nearby that is newer than a checkpoint; None if there is none.

    If a step is asked for, a copy counts that was made after an attempt of this launch had gone back to it.
    """
    # A step that the user asks for is older than what copies have: only a copy made since that return may count, as
    # `launch` shows.
    goes_back = _names_step(keep, own) and not seen.is_back
    if copies is None or (goes_back and not launch):
        return None

    def named(state: dict[str, Any]) -> dict[str, GlobalTensor]:
        return _named(engine, state, with_optimizer=not keep.no_load_optim).tensors

    than = seen.checkpoint if seen.has_begun else None
    return copies.fetch_newest(named, than=than, launch=launch if goes_back else None)


def _names_step(keep: CheckpointConfig, own: Location) -> bool:
    """Whether the user asks for one checkpoint of the run, and not for the newest state."""
    load = None if keep.load is None else location(keep.load)
    is_own = load is None or _name(folder_of(load)) == _name(own)  # of another's a run takes a step once, to begin
    is_step = load is not None and folder_of(load) == load.parent
    return is_own and (keep.ckpt_step is not None or is_step)


def _from_hf(job: TrainingJob, engine: Engine, load: Path, say: Callable[[str], None]) -> Begun:
    # Hugging Face's models have biases of routers, and no choices of the step before.
    held = tensors_of(engine, with_optimizer=False).items()
    into = {name: tensor for name, tensor in held if not name.endswith(native.LOAD)}

    def read() -> Begun:
        description, tensors = open_hf(load)
        load_weights(tensors, into, source=load)
        return Begun(Progress(), dict(description.origin), {}, job.schedule)

    begun = all_or_none(engine.mesh.checkpoint_axis, read)
    _take_loaded(engine)
    say(f"took the weights of {load}: {FROM_THE_START}")
    return begun


def _take_loaded(engine: Engine, *, restarts: bool = True) -> None:
    """Have the model compute with what was loaded; an island that `restarts` begins with the outer parameters."""
    if restarts and engine.outer is not None:
        engine.outer.restart()
    engine.data_parallel.gather_parameters(frozen=True)


def _upcycled(job: TrainingJob, engine: Engine, checkpoint: Location | None, say: Callable[[str], None]) -> Begun:
    """Start of a model with experts from a dense one: that of `checkpoint`, or of --load-hf. Routers stay as drawn."""
    assert not isinstance(checkpoint, RemotePath), "a rule of the config"
    source = checkpoint or Path(job.config.checkpoint.load_hf or "")
    into = tensors_of(engine, with_optimizer=False)
    # The dense model has no routers: these stay as drawn by name, so every layout starts from the same model.
    into = {name: tensor for name, tensor in into.items() if ".mlp.router." not in name}

    def read() -> Begun:
        description, tensors = open_hf(source) if checkpoint is None else native.read(checkpoint)
        if description.model.num_experts is not None:
            raise UserError(
                f"{source} has num_experts={description.model.num_experts}, and --moe-use-upcycling makes experts of a "
                "dense model; leave it out"
            )
        # As for a resume from weights, and the number of experts is the one difference that is wanted.
        if checkpoint is not None:
            now = job.facts["config"]
            dense = {**now, "model": {**now["model"], "num_experts": None}}
            refuse_other_function(read_run(checkpoint)["config"], dense, source=checkpoint)
        load_weights(upcycled(tensors, job.config.model), into, source=source)
        return Begun(Progress(), dict(description.origin), {}, job.schedule)

    begun = all_or_none(engine.mesh.checkpoint_axis, read)
    _take_loaded(engine)
    say(f"made experts of the MLPs of {source}, routers are drawn: {FROM_THE_START}")
    return begun
