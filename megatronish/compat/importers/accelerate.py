"""Accelerate's default_config.yaml as settings of this project: where and how a program runs, not what it trains."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatronish.compat.importers.deepspeed import OLDER_CLIPPING, from_deepspeed
from megatronish.compat.importers.deepspeed import SWITCHES as OF_DEEPSPEED
from megatronish.compat.importers.imported import (
    SPEED,
    Imported,
    Rule,
    apply,
    dropped,
    field,
)
from megatronish.compat.importers.sharding import FSDP_PREFIX, FSDP_SWITCHES, fsdp, is_file
from megatronish.compat.importers.values import (
    Switches,
    number,
    read_object,
    section,
    settled,
    switches_of,
    text,
    whole,
)
from megatronish.config.fields import FIELDS, one_of
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown

PLACE = dropped("ranks are started by torchrun, srun, or by the command itself (docs/MANY_MACHINES.md)")
TPU = dropped("there are GPUs and CPUs")
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
    **dict.fromkeys(("enable_cpu_affinity", "ipex_config"), SPEED),
    "fp8_config": dropped("fp8 is not there"),
}
COPY = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Sizes whose product is the ranks of one copy of the model."""
CLIPPED = "1.0, which Accelerate puts in its place; the Trainer of transformers puts its max_grad_norm: --clip-grad"
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
    "context_parallel_size": field("context_parallel_size"),
    "expert_model_parallel_size": field("expert_model_parallel_size"),
    "expert_tensor_parallel_size": field("expert_tensor_parallel_size"),
    "gradient_clipping": field("clip_grad"),
    "sequence_parallelism": field("sequence_parallel"),
    "use_distributed_optimizer": field("use_distributed_optimizer"),
    "optimizer_cpu_offload": field("optimizer_cpu_offload"),
    "recompute_granularity": field("recompute_granularity"),
    "recompute_method": field("recompute_method"),
    "recompute_num_layers": field("recompute_num_layers"),
    "attention_dropout": field("attention_dropout"),
    "hidden_dropout": field("hidden_dropout"),
    "eod_mask_loss": field("eod_mask_loss"),
    "num_micro_batches": dropped("--global-batch-size is this times --micro-batch-size times the ranks over tp and pp"),
    "calculate_per_token_loss": dropped("the loss is always that of a token of the whole batch"),
    "use_rotary_position_embeddings": dropped("give the model's --position-embedding-type"),
    "decoder_last_pipeline_num_layers": field("decoder_last_pipeline_num_layers"),
    **dict.fromkeys(("attention_backend", "attention_softmax_in_fp32", "use_precision_aware_optimizer"), SPEED),
    **dict.fromkeys(("use_custom_fsdp", "overlap_cpu_optimizer_d2h_h2d"), SPEED),
}
MEGATRON_ABSENT: dict[str, Any] = {
    "clip_grad": 1.0,
    "use_distributed_optimizer": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
"""What keys of the plug-in for Megatron-LM mean that are absent."""
MEGATRON_SCALE: dict[str, Any] = {
    "initial_loss_scale": 2.0**32,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1.0,
}
"""Megatron-LM's loss scale, of which the plug-in names nothing."""
FILE_ALONE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model"),
)
"""Keys that accelerate launch refuses with a file of DeepSpeed's."""
DEEPSPEED: dict[str, Rule] = {
    **dict.fromkeys(
        (
            *("zero3_init_flag", "deepspeed_multinode_launcher", "deepspeed_exclusion_filter", "deepspeed_hostfile"),
            *("deepspeed_inclusion_filter", "deepspeed_moe_layer_cls_names", "zero3_save_16bit_model"),
        ),
        SPEED,
    ),
}
DYNAMO: dict[str, Rule] = dict.fromkeys(
    (
        *("dynamo_mode", "dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation"),
        *("mode", "use_dynamic", "use_fullgraph", "use_regional_compilation"),
    ),
    SPEED,
)
"""What is left of the sections of DeepSpeed and of torch.compile."""
OF_KEYS = {
    "zero_optimization.stage": "zero_stage",
    "gradient_clipping": "gradient_clipping",
    **{f"zero_optimization.{key}": f"{key}_device" for key in ("offload_optimizer", "offload_param")},
    **{f"zero_optimization.{key}.nvme_path": f"{key}_nvme_path" for key in ("offload_optimizer", "offload_param")},
}
"""Keys of DeepSpeed that Accelerate makes of its own, and those."""
OF_KINDS = {"DEEPSPEED": "deepspeed_config", "FSDP": "fsdp_config", "MEGATRON_LM": "megatron_lm_config"}
"""The section that each kind reads."""
MEGATRON_PREFIX, WITHIN = "megatron_lm_", "deepspeed_config."
SWITCHES: Switches = {
    **dict.fromkeys(("use_cpu", "fp16", "megatron_lm_config.recompute_activations"), ()),
    **FSDP_SWITCHES,
    **switches_of(MEGATRON, within="megatron_lm_config."),
}
"""Switches of the whole file."""
KINDS = ("NO", "DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TPU")
_SECTIONS = (
    *("fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config", "dynamo_config"),
    *("distributed_type", "mixed_precision", "fp16", "num_processes", "use_cpu", "gradient_accumulation_steps"),
    "dynamo_backend",
)
PROGRAM = (
    "they are in your program: give --lr, --lr-decay-style, --weight-decay, --clip-grad, the batch, --train-iters or "
    "--num-epochs, the model with its dropout, the data"
)


