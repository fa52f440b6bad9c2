"""DeepSpeed's ds_config.json as settings of this project."""

from collections.abc import Mapping
from typing import Any

from megatronish.config.fields import FIELDS
from megatronish.config.importers.deepspeed_keys import (
    ACTIVATIONS,
    ADAM,
    DEFAULT_PEAK,
    DEFAULT_WARMUP_STEPS,
    FP16,
    NOT_THERE,
    OPTIMIZERS,
    SCHEDULER_FLAGS,
    SPEED,
    TOP,
    ZERO,
)
from megatronish.config.importers.imported import AUTO, Imported, apply, field, number, section
from megatronish.errors import UserError


def from_deepspeed(values: Mapping[str, Any], *, dp: int | None = None) -> Imported:
    """Settings of a ds_config.json; `dp` is the data-parallel size, where the batch follows from it."""
    found = Imported()
    inner = ("optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "activation_checkpointing", "compile")
    others = (*inner, "bfloat16", "tensorboard", "wandb", "tensor_parallel", "gradient_accumulation_steps")
    apply(found, {key: value for key, value in values.items() if key not in others}, TOP)
    _batch(found, values, dp)
    _optimizer(found, section(values, "optimizer"))
    _scheduler(found, section(values, "scheduler"))
    _precision(found, values)
    _zero(found, section(values, "zero_optimization"))
    _activations(found, section(values, "activation_checkpointing"))
    _compile(found, section(values, "compile"))
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


def _compile(found: Imported, values: Mapping[str, Any]) -> None:
    """torch.compile is on if one of two keys says so; everything else in there chooses how."""
    if values.get("enabled") or values.get("deepcompile"):
        found.set("compile", True)
    for key in values.keys() - {"enabled", "deepcompile"}:
        found.leave_out(f"compile.{key}", "layers are always compiled by inductor")


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
        apply(found, rest, dict.fromkeys(rest, SPEED), within="bf16.")
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
        names = {"project": field("wandb_project"), "team": field("wandb_entity"), "group": NOT_THERE}
        apply(found, {key: value for key, value in wandb.items() if key != "enabled"}, names, within="wandb.")
