"""Families of Hugging Face models: the record of a family, a `model_type` of transformers.

A family is one file: the keys of its config.json, and its tensors as rules between the names and shapes of
transformers and ours. RoPE turns the two halves of a head in all families, as here.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.config_json import ConfigJson
from megatronish.formats.tensor_rule import TensorRule

HEAD = "lm_head.weight"


class ExpertNames(NamedTuple):
    """Names of a family in a layer: of the part that holds router and experts, and of an expert's matrices."""

    part: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class FamilyTensors(NamedTuple):
    """Tensors of a family: the prefix of all except the head in transformers, and the rules, embedding first.

    `experts` are the names of single experts, where a family has them: packed ones are read under these.
    """

    base: str
    rules: Callable[[ModelConfig], Iterable[TensorRule]]
    experts: ExpertNames | None = None


class ModelFamily(NamedTuple):
    """Family of models, a `model_type`: how its keys are read and written, and the field of a model that it lacks.

    `aliases` are other names of its keys, which transformers reads too. The `tensors` of a plug-in's family are given
    with it when it is registered.
    """

    architecture: str
    seq_length: str
    defaults: dict[str, Any]
    aliases: dict[str, str]
    read: Callable[[ConfigJson], dict[str, Any]]
    write: Callable[[ModelConfig, int], dict[str, Any]]
    cannot_describe: Callable[[ModelConfig], str | None]
    tensors: FamilyTensors = FamilyTensors("", lambda _model: ())

    def lacks(self, model: ModelConfig) -> str | None:
        """What a model has and the family has not, or the other way round."""
        has_experts = self.tensors.experts is not None
        if model.num_experts is not None and not has_experts:
            return f"num_experts={model.num_experts}"
        if model.num_experts is None and has_experts:
            return "a model without experts"
        return self.cannot_describe(model)


def in_no_family(model: ModelConfig) -> str | None:
    """Field of a model that no family here has."""
    factor, capacity = model.moe_router_topk_scaling_factor, model.moe_expert_capacity_factor
    has_experts = model.num_experts is not None
    return first_true(
        {
            f"moe_router_score_function={model.moe_router_score_function}": has_experts
            and model.moe_router_score_function != "softmax",
            f"moe_router_num_groups={model.moe_router_num_groups}": has_experts
            and model.moe_router_num_groups is not None,
            f"moe_router_topk_scaling_factor={factor}": has_experts and factor not in (None, 1),
            f"moe_expert_capacity_factor={capacity}": has_experts and capacity is not None,
            f"softmax_type={model.softmax_type}": model.softmax_type != "vanilla",
            "quick_geglu": model.quick_geglu,
            f"glu_linear_offset={model.glu_linear_offset}": model.is_gated and model.glu_linear_offset != 0,
            f"activation_func_clamp_value={model.activation_func_clamp_value}": model.is_gated
            and model.activation_func_clamp_value is not None,
            f"no_rope_freq={model.no_rope_freq}": model.position_embedding_type == "rope"
            and not all(model.rotated_layers),
        }
    )


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
