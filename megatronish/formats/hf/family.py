"""Families of Hugging Face models: the record of a family, a `model_type` of transformers."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megatronish.config.model import ModelConfig
from megatronish.formats.hf.config_json import ConfigJson


class ModelFamily(NamedTuple):
    """Family of models, a `model_type`: how its keys are read and written, and the field of a model that it lacks.

    `aliases` are other names of its keys, which transformers reads too.
    """

    architecture: str
    seq_length: str
    defaults: dict[str, Any]
    aliases: dict[str, str]
    read: Callable[[ConfigJson], dict[str, Any]]
    write: Callable[[ModelConfig, int], dict[str, Any]]
    cannot_describe: Callable[[ModelConfig], str | None]


def in_no_family(model: ModelConfig) -> str | None:
    """Field of a model that no family here has."""
    return first_true(
        {
            f"num_experts={model.num_experts}": model.num_experts is not None,
            f"softmax_type={model.softmax_type}": model.softmax_type != "vanilla",
            "quick_geglu": model.quick_geglu,
            f"glu_linear_offset={model.glu_linear_offset}": model.is_gated and model.glu_linear_offset != 0,
            f"activation_func_clamp_value={model.activation_func_clamp_value}": model.is_gated
            and model.activation_func_clamp_value is not None,
            f"no_rope_freq={model.no_rope_freq}": model.position_embedding_type == "rope"
            and not all(model.rotated_layers),
        }
    )


def first_true(reasons: Mapping[str, bool]) -> str | None:
    """First key whose value is true."""
    return next((reason for reason, holds in reasons.items() if holds), None)
