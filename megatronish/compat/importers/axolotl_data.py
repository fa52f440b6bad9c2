"""Keys of Axolotl's config.yml, and its data sets: chats, texts and preferences as flags of --dataset-type chat.

A file that is here is named as it is found, and a name of Hugging Face's hub as it is written, for a run that downloads
it. Both that name and any other path that is not here are listed.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatronish.compat.importers.imported import (
    NO_SUCH_RECORD,
    NOT_THERE,
    SPEED,
    Imported,
    Rule,
    dropped,
    field,
    missed,
)
from megatronish.compat.importers.sharding import is_file
from megatronish.compat.importers.values import section, text
from megatronish.config.hub import hub_name
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown
from megatronish.core.roles import ROLE_NAMES, THOUGHTS

FORMATS = {"chat_template": "auto", "alpaca": "alpaca", "sharegpt": "sharegpt", "alpaca_chat": "alpaca"}
"""Types of data sets that are chats, and the format of their files."""
TEMPLATES = {
    **{name: name for name in ("chatml", "llama3", "gemma", "alpaca", "qwen3")},
    **{"phi_3": "phi3", "mistral_v1": "mistral", "qwen_25": "qwen25", "gemma3": "gemma", "tokenizer_default": None},
}
"""Names of templates; None is the model's own."""
TEXTS = (None, "", "completion", "pretrain")
MAPPED = {"role": ("role", "from"), "content": ("content", "value"), "reasoning_content": THOUGHTS}
"""Names of properties of a message, and the columns that are read as each; any other property keeps its name."""
MEANT = {"message_property_mappings": MAPPED, "roles": ROLE_NAMES}
"""Keys of a data set that name parts of a message or roles, and what is read as each without them."""
READ = ("path", "type", "data_files", "ds_type", "trust_remote_code", "preprocess_shards")
"""Keys of a data set that are read, or that say nothing here."""
READ_ANYWAY: dict[str, tuple[Any, ...]] = {
    "split": ("train",),
    "field": ("text",),
    "text_column": ("text",),
    "field_messages": ("messages", "conversations", "conversation"),
    "field_chosen": ("chosen",),
    "field_rejected": ("rejected",),
    "field_tools": ("tools",),
    "field_thinking": THOUGHTS,
    "message_field_training": ("train",),
    "drop_system_message": (False,),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "field_instruction": ("instruction",),
    "field_input": ("input",),
    "field_output": ("output",),
}
"""Values of its other keys that ask for what is read without them, too."""
PARTS = {
    "split": "every line of the file is read",
    **dict.fromkeys(("field", "text_column"), "the column text is read; rename that of the file"),
    **dict.fromkeys(("shards", "shards_idx"), "every line of the file is read"),
}
"""What is done instead."""
OTHER_FIELDS = ("intel", "icr", "argilla", "nectar", "user_defined")
"""Types of preferences whose files have other names for prompt, chosen and rejected."""
USUAL_PAIRS = (("chat_template.argilla", "orpo"),)
"""Types of OTHER_FIELDS that have the usual names for an objective."""


def data_sets(found: Imported, values: Mapping[str, Any], folder: Path) -> bool:
    """Settings of the data sets; whether they are read as chats. What has no counterpart is listed."""
    # 1. What kind of data: chats if any set is of a chat's type, else texts.
    sets = _sets(values, "datasets")
    if sets and _sets(values, "pretraining_dataset"):
        found.warn("pretraining_dataset", "datasets are trained on; Axolotl trains on this where both are there")
    sets = sets or _sets(values, "pretraining_dataset")
    types = [_type(data_set) for data_set in sets]
    has_chats = any(kind in FORMATS for kind in types)
    _list_unknown(found, values)
    # 2. Texts are read as they are only where each set is a file of JSON lines that lies here; for any other the rules
    # have listed how to make files of tokens.
    if not has_chats and not all(_has_lines(data_set, folder) for data_set in sets):
        if values.get("train_on_inputs") is False:
            found.leave_out("train_on_inputs", EVERY_TOKEN)
        return False
    if not sets:
        found.leave_out("datasets", "there are none in the file; name JSON lines with --data-path")
        return False
    # 3. They are read as chats: the keys that the rules listed as left out do have a meaning now.
    for key in ("datasets", "pretraining_dataset", "chat_template", "chat_template_jinja", "train_on_inputs"):
        found.left_out.pop(key, None)
    found.set("dataset_type", "chat")
    # A text has no answers, so the loss of texts counts every token, among chats, too. What comes from
    # pretraining_dataset is always packed.
    found.set("train_on", "all" if values.get("train_on_inputs") or not has_chats else "assistant")
    found.set("pack_samples", values.get("sample_packing") is True or not values.get("datasets"))
    if not has_chats:  # of which a text has neither
        for key in USUAL:
            if found.otherwise.pop(key, None) is not None:
                found.leave_out(key, EVERY_TOKEN)
    # 4. One format is named for all files; where they are mixed, each record shows its own.
    formats = {FORMATS.get(kind or "", "text") for kind in types}
    if len(formats) == 1 and formats != {"auto"}:
        found.set("chat_format", formats.pop())
    if has_chats:
        _template(found, values, "alpaca" if "alpaca" in types else None)
    files_of(found, sets, folder, key="datasets" if values.get("datasets") else "pretraining_dataset")
    held_out(found, values, folder)
    return True


