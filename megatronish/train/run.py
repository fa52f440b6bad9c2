"""A training run on one rank, from a config to its last line: mesh, job, engine, hooks and trainer put together."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatronish.checkpoint.folder import STATE, find_checkpoint
from megatronish.config.config import Config
from megatronish.config.dump import resolved, write_toml
from megatronish.config.vocabulary_size import vocabulary_of_files
from megatronish.core.aside import Aside
from megatronish.core.errors import RunError, without_passwords
from megatronish.core.figures import no_matplotlib
from megatronish.core.remote import RemotePath, location, refuse_unwritable
from megatronish.data.blend import blend_notes
from megatronish.data.packed import packing_notes
from megatronish.estimate.room import refuse_without_room
from megatronish.launch.os_errors import is_lost_rank, mishap
from megatronish.launch.place import Place
from megatronish.parallel import comm
from megatronish.parallel.all_or_none import from_one
from megatronish.parallel.mesh import Mesh, leave
from megatronish.report.first_lines import first_lines
from megatronish.report.trackers.table import open_trackers
from megatronish.report.trackers.tracker import RunDescription, Trackers
from megatronish.tokenizer.tokenizer import encode_prompt
from megatronish.train.base_model import Base, begin_reference
from megatronish.train.folder import RunMirror, locked, make_writable
from megatronish.train.hooks.health import failed, say_health, say_last
from megatronish.train.hooks.nearby import open_copies
from megatronish.train.hooks.of_run import hooks_of_run
from megatronish.train.hooks.save import Save
from megatronish.train.hooks.stop import Stopper
from megatronish.train.resume import Begun, begin
from megatronish.train.setup import TrainingJob, report_chats
from megatronish.train.start import start_mesh, start_sharing, watchdog_of
from megatronish.train.trainer import Hook, Trainer, TrainingSchedule
from megatronish.watch.record import RankRecord
from megatronish.watch.watchdog import Watchdog


def train(config: Config, notes: Sequence[str], place: Place, *, hooks: Sequence[Hook] = ()) -> int:
    """Train on one rank: lock the folders, make the mesh, run the loop. Returns the exit status.

    `hooks` are called after those of the run, before it saves; every rank is given as many.
    """
    record = RankRecord()
    record.enter_phase("start", "the folders of the run")
    if not config.resilience.watch:
        with _lost_ranks_named(record):
            return _train_watched(config, notes, place, record, None, hooks)
    with place.guarded() as pulses, watchdog_of(config, place, record, pulses) as watchdog:
        start_sharing(watchdog, place)
        with _lost_ranks_named(record):
            try:
                return _train_watched(config, notes, place, record, watchdog, hooks)
            except Exception:
                watchdog.end_if_different()
                raise


@contextmanager
def _lost_ranks_named(record: RankRecord) -> Iterator[None]:
    """Let a collective that fails because its peer has ended be a sentence: the culprit is elsewhere."""
    try:
        yield
    except Exception as error:
        if is_lost_rank(error):
            raise RunError(lost_rank(record, error)) from error
        raise


def lost_rank(record: RankRecord, error: BaseException) -> str:
    """The sentence of a rank whose collective fails because another rank has ended, or cannot be reached any more."""
    entry, where = record.newest.get(record.main_thread), "a transfer"
    if entry is not None and entry.peer is not None:
        where = f"the {entry.operation} {entry.number:,} over {entry.line.name}, whose other end is rank {entry.peer},"
    elif entry is not None:
        ranks = ", ".join(map(str, entry.line.ranks[:16])) + (", ..." if len(entry.line.ranks) > 16 else "")
        where = f"{entry.operation} {entry.number:,} of {entry.line.name} (ranks {ranks})"
    reason = re.sub(r"^\[[^\]]*\] ", "", without_passwords(str(error)).partition("\n")[0])[:200]
    failed = f"{where} failed in step {record.step} ({reason})" if record.step else f"{where} failed ({reason})"
    return (
        f"a rank that this one communicates with has ended, or its machine is cut off: {failed}. "
        "Look for the first of these ranks that failed, and for its machine; a run continues from its newest checkpoint"
    )


def _train_watched(
    config: Config,
    notes: Sequence[str],
    place: Place,
    record: RankRecord,
    watchdog: Watchdog | None,
    hooks: Sequence[Hook],
) -> int:
    with ExitStack() as stack:
        # 1. Folders of the run, before any rank waits for another: a mistake here is reported by one rank, at once. The
        # main rank locks them; one process a machine copies them to a store.
        mirror = None
        if config.run_url is not None and place.local_rank == 0:
            mirror = RunMirror(config.run_dir, RemotePath(config.run_url))
            if place.rank != 0:
                mirror.keep_back()
        if place.rank == 0:
            stack.enter_context(locked(config.run_dir, flag="--run-dir"))
            if mirror is not None:
                refuse_unwritable(mirror.place, flag="--run-dir")
                mirror.fetch()
            # Also where it is a part of the run folder: another run may have been given it by --save.
            save = location(config.save_place)
            if isinstance(save, RemotePath):
                refuse_unwritable(save, flag="--save")
            else:
                stack.enter_context(locked(save, flag="--save"))
            stack.push(partial(_say_failure, config.run_dir))
            make_writable(config.tensorboard_dir, flag="--tensorboard-dir")
            if config.log.profile_schedule:
                make_writable(config.run_dir / "schedule", flag="--profile-schedule")
            if config.log.profile:
                make_writable(config.run_dir / "profile", flag="--profile")
        # 2. The ranks meet. The launch may have its name only from the store there.
        notes = list(notes)
        if mirror is not None:
            notes.append(f"files of the run are written to {config.run_dir} and copied to {mirror.place}")
            stack.callback(mirror.copy)
        record.enter_phase("start", "the meeting of the ranks")
        launches = [place.launch]
        meeting = {"on_note": notes.append, "on_launch": launches.append}
        mesh = start_mesh(config, place, record=record, watchdog=watchdog, **meeting)
        place = replace(place, launch=launches[-1])
        is_finished = _train(config, notes, mesh, stack, hooks, mirror, place)
    # Not on the way out of a failure: others would report a lost peer before this rank reports its failure.
    record.enter_phase("end", "leaving the process group")
    leave()
    # Of local ranks the main one alone says so: their launcher ends all at the first status that is not 0.
    if is_finished or (place.rank != 0 and (place.rendezvous or "").startswith("file://")):
        return 0
    return config.training.exit_status_if_stopped


def _train(
    config: Config,
    notes: Sequence[str],
    mesh: Mesh,
    stack: ExitStack,
    own: Sequence[Hook],
    mirror: RunMirror | None,
    place: Place,
) -> bool:
    """Train from the start that is found; returns whether the run has made its last step."""
    # Signals are watched from here on; then data, first lines, and the engine with the weights that it starts from.
    stopper, record = _stopper(config, place), mesh.record
    job = _open_job(config, mesh)
    say = partial(print, flush=True) if mesh.is_main else _say_nothing
    opening = "\n".join(f"note: {note}" for note in notes)
    with Aside("the table of expected costs").guard():
        opening = first_lines(config, job.costs, device=job.device_name, notes=notes, length=job.length)
    say("\n".join([opening, *blend_notes(job.datasets.train), *packing_notes(job.datasets.train)]))
    with Aside("the audit of the chats").guard():
        report_chats(job, say)
    record.enter_phase("start", "building the model")
    engine = job.build_engine()
    reference = begin_reference(job, engine, say)
    record.enter_phase("start", "loading")
    copies = open_copies(config, engine)
    begun = begin(job, engine, say, reference=reference, copies=copies, launch=place.launch)
    progress, schedule = begun.progress, begun.schedule
    num_steps = job.num_steps(progress)
    # Started again after its end. If it was killed between the last checkpoint and the last files, only these are made
    # again: the loop below has no step left.
    if progress.step >= num_steps:
        say(f"finished already: {progress.step} steps of {num_steps} are done")
        if begun.is_on_disk and _has_its_ending(config, mesh):
            if copies is not None:
                copies.remove()
            if mesh.is_main:
                say_health(config.run_dir, step=progress.step, phase="finished")
            return True
    # The trainer and its hooks; those that hold files or threads are closed with the stack.
    trackers = stack.enter_context(_trackers(config, mesh, first_step=progress.step, opening=opening))
    save = stack.enter_context(_saving(job, stopper, begun, reference, launch=place.launch))
    if mirror is not None:
        save.before_writing = mirror.copy
    trainer = Trainer(
        engine=engine,
        schedule=TrainingSchedule(schedule, job.batch_sizes, num_steps),
        prepare=job.batches_of(job.datasets.train),
        num_ahead=config.data.num_workers,
        hooks=hooks_of_run(job, engine, stopper, trackers, own=own, save=save, copies=copies),
        progress=progress,
        record=record,
    )
    # After all hooks exist and before their `start`, which may read what was loaded.
    trainer.load_hook_states(begun.hook_states)
    if mesh.is_main:
        job.own_files.copy(config)
    record.enter_phase("start", "the first step")
    trainer.run()
    return _finish(trainer, trackers, mesh, config)


def _finish(trainer: Trainer, trackers: Trackers, mesh: Mesh, config: Config) -> bool:
    """The last files of a run and its last words; returns whether it has made its last step. Collective."""
    step, num_steps = trainer.progress.step, trainer.schedule.num_steps
    trainer.record.enter_phase("end", "the last files")
    trackers.ending = "finished" if step >= num_steps else f"stopped: {trainer.stop_reason}"
    if mesh.is_main:
        draw_curves(config.run_dir)
        if trainer.stop_reason is not None and step < num_steps:
            resume = "start again to resume"
            print(f"stopped after step {step} of {num_steps}: {trainer.stop_reason}; {resume}", flush=True)
    # No rank leaves before the main one has written: peers that leave early look like failures to the launcher.
    comm.barrier(mesh.world)
    if mesh.is_main:
        say_health(config.run_dir, step=step, phase=trackers.ending)
    return step >= num_steps


def _say_failure(folder: Path, _kind: object, error: BaseException | None, _trace: object) -> None:
    """Exit of a context: the last word of a run that fails before its first step, or after its last."""
    if error is not None:
        say_last(folder, failed(error))


def _open_job(config: Config, mesh: Mesh) -> TrainingJob:
    """The data and what they say of the model; what is wrong with the prompt of a sample shows now, too.

    Whether there is room is asked before, as to read many chats takes long, where the files tell the vocabulary.
    """
    named = config.data.vocab_size or from_one(mesh.checkpoint_axis, lambda: vocabulary_of_files(config.data))
    if named is not None:
        refuse_without_room(config, mesh, vocab_size=named)
    mesh.record.enter_phase("start", "opening the data")
    job = TrainingJob.open(config, mesh)
    if job.vocab_size != named:
        refuse_without_room(config, mesh, vocab_size=job.vocab_size)
    if config.log.sample_prompt is not None and not config.data.mock_data:
        encode_prompt(job.tokenizer, config.log.sample_prompt)
    return job


def _stopper(config: Config, place: Place) -> Stopper:
    """The hook that decides to stop; it watches signals from now on."""
    training = config.training
    return Stopper(
        exit_interval=training.exit_interval,
        exit_duration_in_mins=training.exit_duration_in_mins,
        exit_signal=training.exit_signal,
        kill_switch=Path(training.kill_switch_path) if training.kill_switch_path else None,
        launched=place.launched,
    )


def _saving(job: TrainingJob, stopper: Stopper, begun: Begun, reference: Base | None, *, launch: str) -> Save:
    """The hook that saves, with what every checkpoint says of the run."""
    config = job.config
    facts = job.facts | {"origin": begun.origin, "schedule": asdict(begun.schedule), "launch": launch}
    models = {"base": begun.base, "reference": reference}
    facts |= {
        name: {"source": each.source, "identity": each.identity} for name, each in models.items() if each is not None
    }
    save = Save(location(config.save_place), config=config.checkpoint, mesh=job.mesh, stopper=stopper, facts=facts)
    save.begins_on_disk, save.taken_after = begun.is_on_disk, begun.taken_after
    return save


def draw_curves(folder: Path) -> None:
    """Draw the curves of a run; what cannot be drawn is no reason to fail what is trained and saved.

    Lines of metrics.jsonl may be from another program, and values in them of any type.
    """
    try:
        # matplotlib takes a second to import: the others, and the start, need not wait for it.
        from megatronish.report.page.write import PAGE, write_page
        from megatronish.report.plot import plot_experts, plot_run

        plot_experts(folder)
        plot_run(folder)
        write_page([folder], folder / PAGE)
    except ImportError as error:
        print(f"the curves were not drawn: {no_matplotlib(error)}", file=sys.stderr)
    except Exception as error:
        print(f"the curves were not drawn: {mishap(error) or error}", file=sys.stderr)


def _has_its_ending(config: Config, mesh: Mesh) -> bool:
    """Whether loss.png is younger than the last checkpoint: a run killed between the two lacks its last evaluation."""

    def look() -> bool:
        curve = config.run_dir / "loss.png"
        checkpoint = find_checkpoint(location(config.save_place)) if curve.exists() else None
        return checkpoint is not None and curve.stat().st_mtime >= (checkpoint / STATE).stat().st_mtime

    return from_one(mesh.checkpoint_axis, look)


def _trackers(config: Config, mesh: Mesh, *, first_step: int, opening: str) -> Trackers:
    """Trackers of the main rank; none on other ranks."""
    if not mesh.is_main:
        return Trackers([])
    settings = resolved(config)
    return open_trackers(
        config.log,
        config.tensorboard_dir,
        RunDescription(
            name=config.run_dir.resolve().name,
            folder=config.run_dir,
            first_step=first_step,
            config=settings,
            config_text=write_toml(settings),
            first_lines=without_passwords(opening),
        ),
    )


def _say_nothing(*_: Any) -> None:
    """Print nothing, as ranks other than the main one do."""
