"""Accelerate's default_config.yaml as settings of this project: where and how a program runs, not what it trains."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatronish.compat.importers.axolotl import fsdp
from megatronish.compat.importers.axolotl_data import is_file
from megatronish.compat.importers.deepspeed import from_deepspeed
from megatronish.compat.importers.imported import (
    Imported,
    Rule,
    apply,
    dropped,
    field,
    is_on,
    number,
    read_object,
    section,
    text,
    whole,
)
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown

PLACE = dropped("ranks are started by torchrun, srun, or by the command itself (docs/MANY_MACHINES.md)")
TPU = dropped("there are GPUs and CPUs")
SPEED = dropped("it changes speed and memory alone")
LAUNCHED = dropped("it is about starting the program")

TOP: dict[str, Rule] = {
    **dict.fromkeys(
        (
            *("num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"),
            *("rdzv_conf", "gpu_ids", "mpirun_config", "deepspeed_hostfile", "monitor_interval", "max_restarts"),
        ),
        PLACE,
    ),
    **dict.fromkeys(("compute_environment", "main_training_function", "debug", "commands", "command_file"), LAUNCHED),
    **dict.fromkeys(("tpu_env", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "downcast_bf16"), TPU),
    **dict.fromkeys(("enable_cpu_affinity", "ipex_config", "fp8_config"), SPEED),
}
PARALLELISM: dict[str, Rule] = {
    "tp_size": field("tensor_model_parallel_size"),
    "cp_size": field("context_parallel_size"),
    "sp_size": field("context_parallel_size"),
    "dp_replicate_size": field("num_distributed_optimizer_instances"),
    "dp_shard_size": dropped("the other ranks of dp share"),
    "cp_comm_strategy": SPEED,
}
MEGATRON: dict[str, Rule] = {
    "tp_degree": field("tensor_model_parallel_size"),
    "pp_degree": field("pipeline_model_parallel_size"),
    "gradient_clipping": field("clip_grad"),
    "sequence_parallelism": field("sequence_parallel"),
    "use_distributed_optimizer": field("use_distributed_optimizer"),
    "num_micro_batches": dropped("--global-batch-size is this times --micro-batch-size times the data-parallel size"),
}
_SECTIONS = (
    *("fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config", "dynamo_config"),
    *("distributed_type", "mixed_precision", "num_processes", "use_cpu", "gradient_accumulation_steps"),
)
PROGRAM = "it is in your program: give --lr, --lr-decay-style, --weight-decay, --train-iters or --num-epochs, the data"


def from_accelerate(values: Mapping[str, Any], *, folder: Path, dp: int | None = None) -> Imported:
    """Settings of a default_config.yaml in `folder`; `dp` is the data-parallel size, else from num_processes."""
    found = Imported()
    kind = text(values, "distributed_type", "NO").upper()
    apply(found, {key: value for key, value in values.items() if key not in _SECTIONS}, TOP)
    _precision(found, values)
    if kind == "DEEPSPEED":
        _deepspeed(found, section(values, "deepspeed_config"), folder, dp)
    elif kind == "FSDP":
        fsdp(found, "", section(values, "fsdp_config"))
    elif kind == "MEGATRON_LM":
        _megatron(found, section(values, "megatron_lm_config"))
    elif kind == "XLA" or kind == "TPU":
        raise UserError(f"distributed_type={kind} is not there: there are GPUs and CPUs; import another config")
    else:
        found.set("zero_stage", 0)
    rest = section(values, "parallelism_config")
    apply(
        found,
        {key.removeprefix("parallelism_config_"): each for key, each in rest.items()},
        PARALLELISM,
        within="parallelism_config.",
    )
    if is_on(values.get("use_cpu")) or kind == "MULTI_CPU":
        found.set("device", "cpu")
    backend = text(section(values, "dynamo_config"), "dynamo_backend", "NO").upper()
    if backend != "NO":
        found.set("compile", True)
    _ranks(found, values, dp)
    found.leave_out("optimizer, learning rate, data", PROGRAM)
    return found


def _precision(found: Imported, values: Mapping[str, Any]) -> None:
    """mixed_precision; there is none where it is absent."""
    kind = values.get("mixed_precision")
    kind = "no" if kind in (None, "", False) else str(kind)  # YAML reads no as False
    if kind == "fp8":
        found.warn("mixed_precision", "fp8 is not there; this trains in bf16, more exactly")
    elif kind not in ("no", "bf16", "fp16"):
        raise UserError(f"mixed_precision={shown(kind)} must be no, fp16, bf16 or fp8; correct the file")
    found.set("bf16", kind in ("bf16", "fp8"))
    if kind == "fp16":
        found.set_grad_scaler()


def _deepspeed(found: Imported, config: dict[str, Any], folder: Path, dp: int | None) -> None:
    """DeepSpeed: its own file, or the few keys that Accelerate makes one of, with Accelerate's defaults."""
    if name := text(config, "deepspeed_config_file"):
        path = next((each for each in (Path(name), folder / name) if is_file(each)), Path(name))
        other = from_deepspeed(read_object(path, is_yaml=False), dp=dp)
        found.settings |= other.settings
        found.left_out |= {f"{path.name}: {key}": reason for key, reason in other.left_out.items()}
        found.otherwise |= {f"{path.name}: {key}": reason for key, reason in other.otherwise.items()}
        return
    stage = number(config, "zero_stage")
    zero: dict[str, Any] = {"stage": 2 if stage is None else whole(stage, "deepspeed_config.zero_stage")}
    for key in ("offload_optimizer", "offload_param"):
        device = text(config, f"{key}_device", "none")
        if device.lower() != "none":
            zero[key] = {"device": device}
    shared = from_deepspeed({"zero_optimization": zero})
    kept = ("zero_stage", "optimizer_cpu_offload", "param_cpu_offload")
    found.settings |= {key: shared.settings[key] for key in kept if key in shared.settings}
    found.left_out |= {key: each for key, each in shared.left_out.items() if key.startswith("zero_optimization")}
    clip = config.get("gradient_clipping")
    if clip in (None, "none", "auto"):
        found.leave_out("deepspeed_config.gradient_clipping", "the program says it: --clip-grad, 0 for none")
    else:
        found.set("clip_grad", number(config, "gradient_clipping"))
    steps = config.get("gradient_accumulation_steps")
    if steps not in (None, 1, "auto"):
        found.leave_out(
            "deepspeed_config.gradient_accumulation_steps",
            f"{shown(steps)}: --global-batch-size is --micro-batch-size times this times the data-parallel size",
        )
    read = ("zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping")
    rest = {key: each for key, each in config.items() if key not in (*read, "gradient_accumulation_steps")}
    apply(found, rest, dict.fromkeys(rest, SPEED), within="deepspeed_config.")


