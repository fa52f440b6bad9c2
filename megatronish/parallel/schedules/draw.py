"""Text drawings of a timeline: actions over time, a row for each stage."""

from statistics import median

from megatronish.parallel.schedules.timeline import Timed, Timeline, chunks_of, label

ROUNDING = 1e-9  # of a tick: sums of costs like 0.1 must not fall into the cell before


def tick_of(timeline: Timeline) -> float:
    """The time of the shortest kind of action: the median over its actions, which differ in a recorded run."""
    durations: dict[str, list[float]] = {}
    for timed in (timed for row in timeline for timed in row if timed.end > timed.start):
        durations.setdefault(timed.action.kind, []).append(timed.end - timed.start)
    return min((median(times) for times in durations.values()), default=1.0)


def draw(timeline: Timeline, *, until: float | None = None, most_columns: int | None = None) -> str:
    """A row for each stage and a column for each tick, the length of the shortest action; `--` continues an action.

    The drawing ends at `until`, by default at the end of the last action. With `most_columns` a tick is long enough for
    that many columns. Every action has a column of its own: a very short one moves the next one to the right.
    """
    until = max((timed.end for row in timeline for timed in row), default=0.0) if until is None else until
    tick, num_chunks = tick_of(timeline), chunks_of(timeline)
    if most_columns is not None:
        tick = max(tick, until / most_columns)
    rows = [_cells(row, tick=tick, until=until, num_chunks=num_chunks) for row in timeline]
    width = 2 + max((len(text) for cells in rows for text in cells), default=2)
    margin = len(str(len(timeline) - 1))
    return "\n".join(
        f"stage {stage:>{margin}}:" + "".join(f"{text:>{width}}" for text in cells) for stage, cells in enumerate(rows)
    )


def _cells(row: list[Timed], *, tick: float, until: float, num_chunks: int) -> list[str]:
    """The text of each column of a stage's row."""

    def cell(time: float) -> int:
        return int(time / tick + ROUNDING)

    cells = ["."] * cell(until)
    free = 0
    for timed in row:
        if timed.end > timed.start:
            first = max(free, cell(timed.start))
            free = first + 1
            last = max(free, cell(timed.end))
            cells[first:last] = [label(timed.action, num_chunks=num_chunks)] + ["--"] * (last - free)
    return cells
