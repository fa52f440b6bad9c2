"""Picture of a run on a terminal, from the files of its folder: progress, curves, speed, ranks and the last events."""

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from megatronish.core.foreign import shown
from megatronish.report.page.contents import in_short
from megatronish.report.page.curves import Curves, is_number

BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens/s",
    "step_seconds": "seconds a step",
    "data_seconds": "of these for data",
    "mfu": "MFU",
    "peak_memory_bytes": "peak memory, GiB",
}
NUM_EVENTS = 8
OLD_SECONDS = 120.0


def picture_of(run: Path, curves: Curves | None = None, *, width: int = 100) -> tuple[RenderableType, bool]:
    """What is seen of the run now, and whether it has ended; `curves` are those of an earlier look."""
    contents = in_short(run, curves)
    health, drawn = contents["health"] or {}, contents["curves"]
    phase = str(health.get("phase", ""))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("", "now", "lowest", "highest", f"{_first(drawn)} to {_last_step(drawn)}"):
        table.add_column(head, justify="left" if head == "" or " to " in head else "right")
    for name, title in SHOWN.items():
        values = [value for value in drawn.get(name, [[], []])[1] if value is not None]
        if values:
            scale = 2.0**-30 if name == "peak_memory_bytes" else 1.0
            numbers = [f"{value * scale:.5g}" for value in (values[-1], min(values), max(values))]
            table.add_row(title, *numbers, Text(spark(values, max(10, width - 62)), style="cyan"))
    parts: list[RenderableType] = [_progress(contents, health), table]
    if curves is not None and curves.is_behind:
        parts.append(Text("of a long file, lines at equal distances; all of them soon", style="dim"))
    if slow := _ranks(contents["rank_seconds"]):
        parts.append(Text(slow))
    for name, (steps, losses) in contents["evaluations"].items():
        parts.append(Text(f"evaluated on {shown(name)}: loss {losses[-1]} at step {steps[-1]}"))
    parts += [
        Text(f"step {event['step']:>7}  {event['text']}", style="dim") for event in contents["events"][-NUM_EVENTS:]
    ]
    has_ended = phase not in ("", "step")
    return Panel(Group(*parts), title=Text(shown(contents["name"])), width=width), has_ended


def spark(values: Sequence[float], width: int) -> str:
    """A curve of at most `width` characters: of each, the mean of its values."""
    edges = [round(place * len(values) / width) for place in range(width + 1)]
    pieces = [values[start:end] for start, end in pairwise(edges) if end > start]
    means = [sum(piece) / len(piece) for piece in pieces]
    low, high = min(means), max(means)
    return "".join(BLOCKS[int((mean - low) / (high - low) * 7.999) if high > low else 0] for mean in means)


def _first(curves: dict[str, Any]) -> str:
    steps = curves.get("loss", [[], []])[0]
    return f"step {steps[0]}" if steps else "no step"


def _last_step(curves: dict[str, Any]) -> int:
    steps = curves.get("loss", [[], []])[0]
    return steps[-1] if steps else 0


def _progress(contents: dict[str, Any], health: dict[str, Any]) -> RenderableType:
    """A bar of the steps, the time that is left, and how old the last sign of the run is."""
    steps = contents["config"].get("training", {}).get("train_iters")
    done = _last_step(contents["curves"])
    line = Table.grid(padding=(0, 2, 0, 0))
    text = f"step {done:,}"
    if type(steps) is int and steps > 0:
        text += f" of {steps:,} ({done / steps:.1%})"
        seconds = [value for value in contents["curves"].get("step_seconds", [[], []])[1][-20:] if value is not None]
        if seconds and done < steps:
            text += f", {_duration((steps - done) * sum(seconds) / len(seconds))} left"
    phase = shown(health.get("phase", "not started"))
    age = time.time() - health["time"] if is_number(health.get("time")) else math.nan
    if phase == "step":
        phase = f"last sign {_duration(age)} ago"
    style = "red" if phase.startswith(("failed", "hangs")) or (age > OLD_SECONDS and "sign" in phase) else "green"
    bar = Bar(total=max(steps or 1, 1), completed=min(done, steps or 1), width=30) if type(steps) is int else ""
    line.add_row(bar, text, Text(phase, style=style))
    return line


def _ranks(times: dict[str, Any] | None) -> str:
    """The quickest and the slowest rank by their own seconds of a step."""
    if times is None:
        return ""
    newest: Sequence[float] = times["seconds"][-1]
    quick, slow = min(newest), max(newest)
    return (
        f"own seconds of a step, {len(newest)} ranks at step {times['steps'][-1]}: "
        f"{quick:.4g} (rank {newest.index(quick)}) to {slow:.4g} (rank {newest.index(slow)})"
    )


def _duration(seconds: float) -> str:
    """Seconds as 3h 20m, 5m 12s, 8s."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes}m" if hours else f"{minutes}m {rest}s" if minutes else f"{rest}s"