def _megatron(found: Imported, config: dict[str, Any]) -> None:
    """Megatron-LM, with the defaults of Accelerate's plug-in for it."""
    rest = {key.removeprefix("megatron_lm_"): each for key, each in config.items()}
    if is_on(rest.pop("recompute_activations", False)):
        found.set("recompute_granularity", "selective")
    values = {
        key: number(rest, key) if isinstance(each, str) and key.endswith(("degree", "clipping")) else each
        for key, each in rest.items()
    }
    apply(found, values, MEGATRON, within="megatron_lm_config.")
    for name, value in {"clip_grad": 1.0, "use_distributed_optimizer": False}.items():
        found.set_default(name, value)


def _ranks(found: Imported, values: Mapping[str, Any], dp: int | None) -> None:
    """Data-parallel size: all processes over those of one copy of the model; one process where nothing is said."""
    processes = number(values, "num_processes")
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    copy = 1
    for name in names:
        copy *= found.settings.get(name, 1)
    ranks = 1 if processes is None else whole(processes, "num_processes")
    if dp is None and (ranks < 1 or copy < 1 or ranks % copy):
        raise UserError(
            f"num_processes={ranks} must be a multiple of the ranks of one copy of the model, {copy}; correct the file"
        )
    found.set("data_parallel_size", ranks // copy if dp is None else dp)
    steps = number(values, "gradient_accumulation_steps")
    if steps is not None and steps != 1:
        found.leave_out(
            "gradient_accumulation_steps",
            f"{steps:g}: --global-batch-size is --micro-batch-size times this times the data-parallel size",
        )
