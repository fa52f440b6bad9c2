"""Breakdown of recorded steps: the time of each kind of work, as a table, a file of JSON and a bar chart.

It reads a Chrome trace of torch's profiler: what one rank did at each moment.

On a CPU that is the thread that trains: every moment of a step belongs to the innermost of what is open that has a
meaning here (an operator, or a range of ranges.py). On a GPU it is the device: every moment belongs to the kernels that
run. Where kernels of two rows run, the first of `ROWS` gets the moment, so communication gets what no computation
hides; a moment without any kernel belongs to the host. An operator of a backward is attention if its forward was: both
have one sequence number.
"""

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megatronish.core.figures import write_figure
from megatronish.parallel.ranges import ATTENTION, BUBBLE, DATA, OPTIMIZER, UPDATE, WAIT

Event = dict[str, Any]
"""An event of the trace, its times in microseconds."""

MATRIX, OTHER, HOST, HOOKS = "matrix products", "other compute", "host", "hooks"
LINES = ("F up", "F down", "B up", "B down")  # of the pipeline
AXES = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp", "data", "shard", "secondary", "replicate", "islands"),
    "pp": ("pp", "embedding", *LINES),
    "ep": ("ep", "etp"),
}
COMMUNICATION = {name: f"communication {axis}" for axis, names in AXES.items() for name in names}
REST = "communication, other"  # over all ranks at the end of a step, or over an axis of a plug-in
ROWS = (
    *(MATRIX, ATTENTION, OTHER, OPTIMIZER),
    *dict.fromkeys([*COMMUNICATION.values(), REST]),
    *(BUBBLE, DATA, HOST, HOOKS),
)

PRODUCTS = "mm addmm addmm_ bmm baddbmm baddbmm_ mv addmv addmv_ _addmm_activation _scaled_mm _grouped_mm mkldnn_linear"
MATRIX_OPERATORS = {f"aten::{name}" for name in PRODUCTS.split()} | {"mkldnn::_linear_pointwise"}
ATTENTION_NAMES = ("scaled_dot_product", "flash", "fmha", "attention")
MATRIX_KERNELS = ("gemm", "cutlass", "nvjet", "cublas")
NO_OPERATORS = ("autograd::", "torch::", "c10d::", "nccl:", "profiler::")  # launches of collectives are the host's
COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")


class Charge(NamedTuple):
    """Row of the time in something that is open, and of the operators inside (None: each by its name)."""

    row: str
    operators: str | None
    is_final: bool = False  # nothing inside is charged to another row


class Interval(NamedTuple):
    """A part of a timeline, from `start` to `end` in microseconds."""

    start: float
    end: float
    row: str


IN_RANGE = {
    DATA: Charge(DATA, DATA, is_final=True),
    BUBBLE: Charge(BUBBLE, BUBBLE, is_final=True),
    UPDATE: Charge(HOST, None),
    OPTIMIZER: Charge(HOST, OPTIMIZER),
    ATTENTION: Charge(HOST, ATTENTION),
}
IN_HOOKS = Charge(HOOKS, HOOKS)
ELSEWHERE = Charge(HOST, None)  # in the thread of autograd that runs a GPU's backward


def step_intervals(events: Sequence[Event]) -> dict[str, list[Interval]]:
    """Intervals of each recorded step, a range "step N", from its start to its end without a gap."""
    threads: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        # What gloo does in the background is shown over the thread that has started it, and ends when it ends.
        if event.get("cat") in ("cpu_op", "user_annotation") and not event["name"].startswith("gloo:"):
            threads[event["pid"], event["tid"]].append(event)
    of_attention: set[int] = set()
    for thread in threads.values():
        thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        of_attention |= _forwards_of_attention(thread)
    charges: dict[int, Charge] = {}  # by the number that kernels know the operator by that has launched them
    intervals_by_step: dict[str, list[Interval]] = {}
    timelines = [(thread, list(_timeline(thread, of_attention, charges))) for thread in threads.values()]
    for thread, timeline in timelines:
        steps = [event for event in thread if _is_step(event)]
        if steps:
            whole = list(_of_device(events, charges, timeline))
            for step in steps:
                start, end = step["ts"], step["ts"] + step["dur"]
                intervals_by_step[step["name"]] = [
                    Interval(max(interval.start, start), min(interval.end, end), interval.row)
                    for interval in whole
                    if interval.end > start and interval.start < end
                ]
    return intervals_by_step


def _is_step(event: Event) -> bool:
    return event["cat"] == "user_annotation" and event["name"].startswith("step ")


