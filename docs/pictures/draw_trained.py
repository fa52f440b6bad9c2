"""Loss curves of the runs of docs/TRAINED.md, from what they left: python docs/pictures/draw_trained.py"""

import json
import math
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
CURVES = {
    "the demo with experts": "runs/demo-moe",
    "bytes": "runs/bytes",
    "LoRA on questions": "runs/finetune/lora",
}
"""Panels with their run folders."""


def losses(run_dir: Path) -> tuple[list[int], list[float]]:
    """Steps of a run with their training losses."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "loss" in record]
    return [record["step"] for record in records], [record["loss"] for record in records]


def draw(root: Path) -> Figure:
    """The picture of the runs below a folder."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, (title, folder) in zip(figure.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        steps, values = losses(root / folder)
        in_bits = title == "bytes"
        axes.plot(steps, [value / math.log(2) if in_bits else value for value in values], color="#4477aa")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.set_ylabel("bits per byte" if in_bits else "training loss")
    return figure


if __name__ == "__main__":
    draw(ROOT).savefig(Path(__file__).with_name("trained.png"), dpi=90)
