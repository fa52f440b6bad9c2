"""Where a step goes, for the GPU report: two steps under torch's profiler, as the lines of a table."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatronish.train.hooks.profiler import slowest

NUM_STEPS = 2


def where_a_step_goes(take_step: Callable[[], Any], device: torch.device) -> list[str]:
    """The table of --profile; where this checkout has none yet, the slowest operators."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as recorded:
        for step in range(NUM_STEPS):
            with record_function(f"step {step + 1}"):
                take_step()
    if find_spec("megatronish.train.breakdown") is None:
        return slowest(
            recorded.key_averages(), key="self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        )
    with TemporaryDirectory() as folder:
        path = Path(folder, "steps.trace.json.gz")
        recorded.export_chrome_trace(str(path))
        lines: list[str] = import_module("megatronish.train.breakdown").Breakdown.of_trace(path, rank=0).table()
    return lines