def _forwards_of_attention(thread: Iterable[Event]) -> set[int]:
    """Sequence numbers of the forward operators in ranges of attention.

    An operator that autograd does not record has the number of the next one that it does: the last one counts.
    """
    inside: dict[int, bool] = {}
    end = 0.0
    for event in thread:
        if event["name"] == ATTENTION:
            end = event["ts"] + event["dur"]
        elif (number := _sequence_number(event)) is not None and not event["args"].get("Fwd thread id"):
            inside[number] = event["ts"] < end
    return {number for number, is_inside in inside.items() if is_inside}


def _sequence_number(event: Event) -> int | None:
    number = event.get("args", {}).get("Sequence number")
    return number if isinstance(number, int) and number >= 0 else None


def _timeline(thread: Iterable[Event], of_attention: set[int], charges: dict[int, Charge]) -> Iterator[Interval]:
    """Intervals of a thread whose events are sorted; `charges` gets what each event is charged to."""
    opened: list[tuple[float, Charge]] = []  # innermost last
    now = 0.0
    for event in thread:
        while opened and opened[-1][0] <= event["ts"]:
            end, charge = opened.pop()
            yield Interval(now, max(now, end), charge.row)
            now = max(now, end)
        outer = opened[-1][1] if opened else ELSEWHERE
        if opened:
            yield Interval(now, event["ts"], outer.row)
        now = event["ts"]
        charge = _charge(event, outer, of_attention)
        charges[event.get("args", {}).get("External id", -1)] = charge
        opened.append((event["ts"] + event["dur"], charge))
    while opened:
        end, charge = opened.pop()
        yield Interval(now, max(now, end), charge.row)
        now = max(now, end)


def _charge(event: Event, outer: Charge, of_attention: set[int]) -> Charge:
    """What the time in an event is charged to, inside of what is charged to `outer`."""
    name: str = event["name"]
    if outer.is_final:
        return outer
    if event["cat"] == "user_annotation":
        if name.startswith(WAIT):
            row = COMMUNICATION.get(name.removeprefix(WAIT), REST)
            return Charge(row, row, is_final=True)
        if name.startswith("FSDP::"):  # ZeRO-3: torch's fully_shard, which waits and copies in ranges of its own
            return Charge(COMMUNICATION["dp"], COMMUNICATION["dp"], is_final=True)
        return IN_HOOKS if _is_step(event) else IN_RANGE.get(name, outer)
    if name.startswith("autograd::engine::evaluate_function"):
        return Charge(outer.row, ATTENTION) if _sequence_number(event) in of_attention else outer
    if name.startswith(COMPILED):
        return Charge(outer.operators or OTHER, outer.operators)
    if "::" not in name or name.startswith(NO_OPERATORS):
        return outer
    row = outer.operators or _row_of_operator(name)
    return Charge(row, None if row == OTHER else row, is_final=row != OTHER)


def _row_of_operator(name: str) -> str:
    if any(part in name for part in ATTENTION_NAMES):
        return ATTENTION
    return MATRIX if name in MATRIX_OPERATORS else OTHER


def _of_device(
    events: Iterable[Event], charges: Mapping[int, Charge], timeline: Sequence[Interval]
) -> Iterable[Interval]:
    """Timeline of the GPU, where the trace has one: that of the host counts where no kernel runs."""
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        return timeline
    calls = {event["args"].get("External id"): event for event in events if event.get("name") == "record_param_comms"}
    intervals = [
        Interval(interval.start, interval.end, interval.row if interval.row in (DATA, HOOKS) else HOST)
        for interval in timeline
    ]
    for kernel in kernels:
        number = kernel.get("args", {}).get("External id")
        described = {**calls.get(number, {}).get("args", {}), **kernel.get("args", {})}
        row = _row_of_kernel(kernel["name"].lower(), described, charges.get(number, ELSEWHERE))
        intervals.append(Interval(kernel["ts"], kernel["ts"] + kernel["dur"], row))
    return _uppermost(intervals)


def _row_of_kernel(name: str, described: Mapping[str, Any], charge: Charge) -> str:
    if name.startswith("nccl"):
        axis = described.get("Process Group Description", "")
        is_receive = axis in LINES and "recv" in str(described.get("Collective name", ""))
        return BUBBLE if is_receive or charge.row == BUBBLE else COMMUNICATION.get(axis, REST)
    if charge.row in (MATRIX, ATTENTION, OPTIMIZER):
        return charge.row
    if charge.operators is not None and not charge.is_final:
        return charge.operators
    if any(part in name for part in ATTENTION_NAMES):
        return ATTENTION
    return MATRIX if any(part in name for part in MATRIX_KERNELS) else OTHER


