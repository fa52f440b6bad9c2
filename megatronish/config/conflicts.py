"""Resolution of settings that exclude each other.

A flag wins over the file; of one flag given several times the last counts; two flags that exclude each other, or two
keys of the file, are an error.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatronish.config.fields import FIELDS, VERBATIM
from megatronish.config.flag_meaning import Setting
from megatronish.config.marks import ADDS_UP
from megatronish.config.sections.width import OF_MUP
from megatronish.core.errors import STARS

Values = Mapping[str, Any]


class Conflict(NamedTuple):
    """Two groups of fields that exclude each other. `wins`: of two flags, or two keys, the first group's counts."""

    one: tuple[str, ...]
    other: tuple[str, ...]
    rule: str
    wins: bool = False


STEPS = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples")
TOKENS = ("train_tokens", "lr_decay_tokens", "lr_warmup_tokens")
"""Lengths in tokens, which `derive` turns into those in samples."""
LOSS_SCALE_RULE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_SPLIT_DATA = ("train_data_path", "valid_data_path", "test_data_path", "multiple_validation_sets")
_ONE_ACTIVATION = "an MLP has one activation"
_ACTIVATIONS = ("swiglu", "geglu", "quick_geglu", "relu", "squared_relu", "xielu", "openai_gelu")

CONFLICTS = (
    Conflict(
        ("mock_data",),
        ("data_path", "dataset_type", "dataset_args", *_SPLIT_DATA),
        "made-up tokens stand in for files",
        wins=True,
    ),
    Conflict(
        ("num_epochs",),
        ("train_iters", *SAMPLES, *TOKENS),
        "a run has one length, in steps, in samples, in tokens or in epochs",
    ),
    Conflict(STEPS, (*SAMPLES, *TOKENS), "a run is counted in steps, or in samples and tokens"),
    Conflict(
        ("lr_warmup_fraction",), ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens"), "warm-up has one length"
    ),
    *(Conflict((name,), _ACTIVATIONS[place + 1 :], _ONE_ACTIVATION) for place, name in enumerate(_ACTIVATIONS[:-1])),
    Conflict(("bf16",), ("fp16",), "a model is computed in one precision"),
    Conflict(("loss_scale",), LOSS_SCALE_RULE, "a loss scale that is given follows no rule"),
    Conflict(("load",), ("load_hf",), "a run starts from one model"),
    Conflict(
        ("num_layers_per_virtual_pipeline_stage",),
        ("num_virtual_stages_per_pipeline_rank",),
        "both say how many chunks a stage holds",
    ),
    Conflict(
        ("pipeline_split",),
        ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        "layers are shared out by hand or by weight",
    ),
    Conflict(
        ("pipeline_split",),
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        "auto counts the embedding and the head by their cost",
    ),
    Conflict(
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        "layers are shared out by hand or evenly",
    ),
    Conflict(("mup_base_hidden_size",), ("mup_width_mult",), "both say how much wider than its base a model is"),
    Conflict(("rampup_batch_size",), ("step_batch_size_schedule",), "the batch grows in one way"),
    Conflict(("data_path",), _SPLIT_DATA, "--data-path is cut by --split, the others are not"),
)

# A field of the file is idle once another one was typed with one of these values.
IDLE_ONCE: dict[str, tuple[str, tuple[Any, ...]]] = {
    "num_query_groups": ("group_query_attention", (False,)),
    "rope_scaling_type": ("position_embedding_type", ("learned_absolute", "alibi", "none")),
    "window_rotary_base": ("position_embedding_type", ("learned_absolute", "alibi", "none")),
    "no_rope_freq": ("position_embedding_type", ("learned_absolute", "alibi", "none")),
    "qk_layernorm_after_rope": ("position_embedding_type", ("learned_absolute", "alibi", "none")),
    "qk_l2_norm": ("position_embedding_type", ("learned_absolute", "alibi", "none")),
    **dict.fromkeys(("rope_mscale", "rope_mscale_all_dim"), ("multi_latent_attention", (False,))),
    "max_position_embeddings": ("position_embedding_type", ("rope", "alibi", "none")),
    **dict.fromkeys(OF_MUP[1:], ("use_mup", (False,))),
}


class Merged(NamedTuple):
    """One setting for each field, with notes and problems about fields that were set several times."""

    settings: dict[str, Setting]
    notes: list[str]
    problems: list[str]


class Settled(NamedTuple):
    """Settings that count, settings that became idle, and problems."""

    settings: dict[str, Setting]
    idle: dict[str, str]  # field of the file -> how what overrides it was spelled
    problems: list[str]