def from_accelerate(values: Mapping[str, Any], *, folder: Path, dp: int | None = None) -> Imported:
    """Settings of a default_config.yaml in `folder`; `dp` is the data-parallel size, else from num_processes."""
    # 1. Switches; keys whose value alone decides, and the sizes of one copy of the model.
    prefixes = {"fsdp_config": FSDP_PREFIX, "megatron_lm_config": MEGATRON_PREFIX}
    imported, values = Imported(), settled(values, SWITCHES, prefixes=prefixes)
    kind = text(values, "distributed_type", "NO").upper()
    if kind not in KINDS and not kind.startswith("MULTI_"):
        raise UserError(
            f"distributed_type={shown(kind)} must be {one_of(KINDS)}, or MULTI_GPU and its like; correct the file"
        )
    apply(imported, {key: value for key, value in values.items() if key not in _SECTIONS}, TOP)
    precision = _mixed_precision(imported, values)
    _parallelism(imported, section(values, "parallelism_config"))
    # 2. What shares the model. DeepSpeed's settings say more than that, its precision too.
    if kind == "DEEPSPEED":
        _deepspeed(imported, values, precision, folder, dp)
    elif kind == "FSDP":
        fsdp(imported, "", section(values, "fsdp_config"))
    elif kind == "MEGATRON_LM":
        _megatron(imported, section(values, "megatron_lm_config"))
    elif kind == "XLA" or kind == "TPU":
        raise UserError(f"distributed_type={kind} is not there: there are GPUs and CPUs; import another config")
    else:
        imported.set("zero_stage", 0)
    for other, name in OF_KINDS.items():
        if other != kind and values.get(name):
            imported.leave_out(name, f"distributed_type={kind} does not read it")
    if kind != "DEEPSPEED":
        imported.set("bf16", precision in ("bf16", "fp8"))
        if precision == "fp16":
            _scaled(imported, kind)
    # 3. Where it runs.
    if values.get("use_cpu") or kind == "MULTI_CPU":
        imported.set("device", "cpu")
    dynamo, within = section(values, "dynamo_config"), "dynamo_config."
    backend = text(dynamo, "dynamo_backend", text(values, "dynamo_backend", "NO"), within=within)
    backend = text(dynamo, "backend", backend, within=within)
    rest = {key: value for key, value in dynamo.items() if key not in ("dynamo_backend", "backend")}
    apply(imported, rest, DYNAMO, within=within)
    if backend.upper() != "NO":
        imported.set("compile", True)
    _ranks(imported, values, dp)
    imported.leave_out("optimizer, learning rate, data", PROGRAM)
    return imported


