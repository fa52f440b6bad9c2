"""DeepSpeed's ds_config.json as settings of this project."""

from collections.abc import Mapping
from typing import Any

from megatronish.config.fields import FIELDS
from megatronish.config.importers.imported import AUTO, Imported, Rule, apply, dropped, field, number, section
from megatronish.errors import UserError

_SPEED = dropped("it changes speed and memory alone")
_EXACT = dropped("rounding that saves messages is not there; the exact numbers are sent")
_LOGGED = dropped("the time of a step, throughput and memory are always logged")
_NOT_THERE = dropped("it is not there")

TOP: dict[str, Rule] = {
    "train_batch_size": field("global_batch_size"),
    "train_micro_batch_size_per_gpu": field("micro_batch_size"),
    "gradient_clipping": field("clip_grad"),
    "steps_per_print": field("log_interval"),
    "sequence_parallel_size": field("context_parallel_size"),
    "wall_clock_breakdown": _LOGGED,
    "memory_breakdown": _LOGGED,
    "dump_state": _LOGGED,
    "comms_logger": _LOGGED,
    "csv_monitor": dropped("metrics.jsonl in the run folder has every number"),
    "flops_profiler": dropped("throughput in TFLOP/s is always logged"),
    "prescale_gradients": _SPEED,
    "gradient_predivide_factor": _SPEED,
    "sparse_gradients": _SPEED,
    "disable_allgather": _SPEED,
    "aio": _SPEED,
    "autotuning": _SPEED,
    "compile": _SPEED,
    "use_node_local_storage": _SPEED,
    "zero_allow_untested_optimizer": dropped("every optimizer works with every stage"),
    "zero_force_ds_cpu_optimizer": dropped("there is one optimizer on the CPU"),
    "checkpoint": dropped("every checkpoint loads in every layout"),
    "amp": dropped("use --bf16 or --fp16"),
    "elasticity": dropped("a run resumes on any number of ranks, with the same --global-batch-size"),
    "compression_training": _NOT_THERE,
    "curriculum_learning": _NOT_THERE,
    "data_efficiency": _NOT_THERE,
    "sparse_attention": _NOT_THERE,
    "progressive_layer_drop": _NOT_THERE,
    "eigenvalue": _NOT_THERE,
    "quantize_training": _NOT_THERE,
    "pipeline": dropped("use --pipeline-model-parallel-size and --pipeline-schedule"),
    "data_types": dropped("gradients are accumulated in fp32"),
    "communication_data_type": dropped("gradients are reduced in fp32; --grad-reduce-in-bf16 with --bf16 halves that"),
}

ADAM: dict[str, Rule] = {
    "lr": field("lr"),
    "eps": field("adam_eps"),
    "weight_decay": field("weight_decay"),
    "momentum": field("sgd_momentum"),
    "torch_adam": dropped("there is one implementation"),
    "bias_correction": dropped("Adam always corrects its bias"),
    "freeze_step": _EXACT,
    "amsgrad": _NOT_THERE,
    "nesterov": _NOT_THERE,
}
OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam"), "adam"),
    **{"sgd": "sgd", "muon": "muon"},
}

SCHEDULER_FLAGS = {
    "warmup_num_steps": "--lr-warmup-iters",
    "warmup_max_lr": "--lr",
    "warmup_min_lr": "--lr-warmup-init",
    "warmup_min_ratio": "--lr-warmup-init",
    "cos_min_ratio": "--min-lr",
    "total_num_steps": "--lr-decay-iters",
}
"""Flags to give where a parameter of the scheduler is "auto"."""

DEFAULT_WARMUP_STEPS = 1000
DEFAULT_PEAK = 0.001
"""What DeepSpeed's documentation says of a scheduler that does not name its warmup_num_steps, or warmup_max_lr."""

FP16: dict[str, Rule] = {
    "enabled": field("fp16"),
    "loss_scale": field("loss_scale"),
    "loss_scale_window": field("loss_scale_window"),
    "hysteresis": field("hysteresis"),
    "min_loss_scale": field("min_loss_scale"),
    "auto_cast": dropped("inputs are cast where a layer computes"),
    "consecutive_hysteresis": _NOT_THERE,
    "fp16_master_weights_and_grads": dropped("master weights and gradients are in fp32, more exactly"),
}

