"""Contents of a run's page: what the files of a run folder say, as plain values for JSON.

Every file may be missing, cut off by a kill, or of another program: what cannot be read is left out, and nothing in it
is code.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatronish.core.errors import UserError
from megatronish.core.files import ordinary
from megatronish.core.foreign import LARGEST_TOML, parse_toml, read_json, read_text, shown
from megatronish.core.layout import AXES
from megatronish.parallel.schedules.recorded import Recorded
from megatronish.report.metrics import EXPERTS_FILE, RANK_TIMES
from megatronish.report.page.curves import Curves, is_number, is_step, pair
from megatronish.report.plot import each_line, read_counts, thinned

MOST_EVENTS, LONGEST_EVENT, MOST_FIRST_LINES = 500, 1000, 80
MOST_RANK_LINES = 200
METRICS = "metrics.jsonl"
LARGEST_LOG, LARGEST_END = 2**26, 2**20  # bytes of the end of a log, or of the ranks' times, that are read
Value = TypeVar("Value")
_ITERATION = re.compile(r"^ \[[-\d :.]+\] iteration ")
_STEP = re.compile(r"\bstep[_ ](\d{1,18})\b(?!\.\d)")
_PATHS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "dp": "data_parallel_size",
    "pp": "pipeline_model_parallel_size",
}


def contents_of(run: Path, curves: Curves | None = None) -> dict[str, Any]:
    """All that a page shows of a run, with `curves` of an earlier look. UserError for a folder of no run."""
    picture = in_short(run, curves)
    return picture | {
        "layout": _layout(picture["config"]),
        "forecast": _object(run / "forecast.json"),
        "ledger": _object(run / "goodput.json"),
        "experts": _read(lambda: _experts(run / EXPERTS_FILE)),
        "schedule": _read(lambda: _schedule(run / "schedule")),
        "rank_seconds": _rank_seconds(each_line(run / RANK_TIMES)),
        "audit": _read(lambda: ordinary(run / "audit.txt").read_text(encoding="utf-8")[: 2**18]),
    }


def in_short(run: Path, curves: Curves | None = None) -> dict[str, Any]:
    """What a terminal shows of a run, and a page, too: of long files no more than the end, or what is new."""
    if not any((run / name).is_file() for name in (METRICS, "config.toml")):
        raise UserError(f"{run} is not a run folder: it has neither {METRICS} nor config.toml; name what --run-dir was")
    config = _read(lambda: parse_toml(read_text(run / "config.toml", LARGEST_TOML))) or {}
    first_lines, events = lines_of_log(run / "logs" / "rank_0.log")
    return {
        "name": run.resolve().name,
        "config": {section: dict(fields) for section, fields in config.items() if isinstance(fields, dict)},
        "curves": (curves or curves_of(run)).read(),
        "evaluations": _evaluations(run / "evaluations.jsonl"),
        "health": _object(run / "health.json"),
        "first_lines": first_lines,
        "events": events,
        "rank_seconds": _rank_seconds(_last_lines(run / RANK_TIMES)),
    }


def curves_of(run: Path, *, hurries: bool = False) -> Curves:
    """Curves of a run; those that are kept read only what is new. With `hurries` no look waits for a long file."""
    return Curves(run / METRICS, hurries=hurries)


def _evaluations(path: Path) -> dict[str, list[list[Any]]]:
    """{name: [steps, losses]} of the data sets that were evaluated."""
    lines = [line for line in each_line(path) if is_number(line.get("loss")) and is_step(line.get("step"))]
    losses = {(str(line.get("name")), line["step"]): line["loss"] for line in lines}
    names = dict.fromkeys(name for name, _ in losses)
    by_name = {name: sorted((step, loss) for (other, step), loss in losses.items() if other == name) for name in names}
    return {name: pair(*map(np.array, zip(*points, strict=True))) for name, points in by_name.items()}


def lines_of_log(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """First lines of the newest start, and what happened: all lines of the main rank's log that are no iteration."""
    text = _read(lambda: _end_of(path)) or ""
    first_lines: list[str] = []
    events: list[dict[str, Any]] = []
    step = 0
    opens = False  # the first lines of a start
    for line in text.splitlines():
        if line.startswith("megatronish on "):
            first_lines, opens = [], True
            events.append({"step": step, "text": f"start: {shown(line, most=LONGEST_EVENT)}"})
        if _ITERATION.match(line):
            with suppress(ValueError, IndexError):
                step = int(line.split("iteration", 1)[1].split("/", 1)[0])
            opens = False
        elif opens and not line.startswith(" saved"):
            first_lines.append(shown(line, most=LONGEST_EVENT))
        elif line.strip():
            opens = False
            named = _STEP.search(line)
            events.append({"step": int(named[1]) if named else step, "text": shown(line.strip(), most=LONGEST_EVENT)})
    return first_lines[:MOST_FIRST_LINES], events[-MOST_EVENTS:]


