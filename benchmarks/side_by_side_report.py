"""Report of the comparison: a table for each case, in the terminal and in docs/BENCHMARKS.md, and a bar chart."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BEGIN, END = "<!-- side by side: begin -->", "<!-- side by side: end -->"
ALWAYS = ("plain loop", "megatronish")
"""Contestants in every table."""
CHART = "pictures/side_by_side.png"
LAYOUTS = {
    "one": "one process",
    "dp2": "two processes, dp 2",
    "tp2": "two processes, tp 2",
    "pp2": "two processes, pp 2, 8 micro-batches",
}
SIZES = {
    "tiny": "tiny",
    "small": "6 layers, hidden 256, sequence 256, vocabulary 8192",
    "gpt2-124m": "GPT-2 124M, sequence 256",
}
NUMBERS = {"fp32": "fp32", "bf16": "bf16", "dropout": "fp32, dropout 0.1"}
HEADINGS = ("", "tokens/s", "ratio to the plain loop", "peak memory", "of the matrix-product peak", "losses within")


class Spread(NamedTuple):
    """Median of some values, and the limits of their middle half."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of at least one value."""
        ordered, quarter = sorted(values), len(values) // 4
        return cls(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter])


class Line(NamedTuple):
    """One contestant of one case, as it is shown."""

    name: str
    failure: str | None
    speed: Spread | None = None
    ratio: Spread | None = None
    peak_bytes: int = 0
    part_of_peak: float = 0.0
    loss_difference: float = 0.0

    @property
    def cells(self) -> list[str]:
        """Cells of the table, under HEADINGS."""
        if self.failure is not None or self.speed is None or self.ratio is None:
            return [self.name, self.failure or "not measured", "", "", "", ""]
        speed, ratio = self.speed, self.ratio
        return [
            self.name,
            f"{speed.median:,.0f} ({speed.low:,.0f} to {speed.high:,.0f})",
            f"**{ratio.median:.2f}** ({ratio.low:.2f} to {ratio.high:.2f})",
            f"{self.peak_bytes / 2**30:.2f} GiB",
            f"{self.part_of_peak:.0%}" if self.part_of_peak else "",
            f"{self.loss_difference:.0e}",
        ]


def lines_of(record: Mapping[str, Any]) -> list[Line]:
    """The contestants of a record. A ratio is that of two steps of one round."""
    baseline, *_ = record["rows"]
    return [_line(record, row, baseline) for row in record["rows"]]


def _line(record: Mapping[str, Any], row: Mapping[str, Any], baseline: Mapping[str, Any]) -> Line:
    if row["failure"] is not None or not row["seconds"]:
        return Line(row["name"], row["failure"])
    seconds = row["seconds"]
    peak = record["products_flops_per_second"]
    differences = [abs(a - b) / abs(b) for a, b in zip(row["losses"], baseline["losses"], strict=True)]
    return Line(
        row["name"],
        None,
        Spread.of([record["tokens"] / each for each in seconds]),
        Spread.of([theirs / ours for theirs, ours in zip(baseline["seconds"], seconds, strict=True)]),
        row["peak_bytes"],
        record["flops"] / statistics.median(seconds) / peak if peak else 0.0,
        max(differences),
    )


def title_of(record: Mapping[str, Any]) -> str:
    """Heading of a case."""
    case = record["case"]
    return f"{LAYOUTS[case['layout']]}: {SIZES[case['size']]}, {NUMBERS[case['numbers']]}"


def facts_of(record: Mapping[str, Any]) -> str:
    """Date, machine and conditions of a case."""
    steps, rate = len(record["rows"][0]["seconds"]), record["products_flops_per_second"] / 1e9
    threads = f"{record['threads']} threads" if record["threads"] != 1 else "1 thread"
    processes = "" if record["case"]["layout"] == "one" else "; two processes with one thread each"
    return (
        f"{record['date']}, commit {record['commit']}, {record['machine']}, torch {record['torch']}, load "
        f"{record['load']:.1f}; {record['parameters']:,} parameters, {record['tokens']:,} tokens a step, "
        f"{steps} steps; one process with {threads}{processes}; matrix products {rate:.0f} GFLOP/s"
    )