ZERO: dict[str, Rule] = {
    "stage": field("zero_stage"),
    "overlap_comm": field("overlap_grad_reduce"),
    "reduce_bucket_size": field("ddp_bucket_size"),
    "cpu_offload": field("optimizer_cpu_offload"),
    "stage3_gather_16bit_weights_on_model_save": dropped("tools/convert_checkpoint.py writes whole weights"),
    "gather_16bit_weights_on_model_save": dropped("tools/convert_checkpoint.py writes whole weights"),
    "zero_quantized_weights": _EXACT,
    "zero_quantized_nontrainable_weights": _EXACT,
    "zero_quantized_gradients": _EXACT,
    "mics_shard_size": dropped("use --num-distributed-optimizer-instances, the number of groups"),
    **dict.fromkeys(
        (
            *("allgather_partitions", "allgather_bucket_size", "reduce_scatter", "contiguous_gradients"),
            *("round_robin_gradients", "sub_group_size", "ignore_unused_parameters", "legacy_stage1"),
            *(
                "elastic_checkpoint",
                "load_from_fp32_weights",
                "zero_hpz_partition_size",
                "use_multi_rank_bucket_allreduce",
            ),
            *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters"),
            *("stage3_max_reuse_distance", "stage3_model_persistence_threshold", "memory_efficient_linear"),
            *("mics_hierarchical_params_gather", "override_module_apply", "log_trace_cache_warnings"),
        ),
        _SPEED,
    ),
}

ACTIVATIONS: dict[str, Rule] = {
    "partition_activations": dropped("add --distribute-saved-activations, with --tp 2 or more"),
    "number_checkpoints": dropped("use --recompute-num-layers, the layers of one group"),
    "contiguous_memory_optimization": _SPEED,
    "synchronize_checkpoint_boundary": _SPEED,
    "profile": _SPEED,
}


