"""Axolotl's config.yml as settings of this project."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatronish.compat.importers.axolotl_data import (
    ABSENT,
    LORA,
    MUON,
    OPTIMIZERS,
    PEFT,
    PEFT_TARGETS,
    QUANTISED_ALONE,
    RULES,
    SEVERAL_MUON,
    TOO_LONG,
    USUAL,
    data_sets,
    preferences,
)
from megatronish.compat.importers.axolotl_learning_rate import learning_rate
from megatronish.compat.importers.deepspeed import OF_ONE_RANK
from megatronish.compat.importers.imported import Imported, apply, dropped
from megatronish.compat.importers.sharding import FSDP_PREFIX, FSDP_SWITCHES, sharding
from megatronish.compat.importers.values import (
    AUTO_TOO,
    Switches,
    number,
    section,
    settled,
    switches_of,
    text,
    whole,
)
from megatronish.config.fields import FIELDS
from megatronish.config.hub import hub_name
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown
from megatronish.core.names import OBJECTIVE_NAMES

# Keys of preference learning, `rl` and the numbers of its objectives, and our fields: of the keys of one field, the
# first that is given counts.
_NUMBERS = {
    "trl.beta": "beta",
    "rl_beta": "beta",
    "dpo_beta": "beta",
    "orpo_alpha": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "cpo_alpha": "cpo_alpha",
    "simpo_gamma": "simpo_gamma",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
}
_LOSS_TYPES = ("sigmoid", "hinge", "robust", "ipo")
ABSENT_OF_RL = {
    "beta": 0.1,
    "label_smoothing": 0.0,
    "simpo_gamma": 0.5,
    "cpo_alpha": 1.0,  # of simpo, too, where 0 is the paper's and ours
    "desirable_weight": 1.0,
    "undesirable_weight": 1.0,
}
"""What numbers mean that are absent: TRL's defaults."""
RL_KEYS = ("rl", "dpo_loss_type", "precompute_ref_log_probs", *_NUMBERS)


def from_rl(found: Imported, values: Mapping[str, Any], folder: Path) -> None:
    """The objective of `rl`, with those of its numbers that it reads here, and its data."""
    name = text(values, "rl")
    if not name:
        return
    if name not in ("dpo", "ipo", "kto", "orpo", "simpo"):
        found.warn(
            "rl",
            f"{name} is not there, and preferences are not learned: this trains on the data as without rl; there are "
            "dpo, ipo, simpo, cpo, orpo and kto (--objective)",
        )
        return
    # 1. Preferences are chats, and the objective decides which of its numbers are read at all.
    found.set("objective", name)
    found.set("dataset_type", "chat")
    reads = OBJECTIVE_NAMES[name].reads
    # 2. Several keys mean one number (`beta` has four); the first of `_NUMBERS` that is given is kept.
    given = {**values, "trl.beta": section(values, "trl").get("beta")}
    for key, field in _NUMBERS.items():
        if given.get(key) is None or field in found.settings:
            continue
        if field in reads:
            found.set(field, number(given, key), key=key)
        else:
            found.leave_out(key, f"rl: {name} does not read it")
    # 3. Their absence means TRL's defaults there, which are not those of this project.
    for field, value in ABSENT_OF_RL.items():
        if field in reads:
            found.set_default(field, value)
    # 4. Newer files have a list of losses, which TRL adds up; a list of one is that loss.
    kinds = values.get("dpo_loss_type")
    kind = kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else kinds
    if kind is not None and (name != "dpo" or kind not in _LOSS_TYPES):
        found.warn("dpo_loss_type", f"{shown(kinds)} is not there for {name}; dpo has {', '.join(_LOSS_TYPES)}")
    elif kind is not None:
        found.set("dpo_loss_type", kind)
    if values.get("precompute_ref_log_probs") and OBJECTIVE_NAMES[name].has_reference:
        found.set("reference", "stored")
    preferences(found, values, folder)


# Keys that a function below reads.
_OWN = (
    *("optimizer", "lr_scheduler", "cosine_min_lr_ratio", "lr_scheduler_kwargs", "excess_length_strategy"),
    *("bf16", "fp16", "bfloat16", "float16", "sample_packing"),
    *("gradient_accumulation_steps", "batch_size", "gradient_checkpointing", "val_set_size", "deepspeed", "fsdp"),
    *("fsdp_config", "fsdp_version", "eval_steps", "save_steps", "adapter", "lora_target_linear"),
    *RL_KEYS,
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "peft_use_rslora", "loraplus_lr_ratio"),
    *("load_in_4bit", "load_in_8bit", "bnb_config_kwargs", "num_epochs", "float32"),
)
_NONE = object()
_OF_LORA = {
    "lora_r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "peft_use_rslora": "use_rslora",
    "loraplus_lr_ratio": "loraplus_lr_ratio",
}


