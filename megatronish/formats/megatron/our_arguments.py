"""Arguments of Megatron-LM for a model of ours, as its checkpoints keep them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from megatronish.config.sections.block import BlockOptions
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.megatron.arguments import LINEAR_SCALING, LLAMA3, PATTERNS, SAME
from megatronish.formats.megatron.expert_arguments import arguments_of_experts, expert_flags, without_counterpart
from megatronish.formats.megatron.grid import RankGrid
from megatronish.formats.megatron.latent import latent_arguments, latent_flags, latent_without_counterpart
from megatronish.formats.weights import Description


def check_counterpart(model: ModelConfig) -> None:
    """Check that Megatron-LM's arguments can describe a model; UserError, with the field, if not."""

    def refuse(what: str) -> UserError:
        return UserError(f"Megatron-LM has no counterpart for {what}; keep this model in another format")

    if model.has_encoder:
        raise refuse(f"model_type={model.model_type} (its T5 has names and tensors that are not written here)")
    if model.model_type != "gpt":
        raise refuse(f"model_type={model.model_type} (its BERT normalises before a sublayer)")
    if model.block != "transformer":
        raise refuse(f"block={model.block}")
    if model.position_embedding_type == "alibi":
        raise refuse("position_embedding_type=alibi")
    if model.embed_layernorm:
        raise refuse("embed_layernorm")
    for field in fields(BlockOptions):
        if (value := getattr(model, field.name)) != field.default:
            raise refuse(f"{field.name}={value}")
    if model.qk_layernorm_across_heads:
        raise refuse("qk_layernorm_across_heads")
    if model.attention_pattern != "none":
        raise refuse(f"attention_pattern={model.attention_pattern}")
    if model.clip_qkv is not None:
        raise refuse(f"clip_qkv={model.clip_qkv}")
    for name in ("add_attention_bias", "add_mlp_bias"):
        if getattr(model, name) and not model.linear_bias:
            raise refuse(name)
    if model.activation == "gelu_tanh" and model.disable_bias_linear:
        raise refuse("openai_gelu (the tanh form) with disable_bias_linear")
    if model.xielu:
        raise refuse("xielu")
    if model.rope_scaling in ("longrope", "proportional") or (
        model.rope_scaling == "yarn" and not model.multi_latent_attention
    ):
        raise refuse(f"rope_scaling_type={model.rope_scaling}")
    if model.rope_scaling == "yarn" and not model.yarn_correction_range_round_to_int:
        raise refuse("yarn_correction_range_round_to_int=False")
    if what := without_counterpart(model) or latent_without_counterpart(model):
        raise refuse(what)
    if model.rope_scaling == "llama3":
        for name, value in LLAMA3.items():
            if getattr(model, name) != value:
                raise refuse(f"{name}={getattr(model, name)} (it has {value} built in)")
    if model.rope_scaling == "linear" and model.rope_scaling_factor % 1:
        raise refuse(f"rope_scaling_factor={model.rope_scaling_factor} (a linear one is a whole number there)")


