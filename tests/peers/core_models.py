"""Models of megatron-core on CPU from arguments of Megatron-LM, and their logits, there and here."""

import contextlib
import dataclasses
import signal
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from peer_on_cpu import core_on_cpu
from torch import Tensor

from megatronish.formats.megatron import read as megatron
from megatronish.formats.weights import Description, LazyTensor, to_ours
from megatronish.model.batch import MicroBatch, TokensAhead
from megatronish.model.gpt import GPT

VOCAB_SIZE, SEQ_LENGTH = 30, 8
# What Megatron-LM's command line has where nothing is typed, as far as it says what is computed.
DEFAULTS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "ffn_hidden_size": 16,
    "kv_channels": 2,
    "group_query_attention": False,
    "num_query_groups": 1,
    "seq_length": SEQ_LENGTH,
    "max_position_embeddings": SEQ_LENGTH,
    "position_embedding_type": "learned_absolute",
    "use_rotary_position_embeddings": False,
    "add_position_embedding": True,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "apply_layernorm_1p": False,
    "swiglu": False,
    "squared_relu": False,
    "quick_geglu": False,
    "openai_gelu": False,
    "bias_gelu_fusion": True,
    "bias_swiglu_fusion": True,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "window_size": None,
    "untie_embeddings_and_output_weights": False,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "init_method_std": 0.5,  # large, so that logits tell models apart
    "make_vocab_size_divisible_by": 4,
    "vocab_size": VOCAB_SIZE,
    "num_experts": None,
    "multi_latent_attention": False,
    "softmax_type": "vanilla",
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "mtp_num_layers": None,
    "window_attn_skip_freq": None,
    "no_rope_freq": None,
    "params_dtype": torch.float32,
    "tokenizer_type": None,
    "attention_backend": AttnBackend.auto,
    "model_type": ModelType.encoder_or_decoder,
    "exit_signal": signal.SIGTERM,
    "save": Path("/checkpoints"),
}
EXPERTS: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "moe_router_load_balancing_type": "none",
}
LATENT: dict[str, Any] = EXPERTS | {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
    "kv_channels": 4,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 4,
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
}
TYPED: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "exact gelu": {"bias_gelu_fusion": False},
    "gelu without biases": {"add_bias_linear": False, "bias_gelu_fusion": False},
    "llama 3": {
        "group_query_attention": True,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "rotary_base": 500,
        "use_rope_scaling": True,
        "rope_scaling_factor": 4.0,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-3,
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
    },
    "multi-query": {
        "group_query_attention": True,
        "num_query_groups": 1,
        "position_embedding_type": "rope",
        "qk_layernorm": True,
    },
    "qwen": {
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 6,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "window_size": (2, 0),
    },
    "gpt-oss": {
        "group_query_attention": True,
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 0.4,
        "bias_gelu_fusion": False,
        "softmax_type": "learnable",
        "window_size": (2, 0),
        "window_attn_skip_freq": 2,
        "untie_embeddings_and_output_weights": True,
    },
    "smollm": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "bias_swiglu_fusion": False,
        "activation_func_clamp_value": 0.3,
        "add_bias_linear": False,
        "softmax_type": "off-by-one",
        "window_size": (3, 0),
        "window_attn_skip_freq": [1, 0, 0, 1],
        "no_rope_freq": [0, 1, 0, 1],
    },
    "mixtral": EXPERTS | {"num_experts": 4, "moe_router_dtype": "fp32"},
    "mixtral with biases": EXPERTS
    | {
        "num_experts": 4,
        "moe_router_dtype": "fp32",
        "moe_layer_freq": [0, 1, 1, 1],
        "add_bias_linear": True,
        "bias_swiglu_fusion": False,  # its fused operator knows no biases of experts
    },
    "experts of gelu with biases": EXPERTS
    | {
        "num_experts": 4,
        "moe_router_dtype": "fp32",
        "swiglu": False,
        "add_bias_linear": True,
        "bias_gelu_fusion": False,
    },
    "deepseek": EXPERTS
    | {
        "num_experts": 8,
        "moe_router_dtype": "fp32",
        "moe_layer_freq": [0, 1, 0, 1],
        "moe_ffn_hidden_size": 12,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 20,
    },
    "qwen2-moe": EXPERTS
    | {
        "num_experts": 4,
        "moe_router_dtype": "fp32",
        "moe_layer_freq": 2,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_intermediate_size": 8,
        "moe_shared_expert_gate": True,
    },
    "latent": LATENT,
    "latent without one of queries": LATENT
    | {"q_lora_rank": None, "qk_layernorm": False, "rope_type": "rope", "mscale_all_dim": 0.0},
    "deepseek-v3": LATENT
    | {
        "num_experts": 4,
        "moe_router_dtype": "fp32",
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_ffn_hidden_size": 12,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 20,
    },
    "llama, two ahead": EXPERTS
    | {"group_query_attention": True, "num_query_groups": 2, "add_bias_linear": False, "mtp_num_layers": 2},
    "tied, one ahead": {"position_embedding_type": "rope", "mtp_num_layers": 1},
    "deepseek-v3, ahead": LATENT
    | {
        "num_experts": 4,
        "moe_router_dtype": "fp32",
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_ffn_hidden_size": 12,
        "moe_shared_expert_intermediate_size": 20,
        "mtp_num_layers": 1,
    },
    "nemotron": {
        "kv_channels": 8,
        "position_embedding_type": "rope",
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "rotary_seq_len_interpolation_factor": 4,
        "squared_relu": True,
        "bias_gelu_fusion": False,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
    },
}