def preferences(found: Imported, values: Mapping[str, Any], folder: Path) -> None:
    """Settings of the data sets of `rl`: pairs, or labelled completions."""
    sets = _sets(values, "datasets")
    for key in ("datasets", "chat_template", "chat_template_jinja"):
        found.left_out.pop(key, None)
    # Types are template.fields, such as chatml.intel: the part before the dot is a template, the part after it names
    # the columns of the file, which must be ours.
    types = [str(data_set.get("type") or "") if isinstance(data_set, dict) else "" for data_set in sets]
    for key in ("datasets", "test_datasets"):
        for index, data_set in enumerate(_sets(values, key)):
            _list_parts(found, values, data_set, f"{key}[{index}].", is_chat=True)
    for index, kind in enumerate(types):
        is_other = kind.rpartition(".")[2] in OTHER_FIELDS and (kind, values.get("rl")) not in USUAL_PAIRS
        if is_other or not isinstance(_type(sets[index]), str | None):
            found.warn(
                f"datasets[{index}].type",
                f"{kind}: the columns of a line are read as prompt, chosen and rejected, or as prompt, completion and "
                "label; rename those of the file",
            )
    begun = {kind.partition(".")[0] for kind in types} & {"chatml", "llama3", "zephyr"}
    _template(found, values, begun.pop() if len(begun) == 1 else None)
    if found.settings.get("objective") == "kto":
        found.set("chat_format", "labelled")
    found.set("pack_samples", values.get("sample_packing") is True)
    files_of(found, sets, folder, key="datasets")
    held_out(found, values, folder)


def held_out(found: Imported, values: Mapping[str, Any], folder: Path) -> None:
    """Sets for validation, which Axolotl calls test_datasets."""
    sets = _sets(values, "test_datasets")
    if not sets or "data_path" not in found.settings:
        return
    found.left_out.pop("test_datasets", None)
    # --data-path is cut by --split into training and validation; with files of its own for validation it is not cut.
    found.set("train_data_path", found.settings.pop("data_path"))
    files_of(found, sets, folder, key="test_datasets", field="valid_data_path")


def _list(sets: Any) -> list[Any]:
    return sets if isinstance(sets, list) else [] if sets is None else [sets]


def _sets(values: Mapping[str, Any], key: str) -> list[Any]:
    """Data sets under a key: objects with a path, or paths. UserError for anything else."""
    value = values.get(key)
    sets = [] if value is None or value is False or value == "" else _list(value)
    for index, data_set in enumerate(sets):
        if not isinstance(data_set, dict | str) or not data_set:
            raise UserError(
                f"{key}[{index}]={shown(data_set)} must be an object with a path, or a path; correct the file"
            )
    return sets


WRITTEN = "written in the file"


def _type(data_set: Any) -> str | None:
    """Type of a data set, such as chat_template; WRITTEN for one that the file itself describes."""
    kind = data_set.get("type") if isinstance(data_set, dict) else None
    return kind.split(".")[0] if isinstance(kind, str) else None if kind is None else WRITTEN