def _mixed_precision(found: Imported, values: Mapping[str, Any]) -> str:
    """mixed_precision: no, bf16, fp16 or fp8. There is none where it is absent; older files have a switch, fp16."""
    kind = values.get("mixed_precision")
    if kind is None and values.get("fp16"):
        kind = "fp16"
    kind = "no" if kind in (None, "", False) else str(kind).lower()  # YAML reads no as False
    if kind == "fp8":
        found.warn("mixed_precision", "fp8 is not there; this trains in bf16, more exactly")
    elif kind not in ("no", "bf16", "fp16"):
        raise UserError(f"mixed_precision={shown(kind)} must be no, fp16, bf16 or fp8; correct the file")
    return kind


def _scaled(found: Imported, kind: str) -> None:
    """fp16 with the loss scale of whoever trains: Megatron-LM has one of its own, all others torch's."""
    if kind != "MEGATRON_LM":
        found.set_grad_scaler()
        return
    found.set("fp16", True)
    for name, value in MEGATRON_SCALE.items():
        found.set(name, value)


def _parallelism(found: Imported, values: Mapping[str, Any]) -> None:
    prefix, within = "parallelism_config_", "parallelism_config."
    # Sequences are cut in one of two ways, and a size of 1 for the other one is none.
    rest = {
        key: value
        for key, value in values.items()
        if value != 1 or key.removeprefix(prefix) not in ("cp_size", "sp_size")
    }
    apply(found, rest, {**PARALLELISM, **{f"{prefix}{key}": rule for key, rule in PARALLELISM.items()}}, within=within)
    if {"sp_size", f"{prefix}sp_size"} & rest.keys():
        found.set("cp_comm_type", "a2a")  # DeepSpeed's Ulysses


def _deepspeed(found: Imported, values: Mapping[str, Any], precision: str, folder: Path, dp: int | None) -> None:
    """DeepSpeed, by the settings that Accelerate hands on: those of a file of its own, or made of a few keys."""
    config = section(values, "deepspeed_config")
    if name := text(config, "deepspeed_config_file", within=WITHIN):
        path = next((each for each in (Path(name), folder / name) if is_file(each)), Path(name))
        given, within = _of_file(found, config, read_object(path, is_yaml=False), path.name), f"{path.name}: "
    else:
        path, given, within = None, _of_keys(found, config), WITHIN
    given |= _precisions(found, given, precision, path)
    # 1. Which ranks are data-parallel follows from sizes that the file may have, and the batch follows from them.
    try:
        sizes = from_deepspeed(given).settings
    except UserError as error:
        raise UserError(f"{within if path is None else shown(within)}{error}") from None
    found.settings |= {name: sizes[name] for name in COPY if name in sizes}
    other = from_deepspeed(given, dp=_data_parallel_size(found, values, dp))
    # 2. Without these sections the program makes both, which says more than that DeepSpeed makes none.
    for key, names in {"optimizer": (), "scheduler": ("lr_decay_style", "lr_warmup_iters")}.items():
        if not given.get(key):
            other.left_out.pop(key, None)
            for each in names:
                other.settings.pop(each, None)
    found.settings |= other.settings
    own_names = OF_KEYS if path is None else {}
    found.key_of |= {name: f"{within}{own_names.get(key, key)}" for name, key in other.key_of.items()}
    found.left_out |= {f"{within}{own_names.get(key, key)}": reason for key, reason in other.left_out.items()}
    found.otherwise |= {f"{within}{own_names.get(key, key)}": reason for key, reason in other.otherwise.items()}
    # 3. What is left of the YAML.
    read = ("deepspeed_config_file", *FILE_ALONE)
    apply(found, {key: value for key, value in config.items() if key not in read}, DEEPSPEED, within=WITHIN)


