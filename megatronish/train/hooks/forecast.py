"""The Forecast hook: forecast.json, what was expected when a run started and, at its end, what was measured.

Next to it report.md has both as tables.
"""

import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatronish.engine.balancing import WITHOUT_ROOM
from megatronish.estimate.costs.memory_table import format_bytes
from megatronish.estimate.costs.step_traffic import SCALAR, TrafficKey
from megatronish.estimate.costs.traffic import by_axis
from megatronish.report.forecast_page import page
from megatronish.train.hooks.log import peak_memory_bytes
from megatronish.train.trainer import Hook, StepRecord, Trainer
from megatronish.watch.record import RankRecord

WARM_UP = 2  # steps that are slower than others
COLLECTIVES = {
    "all_reduce": ("all-reduce",),
    "all_gather": ("all-gather",),
    "reduce_scatter": ("reduce-scatter",),
    "all_to_all": ("all-to-all",),
    "all_to_all_rows": ("all-to-all",),
    "deep_ep_dispatch": ("all-to-all",),
    "deep_ep_combine": ("all-to-all",),
    "shift": ("send", "receive"),
    "send": ("send",),
    "receive": ("receive",),
}
"""Names of estimate/costs/traffic.py by those of a record's entries."""


class Forecast(Hook):
    """Expected against measured, on the main rank: seconds of a step, peak memory, and bytes by axis of one step.

    Seconds are the median after two steps; bytes are counted in the third one (of a short run in the last one), or
    in the first one after it whose batch is whole and which was computed once (rows of experts may find no room).
    """

    is_observer = True

    def __init__(self, path: Path, expected: dict[str, Any], device: torch.device) -> None:
        self.path, self.expected, self.device = path, expected, device
        self._seconds: list[float] = []
        self._sent: Counter[TrafficKey] | None = None

    def start(self, trainer: Trainer) -> None:
        """Write what is expected."""
        self._write({"expected": self.expected})

    def before_step(self, trainer: Trainer) -> None:
        """Begin to count bytes, unless they are known."""
        if "traffic" in self.expected and (len(self._seconds) <= WARM_UP or self._sent is None):
            trainer.record.count_bytes()

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Note the time of the step, and what it has sent."""
        self._seconds.append(record.seconds)
        if trainer.record.counts_bytes:
            trainer.record.counts_bytes = False
            if self._is_usual(record):
                sent = traffic_of(trainer.record)
                sums = TrafficKey("world", "all-reduce")
                if sums in sent:  # hooks send their votes with the sums of the step; one process sends nothing
                    sent[sums] -= SCALAR * len(record.result.votes)
                self._sent = sent

    def _is_usual(self, record: StepRecord) -> bool:
        """Whether a step sends what is expected: of a whole batch, not left out, and computed once."""
        is_whole = record.global_batch_size == self.expected["global_batch_size"]
        return is_whole and not record.result.skipped and WITHOUT_ROOM not in record.result.metrics

    def finish(self, trainer: Trainer) -> None:
        """Write what was measured next to it, as JSON and as a page, and print both."""
        if not self._seconds:
            return
        seconds = statistics.median(self._seconds[WARM_UP:] or self._seconds)
        memory = peak_memory_bytes(self.device)
        on_gpu = self.device.type == "cuda"
        measured = {
            "step_seconds": seconds,
            "steps": len(self._seconds),
            "peak_memory_bytes": memory,
            "memory_of": "the main rank's device" if on_gpu else "the main rank's process, with all its libraries",
            **({} if self._sent is None else {"traffic": by_axis(self._sent)}),
        }
        self._write({"expected": self.expected, "measured": measured})
        self._write_text(self.path.with_name("report.md"), page(self.expected, measured))
        texts = [self._time(seconds), self._memory(memory), *self._traffic()]
        tqdm.write(f" forecast: {', '.join(texts)}")

    def _time(self, seconds: float) -> str:
        expected = self.expected.get("step_seconds")
        if expected is None:
            return f"step {seconds:.3g} s (none expected)"
        return f"step {seconds:.3g} s (expected {expected['low']:.3g}-{expected['high']:.3g})"

    def _memory(self, memory: int) -> str:
        expected = format_bytes(self.expected["memory"]["bytes"])
        if self.device.type == "cuda":
            return f"memory {format_bytes(memory)} (expected {expected})"
        return f"process {format_bytes(memory)} (of tensors {expected} expected)"

    def _traffic(self) -> list[str]:
        """Whether the bytes of a step, where they were counted, are the expected ones."""
        if self._sent is None:
            return []
        expected, sent = self.expected["traffic"], by_axis(self._sent)
        axes = {*sent, *expected}
        differ = sum(sent.get(axis) != expected.get(axis) for axis in axes)
        return [f"bytes differ over {differ} of {len(axes)} axes" if differ else "bytes as expected"]

    def _write(self, content: dict[str, Any]) -> None:
        self._write_text(self.path, json.dumps(content, indent=2) + "\n")

    @staticmethod
    def _write_text(path: Path, text: str) -> None:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:  # no reason to end a run, which may still save
            tqdm.write(f"{path} was not written: {error.strerror}", file=sys.stderr)


def traffic_of(record: RankRecord) -> Counter[TrafficKey]:
    """Bytes that a record has counted, as `expected_traffic` counts: of each call those of its largest tensor."""
    traffic = Counter[TrafficKey]()
    for line in record.lines:
        if len(line.ranks) == 1 or line.name == "checkpoint":  # which a thread in the background uses
            continue
        for operation, size in line.sent.items():
            whole = size * len(line.ranks) if operation == "all_gather" else size
            for name in COLLECTIVES[operation]:
                traffic[TrafficKey(line.name, name)] += whole
    return traffic
