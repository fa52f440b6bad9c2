"""--profile-schedule leaves what each stage did when: drawn, for chrome://tracing, and as numbers."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from jobs import tiny, train_on_ranks

from megatronish.pipeline.recorded import Recorded
from megatronish.pipeline.schedule import SCHEDULES

FLAGS = "--num-layers 4 --dp 2 --pp 2 --profile-schedule --profile-step-start 2 --profile-step-end 4 --train-iters 4"


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_steps_are_recorded_as_they_ran(schedule: str, tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path, f"{FLAGS} --pipeline-schedule {schedule}"), world_size=4)
    folder = tmp_path / "schedule"
    kinds = (".json", ".png", ".trace.json")
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"step_{n}{kind}" for n in (2, 3) for kind in kinds)
    recorded = Recorded.read(folder / "step_3.json")
    plan = SCHEDULES[schedule].plan(num_stages=2, num_microbatches=2)
    assert [[tuple(row[:3]) for row in rows] for rows in recorded.rows] == plan
    timed = recorded.timed()
    for row in timed.timeline:
        assert all(before.end <= after.start for before, after in pairwise(row))
    # What a stage needs from another one was computed there before.
    ends = {(s, t.action): t.end for s, row in enumerate(timed.timeline) for t in row}
    starts = {(s, t.action): t.start for s, row in enumerate(timed.timeline) for t in row}
    forwards = [action for action in plan[1] if action.kind == "F" and action.chunk == 0]
    assert all(ends[0, action] <= starts[1, action] for action in forwards)
    assert 0 < timed.bubble_rate < 1
    events = json.loads((folder / "step_3.trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == sum(map(len, plan))