def _list_unknown(found: Imported, values: Mapping[str, Any]) -> None:
    """List the types that are not there, and keys of data sets. Sets for tests are not read as chats."""
    for key in ("datasets", "test_datasets", "pretraining_dataset"):
        for index, data_set in enumerate(_sets(values, key)):
            kind = _type(data_set)
            if kind not in TEXTS and kind not in FORMATS:
                reason = f"{kind}: a prompt template is not applied; text is trained on as it is"
                found.warn(f"{key}[{index}].type", reason)
            _list_parts(found, values, data_set, f"{key}[{index}].", is_chat=kind in FORMATS)


def _list_parts(found: Imported, values: Mapping[str, Any], data_set: Any, within: str, *, is_chat: bool) -> None:
    """List the keys of a data set that say which part of it is read, and which part of that is trained on."""
    for name, value in data_set.items() if isinstance(data_set, dict) else ():
        key = f"{within}{name}"
        if name in READ or value in (None, "", [], {}):
            continue
        if name in USUAL:
            if not is_chat:
                found.leave_out(key, EVERY_TOKEN)
            elif value != USUAL[name]:
                found.warn(key, ROLES.reason)
        elif name in ("chat_template", "conversation"):
            if value != values.get("chat_template"):
                found.warn(key, f"{shown(value)}: all sets have one template, --chat-template, and not one each")
        elif (name in MEANT and is_usual(value, MEANT[name])) or (
            name == "field_messages" and value == "prompt" and values.get("rl")
        ):
            continue
        elif value not in READ_ANYWAY.get(name, ()):
            found.warn(key, f"{shown(value)}: {PARTS.get(name, 'it is not read, and may change what is trained on')}")


def is_usual(value: Any, usual: Mapping[str, Sequence[str]]) -> bool:
    """Whether an object gives names, one or a list of them, that are read so without it, too."""
    return isinstance(value, dict) and all(
        name in usual.get(key, (key,)) for key, names in value.items() for name in _list(names)
    )


def _template(found: Imported, values: Mapping[str, Any], of_data: str | None) -> None:
    """The template that is named, that of the type of the data, or the model's own; and its variables."""
    found.left_out.pop("chat_template_kwargs", None)
    if variables := section(values, "chat_template_kwargs"):
        found.set("chat_template_kwargs", json.dumps(variables, ensure_ascii=False), key="chat_template_kwargs")
    # The text of a template wins over a name; it must be in a file, as no flag takes a text.
    name, source = text(values, "chat_template"), text(values, "chat_template_jinja")
    if source:
        if source.endswith(".jinja"):
            found.set("chat_template", source)
        else:
            found.warn("chat_template_jinja", "write it into a file, and name it: --chat-template FILE.jinja")
    elif not name:
        if of_data is not None:
            found.set("chat_template", of_data)
        if of_data == "alpaca":
            found.warn("datasets.type", f"the opening sentence of {of_data} is not added: put it in the data")
    # Names that are not known: those with a fallback use it only if the model has no template, which this importer
    # cannot see.
    elif name not in TEMPLATES:
        fallback = TEMPLATES.get(name.removeprefix("tokenizer_default_fallback_"))
        if fallback is None:
            found.warn(
                "chat_template", f"{name} is not there; the model's own is used, or name one with --chat-template"
            )
        else:
            found.leave_out(
                "chat_template", f"{name}: the model's own is used; without one add --chat-template {fallback}"
            )
    elif (ours := TEMPLATES[name]) is not None:
        found.set("chat_template", ours)


def _path_of(data_set: Any) -> str:
    """Path of a data set: of a reader of the Hub's library, such as json, the first of its files."""
    name = data_set.get("path") if isinstance(data_set, dict) else data_set
    if isinstance(data_set, dict) and name in ("json", "jsonl", "parquet", "csv", "arrow", "text"):
        name = next(iter(_list(data_set.get("data_files"))), name)
    return name if isinstance(name, str) else shown(name)


def _here(name: str, folder: Path) -> Path | None:
    return next((path for path in (Path(name), folder / name) if is_file(path)), None)


def _has_lines(data_set: Any, folder: Path) -> bool:
    """Whether the texts of a set are a file of JSON lines that is here, which is read as it is."""
    name = _path_of(data_set)
    return _here(name, folder) is not None and name.endswith((".json", ".jsonl"))