def _end_of(path: Path, most: int = LARGEST_LOG) -> str:
    with ordinary(path).open("rb") as file:
        file.seek(max(0, path.stat().st_size - most))
        return file.read().decode("utf-8", errors="replace")


def _layout(config: dict[str, Any]) -> dict[str, int] | None:
    """Sizes of the axes; None where the config does not say them."""
    parallel = config.get("parallel")
    given = parallel if isinstance(parallel, dict) else {}
    sizes = {axis: given.get(name) for axis, name in _PATHS.items()}
    known = {axis: size for axis, size in sizes.items() if isinstance(size, int) and 0 < size < 2**20}
    return known if len(known) == len(AXES) else None


def _experts(path: Path) -> dict[str, Any] | None:
    """Choices of each expert against its layer's mean, over the last steps, and the largest over the run."""
    counts = read_counts(path)
    if counts is None:
        return None
    ratio = counts.last / np.maximum(counts.last.mean(1, keepdims=True), 1e-9)
    steps, largest = thinned(counts.steps, counts.largest.max(1))
    return {
        "layers": list(counts.layers),
        "ratio": np.round(ratio, 3).tolist(),
        "steps": list(counts.last_steps),
        "largest": pair(steps, largest),
    }


def _schedule(folder: Path) -> dict[str, Any] | None:
    """The newest step that --profile-schedule recorded: [kind, chunk, micro-batch, start, end] of each stage."""
    numbered = {int(path.stem[5:]): path for path in folder.glob("step_*.json") if path.stem[5:].isdecimal()}
    if not numbered:
        return None
    newest = max(numbered)
    recorded = Recorded.read(numbered[newest])
    timed = recorded.timed()
    rows = [[[*each.action, each.start, each.end] for each in row] for row in timed.timeline]
    return {"name": recorded.schedule, "step": newest, "rows": rows, "bubble_rate": timed.bubble_rate}


def _last_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of the last lines of a file of JSON lines."""
    for line in (_read(lambda: _end_of(path, LARGEST_END)) or "").splitlines():
        if isinstance(record := _read(partial(json.loads, line)), dict):
            yield record


def _rank_seconds(records: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """{steps: [n], seconds: [n][ranks]} of the ranks' own times; of too many lines every so many."""
    lines = [line for line in records if is_step(line.get("step")) and isinstance(line.get("seconds"), list)]
    by_step = {line["step"]: line["seconds"] for line in lines if line["seconds"]}
    by_step = {step: seconds for step, seconds in by_step.items() if all(map(is_number, seconds))}
    if not by_step:
        return None
    width = len(by_step[max(by_step)])  # of the last start: a run may resume on another number of ranks
    steps = [step for step in sorted(by_step) if len(by_step[step]) == width]
    steps = steps[:: -(-len(steps) // MOST_RANK_LINES)]
    return {"steps": steps, "seconds": [by_step[step] for step in steps]}


def _object(path: Path) -> dict[str, Any] | None:
    value = _read(lambda: read_json(path))
    return value if isinstance(value, dict) else None


def _read(read: Callable[[], Value]) -> Value | None:
    """What `read` returns; None where the file is missing, or is not what it should be."""
    try:
        return read()
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, UserError):
        return None


def as_json(contents: object) -> str:
    """JSON that may stand in a <script>: no text of a file can end the element. Numbers that JSON lacks are null."""
    text = json.dumps(_finite(contents), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