def from_axolotl(values: Mapping[str, Any], *, folder: Path, dp: int | None = None) -> Imported:
    """Settings of a config.yml in `folder`; `dp` is the data-parallel size, from which the batch follows."""
    # 1. Switches; and keys whose value alone decides. A key of a prefix has the rule of the prefix unless it has its
    # own; False asks for nothing.
    imported, values = Imported(), settled(values, SWITCHES, prefixes={"fsdp_config": FSDP_PREFIX})
    rules = dict(RULES)
    for prefix, rule in (("lora_", LORA), ("wandb_", dropped("W&B reads its other settings from its environment"))):
        rules |= {key: rule for key in values if key.startswith(prefix) and key not in RULES}
    rest = {
        key: value
        for key, value in values.items()
        if key not in _OWN and value is not False and value != USUAL.get(key, _NONE)
    }
    apply(imported, {key: _numeric(key, value) for key, value in rest.items()}, rules)
    # 2. Keys that are read together. The order counts: the objective decides about data sets, the length of the run
    # about warm-up and intervals, which may be fractions of it.
    _model(imported, folder)
    _adapter(imported, values)
    from_rl(imported, values, folder)
    has_chats = "objective" in imported.settings or data_sets(imported, values, folder)
    _length(imported, values)
    _batch(imported, values, dp)
    _held_out(imported, values)
    if not has_chats and values.get("sample_packing"):  # rows are always filled; documents do not see each other
        imported.set("reset_attention_mask", True)
        imported.set("reset_position_ids", True)
    _optimizer(imported, values, dp)
    learning_rate(imported, values)
    _precision(imported, values)
    _intervals(imported, values)
    sharding(imported, values, folder)
    # 3. Last, for what no key has set: absent keys mean Axolotl's defaults, and not ours.
    for name, value in ABSENT.items():
        imported.set_default(name, value)
    if imported.settings.get("dataset_type") == "chat" and values.get("excess_length_strategy") != "truncate":
        imported.leave_out("excess_length_strategy", TOO_LONG)
    return imported


def _numeric(key: str, value: Any) -> Any:
    """Value with texts such as 2e-4, which YAML does not read as a number, as numbers."""
    rule = RULES.get(key)
    if rule is None or rule.field is None or FIELDS[rule.field].type not in (int, float) or value == "auto":
        return value
    return number({key: value}, key) if isinstance(value, str) else value


def _model(found: Imported, folder: Path) -> None:
    """The model to start from: a folder, from here or from that of the config, or a name of the hub."""
    name = found.settings.get("load_hf")
    if name is None and "base_model" in found.otherwise:  # there is one, which no file may hold
        return
    if name is None:
        found.leave_out("base_model", "there is none in the file, and so no model to start from; add --load-hf FOLDER")
        return
    here = next((path for path in (Path(name), folder / name) if is_folder(path)), None)
    if here is not None:
        found.set("load_hf", str(here), key="base_model")
    elif hub_name(name) is not None:
        found.leave_out("base_model", f"{name} is not a folder here, so a run downloads it from Hugging Face's hub")
    else:
        found.leave_out("base_model", f"{name} is not a folder here, and no name of a hub; add --load-hf FOLDER")


def is_folder(path: Path) -> bool:
    """Whether a folder is there; False for what is no path at all."""
    try:
        return path.is_dir()
    except (OSError, ValueError):  # a name of thousands of characters, or one with NUL in it
        return False


