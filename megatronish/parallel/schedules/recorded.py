"""Recorded steps: the measured times of every action of one training step, in a JSON file.

The file has the schedule's name and, for each stage, its actions in order as
[kind, chunk, micro-batch, start, end], in seconds of one clock. An action starts when its input has arrived and ends
before its output is sent, so the time between actions is waiting time.
"""

import errno
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from megatronish.core.errors import UserError
from megatronish.core.files import write_quickly
from megatronish.parallel.schedules.plan import Action, Kind
from megatronish.parallel.schedules.simulate import simulate
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.parallel.schedules.timeline import Timed, TimedPlan, chunks_of, label, measure

Row = tuple[Kind, int, int, float, float]
"""kind, chunk, micro-batch, start and end in seconds."""

NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}
CHROME_COLOURS = {"F": "rail_response", "B": "good", "W": "rail_animation"}  # blue, green, yellow of chrome://tracing


@dataclass(frozen=True)
class Recorded:
    """One step of a run. `rows[s]` has the actions of stage s, in order, with their measured times."""

    schedule: str
    rows: Sequence[Sequence[Row]]

    def timed(self) -> TimedPlan:
        """The recorded step as a `TimedPlan`, in seconds since its first start."""
        first = min(row[0][3] for row in self.rows)
        return measure(
            [
                [
                    Timed(Action(kind, chunk, micro_batch), start - first, end - first)
                    for kind, chunk, micro_batch, start, end in row
                ]
                for row in self.rows
            ]
        )

    def simulated(self) -> TimedPlan | None:
        """What the simulator makes of this step: each action takes the median of its kind, stage and chunk.

        Transfers take no time, so the difference to `timed` is communication and what else held a stage up. None for a
        schedule that is not in SCHEDULES.
        """
        schedule = SCHEDULES.get(self.schedule)
        if schedule is None:
            return None
        plan = [[Action(*row[:3]) for row in rows] for rows in self.rows]
        samples: dict[tuple[int, Kind, int], list[float]] = {}
        for stage, rows in enumerate(self.rows):
            for kind, chunk, _, start, end in rows:
                samples.setdefault((stage, kind, chunk), []).append(end - start)
        usual = {key: median(values) for key, values in samples.items()}
        num_chunks = chunks_of(self.timed().timeline)
        return simulate(
            plan,
            placement=schedule.place(num_stages=len(plan), num_chunks=num_chunks),
            durations=lambda stage, action: usual[stage, action.kind, action.chunk],
        )

    def write(self, path: Path) -> None:
        """Write the JSON file, with a line for each stage."""
        stages = ",\n".join(json.dumps(list(row)) for row in self.rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_quickly(path, f'{{"schedule": {json.dumps(self.schedule)}, "stages": [\n{stages}\n]}}\n')

    @classmethod
    def read(cls, path: Path) -> "Recorded":
        """Read such a file. UserError if it is not a recorded step."""
        try:
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "it is no file")
            content = json.loads(path.read_text(encoding="utf-8"))
            rows = [[_row(fields) for fields in stage] for stage in content["stages"]]
            if not rows or not all(rows):
                raise ValueError("a stage does nothing")
            for row in rows:
                for before, after in pairwise(row):
                    if after[3] < before[4]:
                        raise ValueError(f"{list(after)} begins before {list(before)} has ended")
            return cls(str(content["schedule"]), rows)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise UserError(
                f"{path} is not a recorded step ({error}); megatronish pretrain writes one with --profile-schedule"
            ) from error

    def write_chrome_trace(self, path: Path) -> None:
        """Write a trace for chrome://tracing or ui.perfetto.dev, with a row for each stage."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_quickly(path, json.dumps(chrome_trace(self.timed(), title=self.schedule)))


def chrome_trace(timed_plan: TimedPlan, *, title: str) -> dict[str, Any]:
    """A timeline in Chrome's trace event format: complete events ("X"), times in microseconds, a thread a stage."""
    num_chunks = chunks_of(timed_plan.timeline)
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title}}]
    for stage, row in enumerate(timed_plan.timeline):
        thread: dict[str, Any] = {"pid": 0, "tid": stage}
        events.append({"name": "thread_name", "ph": "M", **thread, "args": {"name": f"stage {stage}"}})
        events.append({"name": "thread_sort_index", "ph": "M", **thread, "args": {"sort_index": stage}})
        for action, start, end in row:
            events.append(
                {
                    "name": label(action, num_chunks=num_chunks),
                    "cat": NAMES[action.kind],
                    "ph": "X",
                    **thread,
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                    "cname": CHROME_COLOURS[action.kind],
                    "args": {"chunk": action.chunk, "micro_batch": action.micro_batch},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _row(fields: Any) -> Row:
    """The fields of an action with its times. ValueError for anything else."""
    kind, chunk, micro_batch, start, end = fields
    whole = type(chunk) is int and type(micro_batch) is int and min(chunk, micro_batch) >= 0
    if kind not in NAMES or not whole or not 0 <= float(start) <= float(end) < float("inf"):
        raise ValueError(f"{fields} is not [F, B or W, chunk, micro-batch, start, end]")
    return kind, chunk, micro_batch, float(start), float(end)
