"""What does a plan look like? Actions over time as text, a row for each stage."""

from typing import NamedTuple

from megatronish.pipeline.plan import Action

ROUNDING = 1e-9  # of a tick: sums of costs like 0.1 must not fall into the cell before


class Timed(NamedTuple):
    """An action with its time on paper."""

    action: Action
    start: float
    end: float


def label(action: Action, *, num_chunks: int = 1) -> str:
    """F0, or F0a for its first chunk where there are several."""
    chunk = chr(ord("a") + action.chunk) if num_chunks > 1 else ""
    return f"{action.kind}{action.micro_batch}{chunk}"


def draw(timeline: list[list[Timed]], *, until: float | None = None) -> str:
    """A row for each stage and a column for each tick, the shortest action's length; `--` goes on with an action.

    The drawing ends at `until`, by default when the last action ends.
    """
    actions = [timed for row in timeline for timed in row]
    tick = min((timed.end - timed.start for timed in actions if timed.end > timed.start), default=1.0)
    until = max((timed.end for timed in actions), default=0.0) if until is None else until
    num_chunks = 1 + max((timed.action.chunk for timed in actions), default=0)
    width = 2 + max((len(label(timed.action, num_chunks=num_chunks)) for timed in actions), default=2)
    margin = len(str(len(timeline) - 1))

    def cell(time: float) -> int:
        return int(time / tick + ROUNDING)

    lines = []
    for stage, row in enumerate(timeline):
        cells = ["."] * cell(until)
        for timed in row:
            for column in range(cell(timed.start), cell(timed.end)):
                cells[column] = "--"
            if timed.end > timed.start:
                cells[cell(timed.start)] = label(timed.action, num_chunks=num_chunks)
        lines.append(f"stage {stage:>{margin}}:" + "".join(f"{text:>{width}}" for text in cells))
    return "\n".join(lines)
