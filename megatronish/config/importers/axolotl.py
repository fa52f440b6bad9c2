"""Axolotl's config.yml as settings of this project."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatronish.config.fields import FIELDS
from megatronish.config.importers.axolotl_data import data_sets
from megatronish.config.importers.axolotl_keys import (
    CHECKPOINTS,
    DECAYS,
    LORA,
    OPTIMIZERS,
    QUANTISED_ALONE,
    RULES,
    SPEED,
)
from megatronish.config.importers.axolotl_rl import RL_KEYS, from_rl
from megatronish.config.importers.deepspeed import from_deepspeed
from megatronish.config.importers.imported import Imported, apply, dropped, number, read_json, section
from megatronish.errors import UserError

# Keys that a function below reads.
_OWN = (
    *("optimizer", "lr_scheduler", "cosine_min_lr_ratio", "bf16", "fp16", "bfloat16", "float16", "sample_packing"),
    *("gradient_accumulation_steps", "batch_size", "gradient_checkpointing", "val_set_size", "deepspeed", "fsdp"),
    *("fsdp_config", "fsdp_version", "eval_steps", "save_steps", "adapter", "lora_target_linear"),
    *RL_KEYS,
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "peft_use_rslora", "loraplus_lr_ratio"),
    *("load_in_4bit", "bnb_config_kwargs"),
)
_OF_LORA = {
    "lora_r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "peft_use_rslora": "use_rslora",
    "loraplus_lr_ratio": "loraplus_lr_ratio",
}


def from_axolotl(values: Mapping[str, Any], *, folder: Path, dp: int | None = None) -> Imported:
    """Settings of a config.yml in `folder`; `dp` is the data-parallel size, from which the batch follows."""
    found = Imported()
    rules = dict(RULES)
    for prefix, rule in (("lora_", LORA), ("wandb_", dropped("W&B reads its other settings from its environment"))):
        rules |= {key: rule for key in values if key.startswith(prefix) and key not in RULES}
    rest = {key: value for key, value in values.items() if key not in _OWN and value is not False}
    apply(found, {key: _numeric(key, value) for key, value in rest.items()}, rules)
    _model(found, folder)
    _adapter(found, values)
    from_rl(found, values)
    has_chats = "objective" in found.settings or data_sets(found, values, folder)
    _batch(found, values, dp)
    if not has_chats and values.get("sample_packing"):  # rows are always filled; documents do not see each other
        found.set("reset_attention_mask", True)
        found.set("reset_position_ids", True)
    _optimizer(found, values)
    _precision(found, values)
    _intervals(found, values)
    _sharding(found, values, folder)
    return found


def _numeric(key: str, value: Any) -> Any:
    """Value with texts such as 2e-4, which YAML does not read as a number, as numbers."""
    rule = RULES.get(key)
    if rule is None or rule.field is None or FIELDS[rule.field].type not in (int, float) or value == "auto":
        return value
    return number({key: value}, key) if isinstance(value, str) else value


def _model(found: Imported, folder: Path) -> None:
    """The folder of the model to start from; nothing is downloaded."""
    name = found.settings.pop("load_hf", None)
    places = [] if name is None else [Path(name), folder / name]
    here = next((path for path in places if path.is_dir()), None)
    if here is not None:
        found.set("load_hf", str(here))
    elif name is not None:
        found.leave_out("base_model", f"{name} is not a folder here; download it, and add --load-hf FOLDER")


def _adapter(found: Imported, values: Mapping[str, Any]) -> None:
    """LoRA of the model to start from."""
    kind = values.get("adapter")
    if not kind:
        if values.get("load_in_4bit"):
            found.leave_out("load_in_4bit", QUANTISED_ALONE)
        return
    if kind not in ("lora", "qlora"):
        found.leave_out("adapter", f"{kind} is not there; there are lora and ia3, for --adapter-type")
        return
    if "load_hf" not in found.settings:
        found.leave_out("adapter", f"add --adapter-type lora with --load-hf FOLDER, and lora_* as flags ({kind} here)")
        return
    found.set("adapter_type", "lora")
    for key, name in _OF_LORA.items():
        if values.get(key) is not None:
            found.set(name, values[key] if name == "use_rslora" else number(values, key))
    targets = values.get("lora_target_modules")
    if isinstance(targets, list) and not values.get("lora_target_linear"):
        found.set("adapter_targets", tuple(map(str, targets)))
    if kind == "qlora" or values.get("load_in_4bit"):
        _quantised(found, section(values, "bnb_config_kwargs"))


def _quantised(found: Imported, options: Mapping[str, Any]) -> None:
    """QLoRA; the options are those of bitsandbytes, of which Axolotl's default is NF4 with double quantisation."""
    found.set("quantize_base", "nf4")
    for name, value in options.items():
        if name == "bnb_4bit_use_double_quant":
            found.set("double_quantization", bool(value))
        elif (name, value) != ("bnb_4bit_quant_type", "nf4"):
            found.leave_out(f"bnb_config_kwargs.{name}", f"{value}: the base is quantised to NF4 and stored in bytes")


