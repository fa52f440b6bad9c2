"""Config of a Hugging Face model: config.json as fields of ModelConfig, and back. Needs no torch.

A family is a `model_type` of transformers. Keys that a config.json leaves out have transformers' own defaults. A
feature that only one of the two sides has is refused by name: nothing is dropped that would change what a model
computes.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatronish.config.check import absurd_size
from megatronish.config.fields import FIELDS
from megatronish.config.model_source import function_of
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.hf.families import FAMILIES
from megatronish.formats.hf.family import CONFIG, CORRECT, ConfigJson, ModelFamily, in_no_family, read_json
from megatronish.formats.hf.quantised import QUANTISED, quantisation
from megatronish.formats.hf.rope import KEYS as ROPE_KEYS
from megatronish.formats.hf.window import WINDOW_KEYS
from megatronish.formats.stored_names import stored_names
from megatronish.tokenizer.names import tokenizer_in

FURTHER = ("num_nextn_predict_layers", "num_mtp_layers")
"""Numbers of layers of multi-token prediction, of which a family may have none here: they are left out."""

LIKE_GPT2 = ("gpt2", "gptj", "opt")
"""Types of models whose vocab.json and merges.txt are those of GPT-2's way to split text."""


@dataclass(frozen=True)
class HfModel:
    """Model of a config.json, which is kept as `origin`; `seq_length` is the longest sequence of the model.

    `model` and `data` are fields of ModelConfig and DataConfig.
    """

    model: dict[str, Any]
    vocab_size: int
    seq_length: int
    eos_token_ids: tuple[int, ...]
    data: dict[str, Any]
    origin: dict[str, Any]


def read_hf_config(folder: Path) -> HfModel:
    """Model of a Hugging Face folder. UserError, with file and key, for a model that cannot be read or is not known."""
    values = read_json(folder)
    config = _understand(values, folder, data=tokenizer_in(folder, like_gpt2=values.get("model_type") in LIKE_GPT2))
    return _without_missing_layers(config, stored_names(folder))


def _without_missing_layers(config: HfModel, names: Collection[str] | None) -> HfModel:
    """Config without layers of multi-token prediction that are not in the files: transformers writes none of them."""
    first = f"model.layers.{config.model['num_layers']}."
    if not config.model.get("mtp_num_layers") or names is None or any(name.startswith(first) for name in names):
        return config
    return replace(config, model=config.model | {"mtp_num_layers": None})


