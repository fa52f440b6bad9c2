"""Axolotl's config.yml as settings of this project."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatronish.config.fields import FIELDS
from megatronish.config.importers.deepspeed import from_deepspeed
from megatronish.config.importers.imported import Imported, Rule, apply, dropped, field, number, read_json, section
from megatronish.errors import UserError

_SPEED = dropped("it changes speed and memory alone")
_FUSED = dropped("which kernels are used is decided at run time")
_EPOCHS = dropped("lengths are in steps; use --train-iters, --eval-interval and --save-interval")
_LORA = dropped("LoRA is not there yet: all weights are trained")
_QUANTISED = dropped("weights are not quantised: the model is trained in the precision of the run")
_DIALOGUE = dropped("fine-tuning on dialogues is not there yet; text is trained on as it is")
_HUB = dropped("nothing is uploaded or downloaded")
_NOT_THERE = dropped("it is not there")
_DATA = dropped("make .bin/.idx files with tools/preprocess_data.py, and name them with --data-path")
_MODEL = dropped("the files of the model say it")
_PLUGINS = dropped("Axolotl's plug-ins are its own classes; here a plug-in is a file given with --plugin")
_RESUME = dropped(
    "it is a Hugging Face folder, which --load cannot read; convert it with megatronish convert --from hf "
    "--to megatronish, and name the new folder with --load"
)
_EVERY_TOKEN = "the loss counts every token; fine-tuning on answers only is not there yet"

RULES: dict[str, Rule] = {
    "base_model": field("load_hf"),
    "sequence_len": field("seq_length"),
    "micro_batch_size": field("micro_batch_size"),
    "max_steps": field("train_iters"),
    "learning_rate": field("lr"),
    "weight_decay": field("weight_decay"),
    "max_grad_norm": field("clip_grad"),
    "adam_beta1": field("adam_beta1"),
    "adam_beta2": field("adam_beta2"),
    "adam_epsilon": field("adam_eps"),
    "warmup_steps": field("lr_warmup_iters"),
    "warmup_ratio": field("lr_warmup_fraction"),
    "logging_steps": field("log_interval"),
    "save_total_limit": field("keep_last"),
    "output_dir": field("run_dir"),
    "seed": field("seed"),
    "resume_from_checkpoint": _RESUME,
    "plugins": _PLUGINS,
    "tensor_parallel_size": field("tensor_model_parallel_size"),
    "context_parallel_size": field("context_parallel_size"),
    "sequence_parallel_degree": field("context_parallel_size"),
    "dp_replicate_size": field("num_distributed_optimizer_instances"),
    "wandb_project": field("wandb_project"),
    "wandb_name": field("wandb_exp_name"),
    "wandb_entity": field("wandb_entity"),
    **dict.fromkeys(("num_epochs", "evals_per_epoch", "saves_per_epoch", "eval_strategy", "save_strategy"), _EPOCHS),
    **dict.fromkeys(("datasets", "test_datasets", "pretraining_dataset", "dataset_prepared_path"), _DATA),
    **dict.fromkeys(("adapter", "peft_layers_to_transform", "relora_steps", "qlora_sharded_model_loading"), _LORA),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "gptq", "bnb_config_kwargs", "quantization"), _QUANTISED),
    **dict.fromkeys(
        (
            *("chat_template", "train_on_inputs", "rl", "trl", "group_by_length", "excess_length_strategy"),
            *("roles_to_train", "train_on_eos", "chat_template_jinja", "dpo_beta", "reward_model"),
        ),
        _DIALOGUE,
    ),
    **dict.fromkeys(
        (
            *("base_model_config", "model_type", "tokenizer_type", "tokenizer_config", "trust_remote_code"),
            *("is_llama_derived_model", "is_mistral_derived_model", "special_tokens", "tokens", "tokenizer_use_fast"),
            *("overrides_of_model_config", "revision_of_model", "strict"),
        ),
        _MODEL,
    ),
    **dict.fromkeys(
        (
            *("flash_attention", "sdp_attention", "xformers_attention", "eager_attention", "flex_attention"),
            *("flash_attn_rms_norm", "flash_attn_cross_entropy", "flash_attn_fuse_mlp", "flash_attn_fuse_qkv"),
            *("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_swiglu", "attn_implementation"),
            *("liger_fused_linear_cross_entropy", "cut_cross_entropy", "liger_layer_norm", "liger_cross_entropy"),
        ),
        _FUSED,
    ),
    **dict.fromkeys(
        (
            *("torch_compile", "torch_compile_backend", "tf32", "dataset_processes", "dataloader_num_workers"),
            *("dataloader_pin_memory", "dataloader_prefetch_factor", "eval_batch_size", "pad_to_sequence_len"),
            *("ddp_timeout", "ddp_bucket_cap_mb", "low_cpu_mem_usage", "dp_shard_size", "heads_k_stride", "gc_steps"),
            *("gradient_checkpointing_kwargs", "auto_resume_from_checkpoints", "save_safetensors", "local_rank"),
        ),
        _SPEED,
    ),
    **dict.fromkeys(("hub_model_id", "push_dataset_to_hub", "hub_strategy", "hf_use_auth_token"), _HUB),
    **dict.fromkeys(
        (
            *("early_stopping_patience", "neftune_noise_alpha", "unfrozen_parameters", "loss_watchdog_threshold"),
            *("loss_watchdog_patience", "lr_groups", "embedding_lr", "embedding_lr_scale", "rope_scaling", "debug"),
            *(
                "lr_scheduler_kwargs",
                "optim_args",
                "optim_target_modules",
                "eval_sample_packing",
                "multipack_real_batches",
            ),
        ),
        _NOT_THERE,
    ),
}

OPTIMIZERS = {"adamw": "adam", "adam": "adam", "sgd": "sgd", "muon": "muon"}
DECAYS = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "inverse_sqrt": "inverse-square-root",
}
# Keys that a function below reads.
_OWN = (
    *("optimizer", "lr_scheduler", "cosine_min_lr_ratio", "bf16", "fp16", "bfloat16", "float16", "sample_packing"),
    *("gradient_accumulation_steps", "batch_size", "gradient_checkpointing", "val_set_size", "deepspeed", "fsdp"),
    *("fsdp_config", "fsdp_version", "eval_steps", "save_steps"),
)


def from_axolotl(values: Mapping[str, Any], *, folder: Path, dp: int | None = None) -> Imported:
    """Settings of a config.yml in `folder`; `dp` is the data-parallel size, from which the batch follows."""
    found = Imported()
    rules = dict(RULES)
    for prefix, rule in (("lora_", _LORA), ("wandb_", dropped("W&B reads its other settings from its environment"))):
        rules |= {key: rule for key in values if key.startswith(prefix) and key not in RULES}
    rest = {key: value for key, value in values.items() if key not in _OWN and value is not False}
    apply(found, {key: _numeric(key, value) for key, value in rest.items()}, rules)
    _model(found, folder)
    _templates(found, values)
    _batch(found, values, dp)
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


def _templates(found: Imported, values: Mapping[str, Any]) -> None:
    """Prompt templates of the data sets, and the part of a sample that is learned."""
    if values.get("train_on_inputs") is False:
        found.leave_out("train_on_inputs", _EVERY_TOKEN)
    for key in ("datasets", "test_datasets", "pretraining_dataset"):
        plain = (None, "", "completion", "pretrain") if key == "pretraining_dataset" else (None, "", "completion")
        sets = values.get(key)
        for index, each in enumerate(sets if isinstance(sets, list) else [sets]):
            kind = each.get("type") if isinstance(each, dict) else None
            if kind not in plain:
                name = kind if isinstance(kind, str) else "written in the file"
                found.leave_out(
                    f"{key}[{index}].type", f"{name}: a prompt template is not applied; text is trained on as it is"
                )


def _batch(found: Imported, values: Mapping[str, Any], dp: int | None) -> None:
    micro, steps = found.settings.get("micro_batch_size"), number(values, "gradient_accumulation_steps") or 1
    if micro is not None and dp is not None:
        found.set("global_batch_size", int(micro * steps * dp))
    elif steps > 1:
        found.leave_out(
            "gradient_accumulation_steps",
            "--global-batch-size is --micro-batch-size times this times the data-parallel size (--dp)",
        )
    if values.get("sample_packing"):  # samples are always filled; documents of a sample do not see each other
        found.set("reset_attention_mask", True)
        found.set("reset_position_ids", True)
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
        found.set("zero_stage", 3)
        config = values.get("fsdp_config") or {}
        offloads = isinstance(config, dict) and (config.get("offload_params") or config.get("fsdp_offload_params"))
        if offloads or "offload" in str(values.get("fsdp")):
            found.set("param_cpu_offload", True)