def _batch(found: Imported, values: Mapping[str, Any], dp: int | None) -> None:
    micro, steps = found.settings.get("micro_batch_size"), number(values, "gradient_accumulation_steps") or 1
    if micro is not None and dp is not None:
        found.set("global_batch_size", int(micro * steps * dp))
    elif steps > 1:
        found.leave_out(
            "gradient_accumulation_steps",
            "--global-batch-size is --micro-batch-size times this times the data-parallel size (--dp)",
        )
    held_out = number(values, "val_set_size")
    if held_out is not None and 0 < held_out < 1:
        found.set("split", f"{1 - held_out:g},{held_out:g},0")
    elif held_out is not None and held_out >= 1:
        found.leave_out("val_set_size", "give the part of the data by --split")


def _optimizer(found: Imported, values: Mapping[str, Any]) -> None:
    name = str(values.get("optimizer") or "adamw_torch").removeprefix("OptimizerNames.").lower()
    kind = name.removeprefix("paged_").split("_")[0]
    if kind not in OPTIMIZERS:
        found.leave_out("optimizer", f"{name} is not there; there are adam (AdamW), sgd and muon, for --optimizer")
    else:
        found.set("optimizer", OPTIMIZERS[kind])
        if "8bit" in name or "4bit" in name:
            found.leave_out("optimizer", f"{name}: optimizer states are in fp32, which is more exact")
    if "weight_decay" not in found.settings:
        found.set("weight_decay", 0.0)  # Hugging Face's default
    decay = str(values.get("lr_scheduler") or "cosine")
    if decay in DECAYS:
        found.set("lr_decay_style", DECAYS[decay])
    else:
        found.leave_out("lr_scheduler", f"{decay} is not there; use --lr-decay-style cosine, linear, constant or WSD")
    ratio, peak = number(values, "cosine_min_lr_ratio"), found.settings.get("lr")
    if ratio is not None and peak is not None:
        found.set("min_lr", ratio * peak)
    if "lr_warmup_iters" in found.settings:
        found.settings.pop("lr_warmup_fraction", None)  # Hugging Face's Trainer lets the steps win


def _precision(found: Imported, values: Mapping[str, Any]) -> None:
    bf16 = values.get("bf16", values.get("bfloat16"))
    if bf16 in (True, "full", "auto", "true"):
        found.set("bf16", True)
    elif values.get("fp16", values.get("float16")) in (True, "true"):
        found.set("fp16", True)
    again = values.get("gradient_checkpointing")
    if again in (True, "true", "offload", "offload_disk"):
        found.set("recompute_granularity", "full")
    if again in ("offload", "offload_disk"):
        found.set("offload_saved_activations", True)


def _intervals(found: Imported, values: Mapping[str, Any]) -> None:
    """Steps between evaluations and checkpoints; below 1 they are parts of the run, of --max-steps."""
    for key, name in (("eval_steps", "eval_interval"), ("save_steps", "save_interval")):
        every, run = number(values, key), found.settings.get("train_iters")
        if every is None:
            continue
        if every >= 1:
            found.set(name, int(every))
        elif run is not None:
            found.set(name, max(1, int(every * run)))
        else:
            found.leave_out(key, f"a part of a run whose length is not given; use {FIELDS[name].flag}")


def _sharding(found: Imported, values: Mapping[str, Any], folder: Path) -> None:
    """ZeRO, from the DeepSpeed file that the config names, or from FSDP."""
    if values.get("deepspeed"):
        path = Path(str(values["deepspeed"]))
        path = next((each for each in (path, folder / path, folder / path.name) if each.is_file()), path)
        try:
            zero = section(read_json(path), "zero_optimization")
            shared = from_deepspeed({"zero_optimization": zero}).settings
        except UserError:
            found.leave_out("deepspeed", f"{path} cannot be read; name its stage with --zero-stage")
            return
        kept = ("zero_stage", "optimizer_cpu_offload", "param_cpu_offload", "overlap_grad_reduce", "ddp_bucket_size")
        for name in kept:
            if name in shared:
                found.set(name, shared[name])
    elif values.get("fsdp") or values.get("fsdp_config"):
        _fsdp(found, str(values.get("fsdp") or ""), section(values, "fsdp_config"))


def _fsdp(found: Imported, words: str, config: Mapping[str, Any]) -> None:
    """ZeRO, from FSDP: `words` are those of the older key, the keys of `config` may begin with fsdp_."""
    rest = {key.removeprefix("fsdp_"): value for key, value in config.items()}
    strategy = f"{words} {rest.pop('sharding_strategy', '')}".upper()
    keeps_parameters = rest.pop("reshard_after_forward", True) is False
    stage = 2 if keeps_parameters or "SHARD_GRAD_OP" in strategy or "ZERO2" in strategy else 3
    found.set("zero_stage", 0 if "NO_SHARD" in strategy else stage)
    if "HYBRID" in strategy and "num_distributed_optimizer_instances" not in found.settings:
        found.leave_out("fsdp_config.sharding_strategy", "a hybrid one; add --dp-replicate, the number of groups")
    if (rest.pop("offload_params", False) is True or "OFFLOAD" in strategy) and "NO_SHARD" not in strategy:
        found.set("param_cpu_offload" if stage == 3 else "optimizer_cpu_offload", True)
    if rest.pop("activation_checkpointing", False) is True:
        found.set("recompute_granularity", "full")
    apply(found, rest, dict.fromkeys(rest, SPEED) | {"state_dict_type": CHECKPOINTS}, within="fsdp_config.")
