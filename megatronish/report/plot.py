"""Pictures of a run, drawn from its files: the loss curve, and the heat map of its experts, who gets the tokens."""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from megatronish.core.figures import write_figure
from megatronish.report.metrics import EXPERTS_FILE

FEW_STEPS = 50  # a curve of fewer steps is not smoothed
MOST_BINS = 1000  # a curve of more than twice as many points is drawn by the lowest and the highest of each bin
LOG_FROM = 6.0  # ratio of the highest to the lowest loss from which on the axis is logarithmic


def each_line(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a file of JSON lines, without the line that a killed run left unfinished; no file has no objects."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError, RecursionError):  # also of what is no text
                if isinstance(record := json.loads(line), dict):
                    yield record


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All objects of a file of JSON lines."""
    return list(each_line(path))


def plot_run(run_dir: Path) -> Path:
    """Draw RUN_DIR/loss.png: training loss, its smoothed curve, every evaluation, the learning rate; returns its path.

    Of a step that was repeated after a resume the last line counts. Losses that are not finite leave a gap.
    """
    by_step = {line["step"]: line for line in read_lines(run_dir / "metrics.jsonl")}
    steps = np.array(sorted(by_step), dtype=np.int64)
    loss, rate = (
        np.array([by_step[step].get(name) for step in steps.tolist()], dtype=np.float64)
        for name in ("loss", "learning_rate")
    )
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw_rate(axes.twinx(), steps, rate)
    _draw_loss(axes, steps, loss)
    seen = _draw_evaluations(axes, read_lines(run_dir / "evaluations.jsonl"))
    _choose_scale(axes, np.array([*loss, *seen]))
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=run_dir.resolve().name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if len(steps) < 2:
        axes.set_xlim(0, 2)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    # Above the learning rate, with a background that lets it through.
    axes.set_zorder(1)
    axes.patch.set_visible(False)
    return write_figure(figure, run_dir / "loss.png")


def _draw_rate(axes: Axes, steps: np.ndarray, rate: np.ndarray) -> None:
    axes.plot(*thinned(steps, rate), color="0.6", linewidth=0.8, linestyle="--")
    axes.set_ylabel("learning rate (dashed)", color="0.5")
    axes.tick_params(colors="0.5", labelsize="small")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.set_ylim(bottom=0)
    axes.spines[["top", "left"]].set_visible(False)
    axes.spines["right"].set_color("0.8")


def _draw_loss(axes: Axes, steps: np.ndarray, loss: np.ndarray) -> None:
    last = f" ({loss[np.isfinite(loss)][-1]:.3f})" if np.isfinite(loss).any() else ""
    if len(steps) < FEW_STEPS:
        marker = "." if len(steps) <= 20 else None
        axes.plot(steps, loss, color="C0", linewidth=1.2, marker=marker, label=f"training{last}")
        return
    axes.plot(*thinned(steps, loss), color="C0", linewidth=0.6, alpha=0.35)
    smooth = smoothed(loss)
    last = f" ({smooth[np.isfinite(smooth)][-1]:.3f})" if np.isfinite(smooth).any() else ""
    axes.plot(*thinned(steps, smooth), color="C0", linewidth=1.6, label=f"training, smoothed{last}")


def _draw_evaluations(axes: Axes, lines: list[dict[str, Any]]) -> list[float]:
    """Draw a dot for each evaluation; returns all losses."""
    # Of lines that another program has written, those that are evaluations.
    whole = [line for line in lines if {"name", "step", "loss"} <= line.keys() and np.isfinite(line["step"])]
    losses = {(line["name"], line["step"]): line["loss"] for line in whole}
    for place, name in enumerate(dict.fromkeys(name for name, _ in losses), start=1):
        points = sorted((step, loss) for (other, step), loss in losses.items() if other == name)
        size = 5 if len(points) < 50 else 2.5
        (line,) = axes.plot(*zip(*points, strict=True), f"C{place}o:", linewidth=1, markersize=size)
        line.set_label(f"{name} ({points[-1][1]:.3f})")
    return list(losses.values())


def _choose_scale(axes: Axes, losses: np.ndarray) -> None:
    """Logarithmic axis for losses of very different size, with labels that are plain numbers."""
    finite = losses[np.isfinite(losses)]
    if finite.size and finite.min() > 0 and finite.max() / finite.min() >= LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1, 2, 3, 5, 7) if finite.max() / finite.min() < 30 else (1, 2, 5))
        )
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())


def smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over a window of a fiftieth of all values around each one. What is not finite counts nowhere.

    Near the start, where a loss falls steeply, the window is narrower; at the end its right half is cut off.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(len(values))
    half = np.minimum(max(1, len(values) // 100), places)
    first, end = places - half, np.minimum(places + half + 1, len(values))
    count = counts[end] - counts[first]
    return np.where(count > 0, (sums[end] - sums[first]) / np.maximum(count, 1), np.nan)


def thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most two points of each of MOST_BINS bins, the lowest and the highest, so that no spike is lost."""
    if len(steps) <= 2 * MOST_BINS:
        return steps, values
    kept: set[int] = {0, len(steps) - 1}
    for bin_ in np.array_split(np.arange(len(steps)), MOST_BINS):
        inside = values[bin_]
        if np.isfinite(inside).any():
            kept |= {int(bin_[np.nanargmin(inside)]), int(bin_[np.nanargmax(inside)])}
        else:
            kept.add(int(bin_[0]))  # a gap stays a gap
    places = np.array(sorted(kept))
    return steps[places], values[places]


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
