"""Metrics of a run: their names and formats, and the lines of files and of the console that show them.

A line is compact and coloured on a terminal, and Megatron-LM's parseable line in files, pipes and logs.
"""

import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from megatronish.launch.rank import Shown

Value = float | int | None


class Metric(NamedTuple):
    """A number of a step under its name in metrics.jsonl; `tag` is the trackers', `console` its part of the log line.

    Tags and parts are Megatron-LM's, for which people have parsers. None: it does not stand there.
    """

    name: str
    unit: str
    tag: str | None = None
    console: Callable[[float], str] | None = None
    in_file: bool = True


def duration(seconds: float) -> str:
    """Time in at most seven characters, in its two largest units: 59s, 3m05s, 2h07m, 12d03h."""
    whole = math.ceil(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def _tflops(value: float) -> str:
    return f"throughput per GPU (TFLOP/s/GPU): {value:.{1 if value >= 1 else 4}f}"


def _loss(tag: str) -> Callable[[float], str]:
    """Part of the log line of a further loss, as Megatron-LM writes it."""
    return lambda value: f"{tag}: {value:.6E}"


EXPERTS_FILE = "experts.jsonl"
RANK_TIMES = "ranks.jsonl"
"""File of a run folder: tokens of each expert, which are too many for the table that metrics.jsonl is."""
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("step", "steps so far, from 1"),
        Metric("loss", "nats a token", "lm loss", lambda value: f"lm loss: {value:.6E}"),
        Metric("grad_norm", "2-norm before clipping", "grad-norm", lambda value: f"grad norm: {value:.3f}"),
        Metric("learning_rate", "", "learning-rate", lambda value: f"learning rate: {value:.6E}"),
        Metric(
            "decoupled_learning_rate",
            "with --decoupled-lr alone",
            "decoupled-learning-rate",
            lambda value: f"decoupled learning rate: {value:.6E}",
        ),
        Metric("momentum", "where it cycles", "momentum", lambda value: f"momentum: {value:.4f}"),
        # Of models with experts; docs/EXPERTS.md explains them.
        Metric("load_balancing_loss", "1 where the load is even", "load_balancing_loss", _loss("load_balancing_loss")),
        Metric(
            "global_load_balancing_loss",
            "1 where the load is even",
            "global_load_balancing_loss",
            _loss("global_load_balancing_loss"),
        ),
        Metric("router_z_loss", "", "z_loss", _loss("z_loss")),
        Metric("dropped_share", "fraction", "dropped-share", lambda value: f"dropped: {100 * value:.1f}%"),
        Metric(
            "rows_without_room",
            "rows, of steps that were computed again",
            "rows-without-room",
            lambda value: f"rows without room: {int(value)}, computed again",
        ),
        Metric(
            "largest_expert_load",
            "times the mean",
            "largest-expert-load",
            lambda value: f"largest expert load: {value:.2f}",
        ),
        Metric("num_idle_experts", "", "idle-experts", lambda value: f"idle experts: {int(value)}"),
        Metric(
            "max_attention_logit",
            "with --qk-clip or --log-max-attention-logit",
            "max-attention-logit",
            lambda value: f"max attention logit: {value:.3f}",
        ),
        Metric("loss_scale", "", "loss-scale", lambda value: f"loss scale: {value:.1f}"),
        Metric("skipped_iterations", "steps so far"),
        Metric("tokens", "tokens so far"),
        Metric("consumed_samples", "samples so far", None, lambda value: f"consumed samples: {value:12d}"),
        Metric(
            "step_seconds",
            "seconds",
            "iteration-time",
            lambda value: f"elapsed time per iteration (ms): {1000 * value:.1f}",
        ),
        Metric("data_seconds", "seconds", "data-time", lambda value: f"data time (ms): {1000 * value:.1f}"),
        Metric("tokens_per_second", "tokens/s", "tokens-per-second", lambda value: f"tokens per second: {value:.0f}"),
        Metric("model_tflops_per_device", "TFLOP/s", "throughput", _tflops),
        Metric("mfu", "fraction of the peak", "mfu", lambda value: f"MFU: {100 * value:.1f}%"),
        Metric("peak_memory_bytes", "bytes"),
        Metric("world_size", "ranks", "world-size"),
        Metric("params_norm", "2-norm", "params-norm", lambda value: f"params norm: {value:.3f}"),
        Metric("num_zeros", "gradient elements", "num-zeros", lambda value: f"num zeros: {int(value)}"),
        Metric("goodput", "share of the time so far that was training"),
        # These count from one line of the log to the next, or are the config's: not in the file.
        Metric(
            "global_batch_size",
            "samples",
            "batch-size",
            lambda value: f"global batch size: {value:5d}",
            in_file=False,
        ),
        Metric(
            "skipped_since_line",
            "steps",
            None,
            lambda value: f"number of skipped iterations: {value:3d}",
            in_file=False,
        ),
        Metric("nan_since_line", "steps", None, lambda value: f"number of nan iterations: {value:3d}", in_file=False),
        Metric("seconds_left", "seconds", None, lambda value: f"ETA: {duration(value)}", in_file=False),
    )
}