def print_record(record: Mapping[str, Any]) -> None:
    """The table of a case in the terminal."""
    rows = [list(HEADINGS), *(line.cells for line in lines_of(record))]
    measured = [row for row in rows if any(row[2:])]
    widths = [max(len(row[column]) for row in measured) for column in range(len(HEADINGS))]
    print(f"\n{title_of(record)}\n{facts_of(record)}")
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def markdown_of(record: Mapping[str, Any], lines: Sequence[Line]) -> Iterator[str]:
    """The table of a case in docs/BENCHMARKS.md."""
    yield from (f"**{title_of(record)[0].upper()}{title_of(record)[1:]}**", "")
    yield "| " + " | ".join(HEADINGS) + " |"
    yield "|" + "---|" * len(HEADINGS)
    for line in lines:
        yield "| " + " | ".join(line.cells) + " |"
    yield from ("", f"{facts_of(record)}.", "")


class Table(NamedTuple):
    """Contestants of one run: all of the newest run of a case, and of earlier ones those that later ones lack."""

    record: Mapping[str, Any]
    lines: Sequence[Line]
    is_newest: bool


def tables_of(results: Path) -> list[Table]:
    """The tables of each case, newest first. Rows of different runs stand in no table together.

    Of an earlier run, or one on another machine, the plain loop and megatronish are shown beside what only it measured.
    """
    cases: dict[str, list[dict[str, Any]]] = {}
    for text in results.read_text(encoding="utf-8").splitlines():
        record = json.loads(text)
        cases.setdefault(json.dumps(record["case"]), []).append(record)
    return [table for records in cases.values() for table in _of_case(records[::-1])]


def _of_case(newest_first: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    seen: dict[str, set[str]] = {}  # names of contestants by machine
    for record in newest_first:
        known, lines = seen.get(record["machine"]), lines_of(record)
        new = {line.name for line in lines} - (known or set())
        if known is None or new:
            kept = [line for line in lines if line.name in new or line.name in ALWAYS]
            yield Table(record, kept, is_newest=not seen)
        seen.setdefault(record["machine"], set()).update(new)


def write_report(results: Path, docs: Path) -> None:
    """Put the tables between the marks of BENCHMARKS.md, and draw the chart."""
    if not results.exists():
        raise SystemExit(f"there are no results in {results}; measure some first: make bench")
    tables, page = tables_of(results), docs / "BENCHMARKS.md"
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    picture = f"![tokens per second of every contestant]({CHART})"
    parts = ["", picture, "", *_markdown([table for table in tables if table.is_newest])]
    if earlier := [table for table in tables if not table.is_newest]:
        parts += ["### Earlier runs, and other machines", "", *_markdown(earlier)]
    page.write_text("\n".join([before + BEGIN, *parts, END + after]), encoding="utf-8")
    draw([(table.record, table.lines) for table in tables if table.is_newest or _has_peers(table)], docs / CHART)


def _markdown(tables: Sequence[Table]) -> Iterator[str]:
    for table in tables:
        yield from markdown_of(table.record, table.lines)


def _has_peers(table: Table) -> bool:
    """Whether it shows what is neither the plain loop nor megatronish."""
    return any(not line.name.startswith(ALWAYS) for line in table.lines)


def draw(cases: Sequence[tuple[Mapping[str, Any], Sequence[Line]]], path: Path) -> None:
    """A group of bars for each case: the ratio to the plain loop with its middle half."""
    from matplotlib.figure import Figure  # late: measuring needs no picture

    measured = [(record, [line for line in lines if line.ratio is not None]) for record, lines in cases]
    heights = [len(lines) + 1.8 for _, lines in measured]
    figure = Figure(figsize=(9, 0.24 * sum(heights) + 0.4), layout="constrained")
    several = figure.subplots(len(measured), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (record, lines) in zip(several, measured, strict=True):
        ratios = [line.ratio for line in lines if line.ratio is not None]
        errors = [[each.median - each.low for each in ratios], [each.high - each.median for each in ratios]]
        colours = ["#4a7fcb" if line.name.startswith("megatronish") else "#b7b7b7" for line in lines]
        axes.barh(
            [line.name for line in lines], [each.median for each in ratios], xerr=errors, color=colours, height=0.8
        )
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_title(f"{title_of(record)}\n{record['machine']}", fontsize=8, loc="left")
        axes.tick_params(labelsize=8)
        axes.invert_yaxis()
    several[-1].set_xlabel("tokens/s, as a multiple of the plain loop on one process in the same run")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=80)