def hf_config_of(
    model: ModelConfig,
    *,
    vocab_size: int,
    seq_length: int,
    eos_token_id: int | None = None,
    origin: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The config.json of a model: `origin` if that is of the same family, with only those keys changed that differ.

    UserError, with the field, if no family has such a model.
    """
    origin = origin or {}
    name = _choose_family(model, prefer=origin.get("model_type"))
    wanted = _write(name, model, vocab_size=vocab_size, seq_length=seq_length, eos=eos_token_id)
    if origin.get("model_type") != name:
        return wanted
    before = _understand(origin, Path(), data={})
    ends_before = eos_token_id in (None, *before.eos_token_ids)
    unchanged = _write(
        name,
        ModelConfig(**before.model),
        vocab_size=before.vocab_size,
        seq_length=before.seq_length,
        eos=eos_token_id if ends_before else None,
    )
    changed = {key: value for key, value in wanted.items() if unchanged[key] != value}
    stale: set[str] = set()
    # A scaling of RoPE may leave out the length that it begins from, which then is that of the model.
    is_longer = FAMILIES[name].seq_length in changed and wanted.get("rope_scaling") is not None
    for group in (ROPE_KEYS, WINDOW_KEYS):
        if changed.keys() & set(group) or (group is ROPE_KEYS and is_longer):
            stale |= set(group)
            changed |= {key: wanted[key] for key in group if key in wanted}
    stale.add(QUANTISED)  # as read, and so as written, the weights are not
    further = {key: model.num_depths for key in FURTHER if origin.get(key)}
    return {key: value for key, value in origin.items() if key not in stale} | changed | further


def _understand(origin: Mapping[str, Any], folder: Path, *, data: dict[str, Any]) -> HfModel:
    path = folder / CONFIG
    name = origin.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(
            f"{path}: model_type {name!r} is not supported; supported are {', '.join(FAMILIES)}; "
            "others are those of plug-ins (--plugin)"
        )
    family = FAMILIES[name]
    aliased = {family.aliases[key]: value for key, value in origin.items() if key in family.aliases}
    config = ConfigJson(path, {**aliased, **origin}, family.defaults)
    quantisation(config)
    config.must_be("is_causal", None, True, why="is not supported: a decoder sees what comes before alone")
    config.must_be("per_layer_config", None, {}, why="is not supported: layers have the settings of the whole model")
    model = _fields(family, config)
    for field, value in model.items():
        for bound in FIELDS[field].ranges:
            if isinstance(value, int | float) and not bound.is_maximum and not bound.holds(value):
                raise UserError(f"{path}: its {field}={value} {bound.rule}; {CORRECT}")
    vocab_size, seq_length = config.whole("vocab_size"), config.whole(family.seq_length)
    if absurd := absurd_size(ModelConfig(**model), vocab_size=vocab_size, seq_length=seq_length):
        raise UserError(f"{path}: {absurd}; download it again")
    return HfModel(
        model,
        vocab_size,
        seq_length,
        _eos_token_ids(config),
        data,
        dict(origin),
    )


def _fields(family: ModelFamily, config: ConfigJson) -> dict[str, Any]:
    """Fields of ModelConfig from the keys of a family."""
    return family.read(config) | {
        "init_method_std": config.number("initializer_range"),
        "untie_embeddings_and_output_weights": not config.flag("tie_word_embeddings"),
    }


def _eos_token_ids(config: ConfigJson) -> tuple[int, ...]:
    eos = config.values.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) for token in ids):
        config.refuse("eos_token_id", "must be a token id, or a list of them", remedy=CORRECT)
    return tuple(ids)


def _write(name: str, model: ModelConfig, *, vocab_size: int, seq_length: int, eos: int | None) -> dict[str, Any]:
    family = FAMILIES[name]
    return {
        "architectures": [family.architecture],
        "model_type": name,
        "vocab_size": vocab_size,
        "pad_token_id": None,  # a family's own default would be a token of ours, or none of the table
        **family.write(model, max(seq_length, model.max_position_embeddings or 0)),
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": model.tied,
        "bos_token_id": None,
        "eos_token_id": eos,
    }


def _changed(name: str, model: ModelConfig) -> str | None:
    """What becomes another of a model that is written in the keys of a family and read again."""
    family, rows = FAMILIES[name], model.max_position_embeddings or 1
    keys = _write(name, model, vocab_size=1, seq_length=rows, eos=None)
    try:
        again = ModelConfig(**_fields(family, ConfigJson(Path(CONFIG), keys, family.defaults)))
    except UserError as error:
        return str(error)
    before, after = (function_of(each, seq_length=rows) for each in (model, again))
    other = next((key for key in before if not _is_same(before[key], after.get(key))), None)
    return None if other is None else f"{other}={before[other]}"


def _is_same(first: Any, second: Any) -> bool:
    """Whether two values are equal, numbers except for the rounding of an inverse."""
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-12)
    return bool(first == second)


def _choose_family(model: ModelConfig, *, prefer: Any) -> str:
    """Name of a family that has such a model, `prefer` if possible."""
    nowhere = in_no_family(model)
    if nowhere is not None:
        raise UserError(f"no family of Hugging Face that is known here has {nowhere}; keep the model in another format")
    reasons = {name: family.lacks(model) or _changed(name, model) for name, family in FAMILIES.items()}
    able = [name for name, reason in reasons.items() if reason is None]
    if not able:
        raise UserError(f"no supported family of Hugging Face can express this model: {_told(model, reasons)}")
    return prefer if prefer in able else able[0]


def _told(model: ModelConfig, reasons: Mapping[str, str | None]) -> str:
    """Families and their reasons; those that have experts where the model has none, or none, are named together."""
    together: dict[tuple[str | None, str], list[str]] = {}
    for name, reason in reasons.items():
        is_other_kind = (FAMILIES[name].tensors.experts is None) != (model.num_experts is None)
        together.setdefault((reason, "" if is_other_kind else name), []).append(name)
    return "; ".join(f"{', '.join(names)} not {reason}" for (reason, _), names in together.items())
