"""Rules on ZeRO: what ranks of dp and cp share, copies of the shares, and offloading."""

from megatronish.config.config import Config
from megatronish.config.fields import one_of
from megatronish.config.rules.rule import MESH, ConfigRule
from megatronish.parallel.schedules.table import SCHEDULES

_ZERO = ("zero_stage", "use_distributed_optimizer")
_SCHEDULE = ("pipeline_schedule", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


def _zero(config: Config) -> str | None:
    parallel = config.parallel
    stage, schedule = parallel.zero, parallel.schedule
    if parallel.use_distributed_optimizer and parallel.zero_stage == 0:
        return "use_distributed_optimizer=true is ZeRO-1 and contradicts zero_stage=0; leave one of them out"
    if stage >= 2 and SCHEDULES[schedule].has_weight_gradients:
        return (
            f"zero_stage={stage} exchanges gradients after every backward, but pipeline_schedule={schedule} computes "
            "those of weights later; use --zero-stage 1, or --pipeline-schedule 1f1b"
        )
    return None


def _copies(config: Config) -> str | None:
    copies, dp, cp = config.parallel.num_distributed_optimizer_instances, config.layout.dp, config.layout.cp
    setting = f"num_distributed_optimizer_instances={copies}"
    if copies > 1 and config.parallel.zero == 0:
        return f"{setting} groups of ranks share nothing with zero_stage=0; add --zero-stage 1, 2 or 3, or leave it out"
    if dp * cp % copies == 0:
        return None
    sizes = [size for size in range(1, dp * cp + 1) if dp * cp % size == 0]
    return (
        f"{setting} must divide data_parallel_size={dp} x context_parallel_size={cp} = {dp * cp}, as groups are of one "
        f"size; use --num-distributed-optimizer-instances {one_of(sizes)}"
    )


def _offload(config: Config) -> str | None:
    parallel = config.parallel
    if parallel.param_cpu_offload and parallel.zero < 3:
        return (
            f"param_cpu_offload keeps shares of parameters in the CPU's memory, and zero_stage={parallel.zero} shares "
            "no parameters; add --zero-stage 3, or leave it out"
        )
    if parallel.optimizer_cpu_offload and parallel.zero == 0:
        return (
            "optimizer_cpu_offload lets the CPU of each rank step its share, and zero_stage=0 shares nothing; "
            "add --zero-stage 1, 2 or 3, or leave it out"
        )
    return None


RULES = (
    ConfigRule((*_ZERO, *_SCHEDULE), _zero),
    ConfigRule((*_ZERO, *MESH, "num_distributed_optimizer_instances"), _copies),
    ConfigRule((*_ZERO, "optimizer_cpu_offload", "param_cpu_offload"), _offload),
)
