"""Forecast of a run: what its step time and memory are expected to be when it starts, from its config alone."""

from dataclasses import replace
from typing import Any

from megatronish.config.config import Config
from megatronish.core.errors import UserError
from megatronish.estimate.costs.candidate import candidate_of
from megatronish.estimate.costs.traffic import by_axis, expected_traffic, why_no_traffic
from megatronish.estimate.planner.device_speed import Efficiencies, known_error, reservations, unconfirmed
from megatronish.estimate.planner.devices import device_of, find_device
from megatronish.estimate.planner.exact import exact_step, fullest_stage
from megatronish.estimate.planner.step_time import StepClock
from megatronish.estimate.planner.workload import StageLayers, Workload
from megatronish.parallel.stages import stage_loads
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
    figures: dict[str, Any] = {
        "layout": f"{candidate.mesh_text}, {candidate.choices_text}",
        "global_batch_size": config.global_batch_size,
        "memory": {"stage": fullest.stage, "bytes": fullest.memory.total, "by_owner": fullest.owners},
        **_traffic(config, vocab_size),
    }
    given = config.log.forecast_device
    device = find_device(given) if given is not None else device_of(device_name)
    if device is None:
        return figures | {
            "no_time": f"{device_name} is not calibrated; megatronish plan --probe and --calibrate measure it, and "
            "--forecast-device names the result"
        }
    if (lack := device.lacks(config.training.precision)) is not None:
        return figures | {"no_time": lack}
    if gpus_per_node is not None:
        device = replace(device, gpus_per_node=gpus_per_node)
    work = Workload.of(config, vocab_size)
    clock = StepClock(work, device, Efficiencies())
    step = exact_step(clock, candidate, StageLayers.of(work, config.parallel), config)
    error = known_error(device, config.model)
    low, high = error.interval(step.low, step.high, unconfirmed(candidate.schedule, candidate.mesh.pp))
    return figures | {
        "step_seconds": {
            "low": low,
            "high": high,
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
    first = stage_loads(config, vocab_size)[0]
    return {"traffic": by_axis(expected_traffic(config, first, 0, vocab_size=vocab_size))}


def refuse_unknown_device(config: Config) -> None:
    """UserError if --forecast-device names no device."""
    if config.log.forecast_device is not None:
        try:
            find_device(config.log.forecast_device)
        except UserError as error:
            raise UserError(str(error).replace("--device", "--forecast-device")) from error