# The order of the log line: Megatron-LM's, what an objective reports after its loss, our own values last.
_BEFORE = (
    "consumed_samples",
    "step_seconds",
    "model_tflops_per_device",
    "learning_rate",
    "decoupled_learning_rate",
    "momentum",
    "global_batch_size",
    "loss",
)
_AFTER = (
    "load_balancing_loss",
    "global_load_balancing_loss",
    "router_z_loss",
    "dropped_share",
    "rows_without_room",
    "largest_expert_load",
    "num_idle_experts",
    "max_attention_logit",
    "loss_scale",
    "grad_norm",
    "num_zeros",
    "params_norm",
    "skipped_since_line",
    "nan_since_line",
    "tokens_per_second",
    "mfu",
    "data_seconds",
    "seconds_left",
)


def metric_of(name: str) -> Metric:
    """The entry of the table, or that of a metric which is written under its own name."""
    words = name.replace("_", " ")
    return METRICS.get(name) or Metric(name, "", name.replace("_", "-"), lambda value: f"{words}: {value:.6g}")


def console_parts(values: Mapping[str, Value]) -> list[str]:
    """The parts of the log line, of what has a value."""
    own = [name for name in values if name not in METRICS]
    parts = []
    for name in (*_BEFORE, *own, *_AFTER):
        value, console = values.get(name), metric_of(name).console
        if value is not None and console is not None:
            parts.append(console(value))
    return parts


def points(values: Mapping[str, Value]) -> dict[str, float]:
    """Points of trackers, {tag: value}, of what has a value."""
    tags = {metric_of(name).tag: value for name, value in values.items()}
    return {tag: value for tag, value in tags.items() if tag is not None and value is not None}


def file_line(values: Mapping[str, Value]) -> dict[str, Value]:
    """The object of a line of metrics.jsonl."""
    return {name: value for name, value in values.items() if metric_of(name).in_file}


def add_line(file: Path, line: dict[str, Any]) -> None:
    """Append an object to a file of JSON lines. On a full disk the line is left out, with a message."""
    try:
        with file.open("ab", buffering=0) as lines:
            data, begin = (json.dumps(line) + "\n").encode(), lines.tell()
            if lines.write(data) < len(data):
                lines.truncate(begin)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        tqdm.write(f"{file} lacks the line of step {line['step']}: {error.strerror}", file=sys.stderr)


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
    numbers = {name: value for name, value in values.items() if value is not None}
    own = [name for name in numbers if name not in METRICS]
    width = len(str(num_steps))
    loss = numbers["loss"]
    return [
        Part("step", f"{numbers['step']:{width}d}/{num_steps}"),
        Part("loss", f"{loss:6.4f}", "bold" if math.isfinite(loss) else "red"),
        *(Part(metric_of(name).tag or name, f"{numbers[name]:.4g}", rank=1) for name in own),
        *_experts(numbers),
        Part("grad", f"{numbers['grad_norm']:<5.3g}", rank=2),
        Part("lr", f"{numbers['learning_rate']:.1e}".replace("e-0", "e-").replace("e+0", "e+"), rank=3),
        Part("", "{}{} tok/s".format(*with_prefix(numbers["tokens_per_second"]))),
        _computing(numbers),
        Part("", f"{numbers['peak_memory_bytes'] / 2**30:.1f}GiB", rank=5),
        *([Part("ETA", f"{duration(numbers['seconds_left']):<6}", rank=1)] if "seconds_left" in numbers else []),
        *_troubles(numbers),
    ]


def _computing(numbers: Mapping[str, float]) -> Part:
    """MFU, or FLOP/s of a device whose peak is not known."""
    if "mfu" in numbers:
        return Part("MFU", f"{numbers['mfu']:5.1%}", rank=4)
    return Part("", "{} {}FLOP/s".format(*with_prefix(1e12 * numbers["model_tflops_per_device"])), rank=4)


def _experts(numbers: Mapping[str, float]) -> list[Part]:
    """Of a model with experts the largest load, over the mean; idle experts and dropped choices where there are any."""
    parts = [Part("load", f"{numbers['largest_expert_load']:.2f}x", rank=2)] if "largest_expert_load" in numbers else []
    if count := numbers.get("num_idle_experts"):
        parts.append(Part("idle", f"{count:.0f}", "yellow", rank=1))
    if share := numbers.get("dropped_share"):
        parts.append(Part("dropped", f"{share:.1%}", rank=1))
    if rows := numbers.get("rows_without_room"):
        parts.append(Part("computed again, rows without room", f"{rows:.0f}", "yellow", rank=1))
    return parts


def _troubles(numbers: Mapping[str, float]) -> list[Part]:
    """What is shown only where there is something to see: skipped steps, a loss scale, waiting for data."""
    parts = []
    if numbers["loss_scale"] != 1.0:
        parts.append(Part("scale", f"{numbers['loss_scale']:.0f}", rank=2))
    for name in ("skipped", "nan"):
        if count := numbers[f"{name}_since_line"]:
            parts.append(Part(name, str(count), "red"))
    share = numbers["data_seconds"] / (numbers["data_seconds"] + numbers["step_seconds"])
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