def from_deepspeed(values: Mapping[str, Any], *, dp: int | None = None) -> Imported:
    """Settings of a ds_config.json; `dp` is the data-parallel size, where the batch follows from it."""
    found = Imported()
    inner = ("optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "activation_checkpointing")
    others = (*inner, "bfloat16", "tensorboard", "wandb", "tensor_parallel", "gradient_accumulation_steps")
    apply(found, {key: value for key, value in values.items() if key not in others}, TOP)
    _batch(found, values, dp)
    _optimizer(found, section(values, "optimizer"))
    _scheduler(found, section(values, "scheduler"))
    _precision(found, values)
    _zero(found, section(values, "zero_optimization"))
    _activations(found, section(values, "activation_checkpointing"))
    _records(found, values)
    if "context_parallel_size" in found.settings and found.settings["context_parallel_size"] > 1:
        found.set("cp_comm_type", "a2a")  # DeepSpeed's Ulysses
    if "tensor_parallel" in values:
        apply(found, section(values, "tensor_parallel"), {"autotp_size": field("tensor_model_parallel_size")})
    if "clip_grad" not in found.settings and values.get("gradient_clipping") != "auto":
        found.set("clip_grad", 0.0)  # DeepSpeed's default: no clipping
    return found


def _batch(found: Imported, values: Mapping[str, Any], dp: int | None) -> None:
    steps, key = number(values, "gradient_accumulation_steps"), "gradient_accumulation_steps"
    micro, batch = found.settings.get("micro_batch_size"), found.settings.get("global_batch_size")
    if steps and micro and batch and batch % (micro * steps):
        raise UserError(
            f"train_batch_size={batch} must be a multiple of train_micro_batch_size_per_gpu={micro} times "
            f"gradient_accumulation_steps={steps:g}, {micro * steps:g}; correct the file, or remove one of the three"
        )
    if steps is None:
        if key in values:
            found.leave_out(key, "use --global-batch-size, from which it follows")
    elif batch is not None and micro is None and dp is not None:
        found.set("micro_batch_size", max(1, int(batch // (steps * dp))))
    elif batch is None and micro is not None and dp is not None:
        found.set("global_batch_size", int(micro * steps * dp))
    elif batch is None or micro is None:
        found.leave_out(key, "--global-batch-size is --micro-batch-size times this times the data-parallel size (--dp)")


def _optimizer(found: Imported, values: Mapping[str, Any]) -> None:
    if not values:
        return
    kind, params = str(values.get("type", "")), dict(section(values, "params"))
    ours = OPTIMIZERS.get(kind.lower())
    if ours is None:
        found.leave_out("optimizer.type", f"{kind} is not there; there are adam (AdamW), sgd and muon, for --optimizer")
    else:
        found.set("optimizer", ours)
    if ours in ("adam", "sgd") and params.get("weight_decay") is None:
        found.set("weight_decay", _default_weight_decay(kind.lower(), params))
    if params.pop("adam_w_mode", True) is False:
        found.leave_out("optimizer.params.adam_w_mode", "adam is AdamW: weight decay is decoupled")
    betas = params.pop("betas", None)
    if isinstance(betas, list) and len(betas) == 2:
        found.set("adam_beta1", betas[0])
        found.set("adam_beta2", betas[1])
    elif betas is not None:
        found.leave_out("optimizer.params.betas", "use --adam-beta1 and --adam-beta2")
    apply(found, params, ADAM, within="optimizer.params.")


def _default_weight_decay(kind: str, params: Mapping[str, Any]) -> float:
    """Weight decay of an optimizer that names none: 0, except for PyTorch's own AdamW."""
    is_adamw = kind == "adamw" or (kind == "adam" and params.get("adam_w_mode", True) is not False)
    return 0.01 if is_adamw and params.get("torch_adam") is True else 0.0


def _scheduler(found: Imported, values: Mapping[str, Any]) -> None:
    if not values:
        return
    kind, params = values.get("type"), section(values, "params")
    style = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}.get(str(kind))
    if style is None:
        found.leave_out("scheduler", f"{kind} is not there; use --lr-decay-style constant, linear, cosine or WSD")
        return
    found.set("lr_decay_style", style)
    for key, value in params.items():
        if value == "auto":
            flag = SCHEDULER_FLAGS.get(key)
            found.leave_out(f"scheduler.params.{key}", f"{AUTO}, as {flag}" if flag else AUTO)
    _peak(found, params, style)
    total = number(params, "total_num_steps")
    if params.get("warmup_num_steps") != "auto":
        warmup = number(params, "warmup_num_steps")
        found.set("lr_warmup_iters", DEFAULT_WARMUP_STEPS if warmup is None else int(warmup))
        if params.get("warmup_type", "log") == "log":
            found.leave_out("scheduler.params.warmup_type", "log, DeepSpeed's default, is not there: warm-up is linear")
    if total is not None:
        found.set("train_iters", int(total))
    elif style != "constant" and "total_num_steps" not in params:
        found.leave_out("scheduler.params.total_num_steps", "give --train-iters")
    start = number(params, "warmup_min_lr")
    if start:
        found.set("lr_warmup_init", start)
    peak = found.settings.get("lr")
    if style == "cosine" and peak is not None:
        least, first = number(params, "cos_min_ratio"), number(params, "warmup_min_ratio")
        if params.get("cos_min_ratio") != "auto":
            found.set("min_lr", peak * (0.0001 if least is None else least))
        if first:
            found.set("lr_warmup_init", peak * first)


def _peak(found: Imported, params: Mapping[str, Any], style: str) -> None:
    """The learning rate after warm-up, by which DeepSpeed's schedulers except the cosine replace the optimizer's."""
    peak = number(params, "warmup_max_lr")
    if peak is None and style != "cosine" and "warmup_max_lr" not in params:
        peak = DEFAULT_PEAK
        if found.settings.get("lr", peak) != peak:
            found.leave_out(
                "optimizer.params.lr", f"the scheduler replaces it by its warmup_max_lr, by default {peak:g}"
            )
    if peak is not None:
        found.set("lr", peak)


def _precision(found: Imported, values: Mapping[str, Any]) -> None:
    bf16 = section(values, "bf16") or section(values, "bfloat16")
    if bf16:
        apply(found, {"enabled": bf16.get("enabled")}, {"enabled": field("bf16")}, within="bf16.")
        rest = {key: value for key, value in bf16.items() if key != "enabled"}
        apply(found, rest, dict.fromkeys(rest, _SPEED), within="bf16.")
    fp16 = section(values, "fp16")
    if not fp16:
        return
    if fp16.get("enabled") not in (True, "auto"):
        return  # the other settings of fp16 say nothing
    power, rest = number(fp16, "initial_scale_power"), {k: v for k, v in fp16.items() if k != "initial_scale_power"}
    if rest.get("loss_scale") in (0, 0.0):  # dynamic
        rest.pop("loss_scale")
    apply(found, rest, FP16, within="fp16.")
    if "loss_scale" not in found.settings:
        found.set("initial_loss_scale", 2.0 ** (16 if power is None else power))


def _zero(found: Imported, values: Mapping[str, Any]) -> None:
    offload = {"offload_optimizer": "optimizer_cpu_offload", "offload_param": "param_cpu_offload"}
    apply(found, {k: v for k, v in values.items() if k not in offload}, ZERO, within="zero_optimization.")
    for key, name in offload.items():
        device = section(values, key).get("device", "none")
        if device == "cpu":
            found.set(name, True)
        elif device != "none":
            found.leave_out(
                f"zero_optimization.{key}", f"{device} is not there; {FIELDS[name].flag} uses the CPU's memory"
            )
    if not found.settings.get("zero_stage"):
        for name in offload.values():
            found.settings.pop(name, None)


def _activations(found: Imported, values: Mapping[str, Any]) -> None:
    rest = dict(values)
    if rest.pop("cpu_checkpointing", False) is True:
        found.set("recompute_granularity", "full")
        found.set("offload_saved_activations", True)
    said = {key: value for key, value in rest.items() if value is not False}
    apply(found, said, ACTIVATIONS, within="activation_checkpointing.")


def _records(found: Imported, values: Mapping[str, Any]) -> None:
    board, wandb = section(values, "tensorboard"), section(values, "wandb")
    if board.get("enabled") and board.get("output_path"):
        found.set("tensorboard_dir", str(board["output_path"]))
    if wandb.get("enabled"):
        names = {"project": field("wandb_project"), "team": field("wandb_entity"), "group": _NOT_THERE}
        apply(found, {key: value for key, value in wandb.items() if key != "enabled"}, names, within="wandb.")
