"""What does a plan look like? A picture in a file, with matplotlib (draw.py draws text and needs none)."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from megatronish.pipeline.draw import Timed
from megatronish.pipeline.simulate import Simulation

COLOURS = {"F": "#5b8bd0", "B": "#79c27a", "W": "#f0c75e"}
NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}
LARGEST_WIDTH = 40.0  # inches


def draw_png(simulation: Simulation, path: Path, *, title: str) -> None:
    """Stages as rows, time to the right, micro-batch numbers in the boxes, later chunks paler."""
    actions = [timed for row in simulation.timeline for timed in row]
    stages = range(len(simulation.timeline))
    tick = min((timed.end - timed.start for timed in actions if timed.end > timed.start), default=1.0)
    width = min(2 + 0.3 * simulation.makespan / tick, LARGEST_WIDTH)
    figure = Figure(figsize=(max(width, 6), 1.5 + 0.4 * len(stages)), layout="constrained")
    axes = figure.add_subplot()
    for stage, row in enumerate(simulation.timeline):
        for timed in row:
            _draw_action(axes, stage, timed)
    kinds = [kind for kind in NAMES if any(timed.action.kind == kind for timed in actions)]
    patches = [Patch(facecolor=COLOURS[kind], edgecolor="white", label=NAMES[kind]) for kind in kinds]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    axes.set_title(f"{title}: bubble rate {simulation.bubble_rate:.1%}")
    axes.set_yticks([stage + 0.5 for stage in stages], [f"stage {stage}" for stage in stages])
    axes.set_xlabel("time")
    axes.set_xlim(0, simulation.makespan or 1)
    axes.set_ylim(len(stages), 0)
    figure.savefig(path, dpi=120)


def _draw_action(axes: Axes, stage: int, timed: Timed) -> None:
    """A box with the micro-batch's number."""
    alpha = 0.55 ** min(timed.action.chunk, 3)
    box = Rectangle((timed.start, stage), timed.end - timed.start, 1, alpha=alpha)
    box.set(facecolor=COLOURS[timed.action.kind], edgecolor="white")
    axes.add_patch(box)
    if timed.end > timed.start:
        middle = (timed.start + timed.end) / 2
        axes.text(middle, stage + 0.5, str(timed.action.micro_batch), ha="center", va="center", fontsize=8)
