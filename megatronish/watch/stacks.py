"""Stacks of this process's threads as lines of text, read from outside while the threads wait in C++ code."""

import sys
import threading
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).parents[2]
_TORCH = "/torch/distributed/"
_COMPILER = tuple(
    f"/torch/{file}.py"
    for file in ("_dynamo/convert_frame", "_inductor/graph", "_inductor/codecache", "_inductor/async_compile")
)
_WAITING = ("/threading.py", "/concurrent/futures/")


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread, by its identifier; None if it has ended."""
    return sys._current_frames().get(thread)


def lines_of(frame: FrameType | None, *, most: int = 12) -> list[str]:
    """`file:line function` of the frames, the innermost first. Files of this repository are relative to it."""
    found: list[str] = []
    while frame is not None and len(found) < most:
        path = Path(frame.f_code.co_filename)
        name = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else Path(*path.parts[-2:])
        found.append(f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found


def torch_call(frame: FrameType | None) -> str:
    """Name of torch's collective that a frame is in; empty if it is in none. Of a wait it is the caller of the wait."""
    depth, name = 0, ""
    while frame is not None and depth < 6:
        file = frame.f_code.co_filename
        if _TORCH in file and "/checkpoint/filesystem" not in file:
            name = frame.f_code.co_name
            if name != "wrapper":
                return name
        elif not any(part in file for part in _WAITING):
            return name
        frame, depth = frame.f_back, depth + 1
    return name


def is_compiling(frame: FrameType | None) -> bool:
    """Whether a frame is inside torch's compiler, which may take longer than any step."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILER):
            return True
        frame = frame.f_back
    return False


def thread_named(prefix: str) -> int | None:
    """Identifier of the thread whose name starts so, None if there is none."""
    return next((each.ident for each in threading.enumerate() if each.name.startswith(prefix)), None)