def _uppermost(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """At each moment, of the intervals that cover it, the one whose row is first in `ROWS`."""
    changes = [(each.start, 1, each.row) for each in intervals] + [(each.end, -1, each.row) for each in intervals]
    active: Counter[str] = Counter()
    for (time, change, row), (following, _, _) in pairwise(sorted(changes)):
        active[row] += change
        if following > time and (uppermost := next((row for row in ROWS if active[row]), None)):
            yield Interval(time, following, uppermost)


def _color(row: str) -> tuple[float, float, float] | str:
    reds = list(dict.fromkeys([*COMMUNICATION.values()]))
    if row in reds:
        return 0.95 - 0.12 * reds.index(row), 0.25, 0.25
    others = [each for each in ROWS if each not in reds]
    return f"C{[0, 2, 9, 4, 1, 7, 6, 5, 8][others.index(row)]}"


ENDING = ".trace.json.gz"
SECONDS_OF_TIMES = 1e-6  # those of a trace
MEANINGS = {
    MATRIX: "linear layers, experts, logits",
    ATTENTION: "scores, softmax, values",
    OTHER: "norms, activations, dropout, loss, copies",
    OPTIMIZER: "clipping, update",
    **dict.fromkeys(COMMUNICATION.values(), "waiting for other ranks, nothing computed meanwhile"),
    REST: "sums over all ranks",
    BUBBLE: "waiting for another stage to compute and send",
    DATA: "waiting for the batch",
    HOST: "Python, launches, recording",
    HOOKS: "log and other hooks, between steps",
}
BAR = 20  # characters of a whole step


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step of a rank by row; rows without time are left out."""

    step: int
    rows: dict[str, float]

    @property
    def seconds(self) -> float:
        """Whole time of the step, the hooks before and after it included."""
        return sum(self.rows.values())


@dataclass(frozen=True)
class Breakdown:
    """Where the recorded steps of a rank went."""

    rank: int
    steps: list[StepTimes]

    @classmethod
    def of_trace(cls, path: Path, *, rank: int) -> "Breakdown":
        """Read a file that torch's profiler has written."""
        with gzip.open(path, "rt") as file:
            events: list[Event] = json.load(file)["traceEvents"]
        return cls.of_events(events, rank=rank)

    @classmethod
    def of_events(cls, events: Sequence[Event], *, rank: int) -> "Breakdown":
        """Add up the intervals of each step."""
        steps = []
        for name, intervals in step_intervals(events).items():
            rows = dict.fromkeys(ROWS, 0.0)
            for interval in intervals:
                rows[interval.row] += (interval.end - interval.start) * SECONDS_OF_TIMES
            steps.append(StepTimes(int(name.removeprefix("step ")), {row: time for row, time in rows.items() if time}))
        return cls(rank, sorted(steps, key=lambda each: each.step))

    @property
    def mean(self) -> dict[str, float]:
        """Seconds of each row, the mean of the steps, in the order of `ROWS`."""
        means = {row: sum(step.rows.get(row, 0.0) for step in self.steps) / len(self.steps) for row in ROWS}
        return {row: mean for row, mean in means.items() if mean}

    def table(self) -> list[str]:
        """Lines for a reader: time, share, row, what is in it."""
        return list(self._lines())

    def _lines(self) -> Iterator[str]:
        mean = self.mean
        total = sum(mean.values())
        width = max(map(len, mean))
        several = f", the mean of {len(self.steps)}" if len(self.steps) > 1 else ""
        yield f" where a step of rank {self.rank} went: {1000 * total:.2f} ms{several}"
        for row, time in mean.items():
            bar = "#" * round(BAR * time / total)
            yield f"  {1000 * time:9.2f} ms  {time / total:6.1%}  {row:{width}}  {bar:{BAR}}  {MEANINGS[row]}"

    def write(self, path: Path) -> None:
        """Write all steps, and their mean, in seconds, as JSON."""
        steps = [{**asdict(step), "seconds": step.seconds} for step in self.steps]
        path.write_text(json.dumps({"rank": self.rank, "mean": self.mean, "steps": steps}, indent=1) + "\n")


# Bar chart of where the recorded steps of a rank went: a bar for each step, cut into the rows of its breakdown.
MOST_BARS = 20  # the first steps


def plot_breakdown(breakdown: Breakdown, path: Path) -> Path:
    """Draw the chart; returns its path. Communication is red, other rows have colours of their own."""
    from matplotlib.figure import Figure  # which takes a second to import

    steps = breakdown.steps[:MOST_BARS]
    figure = Figure(figsize=(9, 2.2 + 0.35 * len(steps)), layout="constrained")
    axes = figure.subplots()
    begin = [0.0] * len(steps)
    for row in breakdown.mean:
        times = [1000 * step.rows.get(row, 0.0) for step in steps]
        axes.barh([str(step.step) for step in steps], times, left=begin, label=row, color=_color(row))
        begin = [start + time for start, time in zip(begin, times, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", ylabel="step", title=f"where the steps of rank {breakdown.rank} went")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return write_figure(figure, path)
