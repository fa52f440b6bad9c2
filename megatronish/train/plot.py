"""The loss curve of a run, drawn from its metrics.jsonl and evaluations.jsonl."""

import json
import os
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines, without the line that a killed run left unfinished; no file has no objects."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def plot_run(run_dir: Path) -> Path:
    """Draw RUN_DIR/loss.png, the training loss of every step and every validation loss; returns its path."""
    steps = {line["step"]: line for line in read_lines(run_dir / "metrics.jsonl")}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(steps), [line["loss"] for line in steps.values()], linewidth=1, label="training")
    evaluations = {(line["name"], line["step"]): line["loss"] for line in read_lines(run_dir / "evaluations.jsonl")}
    for name in dict.fromkeys(name for name, _ in evaluations):
        points = [(step, loss) for (other, step), loss in evaluations.items() if other == name]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{name} ({points[-1][1]:.3f})")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=run_dir.resolve().name)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path = run_dir / "loss.png"
    aside = path.with_name(f".loss.{os.getpid()}.png")
    figure.savefig(aside, dpi=120)
    aside.replace(path)
    return path
