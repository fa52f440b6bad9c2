"""Help of the commands that train: a page by task, with the flags that most runs set, and a page of all flags."""

import ast
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, NoReturn, get_origin, get_type_hints

import tyro

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, SECTIONS, Field
from megatronish.config.marks import REQUIRED
from megatronish.config.settings import HELP_ALL
from megatronish.core.names import in_braces

_VALUES = {int: "INT", float: "FLOAT", str: "STR"}

_LENGTH = "seq_length micro_batch_size global_batch_size train_iters num_epochs eval_interval eval_iters bf16 seed"
_OPTIMIZER = "optimizer lr min_lr lr_decay_style lr_warmup_fraction lr_warmup_iters weight_decay clip_grad"
_LAYOUT = (
    "tensor_model_parallel_size pipeline_model_parallel_size data_parallel_size context_parallel_size "
    "expert_model_parallel_size sequence_parallel zero_stage recompute_granularity compile device"
)
_RUN = "run_dir dry_run world_size log_interval tensorboard_dir wandb_project sample_prompt"

TASKS: Mapping[str, Mapping[str, str]] = {
    "pretrain": {
        "model": "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size swiglu normalization "
        "position_embedding_type rotary_base max_position_embeddings attention_dropout hidden_dropout "
        "untie_embeddings_and_output_weights num_experts moe_router_topk moe_ffn_hidden_size",
        "data": "data_path split mock_data tokenizer_type tokenizer_model vocab_file merge_file packing",
        "training": _LENGTH,
        "optimizer": _OPTIMIZER,
        "layout": f"{_LAYOUT} pipeline_schedule",
        "checkpoint": "save load save_interval keep_last async_save max_restarts",
        "run": _RUN,
    },
    "finetune": {
        "model": "load load_hf",
        "data": "data_path dataset_type chat_format chat_template train_on pack_samples split",
        "objective": "objective beta dpo_loss_type reference",
        "adapter": "adapter_type adapter_targets lora_rank lora_alpha lora_dropout use_rslora quantize_base",
        "training": _LENGTH,
        "optimizer": _OPTIMIZER,
        "layout": _LAYOUT,
        "checkpoint": "save save_interval keep_last max_restarts",
        "run": _RUN,
    },
    "preprocess cache": {
        "data": "data_path train_data_path valid_data_path test_data_path split blend_schedule dataset_type packing "
        "data_cache_path data_store_cache_path data_store_cache_size",
        "training": "seq_length micro_batch_size global_batch_size train_iters eval_interval eval_iters seed",
    },
}
"""Fields of the page of each task, by group, in the order in which they are thought of."""
_SUBJECTS = {
    "pretrain": "Pretrains a GPT.",
    "finetune": "Fine-tunes a GPT that --load RUN or --load-hf FOLDER names, whole or with adapters (--adapter-type).",
    "preprocess cache": "Builds the indexes of a run's data ahead, from the flags of that run.",
}
_SECTIONS = [f"[{section}]" for section in SECTIONS]
_SOURCES = (
    "--config FILE.toml, or --config NAME of a config that comes with megatronish (demo, quick ...), has sections "
    f"{', '.join(_SECTIONS[:-1])} and {_SECTIONS[-1]}; flags override it. Names and meanings are Megatron-LM's where "
    "it has the flag."
)


def print_help(program: str, *, shows_all: bool) -> NoReturn:
    """Print the page of a program and exit 0. `program` is its name; of one without a page, that of pretraining."""
    task = next((task for task in TASKS if task in program), "pretrain")
    if shows_all:
        groups = {section: [name for name, each in FIELDS.items() if each.section == section] for section in SECTIONS}
        rest = "These are all flags."
    else:
        groups = {title: names.split() for title, names in TASKS[task].items()}
        others = len(FIELDS) - sum(map(len, groups.values()))
        rest = f"These are the flags that most runs set; {HELP_ALL} shows {others} more."
    page: Any = tyro.conf.OmitArgPrefixes[_page(groups)]  # type: ignore[misc] # a class made here
    tyro.cli(page, args=["--help"], prog=program, description=f"{_SUBJECTS[task]} {_SOURCES}\n\n{rest}")
    raise AssertionError("tyro exits after a page")


def meanings(section_type: type) -> dict[str, str]:
    """{field: the text under it}, read from the source, as Python keeps no docstrings of fields."""
    texts = {}
    for part in section_type.__mro__[:-1]:  # all except `object`
        (section,) = ast.parse(inspect.getsource(part)).body
        assert isinstance(section, ast.ClassDef)
        for field, text in pairwise(section.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                texts[field.target.id] = str(ast.literal_eval(text.value))
    return texts


def _page(groups: Mapping[str, Sequence[str]]) -> type:
    """A class that tyro prints: a group of flags for each of its fields."""
    texts = {name: text for kind in get_type_hints(Config).values() for name, text in meanings(kind).items()}
    parts = []
    for title, names in groups.items():
        fields = [
            (name, _annotation(FIELDS[name], texts[name]), dataclasses.field(default=FIELDS[name].default))
            for name in names
        ]
        kind = dataclasses.make_dataclass(title.capitalize(), fields, frozen=True)
        kind.__doc__ = ""
        parts.append((title, kind, dataclasses.field(default_factory=kind)))
    return dataclasses.make_dataclass("Page", parts, frozen=True)


def _annotation(field: Field, text: str) -> Any:
    """Type of a field with its text. What has no default says nothing of it, or that a run must give it."""
    is_open = field.default in (None, ())
    hint = "(required)" if REQUIRED in field.marks else "" if is_open else None
    values = None
    if get_origin(field.type) is not tuple:  # without "None", which stands for a flag that is left out
        names = [str(value) for value in field.choices]
        values = in_braces(names) if names else _VALUES.get(field.type)
    shown = tyro.conf.arg(help=" ".join(text.split()), help_behavior_hint=hint, metavar=values)
    return Annotated[field.annotation, shown]