def _of_keys(found: Imported, config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's settings that Accelerate makes of its own keys, with its defaults."""
    stage = number(config, "zero_stage", within=WITHIN)
    zero: dict[str, Any] = {"stage": 2 if stage is None else whole(stage, "deepspeed_config.zero_stage")}
    for key in ("offload_optimizer", "offload_param"):
        zero[key] = {"device": text(config, f"{key}_device", "none", within=WITHIN).lower()}
        if path := text(config, f"{key}_nvme_path", within=WITHIN):
            zero[key]["nvme_path"] = path
    given: dict[str, Any] = {"zero_optimization": zero}
    if config.get("gradient_clipping") in (None, "none", "auto"):
        clip: float | None = 1.0
        found.leave_out("deepspeed_config.gradient_clipping", CLIPPED)
    # What is off is not handed on, so DeepSpeed's own default counts.
    elif not (clip := number(config, "gradient_clipping", within=WITHIN)):
        clip = 1.0
        found.warn("deepspeed_config.gradient_clipping", f"0 is not handed on, and {OLDER_CLIPPING}")
    given["gradient_clipping"] = clip
    steps = config.get("gradient_accumulation_steps")
    if steps == "auto" or (number(config, "gradient_accumulation_steps", within=WITHIN, least=1) or 1) != 1:
        found.leave_out(
            "deepspeed_config.gradient_accumulation_steps",
            f"{shown(steps)}: --global-batch-size is --micro-batch-size times this times the data-parallel size",
        )
    return given


def _of_file(found: Imported, config: Mapping[str, Any], values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """DeepSpeed's settings of a file, with what Accelerate puts in the place of "auto" and of absent keys."""
    # 1. The file counts: the same keys of the YAML are refused with it when a program is started.
    for key in FILE_ALONE:
        if config.get(key) is not None:
            found.leave_out(f"deepspeed_config.{key}", f"{name} counts; accelerate launch refuses to have both")
    given = settled(values, OF_DEEPSPEED, within=f"{shown(name)}: ")
    if given.get("gradient_clipping") == "auto":
        given["gradient_clipping"] = 1.0
        found.leave_out(f"{name}: gradient_clipping", CLIPPED)
    # 2. "auto" in the sections. A file without the section of ZeRO is refused.
    if "zero_optimization" not in given:
        found.leave_out(f"{name}: zero_optimization", "Accelerate refuses a file without it; this is stage 0")
    zero = dict(section(given, "zero_optimization"))
    if zero.get("stage") == "auto":
        zero["stage"] = 2
    for key in ("offload_optimizer", "offload_param"):
        if section(zero, key).get("device") == "auto":
            zero[key] = {**zero[key], "device": "none"}
    planned = dict(section(given, "scheduler"))
    if section(planned, "params").get("warmup_min_lr") == "auto":
        planned["params"] = {**planned["params"], "warmup_min_lr": 0.0}
    return {**given, "zero_optimization": zero, "scheduler": planned}


def _precisions(
    found: Imported, given: Mapping[str, Any], precision: str, path: Path | None
) -> dict[str, dict[str, Any]]:
    """Sections fp16 and bf16 as Accelerate completes them: it adds what is not there, and changes "auto" alone."""
    wanted = {"no": "", "fp8": "bf16"}.get(precision, precision)
    sections = {}
    for key in ("fp16", "bf16"):
        own = dict(section(given, key))
        if given.get(key) is None:
            own = {"enabled": key == wanted}
        elif own.get("enabled") == "auto":
            own["enabled"] = key == wanted
        sections[key] = own
        if wanted not in ("", key) and own.get("enabled") is True:
            raise UserError(
                f"mixed_precision={precision} and {key} of {path.name if path else 'the file'} contradict each other, "
                "and Accelerate refuses both; correct one of them"
            )
    if path is not None and wanted:
        off = sections[wanted].get("enabled") is not True
        found.leave_out(
            "mixed_precision",
            f"accelerate launch refuses it with {path.name}, and takes it from a program; this is as from a program"
            + (f": {wanted} of {path.name} is off, and counts" if off else ""),
        )
    return sections


def _megatron(found: Imported, config: dict[str, Any]) -> None:
    """Megatron-LM, with the defaults of Accelerate's plug-in for it."""
    within = "megatron_lm_config."
    for name in ("recompute_activations", f"{MEGATRON_PREFIX}recompute_activations"):
        if config.get(name):
            found.set("recompute_granularity", "selective")
    rest = {key: _typed(config, key, within) for key in config if not key.endswith("recompute_activations")}
    apply(
        found, rest, {**MEGATRON, **{f"{MEGATRON_PREFIX}{key}": each for key, each in MEGATRON.items()}}, within=within
    )
    # The plug-in has had dropout, and a default for cp, since 1.13; before, Megatron-LM's own defaults counted.
    within += MEGATRON_PREFIX
    for name in ("attention_dropout", "hidden_dropout"):
        if name not in found.settings:
            found.warn(f"{within}{name}", "none given is 0 since Accelerate 1.13, and 0.1 before")
    if "context_parallel_size" not in found.settings:
        found.leave_out(
            f"{within}context_parallel_size",
            "none given is 2 since Accelerate 1.13, and 1 before; it changes no number: --cp 2",
        )
    if {"recompute_method", "recompute_num_layers"} & found.settings.keys():
        found.set_default("recompute_granularity", "full")
    for name, value in MEGATRON_ABSENT.items():
        found.set_default(name, value)


def _typed(values: Mapping[str, Any], key: str, within: str) -> Any:
    """Value of a key as a number, which YAML files of programs that ask for it have in quotation marks."""
    value, rule = values[key], MEGATRON.get(key.removeprefix(MEGATRON_PREFIX))
    if not isinstance(value, str) or value == "" or rule is None or rule.field is None:
        return value
    return number(values, key, within=within) if FIELDS[rule.field].type in (int, float) else value


def _data_parallel_size(found: Imported, values: Mapping[str, Any], dp: int | None) -> int | None:
    """All processes over those of one copy of the model; None where the number of processes is not in the file."""
    if dp is not None:
        return dp
    processes, copy = number(values, "num_processes"), 1
    for name in COPY:
        copy *= found.settings.get(name, 1)
    # Without a number one process is started, or where there are to be several, none.
    if processes is None and text(values, "distributed_type", "NO").upper() != "NO":
        return None
    ranks = 1 if processes is None else whole(processes, "num_processes")
    if ranks < 1 or copy < 1 or ranks % copy:
        raise UserError(
            f"num_processes={shown(ranks)} must be a multiple of the ranks of one copy of the model, {copy}; "
            "correct the file"
        )
    size = ranks // copy
    if (bound := FIELDS["data_parallel_size"].broken_range(size)) is not None:
        raise UserError(f"num_processes={shown(values['num_processes'])} {bound.rule}; correct the file")
    return size


def _ranks(found: Imported, values: Mapping[str, Any], dp: int | None) -> None:
    """Data-parallel size, and what is said of the batch."""
    found.refuse_out_of_range()  # sizes of 0 among them
    size = _data_parallel_size(found, values, dp)
    if size is not None:
        found.set("data_parallel_size", size)
    else:
        found.leave_out("num_processes", "it is absent, and given to accelerate launch: add --dp")
    steps = number(values, "gradient_accumulation_steps", least=1)
    if steps is not None and steps != 1:
        found.leave_out(
            "gradient_accumulation_steps",
            f"{steps:g}: --global-batch-size is --micro-batch-size times this times the data-parallel size",
        )
