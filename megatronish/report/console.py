"""Console lines of a run: compact and coloured on a terminal, Megatron-LM's parseable line in files, pipes and logs."""

import math
import os
import shutil
import sys
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Literal, NamedTuple

from tqdm import tqdm

from megatronish.launch.rank import Shown
from megatronish.report.metrics import METRICS, Value, console_parts, duration, metric_of

DATA_BOUND = 0.1  # share of a step's time: from here on the wait for data is shown
NOTHING: Mapping[str, float] = MappingProxyType({})
_CODES = {"bold": "1", "dim": "2", "red": "31", "yellow": "33", "plain": "0"}


class Part(NamedTuple):
    """Part of a compact line. The largest `rank` is left out first where the terminal is too narrow; 0 never."""

    label: str
    value: str
    style: str = "plain"
    rank: int = 0

    @property
    def text(self) -> str:
        """Label and value, without colours."""
        return f"{self.label} {self.value}" if self.label else self.value


class Console:
    """Printer of a run's lines on stdout. A log of the rank has the full lines in either form."""

    def __init__(self, *, is_compact: bool, has_colours: bool) -> None:
        self.is_compact, self.has_colours = is_compact, has_colours

    @classmethod
    def of(cls, log_format: Literal["auto", "compact", "full"]) -> "Console":
        """Console of --log-format; colours on a terminal alone, and not where NO_COLOR asks for none."""
        is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        return cls(
            is_compact=log_format == "compact" or (log_format == "auto" and is_terminal),
            has_colours=is_terminal and not os.environ.get("NO_COLOR"),
        )

    def step(self, values: Mapping[str, Value], num_steps: int) -> None:
        """Print the line of a step."""
        full = full_line(values, num_steps)
        self._write(compact_parts(values, num_steps), full=full)

    def evaluation(
        self, *, name: str, step: int, loss: float, perplexity: float, others: Mapping[str, float] = NOTHING
    ) -> None:
        """Print the line of an evaluation; `others` are what an objective reports besides its loss."""
        full = f" {name} loss at iteration {step} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} |"
        full += "".join(f" {other}: {value:.6E} |" for other, value in others.items())
        parts = [
            Part("eval", name, "bold"),
            Part("loss", f"{loss:.4f}", "bold"),
            Part("perplexity", f"{perplexity:.2f}"),
            Part("at step", str(step)),
            *(Part(metric_of(other).tag or other, f"{value:.4g}", rank=1) for other, value in others.items()),
        ]
        self._write(parts, full=full)

    def _write(self, parts: list[Part], *, full: str) -> None:
        line = Shown(self._compact(parts), logged=full) if self.is_compact else full
        tqdm.write(line, file=sys.stdout)

    def _compact(self, parts: list[Part]) -> str:
        """Line of parts that fits into the terminal's columns, if leaving parts out can achieve that."""
        columns = shutil.get_terminal_size((100, 24)).columns
        left = list(parts)
        while sum(len(part.text) + 2 for part in left) - 2 > columns and any(part.rank for part in left):
            left.remove(max(left, key=lambda part: part.rank))
        return "  ".join(map(self._coloured, left))

    def _coloured(self, part: Part) -> str:
        if not self.has_colours:
            return part.text
        label = f"{_styled(part.label, 'dim')} " if part.label else ""
        return label + (part.value if part.style == "plain" else _styled(part.value, part.style))


def _styled(text: str, style: str) -> str:
    return f"\033[{_CODES[style]}m{text}\033[0m"


def full_line(values: Mapping[str, Value], num_steps: int) -> str:
    """Line of a step as in Megatron-LM's log; our own values come last."""
    parts = [f"iteration {values['step']:8d}/{num_steps:8d}", *console_parts(values)]
    return f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] {' | '.join(parts)} |"


def compact_parts(values: Mapping[str, Value], num_steps: int) -> list[Part]:
    """Parts of a step's compact line; with the usual ones, up to 100 columns together."""
    found = {name: value for name, value in values.items() if value is not None}
    own = [name for name in found if name not in METRICS]
    width = len(str(num_steps))
    loss = found["loss"]
    return [
        Part("step", f"{found['step']:{width}d}/{num_steps}"),
        Part("loss", f"{loss:6.4f}", "bold" if math.isfinite(loss) else "red"),
        *(Part(metric_of(name).tag or name, f"{found[name]:.4g}", rank=1) for name in own),
        *_experts(found),
        Part("grad", f"{found['grad_norm']:<5.3g}", rank=2),
        Part("lr", f"{found['learning_rate']:.1e}".replace("e-0", "e-").replace("e+0", "e+"), rank=3),
        Part("", "{}{} tok/s".format(*with_prefix(found["tokens_per_second"]))),
        _computing(found),
        Part("", f"{found['peak_memory_bytes'] / 2**30:.1f}GiB", rank=5),
        *([Part("ETA", f"{duration(found['seconds_left']):<6}", rank=1)] if "seconds_left" in found else []),
        *_troubles(found),
    ]


def _computing(found: Mapping[str, float]) -> Part:
    """MFU, or FLOP/s of a device whose peak is not known."""
    if "mfu" in found:
        return Part("MFU", f"{found['mfu']:5.1%}", rank=4)
    return Part("", "{} {}FLOP/s".format(*with_prefix(1e12 * found["model_tflops_per_device"])), rank=4)


def _experts(found: Mapping[str, float]) -> list[Part]:
    """Of a model with experts the largest load, over the mean; idle experts and dropped choices where there are any."""
    parts = [Part("load", f"{found['largest_expert_load']:.2f}x", rank=2)] if "largest_expert_load" in found else []
    if count := found.get("num_idle_experts"):
        parts.append(Part("idle", f"{count:.0f}", "yellow", rank=1))
    if share := found.get("dropped_share"):
        parts.append(Part("dropped", f"{share:.1%}", rank=1))
    return parts


def _troubles(found: Mapping[str, float]) -> list[Part]:
    """What is shown only where there is something to see: skipped steps, a loss scale, waiting for data."""
    parts = []
    if found["loss_scale"] != 1.0:
        parts.append(Part("scale", f"{found['loss_scale']:.0f}", rank=2))
    for name in ("skipped", "nan"):
        if count := found[f"{name}_since_line"]:
            parts.append(Part(name, str(count), "red"))
    share = found["data_seconds"] / (found["data_seconds"] + found["step_seconds"])
    if share >= DATA_BOUND:
        parts.append(Part("data wait", f"{share:.0%}", "yellow"))
    return parts


def with_prefix(value: float) -> tuple[str, str]:
    """Three digits of a number, and the prefix of its unit: 12345 -> "12.3", "k"."""
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    place = 0
    while abs(value) >= 999.5 and place < len(prefixes) - 1:
        value, place = value / 1000, place + 1
    digits = 0 if value >= 99.95 or place == 0 else 1 if value >= 9.995 else 2
    return f"{value:4.{digits}f}", prefixes[place]
