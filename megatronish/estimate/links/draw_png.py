"""Picture of measured collectives: seconds and bus bandwidth by size, a row of two panels for each axis."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatronish.core.figures import write_figure
from megatronish.estimate.links.fit import LinkFit
from megatronish.estimate.links.measure import LinkTimes

WIDTH, HEIGHT = 11.0, 4.0  # inches, of a row


def draw_links(rows: Sequence[LinkTimes], fits: Sequence[tuple[LinkTimes, LinkFit]], path: Path) -> None:
    """Draw median times with the range of all runs and the fits, and bus bandwidths. OSError if it cannot be written.

    Fits that are refused are dotted.
    """
    names = list(dict.fromkeys(row.axis for row in rows))
    figure = Figure(figsize=(WIDTH, HEIGHT * max(len(names), 1)), layout="constrained")
    panels = figure.subplots(max(len(names), 1), 2, squeeze=False)
    for name, (times, bandwidths) in zip(names, panels, strict=False):
        of_axis = [row for row in rows if row.axis == name]
        for number, collective in enumerate(dict.fromkeys(row.collective for row in of_axis)):
            line = [row for row in of_axis if row.collective == collective]
            _draw_times(times, line, colour=f"C{number}")
            sizes = [row.bytes for row in line]
            bandwidths.plot(sizes, [row.busbw / 1e9 for row in line], f"C{number}.-", label=collective)
            for row, fit in fits:
                if (row.axis, row.collective) == (name, collective):
                    ends = [fit.bytes_min, fit.bytes_max]
                    points = [ends[0] * (ends[1] / ends[0]) ** (i / 30) for i in range(31)]
                    seconds = [1e6 * fit.seconds(point) for point in points]
                    times.plot(points, seconds, f"C{number}", linestyle="--" if fit.accepted else ":", linewidth=0.8)
        ranks, nodes = of_axis[0].ranks, of_axis[0].nodes
        where = f"{name}: {ranks} ranks on {nodes} node{'s' if nodes > 1 else ''}, {of_axis[0].dtype}"
        times.set(xlabel="bytes", ylabel="us", xscale="log", yscale="log", title=f"{where}, median (min to max)")
        bandwidths.set(xlabel="bytes", ylabel="busbw GB/s", xscale="log", title="bus bandwidth of the median")
        bandwidths.legend(frameon=False, fontsize="small")
        for panel in (times, bandwidths):
            panel.grid(alpha=0.3)
    write_figure(figure, path, dpi=100)


def _draw_times(axes: Axes, line: Sequence[LinkTimes], *, colour: str) -> None:
    sizes = [row.bytes for row in line]
    axes.plot(sizes, [1e6 * row.seconds_median for row in line], ".", color=colour)
    axes.fill_between(
        sizes,
        [1e6 * row.seconds_min for row in line],
        [1e6 * row.seconds_max for row in line],
        color=colour,
        alpha=0.12,
        linewidth=0,
    )
