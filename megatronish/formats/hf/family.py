"""Families of Hugging Face models: the record of a family, a `model_type` of transformers.

A family is one file, or a part of that of its ancestors: the keys of its config.json, and its tensors as rules between
the names and shapes of transformers and ours. RoPE turns the two halves of a head, as here, or neighbours with
`rotary_interleaved`.

`ConfigJson` reads config.json: its keys by type, and the errors about them.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from megatronish.config.sections.model import ModelConfig
from megatronish.core import foreign
from megatronish.core.errors import UserError
from megatronish.formats.tensor_rule import TensorRule

CONFIG = "config.json"
CORRECT = "correct that line"
LARGEST_WHOLE = 2**31 - 1


class ConfigJson:
    """Keys of a config.json, read by type. `defaults` replace absent keys, but not a null."""

    def __init__(self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.path, self.values = path, {**defaults, **values}

    def whole(self, key: str, *, null: int | None = None, least: int = 1) -> int:
        """Whole number of at least `least`; `null` if the key is absent or null."""
        value = self.values.get(key)
        value = null if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(key, f"must be a whole number of at least {least}", remedy=CORRECT)
        if value > LARGEST_WHOLE:
            self.refuse(key, f"must be at most {LARGEST_WHOLE}", remedy=CORRECT)
        return value

    def number(self, key: str, *, null: float | None = None) -> float:
        """Number that is not negative; `null` if the key is absent or null."""
        value = self.values.get(key)
        value = null if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            self.refuse(key, "must be a number that is not negative", remedy=CORRECT)
        if value > sys.float_info.max:
            self.refuse(key, "must be finite", remedy=CORRECT)
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; null counts as false."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "must be true or false", remedy=CORRECT)
        return bool(value)

    def must_be(self, key: str, *allowed: Any, why: str) -> None:
        """Check that the value is one of these; UserError if not."""
        if self.values.get(key) not in allowed:
            self.refuse(key, why)

    def refuse(self, key: str, why: str, *, remedy: str = "take another model") -> NoReturn:
        """UserError about a key: file, value, rule and remedy."""
        setting = f"{key}={json.dumps(self.values[key])}" if key in self.values else f"{key}, which is absent,"
        raise UserError(f"{self.path}: {setting} {why}; {remedy}")


def read_json(folder: Path) -> dict[str, Any]:
    """Content of a folder's config.json; UserError if there is none, or it is no JSON object."""
    path = folder / CONFIG
    try:
        values = foreign.read_json(path)
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            problem = f"{folder} holds no {CONFIG}" if folder.is_dir() else f"{folder} does not exist as a folder"
        raise UserError(f"{problem}; name the folder of a Hugging Face model") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}; download it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} is not a JSON object; download it again")
    return values


HEAD = "lm_head.weight"


class ExpertNames(NamedTuple):
    """Names of a family in a layer: of the part that holds router and experts, and of an expert's matrices.

    `bias` is the router's, in that part; `shared` are the experts that every token passes. `is_packed`: the family's
    rules are of packed experts, in a form of its own. `says_turned`: their module in transformers says that inputs come
    before outputs, [E, in, out].
    """

    part: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "gate.e_score_correction_bias"
    shared: str = "shared_expert"
    is_packed: bool = False
    says_turned: bool = False


class FamilyTensors(NamedTuple):
    """Tensors of a family: the prefix of all except the head in transformers, and the rules, embedding first.

    `experts` are the names of single experts, where a family has them: packed ones are read under these. `head` is the
    output layer's weight, which a tied model may have a second time; `copies` are other tensors that may be there
    twice, with their originals, and `written_copies` those of a model that are there in any case. `new_name` is that of
    a tensor of an old file, and `left_out` the reason why a tensor is none of a model's, or None.
    """

    base: str
    rules: Callable[[ModelConfig], Iterable[TensorRule]]
    experts: ExpertNames | None = None
    head: str = HEAD
    copies: Mapping[str, str] = MappingProxyType({})
    written_copies: Callable[[ModelConfig], Mapping[str, str]] = lambda _model: {}
    new_name: Callable[[str], str] = str
    left_out: Callable[[ModelConfig, str], str | None] = lambda _model, _name: None


class ModelFamily(NamedTuple):
    """Family of models, a `model_type` of transformers: how its keys are read and written, and what it lacks.

    `aliases` are other names of its keys, which transformers reads too. The `tensors` of a plug-in's family are given
    with it when it is registered. `model_type` is ours.
    """

    architecture: str
    seq_length: str
    defaults: dict[str, Any]
    aliases: dict[str, str]
    read: Callable[[ConfigJson], dict[str, Any]]
    write: Callable[[ModelConfig, int], dict[str, Any]]
    cannot_describe: Callable[[ModelConfig], str | None]
    tensors: FamilyTensors = FamilyTensors("", lambda _model: ())
    model_type: str = "gpt"

    def lacks(self, model: ModelConfig) -> str | None:
        """What a model has and the family has not, or the other way round."""
        has_experts = self.tensors.experts is not None
        if model.model_type != self.model_type:
            return f"model_type={model.model_type}"
        if model.num_experts is not None and not has_experts:
            return f"num_experts={model.num_experts}"
        if model.num_experts is None and has_experts:
            return "a model without experts"
        return self.cannot_describe(model)


def in_no_family(model: ModelConfig) -> str | None:
    """Field of a model that no family here has; that no dense one has, if it is dense."""
    capacity, is_dense = model.moe_expert_capacity_factor, model.num_experts is None
    return first_true(
        {
            f"moe_expert_capacity_factor={capacity}": not is_dense and capacity is not None,
            f"softmax_type={model.softmax_type}": model.softmax_type == "off-by-one"
            or (is_dense and model.softmax_type != "vanilla"),
            f"attention_pattern={model.attention_pattern}": model.attention_pattern != "none" and not is_chunked(model),
            "quick_geglu": is_dense and model.quick_geglu,
            f"glu_linear_offset={model.glu_linear_offset}": is_dense
            and model.is_gated
            and model.glu_linear_offset != 0,
            f"activation_func_clamp_value={model.activation_func_clamp_value}": is_dense
            and model.is_gated
            and model.activation_func_clamp_value is not None,
        }
    )


def is_chunked(model: ModelConfig) -> bool:
    """Whether the pattern of attention is that of chunks: a token sees what comes before it in its own."""
    blocks = model.attention_local_blocks, model.attention_global_blocks
    return model.attention_pattern == "fixed" and blocks == (1, 0)


def not_gpt_block(model: ModelConfig) -> str | None:
    """Field of a model that GPT-2 and BLOOM do not have."""
    return first_true(
        {
            f"block={model.block}": model.block != "transformer",
            f"normalization={model.normalization}": model.normalization != "LayerNorm",
            "disable_bias_linear": not model.linear_bias,
            "qk_layernorm": model.qk_layernorm,
            f"clip_qkv={model.clip_qkv}": model.clip_qkv is not None,
            f"window_size={model.window_size}": model.window_size is not None,
            f"num_query_groups={model.num_kv_heads}": model.num_kv_heads != model.num_attention_heads,
            f"kv_channels={model.head_size}": model.head_size * model.num_attention_heads != model.hidden_size,
            "apply_layernorm_1p": model.apply_layernorm_1p,
        }
    )


def first_true(reasons: Mapping[str, bool]) -> str | None:
    """First key whose value is true."""
    return next((reason for reason, holds in reasons.items() if holds), None)
