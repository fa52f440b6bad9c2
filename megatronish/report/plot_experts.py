"""The heat map of a run's experts, drawn from its experts.jsonl: who gets the tokens, and since when."""

from collections import deque
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from megatronish.core.figures import write_figure
from megatronish.report.metrics import EXPERTS_FILE
from megatronish.report.plot import each_line, thinned

MOST_LINES = 100  # of which the map shows the sum: a single step is noise
IDLE = "gold"  # on neither side of the scale: an expert with few tokens is dark blue
TICKS = {-2: "1/4", -1: "1/2", 0: "mean", 1: "2 x", 2: "4 x"}
FEW_CELLS = 16  # layers and experts up to which every cell has its number


class Counts(NamedTuple):
    """Choices of each expert: `steps` [n] with the `largest` load of each layer [n, L], the sum of the last [L, E]."""

    layers: tuple[int, ...]
    steps: np.ndarray
    largest: np.ndarray
    last: np.ndarray
    last_steps: tuple[int, int]


def read_counts(path: Path) -> Counts | None:
    """Counts of a run; of a step that was repeated the last line counts. None without a line.

    The file is read line by line: that of a long run may be larger than the memory.
    """
    largest: dict[int, np.ndarray] = {}
    newest = deque[tuple[int, np.ndarray]](maxlen=MOST_LINES)
    layers: tuple[int, ...] = ()
    for line in each_line(path):
        step, counts = line["step"], line["tokens_per_expert"]
        layers, rows = tuple(map(int, counts)), np.array(list(counts.values()), dtype=np.float64)
        largest[step] = rows.max(1) / np.maximum(rows.mean(1), 1e-9)
        while newest and newest[-1][0] >= step:  # the run went back
            newest.pop()
        newest.append((step, rows))
    if not newest:
        return None
    steps = sorted(step for step in largest if step <= newest[-1][0])
    shown = list(newest)[-max(1, round(len(steps) / 10)) :]
    sums = np.sum([rows for _, rows in shown], axis=0)
    curves = np.array([largest[step] for step in steps])
    return Counts(layers, np.array(steps), curves, sums, (shown[0][0], shown[-1][0]))


def plot_experts(run_dir: Path) -> Path | None:
    """Draw RUN_DIR/experts.png: the share of each expert against the mean, and its largest over the run.

    None for a run without experts.
    """
    counts = read_counts(run_dir / EXPERTS_FILE)
    if counts is None:
        return None
    num_layers, num_experts = counts.last.shape
    width, height = np.clip(5 + 0.08 * num_experts, 7.5, 14), np.clip(0.16 * num_layers + 1.1, 1.6, 8)
    figure = Figure(figsize=(float(width), float(height) + 2.6), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[float(height), 2.2])
    first, last = counts.last_steps
    when = f"step {last}" if first == last else f"steps {first} to {last}"
    figure.suptitle(f"{run_dir.resolve().name}: tokens of each expert, {when}", fontsize="medium")
    _draw_map(figure, above, counts)
    _draw_largest(below, counts)
    return write_figure(figure, run_dir / "experts.png")


def _draw_map(figure: Figure, axes: Axes, counts: Counts) -> None:
    """Layers x experts: blue below the mean of the layer, red above it, on a logarithmic scale; idle ones are gold."""
    num_layers, num_experts = counts.last.shape
    ratio = counts.last / np.maximum(counts.last.mean(1, keepdims=True), 1e-9)
    shade = np.log2(np.where(ratio > 0, ratio, np.nan))
    image = axes.pcolormesh(np.ma.masked_invalid(shade), cmap="RdBu_r", norm=Normalize(-2, 2))
    if max(num_experts, num_layers) <= 64:
        image.set(edgecolor="white", linewidth=0.6)
    axes.set_facecolor(IDLE)
    bar = figure.colorbar(image, ax=axes, extend="both", ticks=list(TICKS), pad=0.02, aspect=25, extendfrac=0.04)
    bar.ax.set_yticklabels(list(TICKS.values()), fontsize="small")
    bar.outline.set_visible(False)
    num_idle = int((ratio == 0).sum())
    bar.set_label("tokens of an expert" + (f"\n({num_idle} idle: gold)" if num_idle else ""), fontsize="small")
    if max(num_layers, num_experts) <= FEW_CELLS:
        for (layer, expert), value in np.ndenumerate(ratio):
            colour = "white" if 0 < value < 0.3 or value > 3.2 else "0.15"
            text = "<0.01" if 0 < value < 0.005 else f"{value:.2f}"
            axes.text(expert + 0.5, layer + 0.5, text, ha="center", va="center", color=colour, fontsize=7)
    axes.set(xlabel="expert", ylabel="layer")
    every, row = -(-num_experts // 32), -(-num_layers // 24)
    axes.set_xticks(np.arange(0, num_experts, every) + 0.5, list(map(str, range(0, num_experts, every))))
    axes.set_yticks(np.arange(0, num_layers, row) + 0.5, list(map(str, counts.layers[::row])))
    axes.invert_yaxis()
    axes.tick_params(length=0, labelsize="small")
    axes.spines[:].set_visible(False)


def _draw_largest(axes: Axes, counts: Counts) -> None:
    """The largest load of each layer over the run; early layers are dark, late ones light."""
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(counts.layers)))
    named = {0, len(counts.layers) - 1}
    for place, (layer, colour) in enumerate(zip(counts.layers, colours, strict=True)):
        marker = "." if len(counts.steps) <= 20 else None
        steps, values = thinned(counts.steps, counts.largest[:, place])
        axes.plot(steps, values, color=colour, linewidth=0.9, marker=marker)
        if place in named:
            axes.lines[-1].set_label(f"layer {layer} ({values[-1]:.2f})")
    axes.axhline(1.0, color="0.6", linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="largest / mean")
    if counts.largest.max() > 5:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(bottom=0.9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize="small")
    axes.legend(frameon=False, fontsize="small")
