"""Learning rate and momentum of each shape, drawn by the schedule: python docs/pictures/draw_learning_rates.py"""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.optim.schedules import build_learning_rate_schedule

STEPS = 1000
WARMUP: dict[str, Any] = {"lr_warmup_iters": 150}
CYCLE: dict[str, Any] = {
    **{"lr_warmup_init": 0.1, "min_lr": 0.1, "lr_warmup_iters": 350, "lr_decay_iters": 800},
    **{"cycle_min_momentum": 0.8, "cycle_max_momentum": 0.9},
}
PANELS: dict[str, dict[str, Any]] = {
    "linear, and log warm-up": {**WARMUP, "lr_warmup_style": "log"},
    "cosine, to 0.1 of the peak": {**WARMUP, "lr_decay_style": "cosine", "min_lr": 0.1},
    "WSD, cosine in the last 300 steps": {
        **{**WARMUP, "lr_decay_style": "WSD"},
        **{"lr_wsd_decay_style": "cosine", "lr_wsd_decay_iters": 300},
    },
    "inverse-square-root": {**WARMUP, "lr_decay_style": "inverse-square-root"},
    "one cycle, with DeepSpeed's tail": {**CYCLE, "lr_tail_decay": 0.02},
    "one cycle, with torch's cosines": {
        **{**CYCLE, "lr_warmup_style": "cosine", "lr_decay_style": "cosine"},
        **{"lr_decay_iters": STEPS, "min_lr": 0.0, "lr_warmup_init": 0.04},
    },
    "one cycle, in stairs": {**CYCLE, "lr_warmup_stairs": 5, "lr_decay_stairs": 8},
    "range-test, staircase": {
        **{"lr_decay_style": "range-test", "lr": 0.1, "lr_range_test_iters": 100},
        "lr_range_test_staircase": True,
    },
}


def draw(axes: Axes, title: str, options: dict[str, Any]) -> None:
    """One panel: the learning rate as a part of its peak, and the momentum where it cycles."""
    schedule = build_learning_rate_schedule(
        OptimizerConfig(**{"lr": 1.0} | options), TrainingConfig(train_iters=STEPS), global_batch_size=1
    )
    axes.plot([schedule.learning_rate(step) for step in range(STEPS + 1)], color="#4477aa", label="learning rate")
    momenta = [momentum for step in range(STEPS + 1) if (momentum := schedule.momentum(step)) is not None]
    if momenta:
        other = axes.twinx()
        other.plot(momenta, color="#ee6677", linestyle="--", label="momentum (right)")
        other.set_ylim(0.75, 0.95)
        lines = [*axes.get_lines(), *other.get_lines()]
        axes.legend(lines, [str(line.get_label()) for line in lines], fontsize=7, loc="lower center")
    axes.set_title(title, fontsize=9)
    axes.set_ylim(0, 1.15)


def main() -> None:
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    for number, (title, options) in enumerate(PANELS.items(), start=1):
        draw(figure.add_subplot(2, 4, number), title, options)
    figure.savefig(Path(__file__).with_name("learning_rates.png"), dpi=100)


if __name__ == "__main__":
    main()
