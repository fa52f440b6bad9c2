"""Bar chart of where the recorded steps of a rank went: a bar for each step, cut into the rows of its breakdown."""

from pathlib import Path

from matplotlib.figure import Figure

from megatronish.core.figures import write_figure
from megatronish.report.breakdown import Breakdown
from megatronish.report.timeline import COMMUNICATION, ROWS

MOST_BARS = 20  # the first steps


def plot_breakdown(breakdown: Breakdown, path: Path) -> Path:
    """Draw the chart; returns its path. Communication is red, other rows have colours of their own."""
    steps = breakdown.steps[:MOST_BARS]
    figure = Figure(figsize=(9, 2.2 + 0.35 * len(steps)), layout="constrained")
    axes = figure.subplots()
    begin = [0.0] * len(steps)
    for row in breakdown.mean:
        times = [1000 * each.rows.get(row, 0.0) for each in steps]
        axes.barh([str(each.step) for each in steps], times, left=begin, label=row, color=_color(row))
        begin = [start + time for start, time in zip(begin, times, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", ylabel="step", title=f"where the steps of rank {breakdown.rank} went")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return write_figure(figure, path)


def _color(row: str) -> tuple[float, float, float] | str:
    reds = list(dict.fromkeys([*COMMUNICATION.values()]))
    if row in reds:
        return 0.95 - 0.12 * reds.index(row), 0.25, 0.25
    others = [each for each in ROWS if each not in reds]
    return f"C{[0, 2, 9, 4, 1, 7, 6, 5, 8][others.index(row)]}"
