"""Page of a run's forecast: Markdown tables of what it expected of itself and what it measured, from forecast.json."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatronish.core.foreign import shown
from megatronish.estimate.costs.memory_table import format_bytes

Values = Mapping[str, Any]
LONGEST = 2000


def page(expected: Values, measured: Values) -> str:
    """The whole page; the arguments are the objects of these names in forecast.json.

    Names of devices and what is said of them are of files by others: each stays on its line, and in its cell.
    """
    return "\n".join(shown(line, most=LONGEST) for line in _page_lines(expected, measured)) + "\n"


def _page_lines(expected: Values, measured: Values) -> Iterator[str]:
    memory = expected["memory"]
    yield "# Expected and measured"
    yield ""
    yield f"{expected['layout']}; a step has {expected['global_batch_size']} samples; {measured['steps']} steps."
    yield ""
    peak = [format_bytes(memory["bytes"]), format_bytes(measured["peak_memory_bytes"])]
    # A CPU's memory is known of the whole process alone, of which the tensors are a part.
    alone = "process" in measured["memory_of"]
    peak[0] += " of tensors" if alone else ""
    rows = [_time_row(expected, measured["step_seconds"]), ("peak memory", *peak)]
    yield from _table(("", "expected", "measured"), rows)
    yield ""
    yield f"The memory expected is that of stage {memory['stage']}, the fullest; measured is that of"
    yield f"{measured['memory_of']}."
    yield from _about_time(expected)
    yield from ("", f"## Memory expected of stage {memory['stage']}", "")
    yield from _table(("owner", "bytes"), [(owner, format_bytes(size)) for owner, size in memory["by_owner"].items()])
    yield from ("", "## Bytes of a step on the main rank", "")
    yield from _traffic_lines(expected, measured)


def _time_row(expected: Values, seconds: float) -> tuple[str, str, str]:
    step = expected.get("step_seconds")
    if step is None:
        return "seconds a step", "not known", f"{seconds:.4g}"
    off = 2 * seconds / (step["low"] + step["high"]) - 1
    return "seconds a step", f"{step['low']:.4g} to {step['high']:.4g}", f"{seconds:.4g} ({off:+.0%})"


def _about_time(expected: Values) -> Iterator[str]:
    step = expected.get("step_seconds")
    if step is None:
        yield f"No time was expected: {expected['no_time']}."
        return
    yield f"Times are those of {step['device']}; calibrated: {step['calibrated']}. The interval is widened by"
    yield f"{step['error']}."
    for reservation in step.get("reservations", ()):
        yield f"Not confirmed by any measured step: {reservation}."


def _traffic_lines(expected: Values, measured: Values) -> Iterator[str]:
    if "traffic" not in expected:
        yield f"None were expected: {expected['no_traffic']}."
        return
    if "traffic" not in measured:
        yield "They were not counted: no step after the second one had a whole batch."
        return
    rows, tables = [], (expected["traffic"], measured["traffic"])
    for axis in sorted({axis for table in tables for axis in table}):
        of_axis = [table.get(axis, {}) for table in tables]
        for name in sorted({name for table in of_axis for name in table}):
            sizes = [table.get(name, 0) for table in of_axis]
            rows.append((axis, name, *(f"{size:,}" for size in sizes), "equal" if sizes[0] == sizes[1] else "differs"))
    yield from _table(("axis", "collective", "expected", "measured", ""), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |"