def arguments_of(
    description: Description, layout: RankGrid, *, transformer_impl: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments under which Megatron-LM builds this model in this layout, with all those that it checks at loading."""
    model = description.model
    grouped = model.num_kv_heads != model.num_attention_heads
    scaling = model.rope_scaling
    tanh_gelu = model.activation == "gelu_tanh"
    of_experts = arguments_of_experts(
        model, ep=layout.ep, etp=layout.etp, is_grouped=transformer_impl == "transformer_engine"
    )
    return (
        {name: _plain(getattr(model, name)) for name in SAME}
        | of_experts
        | {
            "ffn_hidden_size": model.ffn_size,
            "kv_channels": model.head_size,
            "group_query_attention": grouped,
            "num_query_groups": model.num_kv_heads if grouped else 1,  # Megatron-LM's default, idle
            "seq_length": description.seq_length,
            "max_position_embeddings": description.num_positions,
            "position_embedding_type": model.position_embedding_type,
            "use_rotary_position_embeddings": model.position_embedding_type == "rope",
            "add_position_embedding": True,  # an old flag, which contradicts nothing where it is on
            "use_rope_scaling": scaling == "llama3",
            "rope_scaling_factor": model.rope_scaling_factor if scaling == "llama3" else 8.0,
            LINEAR_SCALING: int(model.rope_scaling_factor) if scaling == "linear" else None,
            "norm_epsilon": model.norm_epsilon,
            "layernorm_epsilon": model.norm_epsilon,
            "squared_relu": model.activation == "squared_relu",
            "window_attn_skip_freq": _marks(model.windowed_layers),
            "no_rope_freq": _marks(tuple(not rotated for rotated in model.rotated_layers)),
            "add_bias_linear": model.linear_bias,
            "bias_swiglu_fusion": model.glu_linear_offset == 0
            and model.activation_func_clamp_value is None
            and not model.moe_add_bias_linear,  # its fused operator knows no biases of experts
            "bias_gelu_fusion": tanh_gelu,
            "openai_gelu": tanh_gelu,
            "window_size": None if model.window_size is None else (model.window_size - 1, 0),
            "vocab_size": description.vocab_size,
            "padded_vocab_size": model.padded_vocab_size(description.vocab_size, layout.tp),
            "tokenizer_type": None,
            "tensor_model_parallel_size": layout.tp,
            "sequence_parallel": layout.tp > 1 and model.num_experts is not None,  # experts demand it
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": None,
            "num_layers_per_virtual_pipeline_stage": None,
            "transformer_impl": transformer_impl,
            "params_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "iteration": 0,
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
        }
        | latent_arguments(model)
    )


def _marks(layers: tuple[bool, ...]) -> list[int] | None:
    """Pattern of layers as Megatron-LM keeps it; None where all layers are alike."""
    return list(map(int, layers)) if len(set(layers)) > 1 else None


def flags_to_type(args: Mapping[str, Any]) -> list[str]:
    """Flags of a model that Megatron-LM's --use-checkpoint-args does not take from the arguments."""
    flags = []
    if args["norm_epsilon"] != 1e-5:
        flags.append(f"--norm-epsilon {args['norm_epsilon']}")
    if args["qk_layernorm"]:
        flags.append("--qk-layernorm")
    if args["window_size"] is not None:
        flags.append("--window-size {},{}".format(*args["window_size"]))
    if args["use_rope_scaling"]:
        flags.append(f"--use-rope-scaling --rope-scaling-factor {args['rope_scaling_factor']}")
    if args[LINEAR_SCALING] is not None:
        flags.append(f"--rotary-seq-len-interpolation-factor {args[LINEAR_SCALING]}")
    if args["quick_geglu"]:
        flags.append(f"--quick-geglu --glu-linear-offset {args['glu_linear_offset']}")
    if args["activation_func_clamp_value"] is not None:
        flags.append(f"--activation-func-clamp-value {args['activation_func_clamp_value']}")
    if not args["bias_swiglu_fusion"] and args["swiglu"]:
        flags.append(f"--no-bias-swiglu-fusion --glu-linear-offset {args['glu_linear_offset']}")
    if args["softmax_type"] != "vanilla":
        flags.append(f"--softmax-type {args['softmax_type']}")
    if args["mtp_num_layers"]:
        flags.append(f"--mtp-num-layers {args['mtp_num_layers']}")
    flags += [f"--{name.replace('_', '-')} '{args[name]}'" for name in PATTERNS if args[name] is not None]
    if args["quick_geglu"] or (args["add_bias_linear"] and not args["swiglu"] and not args["bias_gelu_fusion"]):
        flags.append("--no-bias-gelu-fusion")
    return flags + expert_flags(args) + latent_flags(args)


def _plain(value: Any) -> Any:
    """Value in the type that Megatron-LM's flag has: its rotary_base is a whole number, ours a float."""
    return int(value) if isinstance(value, float) and value.is_integer() and value > 1 else value
