"""Page of the GPU report in Markdown, from what its parts have measured: aims first, then the tables."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
Report = Mapping[str, Any]

PLAIN, OURS, COMPILED = "plain, compiled", "megatronish", "megatronish --compile"
MFU_MODEL, LEAST_MFU = "1.3b", 0.45
LEAST_OF_COPY = {"forward": 0.85, "backward": 0.75}
LEAST_OF_COPY_CROSS_ENTROPY = 0.80
COPIED = ("softmax", "norm", "cross entropy")  # operations that are held against a copy
NEVER_SLOWER, COMPILE_CELL = "kernels: never slower than torch.compile", 7
HEAD = (
    "model",
    "layers",
    "B x S",
    "a step",
    "contender",
    "ms a step",
    "tokens/s",
    "of plain",
    "TFLOP/s",
    "MFU",
    "of data sheet",
)
MEMORY_HEAD = ("model", "a step", "contender", "peak GiB", "expected GiB", "peak / expected")


class Aim(NamedTuple):
    """An aim, what was found, and whether that meets it; None where nothing was found."""

    text: str
    found: str
    is_met: bool | None


def page(report: Report) -> str:
    """The whole report."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    about = report["circumstances"]
    memory = f", {about['memory_gib']:.0f} GiB" if about["memory_gib"] else ""
    yield "# GPU report"
    yield ""
    yield f"{about['date']}, {about['device']}{memory}, torch {about['torch']}, CUDA {about['cuda']}, Python"
    yield f"{about['python']}, commit {about['commit']}, load average {about['load']:.1f}."
    if report["is_trial"]:
        yield ""
        yield "**A trial of the report itself, at tiny sizes: its numbers mean nothing.**"
    if about["not_here"]:
        yield from ("", *(f"- {line}" for line in about["not_here"]))
    yield from _section("Aims", ("aim", "found", ""), [(a.text, a.found, _verdict(a)) for a in aims(report)])
    rows: Sequence[Row] = report["sweep"]
    yield from _section("Training, bf16, one device", HEAD, [sweep_cells(row) for row in rows])
    yield ""
    yield "A step has so many micro-batches of B x S. It is the median of up to 20, with the middle half, each in turns"
    yield "with one of the plain loop, which *of plain* is against; the loss of each is read on the host. MFU is model"
    yield "FLOPs (causal attention once, nothing computed twice) over a bf16 matrix product of 8192 x 8192 x 8192"
    yield "measured in the same process; the last column has the maker's peak in its place."
    yield from _section("Memory", MEMORY_HEAD, [cells for row in rows if (cells := memory_cells(row))])
    for row in rows:
        if row.get("where"):
            yield from _block(f"Where a step of {row['contender']} goes, {row['model']}", row["where"])
    tables = [_table_in(part["output"]) for part in report["parts"] if _is_of_kernels(part)]
    if any(tables):
        head = next(table[:2] for table in tables if table)
        yield from (
            "",
            "## Kernels, against a copy in the same run",
            "",
            *head,
            *(row for each in tables for row in each[2:]),
        )
    parts = [(each["name"], each["status"], f"{each['seconds']:.0f} s") for each in report["parts"]]
    yield from _section("Parts", ("part", "status", "time"), parts)
    for part in report["parts"]:
        if part["status"] != "done" or part["name"].startswith("tests"):
            yield from _block(f"End of {part['name']}: {part['status']}", part["output"].splitlines()[-15:])


def aims(report: Report) -> list[Aim]:
    """Every aim with what was found. A trial meets and misses none."""
    rows: Sequence[Row] = [] if report["is_trial"] else report["sweep"]
    parts: Sequence[Row] = [] if report["is_trial"] else report["parts"]
    of_model = [row for row in rows if row["model"] == MFU_MODEL and _is_ours(row) and "error" not in row]
    best = max(of_model, key=mfu, default=None)
    return [
        Aim(
            f"MFU of at least {LEAST_MFU:.0%} at {MFU_MODEL.upper()}, bf16",
            "not measured" if best is None else f"{mfu(best):.1%} ({best['contender']})",
            None if best is None else mfu(best) >= LEAST_MFU,
        ),
        plain_aim(rows, parts),
        *kernel_aims(parts),
    ]


def plain_aim(rows: Sequence[Row], parts: Sequence[Row]) -> Aim:
    """Compiled megatronish against the compiled plain loop, in every model that a part was for; eager ones are told.

    A model that we cannot train and the plain loop can is a miss; one without either number is not measured.
    """
    named = [part["name"].removeprefix("sweep ") for part in parts if part["name"].startswith("sweep ")]
    told, met = [], []
    for model in dict.fromkeys([*(row["model"] for row in rows), *named]):
        counts = dict.fromkeys(row["micro_batches"] for row in rows if row["model"] == model) or {None: None}
        for count in counts:
            of_step = [row for row in rows if row["model"] == model and row["micro_batches"] == count]
            text, is_met = _against_plain(of_step)
            told.append(f"{model}{'' if count is None else f' x {count}'} {text}")
            met.append(is_met)
    text = f"{COMPILED}: never below the plain compiled loop"
    return Aim(text, ", ".join(told) or "not measured", _all_of(met))


def _against_plain(rows: Sequence[Row]) -> tuple[str, bool | None]:
    """What is told of ours, of one model and number of micro-batches, and whether the compiled one meets the aim."""
    has_plain = any(row["contender"] == PLAIN and "error" not in row for row in rows)
    texts, is_met = [], None
    for contender in (COMPILED, OURS):
        row = next((each for each in rows if each["contender"] == contender), None)
        share, failed = None if row is None else of_plain(row), row is not None and "error" in row
        texts.append("failed" if failed else "not measured" if share is None else f"{share:.2f}")
        if contender == COMPILED:
            is_met = False if failed and has_plain else None if share is None else share >= 1
    return f"{texts[0]} (eager {texts[1]})", is_met


