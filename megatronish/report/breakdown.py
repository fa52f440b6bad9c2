"""Breakdown of recorded steps: the time of each row of timeline.py, as a table, a file of JSON and a bar chart."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure

from megatronish.core.figures import write_figure
from megatronish.parallel.ranges import ATTENTION, BUBBLE, DATA, OPTIMIZER
from megatronish.report.timeline import COMMUNICATION, HOOKS, HOST, MATRIX, OTHER, REST, ROWS, Event, step_intervals


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
            for each in intervals:
                rows[each.row] += (each.end - each.start) * SECONDS_OF_TIMES
            steps.append(StepTimes(int(name.removeprefix("step ")), {row: time for row, time in rows.items() if time}))
        return cls(rank, sorted(steps, key=lambda each: each.step))

    @property
    def mean(self) -> dict[str, float]:
        """Seconds of each row, the mean of the steps, in the order of `ROWS`."""
        means = {row: sum(each.rows.get(row, 0.0) for each in self.steps) / len(self.steps) for row in ROWS}
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
        steps = [{**asdict(each), "seconds": each.seconds} for each in self.steps]
        path.write_text(json.dumps({"rank": self.rank, "mean": self.mean, "steps": steps}, indent=1) + "\n")


# Bar chart of where the recorded steps of a rank went: a bar for each step, cut into the rows of its breakdown.


MOST_BARS = 20  # the first steps


def plot_breakdown(breakdown: Breakdown, path: Path) -> Path:
    """Draw the chart; returns its path. Communication is red, other rows have colours of their own."""
    steps = breakdown.steps[:MOST_BARS]
    figure = Figure(figsize=(9, 2.2 + 0.35 * len(steps)), layout="constrained")
    axes = figure.subplots()
    begin = [0.0] * len(steps)
    for row in breakdown.mean:
        times = [1000 * each.rows.get(row, 0.0) for each in steps]
        axes.barh([str(each.step) for each in steps], times, left=begin, label=row, color=_color(row))
        begin = [start + time for start, time in zip(begin, times, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", ylabel="step", title=f"where the steps of rank {breakdown.rank} went")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return write_figure(figure, path)