class CoreOfLatents(DotProductAttention):
    """Core of attention without the engine, which does not know by itself that keys and values may differ in size."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)


@contextlib.contextmanager
def the_peer(tp_size: int, pp_size: int, ep_size: int = 1) -> Iterator[None]:
    """megatron-core in a process group, without a GPU and without gradients."""
    with core_on_cpu(tp_size, pp_size, ep_size), torch.no_grad():
        yield


def arguments(name: str, tp_size: int, pp_size: int, **others: Any) -> Namespace:
    multiple = DEFAULTS["make_vocab_size_divisible_by"] * tp_size
    return Namespace(
        **DEFAULTS | TYPED[name] | others,
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=pp_size,
        padded_vocab_size=-(-VOCAB_SIZE // multiple) * multiple,
    )


def their_model(args: Namespace) -> Any:
    """What Megatron-LM builds of its arguments on this rank."""
    kind: Any = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    config = {field.name: getattr(args, field.name) for field in dataclasses.fields(kind) if field.name in args}
    config |= {
        "layernorm_epsilon": args.norm_epsilon,
        "layernorm_zero_centered_gamma": args.apply_layernorm_1p,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "bias_activation_fusion": args.bias_gelu_fusion,
        "use_cpu_initialization": True,
        "pipeline_dtype": args.params_dtype,
    }
    if args.swiglu:
        config |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
        config["bias_activation_fusion"] = getattr(args, "bias_swiglu_fusion", True)
    elif args.quick_geglu:
        config |= {"activation_func": quick_gelu, "gated_linear_unit": True}
    elif args.squared_relu:
        config["activation_func"] = squared_relu
    spec = get_gpt_layer_local_spec(
        qk_layernorm=args.qk_layernorm,
        normalization=args.normalization,
        multi_latent_attention=args.multi_latent_attention,
    )
    if args.num_experts is not None:  # the dispatcher that runs on a CPU
        config |= {"num_moe_experts": args.num_experts, "moe_token_dispatcher_type": "allgather"}
        spec = get_gpt_decoder_block_spec(
            kind(**config), use_transformer_engine=False, normalization=args.normalization
        )
    for layer in getattr(spec, "layer_specs", [spec]):
        if args.multi_latent_attention:
            layer.submodules.self_attention.submodules.core_attention = CoreOfLatents
    ahead = None
    if args.mtp_num_layers:
        ahead = get_gpt_mtp_block_spec(kind(**config), spec, use_transformer_engine=False)
    model = GPTModel(
        kind(**config),
        spec,
        mtp_block_spec=ahead,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    )
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (2, SEQ_LENGTH), generator=torch.Generator().manual_seed(1))


def positions() -> Tensor:
    return torch.arange(SEQ_LENGTH).expand(2, -1)


def their_logits(model: Any, args: Namespace) -> Tensor | None:
    """[B, S, V] on the last stage."""
    if not model.pre_process:
        hidden = torch.empty(SEQ_LENGTH, 2, args.hidden_size)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    model.config.mtp_num_layers = None  # losses of multi-token prediction want labels; its places come last
    output = model(tokens(), positions(), None)
    if not model.post_process:
        dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    return output[:, :SEQ_LENGTH, :VOCAB_SIZE]


def their_losses_ahead(model: Any, args: Namespace) -> list[float]:
    """The mean loss of each depth of multi-token prediction, of tokens that follow in the row."""
    seen: list[Tensor] = []
    handle = model.mtp.register_forward_hook(lambda *given: seen.append(given[-1].detach()))
    model(tokens(), positions(), None, labels=tokens())
    handle.remove()
    losses, head = [], model.shared_embedding_or_output_weight() if model.output_layer.weight is None else None
    weight = model.output_layer.weight if head is None else head
    for depth, hidden in enumerate(seen[0].chunk(1 + args.mtp_num_layers)[1:], 1):
        logits = (hidden @ weight.t())[: SEQ_LENGTH - 1 - depth, :, :VOCAB_SIZE].transpose(0, 1)
        losses.append(
            float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens()[:, 1 + depth :].flatten()))
        )
    return losses


def our_losses_ahead(description: Description, tensors: Mapping[str, LazyTensor]) -> list[float]:
    """The same of our model."""
    gpt = _filled(description, tensors)
    labels = torch.nn.functional.pad(tokens()[:, 1:], (0, 1))
    mask = torch.ones_like(labels, dtype=torch.bool)
    mask[:, -1] = False
    batch = MicroBatch(tokens(), labels, mask, positions(), torch.arange(2))
    ahead = TokensAhead.of(batch, description.model.num_depths)
    with torch.no_grad():
        losses = gpt(None, batch.with_ahead(ahead), step=None)[1:].transpose(1, 2)
    return [float(each[inside].mean()) for each, inside in zip(losses, ahead.loss_mask, strict=True)]


def our_logits(description: Description, tensors: Mapping[str, LazyTensor]) -> Tensor:
    """Logits [B, S, V] of our model."""
    gpt = _filled(description, tensors)
    batch = MicroBatch(tokens(), tokens(), torch.ones_like(tokens(), dtype=torch.bool), positions(), torch.arange(2))
    with torch.no_grad():
        logits = gpt.logits(gpt.hidden(None, batch, step=None)).transpose(0, 1)
    return logits[..., : description.vocab_size]


def _filled(description: Description, tensors: Mapping[str, LazyTensor]) -> GPT:
    """Our model with these weights."""
    gpt = GPT(description.model, vocab_size=description.vocab_size, num_positions=description.num_positions).eval()
    for name, state in gpt.state().items():
        state.copy_(tensors[name].read())
    for name, parameter in gpt.named_parameters():
        values = tensors[name].read()
        parameter.data.zero_()
        parameter.data[tuple(map(slice, values.shape))] = values
    return gpt


def in_our_names(folder: Path, **how: Any) -> tuple[Description, dict[str, LazyTensor]]:
    description, theirs = megatron.read(folder, **how)
    ours = to_ours(theirs, megatron.rules(description))
    assert not ours.missing and not ours.left_over
    return description, ours.tensors
