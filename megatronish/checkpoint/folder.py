"""Folder of checkpoints: names of the steps, publication by renaming, the newest one, removal of old ones.

    checkpoints/
      step_00000100/     .metadata, __0_0.distcp, ... (tensors), state.json (everything else), checksums.json
      step_00000200/
      latest             the name of the newest, for people and scripts

A checkpoint is written under a hidden name and renamed when all of it is on the disk, so a folder named step_* is
complete. A run that is killed at any moment leaves complete checkpoints, and perhaps a `.step_*` folder that the next
save removes. The newest checkpoint is the one saved last, not the one of the highest step: a run that went back to an
earlier step continues from there.

On object storage a checkpoint is whole when `state.json` is there, which is written last and removed first.

    s3://bucket/run/
      step_00000100.20260131120000000000/    __0_0.distcp, ..., .metadata, checksums.json and, last of all, state.json
      step_00000200.20260131121500000000/
      step_00000200.20260131123000000000/    another attempt at the step, after a killed one or after going back
      latest                                 the name of the newest, for people and scripts

There are no renames and no locks, so nothing is overwritten: each attempt has a name of its own, made of the time to a
microsecond. A listing would not do: a process that was taken for dead, and wakes before its first object is there,
would have the name of its successor. So it does not reach what others wrote since.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

from megatronish.checkpoint.checksums import CHECKSUMS, Checksums, DamagedError
from megatronish.core.errors import UserError
from megatronish.core.files import sync_folder, write_durably
from megatronish.core.remote import Location, RemotePath

STATE = "state.json"
LATEST = "latest"
LARGEST_NUMBER = 2**62
NO_TIME = 2.0**35  # seconds since 1970, in the year 3058
NAME = re.compile(r"step_(\d+)")
ATTEMPT_NAME = re.compile(r"step_(\d+)(?:\.(\d+))?")
"""On a store: with the number of the attempt, if it is not the first."""
L = TypeVar("L", Path, Location)  # what is found on a disk is on a disk


def name_of(step: int) -> str:
    """Folder name of a step's checkpoint, step_00000100."""
    return f"step_{step:08d}"


def partial_name_of(step: int) -> str:
    """Hidden folder name of a step's checkpoint while it is written."""
    return f".{name_of(step)}.partial"


