"""Checkpoints on object storage: whole when `state.json` is there, which is written last and removed first.

    s3://bucket/run/
      step_00000100.20260131120000000000/    __0_0.distcp, ..., .metadata, checksums.json and, last of all, state.json
      step_00000200.20260131121500000000/
      step_00000200.20260131123000000000/    another attempt at the step, after a killed one or after going back
      latest                                 the name of the newest, for people and scripts

There are no renames and no locks, so nothing is overwritten: each attempt has a name of its own, made of the time to a
microsecond. A listing would not do: a process that was taken for dead, and wakes before its first object is there,
would have the name of its successor. So it does not reach what others wrote since.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime

from megatronish.checkpoint.remote import RemotePath

DECISIVE = "state.json"
_NAME = re.compile(r"step_(\d+)(?:\.(\d+))?")


def whole_attempts(folder: RemotePath) -> dict[int, RemotePath]:
    """Complete checkpoints by step in ascending order, of each step the last attempt."""
    whole = sorted((step, number) for step, number, is_whole in _attempts(folder) if is_whole)
    return {step: folder / _name(step, number) for step, number in whole}


def new_attempt(folder: RemotePath, step: int) -> RemotePath:
    """Folder for a checkpoint of the step, of a name that no other process gives, after those that are there."""
    highest = max((number for other, number, _ in _attempts(folder) if other == step), default=0)
    now = int(datetime.now(UTC).strftime("%Y%m%d%H%M%S%f"))
    return folder / _name(step, max(now, highest + 1))


def step_of(name: str) -> int:
    """Step of a checkpoint's name, with or without the number of an attempt."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def remove_attempt(folder: RemotePath) -> None:
    """Remove a checkpoint, which is complete or no checkpoint at any moment."""
    (folder / DECISIVE).unlink()
    folder.remove_tree()


def remove_incomplete(folder: RemotePath) -> None:
    """Remove what killed saves have left, and whole attempts that a later one has replaced."""
    whole = whole_attempts(folder)
    for step, number, _ in list(_attempts(folder)):
        attempt = folder / _name(step, number)
        if whole.get(step) != attempt:
            remove_attempt(attempt)


def _attempts(folder: RemotePath) -> Iterator[tuple[int, int, bool]]:
    """(step, number of the attempt, whether it is whole) of all folders of checkpoints."""
    names: dict[str, set[str]] = {}
    for path in folder.sizes():
        attempt, _, name = path.partition("/")
        names.setdefault(attempt, set()).add(name)
    for attempt, files in names.items():
        match = _NAME.fullmatch(attempt)
        if match is not None:
            yield int(match[1]), int(match[2] or 1), DECISIVE in files


def _name(step: int, number: int) -> str:
    return f"step_{step:08d}" if number == 1 else f"step_{step:08d}.{number}"
