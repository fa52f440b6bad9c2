"""The loss curve of a run, drawn from its metrics.jsonl and evaluations.jsonl."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from megatronish.core.figures import write_figure

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
                if isinstance(found := json.loads(line), dict):
                    yield found


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
    found = {(line["name"], line["step"]): line["loss"] for line in lines}
    for place, name in enumerate(dict.fromkeys(name for name, _ in found), start=1):
        points = sorted((step, loss) for (other, step), loss in found.items() if other == name)
        size = 5 if len(points) < 50 else 2.5
        (line,) = axes.plot(*zip(*points, strict=True), f"C{place}o:", linewidth=1, markersize=size)
        line.set_label(f"{name} ({points[-1][1]:.3f})")
    return list(found.values())


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