def files_of(found: Imported, sets: list[Any], folder: Path, *, key: str, field: str = "data_path") -> None:
    """Paths of files of JSON lines, and names of the hub as they are."""
    paths = []
    for index, data_set in enumerate(sets):
        # A path that is not here may be a name of the hub, org/name, which a run downloads; any other would be refused
        # at its start, so it is listed and not set.
        name = _path_of(data_set)
        here, is_name = _here(name, folder), hub_name(name) is not None
        if here is None:
            hint = "so a run downloads its JSON lines from Hugging Face's hub" if is_name else NO_FILE
            found.leave_out(f"{key}[{index}].path", f"{name} is not a file here, {hint}")
        if here is not None or is_name:
            paths.append(name if here is None else str(here))
        files = _list(data_set.get("data_files")) if isinstance(data_set, dict) else []
        if len(files) > 1:
            found.leave_out(f"{key}[{index}].data_files", f"the first of {len(files)} files is taken")
    if paths:
        found.set(field, tuple(paths))


NO_FILE = "and no name of a hub; name JSON lines with --data-path"
FUSED = dropped("which kernels are used is decided at run time")
EPOCHS = dropped("intervals are in steps; use --eval-interval and --save-interval")
LORA = missed("it is not there for adapters")
QUANTISED = missed("the base of adapters may be in NF4 or in 8 bits (--quantize-base), and in no other form")
QUANTISED_ALONE = "only the base of adapters is quantised; add --adapter-type lora --quantize-base nf4 or int8"
CHATS = dropped("name chats with --dataset-type chat --data-path FILE, and their template with --chat-template")
ROLES = missed("answers of the assistant are trained on, each with the token that ends it; --train-on has other parts")
ENDS = dropped("the token that ends an answer in the chat template is trained, whatever it is")
USUAL = {"roles_to_train": ["assistant"], "train_on_eos": "turn"}
"""Values that ask for what is done here, too."""
PREFERENCES = dropped("rewards are not learned, and nothing is generated in training")
FITTING = dropped("chats are packed, and one that is longer than a row is cut")
TOO_LONG = "a chat that is longer than a row is cut; Axolotl leaves it out, except with truncate"
HUB = dropped("nothing is uploaded or downloaded")
DATA = dropped("make .bin/.idx files with tools/preprocess_data.py, and name them with --data-path")
MODEL = dropped("the files of the model say it")
PLUGINS = dropped("Axolotl's plug-ins are its own classes; here a plug-in is a file given with --plugin")
RESUME = dropped(
    "it is a Hugging Face folder, which --load cannot read; convert it with megatronish convert --from hf "
    "--to megatronish, and name the new folder with --load"
)
EVERY_TOKEN = "the loss of texts counts every token; that of --dataset-type chat counts answers only"

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
    "torch_compile": field("compile"),
    "seed": field("seed"),
    "resume_from_checkpoint": RESUME,
    "plugins": PLUGINS,
    "tensor_parallel_size": field("tensor_model_parallel_size"),
    "context_parallel_size": field("context_parallel_size"),
    "sequence_parallel_degree": field("context_parallel_size"),
    "dp_replicate_size": field("num_distributed_optimizer_instances"),
    "wandb_project": field("wandb_project"),
    "wandb_name": field("wandb_exp_name"),
    "wandb_entity": field("wandb_entity"),
    **dict.fromkeys(("evals_per_epoch", "saves_per_epoch", "eval_strategy", "save_strategy"), EPOCHS),
    **dict.fromkeys(("datasets", "test_datasets", "pretraining_dataset", "dataset_prepared_path"), DATA),
    **dict.fromkeys(("peft_layers_to_transform", "relora_steps", "peft_use_dora"), LORA),
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"), FUSED),
    **dict.fromkeys(("eot_tokens", "train_on_eot"), ENDS),
    "shuffle_merged_datasets": dropped("the order of samples is shuffled by --seed, always"),
    **dict.fromkeys(("gptq", "quantization"), QUANTISED),
    **dict.fromkeys(("chat_template", "chat_template_jinja", "chat_template_kwargs", "train_on_inputs"), CHATS),
    **dict.fromkeys(("roles_to_train", "train_on_eos"), ROLES),
    **dict.fromkeys(("trl", "reward_model", "process_reward_model", "dpo_use_weighting"), PREFERENCES),
    "group_by_length": FITTING,
    **dict.fromkeys(
        (
            *("base_model_config", "model_type", "tokenizer_type", "tokenizer_config", "trust_remote_code"),
            *("is_llama_derived_model", "is_mistral_derived_model", "special_tokens", "tokenizer_use_fast", "strict"),
        ),
        MODEL,
    ),
    "tokens": missed("no token is added: add them to the tokenizer of the model's folder, and rows to its embedding"),
    "overrides_of_model_config": missed("the model is as its own config.json says; change it there"),
    "revision_of_model": missed("it is not read; add it to the name: --load-hf ORG/NAME@REVISION"),
    **dict.fromkeys(
        (
            *("flash_attention", "sdp_attention", "xformers_attention", "eager_attention", "flex_attention"),
            *("flash_attn_rms_norm", "flash_attn_cross_entropy", "flash_attn_fuse_mlp", "flash_attn_fuse_qkv"),
            *("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_swiglu", "attn_implementation"),
            *("liger_fused_linear_cross_entropy", "cut_cross_entropy", "liger_layer_norm", "liger_cross_entropy"),
        ),
        FUSED,
    ),
    **dict.fromkeys(
        (
            *("torch_compile_backend", "torch_compile_mode", "tf32", "dataset_processes", "dataloader_num_workers"),
            *("dataloader_pin_memory", "dataloader_prefetch_factor", "eval_batch_size", "pad_to_sequence_len"),
            *("ddp_timeout", "ddp_bucket_cap_mb", "low_cpu_mem_usage", "dp_shard_size", "heads_k_stride", "gc_steps"),
            *(
                "qlora_sharded_model_loading",
                "eval_sample_packing",
                "gradient_checkpointing_kwargs",
                "auto_resume_from_checkpoints",
                "ddp_find_unused_parameters",
                "remove_unused_columns",
                "torchdistx_path",
                "save_safetensors",
                "local_rank",
            ),
        ),
        SPEED,
    ),
    **dict.fromkeys(("hub_model_id", "push_dataset_to_hub", "hub_strategy", "hf_use_auth_token"), HUB),
    **dict.fromkeys(
        (
            *("early_stopping_patience", "neftune_noise_alpha", "unfrozen_parameters", "loss_watchdog_threshold"),
            *("loss_watchdog_patience", "lr_groups", "embedding_lr", "embedding_lr_scale", "rope_scaling"),
            *("optim_args", "optim_target_modules", "cosine_constant_lr_ratio", "lr_quadratic_warmup"),
            *("noisy_embedding_alpha", "lisa_n_layers", "curriculum_sampling"),
        ),
        NOT_THERE,
    ),
    **dict.fromkeys(("debug", "multipack_real_batches", "eval_table_size", "eval_max_new_tokens"), NO_SUCH_RECORD),
}