def kernel_aims(parts: Sequence[Row]) -> Iterator[Aim]:
    """Bandwidth of the kernels against a copy, and their time against torch.compile: the least of each group.

    Where the part did not come to its end, what it has measured can miss an aim and not meet it.
    """
    parts = [part for part in parts if _is_of_kernels(part)]
    ended = all(part["status"] == "done" for part in parts)
    shares: dict[tuple[str, float], list[float]] = {}
    for cells in (line.strip("| ").split(" | ") for part in parts for line in _table_in(part["output"])[2:]):
        operation, direction, share = cells[0], cells[2], cells[5]
        if "cross entropy" in operation:
            shares.setdefault(("cross entropy", LEAST_OF_COPY_CROSS_ENTROPY), []).append(_percent(share))
        elif any(each in operation for each in COPIED):
            shares.setdefault((f"norms and softmax, {direction}", LEAST_OF_COPY[direction]), []).append(_percent(share))
        if len(cells) > COMPILE_CELL and cells[COMPILE_CELL].startswith("x "):
            shares.setdefault((NEVER_SLOWER, 1.0), []).append(float(cells[COMPILE_CELL].removeprefix("x ")))
    wanted = [(f"norms and softmax, {name}", least) for name, least in LEAST_OF_COPY.items()]
    for name, least in (*wanted, ("cross entropy", LEAST_OF_COPY_CROSS_ENTROPY), (NEVER_SLOWER, 1.0)):
        text, of = f"{name}: at least {least:.0%} of a copy's bandwidth", shares.get((name, least))
        if name == NEVER_SLOWER:
            text, told = (
                name,
                "" if not of else f"x {min(of):.2f} to x {max(of):.2f}, median x {statistics.median(of):.2f}",
            )
        else:
            told = "" if not of else f"{min(of):.0%} to {max(of):.0%}, median {statistics.median(of):.0%}"
        if of and not ended:
            told += f"; the part did not end well, and {len(of)} rows are all there are"
        is_met = None if not of else min(of) >= least
        yield Aim(text, told or "not measured", None if is_met and not ended else is_met)


def _all_of(met: Sequence[bool | None]) -> bool | None:
    """Whether an aim of several is met: missed if one is missed, and not measured if one of them is not."""
    return False if False in met else None if not met or None in met else True


def sweep_cells(row: Row) -> tuple[str, ...]:
    """A contender's cells of the table of speed."""
    shape = row["shape"]
    sizes = f"{shape['micro_batch_size']} x {shape['seq_length']}"
    begin = (row["model"], str(shape["num_layers"]), sizes, f"x {row['micro_batches']}", row["contender"])
    if "error" in row:
        return (*begin, row["error"].replace("|", "/"), *["-"] * 5)
    seconds = sorted(row["seconds"])
    middle = f"{1e3 * seconds[len(seconds) // 4]:.1f} to {1e3 * seconds[-1 - len(seconds) // 4]:.1f}"
    share = of_plain(row)
    rate, sheet = tokens_per_second(row) * row["flops_per_token"], row["data_sheet_tflops"]
    return (
        *begin,
        f"{1e3 * statistics.median(seconds):.1f} ({middle})",
        f"{tokens_per_second(row):,.0f}",
        "-" if share is None else f"{share:.2f}",
        f"{rate / 1e12:.1f}",
        f"{mfu(row):.1%}",
        "-" if sheet is None else f"{rate / 1e12 / sheet:.1%}",
    )


def memory_cells(row: Row) -> tuple[str, ...] | None:
    """A contender's cells of the table of memory; None without numbers."""
    if "error" in row:
        return None
    peak, expected = row["peak_bytes"], row["expected_bytes"]
    told = ["-" if size is None else f"{size / 2**30:.2f}" for size in (peak, expected)]
    return (
        row["model"],
        f"x {row['micro_batches']}",
        row["contender"],
        *told,
        f"{peak / expected:.2f}" if peak and expected else "-",
    )


def tokens_per_second(row: Row) -> float:
    """Tokens of a step over the median step."""
    tokens: int = row["shape"]["micro_batch_size"] * row["shape"]["seq_length"] * row["micro_batches"]
    return tokens / statistics.median(row["seconds"])


def of_plain(row: Row) -> float | None:
    """A contender's speed over that of the plain loop in the same rounds; None without numbers."""
    if "error" in row or not row["plain_seconds"]:
        return None
    return statistics.median(row["plain_seconds"]) / statistics.median(row["seconds"])


def mfu(row: Row) -> float:
    """Model FLOPs over those of a matrix product in the same process; 0 for a contender that failed."""
    rate: float = 0.0 if "error" in row else tokens_per_second(row) * row["flops_per_token"] / row["product_flops"]
    return rate


def _is_of_kernels(part: Row) -> bool:
    name: str = part["name"]
    return name.startswith("kernels")


def _is_ours(row: Row) -> bool:
    contender: str = row["contender"]
    return contender.startswith(OURS)


def _verdict(aim: Aim) -> str:
    return "not measured" if aim.is_met is None else "met" if aim.is_met else "**missed**"


def _percent(text: str) -> float:
    return float(text.rstrip("%")) / 100


def _table_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("|")]


def _block(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "```", *lines, "```")


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cells)} |"
