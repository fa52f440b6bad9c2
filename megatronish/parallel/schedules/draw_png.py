"""Pictures of a timeline as PNG files, with matplotlib (timeline.py draws text and does not need it)."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from megatronish.core.figures import write_figure
from megatronish.parallel.schedules.timeline import Timed, TimedPlan, chunk_letter, chunks_of, tick_of

COLOURS: dict[str, str] = {"F": "#4a7fcb", "B": "#58ad5f", "W": "#e9b33f"}
PALER = 0.6  # of the distance to white, for each later chunk
LARGEST_WIDTH = 40.0  # inches
LARGEST_FONT, SMALLEST_FONT = 8.0, 3.0  # points; a number that would be smaller is left out


def draw_png(timed_plan: TimedPlan, path: Path, *, title: str, time: str = "time", inches_a_tick: float = 0.3) -> None:
    """Write a picture: stages as rows, time to the right, micro-batch numbers in the boxes, later chunks paler.

    `time` labels the axis. OSError if the file cannot be written.
    """
    timeline, stages = timed_plan.timeline, range(len(timed_plan.timeline))
    width = max(min(2 + inches_a_tick * timed_plan.makespan / tick_of(timeline), LARGEST_WIDTH), 6)
    figure = Figure(figsize=(width, 1.5 + 0.4 * len(stages)), layout="constrained")
    axes = figure.add_subplot()
    points_a_time = 72 * (width - 1) / (timed_plan.makespan or 1)
    for stage, row in enumerate(timeline):
        for timed in row:
            _draw_action(axes, stage, timed, points=points_a_time * (timed.end - timed.start))
    figure.legend(handles=_legend(timed_plan), loc="outside lower center", ncols=6, frameon=False)
    axes.set_title(f"{title}: bubble rate {timed_plan.bubble_rate:.1%}")
    axes.set_yticks([stage + 0.5 for stage in stages], [f"stage {stage}" for stage in stages])
    axes.set_xlabel(time)
    axes.set_xlim(0, timed_plan.makespan or 1)
    axes.set_ylim(len(stages), 0)
    write_figure(figure, path, dpi=100)


def _legend(timed_plan: TimedPlan) -> list[Patch]:
    """A legend entry for each kind in each chunk."""
    num_chunks = chunks_of(timed_plan.timeline)
    kinds = {timed.action.kind for row in timed_plan.timeline for timed in row}
    names = {"F": "forward", "B": "input gradient" if "W" in kinds else "backward", "W": "weight gradient"}
    return [
        Patch(
            facecolor=_colour(kind, chunk),
            label=names[kind] + (f", chunk {chunk_letter(chunk)}" if num_chunks > 1 else ""),
        )
        for chunk in range(num_chunks)
        for kind in names
        if kind in kinds
    ]


def _draw_action(axes: Axes, stage: int, timed: Timed, *, points: float) -> None:
    """Draw a box `points` wide with the number of the micro-batch."""
    box = Rectangle((timed.start, stage), timed.end - timed.start, 1, linewidth=0.5)
    box.set(facecolor=_colour(timed.action.kind, timed.action.chunk), edgecolor="white")
    axes.add_patch(box)
    number = str(timed.action.micro_batch)
    font = min(LARGEST_FONT, 1.4 * points / len(number))
    if font >= SMALLEST_FONT:
        middle = (timed.start + timed.end) / 2
        axes.text(middle, stage + 0.5, number, ha="center", va="center", fontsize=font)


def _colour(kind: str, chunk: int) -> tuple[float, float, float]:
    """The kind's colour, paler for each later chunk."""
    strength = PALER**chunk
    red, green, blue = (1 - strength * (1 - value) for value in to_rgb(COLOURS[kind]))
    return red, green, blue
