"""DeepSpeed's ds_config.json as settings of this project: its keys, section by section, and what becomes of each."""

from collections.abc import Mapping
from typing import Any

from megatronish.compat.importers.deepspeed_optimizer import OPTIMIZER_SWITCHES, optimizer
from megatronish.compat.importers.deepspeed_scheduler import SCHEDULER_SWITCHES, scheduler
from megatronish.compat.importers.deepspeed_sparse import sparse_attention
from megatronish.compat.importers.imported import (
    AUTO,
    NO_SUCH_RECORD,
    NOT_THERE,
    SPEED,
    Imported,
    Rule,
    apply,
    dropped,
    field,
    missed,
)
from megatronish.compat.importers.values import (
    AUTO_TOO,
    Switches,
    number,
    number_or_auto,
    section,
    settled,
    switches_of,
    text,
)
from megatronish.config.fields import FIELDS
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown


def from_deepspeed(values: Mapping[str, Any], *, dp: int | None = None) -> Imported:
    """Settings of a ds_config.json; `dp` is the data-parallel size, where the batch follows from it."""
    # 1. Switches; and keys whose value alone decides. Sections, and numbers that belong together, are read by functions
    # of their own.
    imported, values = Imported(), settled(values, SWITCHES)
    inner = ("optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "activation_checkpointing", "compile")
    others = (
        *(*inner, "bfloat16", "torch_autocast", "tensorboard", "wandb", "tensor_parallel"),
        *("gradient_accumulation_steps", "gradient_allreduce_op", "sparse_attention"),
    )
    if str(values.get("steps_per_print")).lower() in ("inf", "infinity"):  # as files for Accelerate have it
        values.pop("steps_per_print")
        imported.leave_out("steps_per_print", "it never prints; --log-interval says how seldom this does")
    apply(imported, {key: value for key, value in values.items() if key not in others}, TOP)
    # 2. The order counts: the batch needs the sizes above, and the scheduler replaces the optimizer's learning rate.
    _batch(imported, values, dp)
    optimizer(imported, section(values, "optimizer"))
    scheduler(imported, section(values, "scheduler"))
    _precision(imported, values)
    _autocast(imported, section(values, "torch_autocast"))
    _zero(imported, section(values, "zero_optimization"))
    _activations(imported, section(values, "activation_checkpointing"))
    sparse_attention(imported, section(values, "sparse_attention"))
    _compile(imported, section(values, "compile"))
    _records(imported, values)
    if "context_parallel_size" in imported.settings and imported.settings["context_parallel_size"] > 1:
        imported.set("cp_comm_type", "a2a")  # DeepSpeed's Ulysses
    if "tensor_parallel" in values:
        sizes = {"autotp_size": field("tensor_model_parallel_size")}
        apply(imported, section(values, "tensor_parallel"), sizes, within="tensor_parallel.")
    if text(values, "gradient_allreduce_op", "mean").lower() != "mean":
        imported.warn("gradient_allreduce_op", "gradients are the mean over all ranks, and not their sum")
    # 3. Last, when all is set that the file says: absence means something else there than here.
    _absent(imported, values)
    return imported


def _absent(found: Imported, values: Mapping[str, Any]) -> None:
    """What a key that is not there means in DeepSpeed, where it means something else here; "auto" says nothing."""
    # "auto" is no absence: the program that starts the run fills it in, so no default of DeepSpeed's may take its
    # place.
    if values.get("gradient_clipping") is None:
        found.set_default("clip_grad", 1.0)
        found.warn("gradient_clipping", OLDER_CLIPPING)
    zero = section(values, "zero_optimization")
    if zero.get("stage") != "auto":
        found.set_default("zero_stage", 0)
    asked = [section(values, key).get("enabled") for key in ("fp16", _bf16(values), "torch_autocast")]
    if "auto" not in asked and True not in asked:
        found.set_default("bf16", False)
    # Only the optimizers of ZeRO have the count of overflows: without ZeRO every overflow halves the scale.
    if found.settings.get("zero_stage") == 0 and found.settings.get("hysteresis", 1) != 1:
        found.set("hysteresis", 1)
        if section(values, "fp16").get("hysteresis") is not None:
            found.leave_out(
                "fp16.hysteresis", "DeepSpeed does not read it without ZeRO; every overflow halves the scale"
            )
    if "optimizer" not in found.settings and not values.get("optimizer"):
        found.leave_out(
            "optimizer", "there is none in the file; the program makes its own: give --optimizer, --lr, ..."
        )


def _batch(found: Imported, values: Mapping[str, Any], dp: int | None) -> None:
    """Global batch and micro-batch; of three numbers that belong together each follows from the others and dp."""
    key = "gradient_accumulation_steps"
    # 1. Global batch = micro-batch x accumulation steps x dp. A number that is "auto" is None here, as one that is
    # absent.
    steps, micro, batch = (
        number_or_auto(values, key),
        found.settings.get("micro_batch_size"),
        found.settings.get("global_batch_size"),
    )
    for name, size in ((key, steps), ("train_micro_batch_size_per_gpu", micro), ("train_batch_size", batch)):
        if size is not None and (size < 1 or not float(size).is_integer()):
            raise UserError(f"{name}={size:.15g} must be a whole number of at least 1; correct the file")
    # Without dp this much can be checked: the batch must be micro x steps x some whole number of ranks.
    if micro and batch and batch % (micro * (steps or 1)):
        times = f" times {key}={steps:.15g}, {micro * steps:.15g}" if steps else ""
        raise UserError(
            f"train_batch_size={batch} must be a multiple of train_micro_batch_size_per_gpu={micro}{times}; correct "
            "the file, or remove one of them"
        )
    if steps is None and key in values:
        found.leave_out(key, "use --global-batch-size, from which it follows")
    # 2. With "auto" for the accumulation steps, neither of the other two can be derived.
    if values.get(key) == "auto":
        return
    # 3. One of the two sizes is missing and follows from the other; without dp it cannot, or only for one rank.
    if batch is not None and micro is None and values.get("train_micro_batch_size_per_gpu") != "auto":
        if dp is None:
            found.leave_out(
                "train_micro_batch_size_per_gpu",
                "it follows from the data-parallel size: give --dp, or --micro-batch-size",
            )
        elif batch % ((steps or 1) * dp):
            raise UserError(
                f"train_batch_size={batch} must be a multiple of gradient_accumulation_steps={steps or 1:.15g} times "
                f"--dp {dp}, {(steps or 1) * dp:.15g}; correct the file, or import with another --dp"
            )
        else:
            found.set("micro_batch_size", int(batch // ((steps or 1) * dp)))
    elif batch is None and micro is not None and values.get("train_batch_size") != "auto":
        times = "train_micro_batch_size_per_gpu times gradient_accumulation_steps times --dp"
        found.set("global_batch_size", int(micro * (steps or 1) * (dp or 1)), key=times)
        if dp is None:
            found.leave_out(key, OF_ONE_RANK)
    elif steps is not None and (batch is None or micro is None):
        found.leave_out(key, "--global-batch-size is --micro-batch-size times this times the data-parallel size (--dp)")


def _compile(found: Imported, values: Mapping[str, Any]) -> None:
    """torch.compile is on if one of two keys says so; everything else in there chooses how."""
    if values.get("enabled") or values.get("deepcompile"):
        found.set("compile", True)
    for key in values.keys() - {"enabled", "deepcompile"}:
        found.leave_out(f"compile.{key}", "layers are always compiled by inductor")


def _bf16(values: Mapping[str, Any]) -> str:
    """Name of the section of bf16: the older one is read where the newer one is not there."""
    return "bfloat16" if values.get("bf16") is None else "bf16"


def _precision(found: Imported, values: Mapping[str, Any]) -> None:
    # 1. bf16.
    bf16 = section(values, _bf16(values))
    apply(found, bf16, BF16, within=f"{_bf16(values)}.")
    fp16 = section(values, "fp16")
    if not fp16:
        return
    if fp16.get("enabled") not in (True, "auto"):
        return  # the other settings of fp16 say nothing
    # 2. fp16. A loss_scale of 0 asks for a dynamic one, whose start is a power of two.
    power = number_or_auto(fp16, "initial_scale_power", within="fp16.")
    rest = {key: value for key, value in fp16.items() if key != "initial_scale_power"}
    if rest.get("loss_scale") in (0, 0.0):  # dynamic
        rest.pop("loss_scale")
    apply(found, rest, FP16, within="fp16.")
    # 3. A static scale follows no rule; else the rule has DeepSpeed's defaults.
    if "loss_scale" in found.settings:
        return
    if power is not None and not -60 <= power <= 120:
        raise UserError(f"fp16.initial_scale_power={power:.15g} must be between -60 and 120; correct the file")
    if fp16.get("initial_scale_power") == "auto":
        found.leave_out("fp16.initial_scale_power", f"{AUTO}, as --initial-loss-scale, 2 to this power")
    else:
        found.set("initial_loss_scale", 2.0 ** (16 if power is None else power))
    for name, value in FP16_DEFAULTS.items():
        if fp16.get(name) != "auto":
            found.set_default(name, value)


def _autocast(found: Imported, values: Mapping[str, Any]) -> None:
    """torch's autocast, whose weights are in fp32, as the masters are here."""
    if values.get("enabled") == "auto":
        found.leave_out("torch_autocast.enabled", f"{AUTO}, as --bf16 or --fp16")
    if values.get("enabled") is not True:
        return
    kind = text(values, "dtype", within="torch_autocast.").removeprefix("torch.")
    if kind in ("bfloat16", "bf16"):
        found.set("bf16", True)
    elif kind in ("float16", "fp16", "half"):
        found.set_grad_scaler()
    else:
        found.warn("torch_autocast.dtype", f"{kind or 'none'} is not there; add --bf16 or --fp16")
    rest = values.keys() - {"enabled", "dtype"}
    for key in sorted(rest):
        found.leave_out(f"torch_autocast.{key}", "which operators are in low precision is fixed")


def _zero(found: Imported, values: Mapping[str, Any]) -> None:
    # Offloading has sections of its own, which name a device, and of NVMe a folder: here all of it has one folder.
    offload = {"offload_optimizer": "optimizer_cpu_offload", "offload_param": "param_cpu_offload"}
    others = {key: value for key, value in values.items() if key not in (*offload, HPZ, *CODES)}
    apply(found, others, ZERO, within="zero_optimization.")
    for key, name in offload.items():
        within = f"zero_optimization.{key}."
        options = section(values, key, within="zero_optimization.")
        device = text(options, "device", "none", within=within)
        apply(found, {each: value for each, value in options.items() if each not in ON_DEVICE}, OFFLOAD, within=within)
        if device in ("cpu", "nvme"):
            found.set(name, True)
        elif device != "none":
            found.leave_out(
                f"zero_optimization.{key}", f"{shown(device)} is not there; {FIELDS[name].flag} uses the CPU's memory"
            )
        if device == "nvme":
            _on_disk(found, options, within)
    # Of one rank, which is DeepSpeed's default, nothing is kept; and below stage 3 DeepSpeed does not read it.
    if values.get(HPZ) == "auto":
        found.leave_out(f"zero_optimization.{HPZ}", AUTO)
    elif (neighbours := number(values, HPZ, within="zero_optimization.")) is not None and neighbours != 1:
        if found.settings.get("zero_stage") == 3:
            found.set(HPZ, neighbours, key=f"zero_optimization.{HPZ}")
        else:
            found.leave_out(f"zero_optimization.{HPZ}", "it is for stage 3")
    for key, dtype in CODES.items():
        if values.get(key) and found.settings.get("zero_stage") == 3:
            found.set(key, dtype)
        elif values.get(key):
            found.leave_out(f"zero_optimization.{key}", "it is for stage 3")
    # Stage 0 shares nothing, so there is no share to offload, and the rules of the config would refuse the flags.
    if not found.settings.get("zero_stage"):
        for name in (*offload.values(), "offload_folder"):
            found.settings.pop(name, None)


def _on_disk(found: Imported, values: Mapping[str, Any], within: str) -> None:
    """The folder of what is offloaded to NVMe. The rest of the section says how the disk is asked, or how often."""
    path, key = text(values, "nvme_path", within=within), f"{within}nvme_path"
    if not path:
        found.leave_out(key, "there is none in the file; name a local disk with --offload-folder")
    elif (other := found.settings.get("offload_folder", path)) != path:
        found.leave_out(key, f"one folder holds all that is offloaded: {other}")
    else:
        found.set("offload_folder", path, key=key)


def _activations(found: Imported, values: Mapping[str, Any]) -> None:
    rest = dict(values)
    if rest.pop("cpu_checkpointing", False) is True:
        found.set("recompute_granularity", "full")
        found.set("offload_saved_activations", True)
    said = {key: value for key, value in rest.items() if value is not False}
    apply(found, said, ACTIVATIONS, within="activation_checkpointing.")


def _records(found: Imported, values: Mapping[str, Any]) -> None:
    board, wandb = section(values, "tensorboard"), section(values, "wandb")
    if board.get("enabled"):
        names = {"output_path": field("tensorboard_dir"), "job_name": NO_SUCH_RECORD}
        apply(found, {key: value for key, value in board.items() if key != "enabled"}, names, within="tensorboard.")
    if wandb.get("enabled"):
        names = {"project": field("wandb_project"), "team": field("wandb_entity"), "group": NO_SUCH_RECORD}
        apply(found, {key: value for key, value in wandb.items() if key != "enabled"}, names, within="wandb.")


LOGGED = dropped("the time of a step, throughput and memory are always logged")

TOP: dict[str, Rule] = {
    "train_batch_size": field("global_batch_size"),
    "train_micro_batch_size_per_gpu": field("micro_batch_size"),
    "gradient_clipping": field("clip_grad"),
    "steps_per_print": field("log_interval"),
    "sequence_parallel_size": field("context_parallel_size"),
    "wall_clock_breakdown": LOGGED,
    "memory_breakdown": LOGGED,
    "dump_state": LOGGED,
    "comms_logger": LOGGED,
    "csv_monitor": dropped("metrics.jsonl in the run folder has every number"),
    "flops_profiler": dropped("throughput in TFLOP/s is always logged"),
    "prescale_gradients": SPEED,
    "gradient_predivide_factor": SPEED,
    "sparse_gradients": SPEED,
    "disable_allgather": SPEED,
    "aio": SPEED,
    "autotuning": SPEED,
    "use_node_local_storage": SPEED,
    "zero_allow_untested_optimizer": dropped("every optimizer works with every stage"),
    "zero_force_ds_cpu_optimizer": dropped("there is one optimizer on the CPU"),
    "checkpoint": dropped("every checkpoint loads in every layout"),
    "amp": missed("Apex's is not there, and without another precision this trains in fp32; use --bf16 or --fp16"),
    "elasticity": dropped("a run resumes on any number of ranks, with the same --global-batch-size"),
    "compression_training": NOT_THERE,
    "curriculum_learning": NOT_THERE,
    "data_efficiency": NOT_THERE,
    "progressive_layer_drop": NOT_THERE,
    "eigenvalue": NO_SUCH_RECORD,
    "quantize_training": NOT_THERE,
    "pipeline": dropped("use --pipeline-model-parallel-size and --pipeline-schedule"),
    "data_types": dropped("gradients are accumulated in fp32"),
    "communication_data_type": dropped("gradients are reduced in fp32; --grad-reduce-in-bf16 with --bf16 halves that"),
}

OLDER_CLIPPING = "none given is 1.0 since DeepSpeed 0.19.3, and no clipping before: for that add --clip-grad 0"
OF_ONE_RANK = "the global batch above is that of one data-parallel rank; import again with --dp N for N of them"

BF16: dict[str, Rule] = {
    "enabled": field("bf16"),
    "immediate_grad_update": SPEED,
    "check_grad_overflow": dropped("gradients are always checked"),
    "bf16_master_weights_and_grads": dropped("master weights and gradients are in fp32, more exactly"),
    "bf16_optimizer_states": dropped("optimizer states are in fp32, more exactly"),
}

FP16: dict[str, Rule] = {
    "enabled": field("fp16"),
    "loss_scale": field("loss_scale"),
    "loss_scale_window": field("loss_scale_window"),
    "hysteresis": field("hysteresis"),
    "min_loss_scale": field("min_loss_scale"),
    "auto_cast": dropped("inputs are cast where a layer computes"),
    "consecutive_hysteresis": NOT_THERE,
    "fp16_master_weights_and_grads": dropped("master weights and gradients are in fp32, more exactly"),
}

FP16_DEFAULTS = {"loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1.0}

HPZ = "zero_hpz_partition_size"  # there and here, as are:
CODES = {"zero_quantized_gradients": "int4", "zero_quantized_weights": "int8"}
"""Codes of ZeRO++ that DeepSpeed sends where these are true."""
ZERO: dict[str, Rule] = {
    "stage": field("zero_stage"),
    "overlap_comm": field("overlap_grad_reduce"),
    "reduce_bucket_size": field("ddp_bucket_size"),
    "cpu_offload": field("optimizer_cpu_offload"),
    "cpu_offload_param": field("param_cpu_offload"),
    "stage3_gather_16bit_weights_on_model_save": dropped("tools/convert_checkpoint.py writes whole weights"),
    "gather_16bit_weights_on_model_save": dropped("tools/convert_checkpoint.py writes whole weights"),
    "zero_quantized_nontrainable_weights": dropped("use --quantize-base int8, with adapters of a frozen base"),
    "mics_shard_size": dropped("use --num-distributed-optimizer-instances, the number of groups"),
    **dict.fromkeys(
        (
            *("allgather_partitions", "allgather_bucket_size", "reduce_scatter", "contiguous_gradients"),
            *("round_robin_gradients", "sub_group_size", "ignore_unused_parameters", "legacy_stage1"),
            *(
                "cpu_offload_use_pin_memory",
                "elastic_checkpoint",
                "load_from_fp32_weights",
                "use_multi_rank_bucket_allreduce",
            ),
            *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters"),
            *("stage3_max_reuse_distance", "stage3_model_persistence_threshold", "memory_efficient_linear"),
            *("mics_hierarchical_params_gather", "override_module_apply", "log_trace_cache_warnings"),
        ),
        SPEED,
    ),
}

ON_DEVICE = ("device", "nvme_path")
OFFLOAD: dict[str, Rule] = dict.fromkeys(
    (
        *("pin_memory", "buffer_count", "buffer_size", "fast_init", "max_in_cpu", "ratio", "pipeline_read"),
        *("pipeline_write", "super_offload", "cpuadam_cores_perc"),
    ),
    SPEED,
)
"""Options of what is offloaded, and those that say where it is."""

ACTIVATIONS: dict[str, Rule] = {
    "partition_activations": dropped("add --distribute-saved-activations, with --tp 2 or more"),
    "number_checkpoints": dropped("use --recompute-num-layers, the layers of one group"),
    "contiguous_memory_optimization": SPEED,
    "synchronize_checkpoint_boundary": SPEED,
    "profile": SPEED,
}

SWITCHES: Switches = {
    **dict.fromkeys(("bf16.enabled", "bfloat16.enabled", "fp16.enabled"), AUTO_TOO),
    **dict.fromkeys(("torch_autocast.enabled", "amp.enabled"), AUTO_TOO),
    "fp16.consecutive_hysteresis": (),
    **{f"optimizer.params.{key}": others for key, others in OPTIMIZER_SWITCHES.items()},
    **{f"scheduler.params.{key}": others for key, others in SCHEDULER_SWITCHES.items()},
    **switches_of(ZERO, within="zero_optimization.", others=AUTO_TOO),
    **dict.fromkeys((f"zero_optimization.{key}" for key in CODES), ()),
    **dict.fromkeys(("activation_checkpointing.cpu_checkpointing", "compile.enabled", "compile.deepcompile"), ()),
    **dict.fromkeys(("sparse_attention.different_layout_per_head", "tensorboard.enabled", "wandb.enabled"), ()),
    "sparse_attention.horizontal_global_attention": (),
    **{f"{key}.enabled": () for key, rule in TOP.items() if rule is NOT_THERE},
}
"""Switches of the whole file."""
