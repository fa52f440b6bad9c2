"""Picture of a data set: how long its documents are, and which lengths hold its tokens."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from megatronish.core.figures import write_figure

BINS = 60


def plot_lengths(lengths: NDArray[np.int64], path: Path, *, title: str) -> Path:
    """Draw histograms of documents and of their tokens over the length of a document; returns the path."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    figure.suptitle(title, fontsize="medium")
    sizes = lengths[lengths > 0]
    edges = np.geomspace(1, max(int(sizes.max(initial=1)), 2) + 1, BINS + 1)
    for axes, weights, label in ((above, None, "documents"), (below, sizes, "tokens")):
        axes.hist(sizes, bins=edges.tolist(), weights=weights, color="C0")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    if len(sizes):
        median = float(np.median(sizes))
        above.axvline(median, color="0.4", linestyle="--", linewidth=0.8, label=f"median {median:,.0f}")
        above.legend(frameon=False, fontsize="small")
    below.set(xlabel="tokens of a document", xscale="log")
    return write_figure(figure, path)
