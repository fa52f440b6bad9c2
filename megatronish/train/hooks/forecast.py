"""The Forecast hook: forecast.json, what was expected when a run started and, at its end, what was measured."""

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatronish.costs.memory_table import format_bytes
from megatronish.train.hooks.log import peak_memory_bytes
from megatronish.train.trainer import Hook, StepRecord, Trainer

WARM_UP = 2  # steps that are slower than others


class Forecast(Hook):
    """Expected against measured, on the main rank: median seconds of a step after two, and peak memory."""

    def __init__(self, path: Path, expected: dict[str, Any], device: torch.device) -> None:
        self.path, self.expected, self.device = path, expected, device
        self._seconds: list[float] = []

    def start(self, trainer: Trainer) -> None:
        """Write what is expected."""
        self._write({"expected": self.expected})

    def after_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Note the time of the step."""
        self._seconds.append(record.seconds)

    def finish(self, trainer: Trainer) -> None:
        """Write what was measured next to it, and print both."""
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
        }
        self._write({"expected": self.expected, "measured": measured})
        tqdm.write(f" forecast: {self._time(seconds)}; {self._memory(memory)}")

    def _time(self, seconds: float) -> str:
        expected = self.expected.get("step_seconds")
        if expected is None:
            return f"a step took {seconds:.4g} s, and none was expected ({self.expected['no_time']})"
        low, high = expected["low"], expected["high"]
        off = 2 * seconds / (low + high) - 1
        return f"a step took {seconds:.4g} s, expected {low:.4g} to {high:.4g} ({off:+.0%})"

    def _memory(self, memory: int) -> str:
        expected = self.expected["memory"]["bytes"]
        what = "peak memory" if self.device.type == "cuda" else "peak memory of the process with its libraries"
        return f"{what} {format_bytes(memory)}, expected of the fullest device {format_bytes(expected)}"

    def _write(self, content: dict[str, Any]) -> None:
        self.path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
