"""Forecast of a run: what its step time and memory are expected to be when it starts, from its config alone.

Its page has Markdown tables of what a run expected of itself and what it measured, from forecast.json.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatronish.config.config import Config
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown
from megatronish.estimate.costs.candidate import candidate_of
from megatronish.estimate.costs.memory_table import format_bytes
from megatronish.estimate.costs.traffic import by_axis, expected_traffic, why_no_traffic
from megatronish.estimate.planner.device_speed import Efficiencies, known_error, reservations
from megatronish.estimate.planner.devices import device_of, find_device
from megatronish.estimate.planner.exact import exact_step, fullest_stage
from megatronish.estimate.planner.step_time import StepClock
from megatronish.estimate.planner.workload import StageLayers, Workload
from megatronish.parallel.pipeline.stages import Stages
from megatronish.specs.costs import DeviceType


def forecast(
    config: Config, *, vocab_size: int, device_name: str, device_type: DeviceType, gpus_per_node: int | None = None
) -> dict[str, Any]:
    """{"layout", "step_seconds" or "no_time", "memory", "traffic" or "no_traffic"} of a run, in JSON's types.

    `step_seconds` has both ends of the interval, and whether the device was calibrated; `memory` is that of the fullest
    stage, by owner; `traffic` are the bytes of a step on a rank of the first stage, by axis and collective.
    """
    candidate = candidate_of(config)
    fullest = fullest_stage(config, vocab_size, device_type)
    found: dict[str, Any] = {
        "layout": f"{candidate.mesh_text}, {candidate.choices_text}",
        "global_batch_size": config.global_batch_size,
        "memory": {"stage": fullest.stage, "bytes": fullest.memory.total, "by_owner": fullest.owners},
        **_traffic(config, vocab_size),
    }
    given = config.log.forecast_device
    device = find_device(given) if given is not None else device_of(device_name)
    if device is None:
        return found | {
            "no_time": f"{device_name} is not calibrated; megatronish plan --probe and --calibrate measure it, and "
            "--forecast-device names the result"
        }
    if (lack := device.lacks(config.training.precision)) is not None:
        return found | {"no_time": lack}
    if gpus_per_node is not None:
        device = replace(device, gpus_per_node=gpus_per_node)
    work = Workload.of(config, vocab_size)
    clock = StepClock(work, device, Efficiencies())
    step = exact_step(clock, candidate, StageLayers.of(work, config.parallel), config)
    error = known_error(
        device=device.name,
        calibrated=device.calibrated is not None,
        has_experts=config.model.num_experts is not None,
    )
    return found | {
        "step_seconds": {
            "low": step.low * (1 - error.part),
            "high": step.high * (1 + error.part),
            "error": f"{error.part:.0%} either way: {error.reason}",
            "device": device.name,
            "calibrated": device.calibrated or "no: figures of data sheets",
            **({"reservations": notes} if (notes := reservations(config)) else {}),
        }
    }


def _traffic(config: Config, vocab_size: int) -> dict[str, Any]:
    """Bytes of a step on the main rank, by axis and collective, or why they are not known."""
    if (reason := why_no_traffic(config)) is not None:
        return {"no_traffic": reason}
    training = config.training
    stages = Stages.of(config.parallel, config.model, vocab_size=vocab_size, seq_length=training.seq_length)
    loads = stages.loads(config.global_batch_size // (training.micro_batch_size * config.layout.dp))
    return {"traffic": by_axis(expected_traffic(config, loads[0], 0, vocab_size=vocab_size))}


def refuse_unknown_device(config: Config) -> None:
    """UserError if --forecast-device names no device."""
    if config.log.forecast_device is not None:
        try:
            find_device(config.log.forecast_device)
        except UserError as error:
            raise UserError(str(error).replace("--device", "--forecast-device")) from error


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
