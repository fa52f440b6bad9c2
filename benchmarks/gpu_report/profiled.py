"""Where a step goes, for the GPU report: two steps under torch's profiler, as the lines of a table."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatronish.parallel.ranges import UPDATE, marked
from megatronish.report.breakdown import Breakdown

NUM_STEPS = 2


def where_a_step_goes(take_step: Callable[[], Any], device: torch.device) -> list[str]:
    """The table of --profile."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as recorded:
        for step in range(NUM_STEPS):
            with record_function(f"step {step + 1}"), marked(UPDATE):  # a step as the trainer marks it
                take_step()
    with TemporaryDirectory() as folder:
        path = Path(folder, "steps.trace.json.gz")
        recorded.export_chrome_trace(str(path))
        return Breakdown.of_trace(path, rank=0).table()