def _adapter(found: Imported, values: Mapping[str, Any]) -> None:
    """LoRA of the model to start from."""
    # 1. Whether there are adapters: Axolotl quantises a model without adapters, too, and here only their base can be.
    kind = text(values, "adapter")
    if not kind:
        for key in ("load_in_4bit", "load_in_8bit"):
            if values.get(key):
                found.warn(key, QUANTISED_ALONE)
        return
    if kind not in ("lora", "qlora"):
        found.warn(
            "adapter", f"{kind} is not there, and the whole model learns; there are lora and ia3 (--adapter-type)"
        )
        return
    # 2. Sizes. `lora_rank` is a whole number here; YAML may have it as 8.0 or in quotation marks.
    found.set("adapter_type", "lora")
    for key, name in _OF_LORA.items():
        if values.get(key) is not None:
            found.set(name, values[key] if name == "use_rslora" else number(values, key), key=key)
    if "lora_rank" in found.settings:
        found.set("lora_rank", whole(found.settings["lora_rank"], "lora_r"), key="lora_r")
    for name, value in PEFT.items():
        found.set_default(name, value)
    # 3. Targets: None is every linear layer, which is our default. lora_target_linear asks for it whatever else is
    # named; where nothing is named, PEFT adapts queries and values.
    targets, every = values.get("lora_target_modules"), values.get("lora_target_linear")
    if isinstance(targets, str):
        targets = None if targets == "all-linear" else [targets]
    elif targets is None and not every:
        targets = PEFT_TARGETS
    if targets is not None:
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise UserError(f"lora_target_modules={shown(targets)} must be a list of names; correct the file")
        if not every:
            found.set("adapter_targets", tuple(targets))
    four, eight = (values.get(key) for key in ("load_in_4bit", "load_in_8bit"))
    if four and eight:
        raise UserError("load_in_4bit and load_in_8bit are both true, and a base has one form; correct the file")
    if kind == "qlora" or four:
        _quantised(found, section(values, "bnb_config_kwargs"))
        if eight:
            found.leave_out("load_in_8bit", "adapter=qlora is a base in 4 bits")
    elif eight:
        found.set("quantize_base", "int8")


def _quantised(found: Imported, options: Mapping[str, Any]) -> None:
    """QLoRA; the options are those of bitsandbytes, of which Axolotl's default is NF4 with double quantisation."""
    found.set("quantize_base", "nf4")
    for name, value in options.items():
        if name == "bnb_4bit_use_double_quant":
            if value is not None:
                found.set("double_quantization", value)
        elif (name, value) != ("bnb_4bit_quant_type", "nf4"):
            found.leave_out(
                f"bnb_config_kwargs.{name}", f"{shown(value)}: the base is quantised to NF4 and stored in bytes"
            )


def _length(found: Imported, values: Mapping[str, Any]) -> None:
    """Length of the run: max_steps, or else num_epochs, of which there is one if neither is there."""
    epochs = number(values, "num_epochs")
    for name in ("train_iters", "keep_last"):  # -1 says that there is no limit
        if found.settings.get(name, 1) < 1:
            del found.settings[name]
    if "train_iters" in found.settings:
        if epochs is not None:
            found.leave_out("num_epochs", "max_steps, which is given, counts")
    elif epochs is not None and epochs <= 0:
        raise UserError(f"num_epochs={epochs:g} must be greater than 0; correct the file")
    else:
        found.set("num_epochs", 1.0 if epochs is None else epochs, key="num_epochs")