ABSENT: dict[str, float] = {
    "seq_length": 512,
    "weight_decay": 0.0,
    "clip_grad": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "seed": 42,
}
"""What keys mean that are absent: the defaults of Axolotl, and of the Trainer of transformers, which it calls."""
MUON: dict[str, float | bool | str] = {
    "muon_momentum": 0.95,
    "muon_nesterov": True,
    "muon_num_ns_steps": 5,
    "muon_coefficient_type": "simple",
    "muon_scale_mode": "spectral",
    "muon_extra_scale_factor": 0.2,
    "adam_beta1": 0.95,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
}
SEVERAL_MUON = MUON | {
    "muon_nesterov": False,
    "muon_coefficient_type": "quintic",
    "muon_scale_mode": "unit_rms_norm",
    "muon_extra_scale_factor": 1.0,
    "adam_beta1": 0.9,
}
"""Numbers of Axolotl's two Muons, of one process and of several, that no key names."""
PEFT = {"lora_rank": 8, "lora_alpha": 8.0, "lora_dropout": 0.0}
PEFT_TARGETS = ["q_proj", "v_proj"]
"""The same of PEFT's LoRA in Llama and its relatives."""

OPTIMIZERS = {"adamw": "adam", "adam": "adam", "sgd": "sgd", "muon": "muon"}
