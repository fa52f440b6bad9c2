"""Costs of a run's layout, from its config alone: parameters, FLOPs, memory, and what slow links and a disk move.

They are computed once when a run starts, and printed by report/first_lines.py. A feature that costs something adds its
figure here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatronish.config.config import Config
from megatronish.estimate.costs.disk_traffic import DiskTraffic, disk_traffic
from megatronish.estimate.costs.memory import bytes_of_uneven_load, expected_memory
from megatronish.estimate.costs.memory_table import Memory
from megatronish.estimate.costs.outer_traffic import bytes_to_islands
from megatronish.estimate.costs.parameters import num_active_parameters, num_parameters, parameters_of_stage
from megatronish.estimate.costs.traffic import why_no_traffic
from megatronish.parallel.schedules.live_activations import StageLoad
from megatronish.parallel.stages import stage_loads
from megatronish.specs.costs import DeviceType
from megatronish.specs.flops import model_flops_per_token
from megatronish.specs.layers import layer_specs


@dataclass(frozen=True)
class LayoutCosts:
    """Costs of one step in a layout.

    `loads`, `memory` (bytes on a device when most is held) and `stage_parameters` are of each pipeline stage.
    `uneven_bytes` are what a load of experts of once more the mean adds to the fullest device. `island_bytes` are sent
    to other islands by a device in an outer step (DiLoCo); None where formulas do not cover the run.
    """

    vocab_size: int
    parameters: int
    active_parameters: int  # those that a token passes
    model_flops: float
    loads: Sequence[StageLoad]
    memory: Sequence[Memory]
    stage_parameters: Sequence[int]
    uneven_bytes: int = 0
    island_bytes: int | None = 0
    disk: DiskTraffic = field(default_factory=DiskTraffic)

    @classmethod
    def of(cls, config: Config, *, vocab_size: int, device: DeviceType, kernels: bool) -> "LayoutCosts":
        """Costs of a config's layout on such a device, where fused operators run or do not."""
        model, training, parallel = config.model, config.training, config.parallel
        sizes = {"vocab_size": vocab_size, "seq_length": training.seq_length}
        loads, specs = stage_loads(config, vocab_size), layer_specs(model)
        island_bytes: int | None = 0
        if parallel.num_islands > 1:
            sent = [bytes_to_islands(config, load, stage, vocab_size=vocab_size) for stage, load in enumerate(loads)]
            island_bytes = max(sent) if why_no_traffic(config) is None else None
        uneven_bytes = 0
        if model.num_experts is not None and parallel.expert_layout.ep > 1:
            uneven_bytes = bytes_of_uneven_load(config, loads, vocab_size=vocab_size, device=device)
        flops_per_token = model_flops_per_token(
            model, vocab_size=vocab_size, seq_length=training.seq_length, is_frozen=config.adapter.is_used
        )
        return cls(
            vocab_size=vocab_size,
            parameters=num_parameters(model, **sizes),
            active_parameters=num_active_parameters(model, **sizes),
            model_flops=config.global_batch_size * training.seq_length * flops_per_token,
            loads=loads,
            memory=expected_memory(config, loads, vocab_size=vocab_size, device=device, kernels=kernels),
            stage_parameters=[
                parameters_of_stage(
                    model,
                    [specs[layer] for layer in load.all_layers],
                    **sizes,
                    is_first=load.is_first,
                    is_last=load.is_last,
                ).total
                for load in loads
            ],
            uneven_bytes=uneven_bytes,
            island_bytes=island_bytes,
            disk=disk_traffic(config),
        )


def memory_of_stages(
    config: Config, *, vocab_size: int, device: DeviceType = "cuda", kernels: bool = True
) -> list[Memory]:
    """Bytes on a device of each stage of a config's layout: what `LayoutCosts.memory` has, without the other costs."""
    loads = stage_loads(config, vocab_size)
    return expected_memory(config, loads, vocab_size=vocab_size, device=device, kernels=kernels)
