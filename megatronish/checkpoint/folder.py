"""Which checkpoints does a folder hold, and which of them is whole?

    checkpoints/
      step_00000100/     .metadata, __0_0.distcp, ... (tensors), state.json (everything else)
      step_00000200/
      latest             the name of the newest, for people and scripts

A checkpoint is written under another name and renamed when all of it is on the disk, so a folder named step_* is
whole. Killed at any moment, a run leaves its checkpoints whole, and perhaps a `.partial` folder that the next save
removes. The newest is the one saved last, not the one of the highest step: a run that went back goes on from there.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatronish.errors import UserError

STATE = "state.json"
LATEST = "latest"
NAME = re.compile(r"step_(\d+)")


class DamagedError(UserError):
    """A checkpoint that cannot be read."""

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"{folder} is damaged: {why}; load an earlier step with --ckpt-step, or remove that folder")


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"step_{step:08d}"


def partial_name_of(step: int) -> str:
    """Where it is written before it is whole."""
    return f".{name_of(step)}.partial"


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds beside tensors."""
    try:
        return json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise DamagedError(folder, f"{STATE} cannot be read ({getattr(error, 'strerror', error)})") from error


def steps_in(folder: Path) -> dict[int, Path]:
    """The whole checkpoints of a `checkpoints/` folder, by step."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := NAME.fullmatch(path.name))}
    return {step: found[step] for step in sorted(found)}


def folder_of(load: Path) -> Path:
    """The folder of checkpoints that a run folder, a checkpoints folder or one step's folder stands for."""
    if NAME.fullmatch(load.name) or (load / STATE).is_file():
        return load.parent
    return load / "checkpoints" if (load / "checkpoints").is_dir() else load


def find_checkpoint(load: Path, *, step: int | None = None) -> Path | None:
    """The checkpoint to load from a run folder, its checkpoints folder or one step's folder; None if it holds none.

    `step` asks for one: UserError with those that are there if it is not.
    """
    folder = folder_of(load)
    if folder == load.parent:
        if step is not None and load.name != name_of(step):
            raise UserError(f"{load} is one step's folder and ckpt_step={step} asks for another; name {folder} instead")
        return load
    checkpoints = steps_in(folder)
    if step is not None:
        if step not in checkpoints:
            there = ", ".join(str(step) for step in checkpoints) or "none"
            raise UserError(f"ckpt_step={step} is not in {folder}; the steps there: {there}")
        return checkpoints[step]
    return max(checkpoints.values(), key=_saved_at, default=None)


def _saved_at(folder: Path) -> float:
    return float(read_state(folder).get("saved_at", 0.0))


def publish(partial: Path, *, step: int, state: dict[str, Any]) -> Path:
    """Complete a checkpoint whose tensors are written, and give it its name; one rank calls this."""
    folder = partial.parent
    target = folder / name_of(step)
    write_durably(partial / STATE, json.dumps(state | {"step": step, "saved_at": time.time()}, indent=1))
    sync_folder(partial)
    aside = folder / f".{name_of(step)}.replaced"
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    partial.rename(target)
    sync_folder(folder)
    write_durably(folder / LATEST, name_of(step) + "\n")
    shutil.rmtree(aside, ignore_errors=True)
    return target


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed save left behind. A replaced checkpoint whose successor never came gets its name back."""
    for aside in folder.glob(".step_*.replaced"):
        target = folder / aside.name.removeprefix(".").removesuffix(".replaced")
        if target.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(target)
    for partial in folder.glob(".step_*.partial"):
        shutil.rmtree(partial)


def write_durably(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old text or the new, whenever the machine stops."""
    aside = path.with_name(path.name + ".new")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    _with_descriptor(folder, os.fsync)


def _with_descriptor(folder: Path, use: Callable[[int], None]) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        use(descriptor)
    finally:
        os.close(descriptor)