def merge(*, file: Sequence[Setting], typed: Sequence[Setting], yielding: Iterable[Setting] = ()) -> Merged:
    """One setting for each field: a flag wins over the file, and the last of several flags wins.

    Two different values of a field in the file are a problem. Lists that add up take what the file and all flags have.
    `yielding` settings are for fields that nothing else sets.
    """
    merged = _added_up([*file, *typed])
    notes, problems = [], []
    for setting in file:
        before = merged.setdefault(setting.field, setting)
        if before.values != setting.values and ADDS_UP not in FIELDS[setting.field].marks:
            problems.append(f"{before.spelled} contradicts {setting.spelled}; leave one of them out")
    flags: dict[str, list[Setting]] = {}
    for setting in typed:
        if ADDS_UP not in FIELDS[setting.field].marks:
            flags.setdefault(setting.field, []).append(setting)
    for name, several in flags.items():
        merged[name] = several[-1]
        if len({setting.values for setting in several}) > 1:
            notes.append(_last_counts(several))
    for setting in yielding:
        merged.setdefault(setting.field, setting)
    return Merged(merged, notes, problems)


def _last_counts(settings: list[Setting]) -> str:
    """Note about a field that several flags set to different values."""
    names = {setting.spelled.split()[0].partition("=")[0] for setting in settings}
    if len(names) == 1:
        times = "twice" if len(settings) == 2 else f"{len(settings)} times"
        return f"{names.pop()} is given {times}; the last, {settings[-1].spelled}, counts"
    spelled = ", ".join(dict.fromkeys(setting.spelled for setting in settings))
    return f"{spelled} set the same field, {settings[-1].field}; the last, {settings[-1].spelled}, counts"


def _added_up(settings: Iterable[Setting]) -> dict[str, Setting]:
    """One setting for each list that adds up: what the file has, then what each flag adds, without repetitions."""
    lists: dict[str, list[Setting]] = {}
    for setting in settings:
        if ADDS_UP in FIELDS[setting.field].marks:
            lists.setdefault(setting.field, []).append(setting)
    return {
        field: Setting(
            field,
            tuple(dict.fromkeys(value for part in parts for value in part.values)),
            " ".join(part.spelled for part in parts),
            any(part.typed for part in parts),
        )
        for field, parts in lists.items()
    }


def settle(settings: dict[str, Setting], values: Values) -> Settled:
    """Settings without those that lose a conflict. A setting whose value is the default is in no conflict."""
    left = dict(settings)
    idle: dict[str, str] = {}
    problems = []

    def asked(fields: Iterable[str]) -> list[Setting]:
        return [left[name] for name in fields if name in left and values.get(name) != FIELDS[name].default]

    def drop(losers: Iterable[Setting], winner: Setting) -> None:
        for loser in losers:
            idle[loser.field] = winner.spelled
            del left[loser.field]

    for one, other, rule, wins in CONFLICTS:
        first, second = asked(one), asked(other)
        typed_first, typed_second = _typed(first), _typed(second)
        if not first or not second:
            continue
        if wins and bool(typed_first) == bool(typed_second):
            drop(second, (typed_first or first)[0])
        elif bool(typed_first) == bool(typed_second):
            a, b = (typed_first or first)[0], (typed_second or second)[0]
            problems.append(f"{a.spelled} contradicts {b.spelled}: {rule}; leave one of them out")
        elif typed_first:
            drop(second, typed_first[0])
        else:
            drop(first, typed_second[0])

    for name, (parent, off) in IDLE_ONCE.items():
        if name in left and parent in left and left[parent].typed and not left[name].typed and values[parent] in off:
            drop([left[name]], left[parent])
    return Settled(left, idle, problems)


def _typed(settings: list[Setting]) -> list[Setting]:
    return [setting for setting in settings if setting.typed]


def with_passwords(settings: Mapping[str, Setting]) -> tuple[dict[str, Setting], list[str]]:
    """Settings in which a password that a file shows as *** is left to the environment, and complaints where it is not.

    A run keeps no password (errors.py). For a store, fsspec reads FSSPEC_<PROTOCOL>_PASSWORD.
    """
    completed, problems = dict(settings), []
    for name, setting in settings.items():
        if name in VERBATIM or not any(STARS in value and ("://" in value or "=" in value) for value in setting.values):
            continue
        protocol = setting.values[0].partition("://")[0].upper()
        variable = f"FSSPEC_{protocol}_PASSWORD"
        if variable in os.environ and f":{STARS}@" in setting.values[0]:
            values = tuple(value.replace(f":{STARS}@", "@") for value in setting.values)
            completed[name] = setting._replace(values=values)
            continue
        remedy = f", or set {variable}" if f":{STARS}@" in setting.values[0] else ""
        problems.append(
            f"{setting.spelled}: {STARS} stands for a password, which is not kept in files; give it again with "
            f"{FIELDS[name].flag}{remedy}"
        )
    return completed, problems