def _batch(found: Imported, values: Mapping[str, Any], dp: int | None) -> None:
    found.set_default("micro_batch_size", 1)
    micro, steps = found.settings["micro_batch_size"], number(values, "gradient_accumulation_steps")
    size, batch = 1 if steps is None else whole(steps, "gradient_accumulation_steps"), number(values, "batch_size")
    if micro < 1 or size < 1:
        raise UserError(
            f"micro_batch_size={micro} and gradient_accumulation_steps={size} must be at least 1; correct the file"
        )
    # `batch_size` is what a rank accumulates: Axolotl derives the accumulation steps from it where these are not given.
    if batch is not None and steps is None:
        size = max(1, whole(batch, "batch_size") // micro)
    # The micro-batch and its accumulation are those of one rank there, our batch is that of all: without `dp` one is
    # assumed.
    times = "micro_batch_size times gradient_accumulation_steps times --dp"
    found.set("global_batch_size", micro * size * (dp or 1), key=times)
    if dp is None:
        key = next(
            (each for each in ("gradient_accumulation_steps", "batch_size") if each in values), "micro_batch_size"
        )
        found.leave_out(key, OF_ONE_RANK)


def _held_out(found: Imported, values: Mapping[str, Any]) -> None:
    """Part of the data that is kept for validation; none where nothing is said."""
    held_out = number(values, "val_set_size", least=0) or 0.0
    # --split cuts --data-path alone, and here validation has sets of its own.
    if "train_data_path" in found.settings:
        return  # the sets for validation are named
    if held_out < 1:
        found.set("split", f"{1 - held_out:.10g},{held_out:.10g},0")
    else:
        found.warn("val_set_size", f"{held_out:g} samples: give a part of the data by --split; nothing is held out")
        found.set("split", "1,0,0")


def _optimizer(found: Imported, values: Mapping[str, Any], dp: int | None) -> None:
    name = text(values, "optimizer", "adamw_torch_fused").removeprefix("OptimizerNames.").lower()
    # Names are optimizer_implementation, such as paged_adamw_8bit: only the optimizer changes what is trained.
    kind = name.removeprefix("paged_").split("_")[0]
    found.set("optimizer", OPTIMIZERS.get(kind, "adam"))
    if kind not in OPTIMIZERS:
        found.warn("optimizer", f"{name} is not there; this trains with adam (AdamW); --optimizer has sgd and muon")
    elif "8bit" in name or "4bit" in name:
        found.leave_out("optimizer", f"{name}: optimizer states are in fp32, which is more exact")
    if found.settings["optimizer"] == "sgd":
        found.set("sgd_momentum", 0.0)  # Hugging Face's Trainer gives sgd none
    if found.settings["optimizer"] == "muon":
        _muon(found, values, dp)


def _muon(found: Imported, values: Mapping[str, Any], dp: int | None) -> None:
    """Muon, of which Axolotl has two: one for a single process, and one for several."""
    sizes = ("dp_shard_size", "dp_replicate_size", "tensor_parallel_size", "context_parallel_size")
    is_several = max(dp or 1, *(number(values, key) or 1 for key in sizes)) > 1
    # Betas are handed on as a pair: one alone is not read.
    betas = [key for key in ("adam_beta1", "adam_beta2") if values.get(key) is not None]
    if len(betas) == 1:
        del found.settings[betas[0]]
        found.leave_out(betas[0], "Axolotl's Muon reads both betas, or none")
    for name, value in (SEVERAL_MUON if is_several else MUON).items():
        found.set_default(name, value)
    if not is_several:
        found.warn("optimizer", "norms and biases learn, by adam; Axolotl's Muon of one process leaves them out")
    elif found.settings.get("weight_decay"):
        found.warn("weight_decay", "that of embeddings, too; Axolotl's Muon of several processes leaves them out")
    if dp is None:
        found.leave_out("optimizer", "the Muon of several processes has other numbers: import again with --dp N")


def _precision(found: Imported, values: Mapping[str, Any]) -> None:
    """Precision; where nothing is said, Axolotl takes bf16 on a device that has it."""
    # "auto", Axolotl's default, is bf16 on a GPU that has it, unless fp16 is asked for. Of both, bf16 comes first.
    bf16, fp16 = values.get("bf16"), values.get("fp16")
    is_auto = bf16 in (None, "auto")
    if bf16 is True or bf16 == "full" or values.get("bfloat16") or (is_auto and not fp16):
        found.set("bf16", True)
        for key in ("float32", "float16"):
            if values.get(key):
                found.leave_out(key, "bf16 comes first there, also by its default, auto")
        if fp16 and not is_auto:
            found.warn("fp16", "bf16 is on, too, and the Trainer of transformers refuses both; this trains in bf16")
    elif fp16 or values.get("float16"):
        found.set_grad_scaler()
    else:
        found.set("bf16", False)
    # Values that are no switch name where saved activations are kept meanwhile.
    again = values.get("gradient_checkpointing")
    if again:
        found.set("recompute_granularity", "full")
    if again in OFFLOADS:
        found.set("offload_saved_activations", True)


def _intervals(found: Imported, values: Mapping[str, Any]) -> None:
    """Steps between evaluations and checkpoints; below 1 they are parts of the run, of --max-steps."""
    for key, name in (("eval_steps", "eval_interval"), ("save_steps", "save_interval")):
        every, run = number(values, key), found.settings.get("train_iters")
        if every is None:
            continue
        if every <= 0:
            raise UserError(f"{key}={every:g} must be greater than 0; correct the file, or remove it")
        if every >= 1:
            found.set(name, whole(every, key), key=key)
        elif run is not None:
            found.set(name, max(1, int(every * run)))
        else:
            found.leave_out(key, f"a part of a run whose length is not given; use {FIELDS[name].flag}")


OFFLOADS = ("offload", "offload_disk", "unsloth")
SWITCHES: Switches = {
    **switches_of(RULES, others=AUTO_TOO),
    "bf16": (*AUTO_TOO, "full"),
    "gradient_checkpointing": OFFLOADS,
    **dict.fromkeys(
        (
            *(
                "fp16",
                "bfloat16",
                "float16",
                "float32",
                "sample_packing",
                "train_on_inputs",
                "precompute_ref_log_probs",
            ),
            *("load_in_4bit", "load_in_8bit", "lora_target_linear", "peft_use_rslora", "lora_fan_in_fan_out"),
            *("bnb_config_kwargs.bnb_4bit_use_double_quant", "lr_quadratic_warmup", "dpo_use_weighting"),
            *("lr_scheduler_kwargs.cycle_momentum", "lr_scheduler_kwargs.three_phase"),
        ),
        (),
    ),
    **FSDP_SWITCHES,
}
"""Switches of the whole file."""