def read_state(folder: Location, checksums: Checksums | None = None) -> dict[str, Any]:
    """Content of state.json, verified: everything but the tensors. DamagedError if it or its checksums are damaged."""
    try:
        state = json.loads((checksums or Checksums.read(folder)).read_file(STATE))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(folder, f"{STATE} cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise DamagedError(folder, f"{STATE} is not one of ours")
    if (wrong := _odd_entry(state)) is not None:
        raise DamagedError(folder, f"{STATE} is not one of ours: what it says of {wrong} is of another type")
    return state


def _odd_entry(state: Mapping[str, Any]) -> str | None:
    """Name of an entry of a state whose type none of ours has; None if there is none. What is missing is no matter."""
    for name in ("config", "copies", "origin", "loss_scale", "hooks", "schedule"):
        if not isinstance(state.get(name, {}), dict):
            return name
    for section, fields in state.get("config", {}).items():
        if not isinstance(fields, dict):
            return f"config.{section}"
    for name, path in state.get("copies", {}).items():
        if not isinstance(path, str) or "\0" in path:
            return f"copies.{name}"
    for name in ("step", "vocab_size", "eod"):
        number = state.get(name)
        if number is not None and (type(number) is not int or not -1 <= number < LARGEST_NUMBER):
            return name
    return None


def steps_in(folder: L) -> dict[int, L]:
    """Complete checkpoints of a `checkpoints/` folder, by step in ascending order."""
    if isinstance(folder, RemotePath):
        return cast(dict[int, L], whole_attempts(folder))
    if not folder.is_dir():
        return {}
    folders = [path for path in folder.iterdir() if path.is_dir()]
    by_step = {int(match[1]): path for path in folders if (match := NAME.fullmatch(path.name))}
    return {step: by_step[step] for step in sorted(by_step)}


def by_age(folder: L) -> list[L]:
    """Complete checkpoints of a `checkpoints/` folder in the order of saving, the newest at the end."""
    return sorted(steps_in(folder).values(), key=saved_at)


def folder_of(load: L) -> L:
    """Folder of checkpoints that belongs to a run folder, a checkpoints folder or one step's folder."""
    if NAME.fullmatch(load.name) or (load / STATE).is_file():
        return load.parent
    return load / "checkpoints" if (load / "checkpoints").is_dir() else load


def find_checkpoint(load: L, *, step: int | None = None) -> L | None:
    """Checkpoint to load from a run folder, its checkpoints folder or one step's folder; None if it holds none.

    Without `step` the newest one. UserError, with the steps that are there, if `step` is not among them.
    """
    folder = folder_of(load)
    if folder == load.parent:
        if isinstance(load, RemotePath) and not (load / STATE).is_file():  # a step without the number of an attempt
            load = steps_in(folder).get(step_of(load.name), load)
        if step is not None and load.name.partition(".")[0] != name_of(step):
            raise UserError(f"{load} is one step's folder and ckpt_step={step} asks for another; name {folder} instead")
        return load
    if step is not None:
        checkpoints = steps_in(folder)
        if step not in checkpoints:
            there = ", ".join(str(step) for step in checkpoints) or "none"
            raise UserError(f"ckpt_step={step} is not in {folder}; the steps there: {there}")
        return checkpoints[step]
    return next(reversed(by_age(folder)), None)


def saved_at(folder: Location) -> float:
    """Time of saving in seconds since 1970.

    For a damaged checkpoint the latest of all guesses: if it may be the newest one, loading finds it and reports it.
    OSError if it is on a store that does not answer.
    """
    try:
        return _time(read_state(folder), "saved_at")
    except (UserError, TypeError, ValueError, LookupError, OverflowError):
        pass
    state, guesses = folder / STATE, [0.0]
    # A store that does not answer is an error: taken for the oldest, a checkpoint would be passed over, or removed.
    with suppress(FileNotFoundError if isinstance(folder, RemotePath) else OSError):
        guesses.append((state if state.exists() else folder).stat().st_mtime)
    with suppress(OSError, TypeError, ValueError, LookupError, OverflowError, RecursionError):
        if state.is_file():  # a pipe or a device would never end
            guesses.append(_time(json.loads(state.read_text()), "saved_at"))
    return max(guesses)


def taken_at(folder: Location) -> float:
    """Time at which a state was taken, before it was written: that of saving if it is damaged or of an older version.

    Of two states of a run the later one has trained further, however long it took to write them.
    """
    try:
        return _time(read_state(folder), "taken_at")
    except (UserError, TypeError, ValueError, LookupError, OverflowError):
        return saved_at(folder)


def _time(state: Mapping[str, Any], name: str) -> float:
    """Time in the state of a checkpoint; ValueError, TypeError or LookupError if it is no plausible time."""
    seconds = float(state[name])
    if not 0 <= seconds < NO_TIME:
        raise ValueError(seconds)
    return seconds


def publish(partial: L, *, step: int, state: dict[str, Any]) -> L:
    """Publish a checkpoint whose tensors are written: add state and checksums, rename it to its final name.

    On object storage it has that name already, and the state, which is written last, makes it a checkpoint.

    One rank calls this. Returns the final path. DamagedError, before the renaming, if a file that a rank has written is
    not there.
    """
    # State. Its time is after that of every other checkpoint, whatever the clock of this machine says: the next start
    # continues from this one.
    times = [saved_at(path) + 0.001 for path in steps_in(partial.parent).values()]
    after_others = max(time.time(), state.get("taken_at", 0.0), *times)
    text = json.dumps(state | {"step": step, "saved_at": after_others}, indent=1)
    # Checksums: those of the tensors were computed while writing, .metadata is read again.
    written = Checksums.read(partial)
    written.check_lengths()  # another rank may have written where this one does not see it
    written.with_other_files().with_text(STATE, text).write()
    if isinstance(partial, RemotePath):
        (partial / STATE).write_text(text)
        with suppress(OSError):  # it is whole: the next save writes `latest`, and removes what is left
            (partial.parent / LATEST).write_text(partial.name + "\n")
            remove_incomplete(partial.parent)
        return partial
    write_durably(partial / STATE, text)
    return _renamed(partial, partial.parent / name_of(step))


def _renamed(partial: Path, target: Path) -> Path:
    """The checkpoint under its final name, which `latest` has, too."""
    folder = target.parent
    # Names: an older checkpoint of this step steps aside; remove_leftovers restores it if a kill comes before its
    # successor has the name.
    aside = folder / f".{target.name}.replaced"
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    partial.rename(target)
    sync_folder(folder)
    write_durably(folder / LATEST, target.name + "\n")
    shutil.rmtree(aside, ignore_errors=True)
    return target


def remove_old(folder: Location, *, keep_last: int | None, keep_every: int | None) -> list[str]:
    """Remove all except the `keep_last` newest checkpoints and those whose step is a multiple of `keep_every`.

    The newest one always stays; with None for both, all stay. A checkpoint is renamed before it is removed, so it is
    complete or not there, whenever the run is killed. Only folders that a run has written are removed, under the names
    that a run gives. Returns a complaint for each that could not be removed, because one rank alone calls this: an
    error would end that rank and leave the other ranks waiting.
    """
    if keep_last is None and keep_every is None:
        return []
    complaints: list[str] = []

    @contextmanager
    def complaining(what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            why = error.strerror if isinstance(error, OSError) else None
            complaints.append(f"{what} could not be removed: {why or error}")

    ours: list[Location] = []
    with complaining(f"old checkpoints in {folder}"):
        for path in by_age(folder):
            with complaining(f"the old checkpoint {path}"):
                if isinstance(path, RemotePath) or (not path.is_symlink() and (path / CHECKSUMS).is_file()):
                    ours.append(path)
    for old in ours[: -(keep_last or 1)]:
        step = step_of(old.name)
        if old.name.partition(".")[0] == name_of(step) and (keep_every is None or step % keep_every != 0):
            with complaining(f"the old checkpoint {old}"):
                if isinstance(old, RemotePath):
                    remove_attempt(old)
                else:
                    shutil.rmtree(old.rename(old.with_name(f".{old.name}.removed")))
    return complaints


def remove_leftovers(folder: Location) -> None:
    """Remove the hidden folders of a killed save. A replaced checkpoint without its successor gets its name back."""
    if isinstance(folder, RemotePath):
        remove_incomplete(folder)
        return
    for aside in folder.glob(".step_*.replaced"):
        target = folder / aside.name.removeprefix(".").removesuffix(".replaced")
        if target.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(target)
    for kind in ("partial", "removed"):
        for left in folder.glob(f".step_*.{kind}"):
            shutil.rmtree(left, ignore_errors=True)


def whole_attempts(folder: RemotePath) -> dict[int, RemotePath]:
    """Complete checkpoints by step in ascending order, of each step the last attempt."""
    whole = sorted((step, number) for step, number, is_whole in _attempts(folder) if is_whole)
    return {step: folder / attempt_name(step, number) for step, number in whole}


def new_attempt(folder: RemotePath, step: int) -> RemotePath:
    """Folder for a checkpoint of the step, of a name that no other process gives, after those that are there."""
    highest = max((number for other, number, _ in _attempts(folder) if other == step), default=0)
    now = int(datetime.now(UTC).strftime("%Y%m%d%H%M%S%f"))
    return folder / attempt_name(step, max(now, highest + 1))


def step_of(name: str) -> int:
    """Step of a checkpoint's name, with or without the number of an attempt."""
    match = ATTEMPT_NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def remove_attempt(folder: RemotePath) -> None:
    """Remove a checkpoint, which is complete or no checkpoint at any moment."""
    (folder / STATE).unlink()
    folder.remove_tree()


def remove_incomplete(folder: RemotePath) -> None:
    """Remove what killed saves have left, and whole attempts that a later one has replaced."""
    whole = whole_attempts(folder)
    for step, number, _ in list(_attempts(folder)):
        attempt = folder / attempt_name(step, number)
        if whole.get(step) != attempt:
            remove_attempt(attempt)


def _attempts(folder: RemotePath) -> Iterator[tuple[int, int, bool]]:
    """(step, number of the attempt, whether it is whole) of all folders of checkpoints."""
    names: dict[str, set[str]] = {}
    for path in folder.sizes():
        attempt, _, name = path.partition("/")
        names.setdefault(attempt, set()).add(name)
    for attempt, files in names.items():
        match = ATTEMPT_NAME.fullmatch(attempt)
        if match is not None:
            yield int(match[1]), int(match[2] or 1), STATE in files


def attempt_name(step: int, number: int) -> str:
    """Name of the folder of an attempt."""
    return f"step_{step:08d}" if number == 1 else f"step_{step:08d}.{number}"
