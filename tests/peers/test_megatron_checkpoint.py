"""Tests of checkpoints against megatron-core: equal logits, whoever wrote them. Run by `make test-peers`.

On CPU: its layers without Transformer Engine ("local"), and so no apply_layernorm_1p, which those refuse.

As a script, `python tests/peers/test_megatron_checkpoint.py DIR`, this writes the checkpoints of tests/golden/megatron.
"""

import contextlib
import dataclasses
import random
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

for _folder in (
    Path(__file__).parents[1] / "support",
    Path(__file__).parents[1],
    Path(__file__).parents[2],
):  # as a script
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

pytestmark = pytest.mark.peers("megatron.core")
peer: Any = pytest.importorskip(
    "megatron.core",
    reason="megatron-core is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.activations import quick_gelu, squared_relu  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec  # noqa: E402
from megatron.core.models.bert.bert_model import BertModel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from peer_on_cpu import core_on_cpu  # noqa: E402
from ranks import run_ranks  # noqa: E402
from torch import Tensor  # noqa: E402

from megatronish.core.errors import UserError  # noqa: E402
from megatronish.formats.megatron import read as megatron  # noqa: E402
from megatronish.formats.megatron.arguments import model_of  # noqa: E402
from megatronish.formats.megatron.names import LOCAL  # noqa: E402
from megatronish.formats.weights import Description, LazyTensor, Model, from_ours, to_ours  # noqa: E402
from megatronish.launch.place import Place  # noqa: E402
from megatronish.model.batch import MicroBatch  # noqa: E402
from megatronish.model.gpt import GPT  # noqa: E402

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


@contextlib.contextmanager
def the_peer(tp_size: int, pp_size: int) -> Iterator[None]:
    """megatron-core in a process group, without a GPU and without gradients."""
    with core_on_cpu(tp_size, pp_size), torch.no_grad():
        yield


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with the_peer(1, 1):
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
    config = {
        field.name: getattr(args, field.name) for field in dataclasses.fields(TransformerConfig) if field.name in args
    }
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
    spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    if args.num_experts is not None:  # the dispatcher that runs on a CPU
        config |= {"num_moe_experts": args.num_experts, "moe_token_dispatcher_type": "allgather"}
        spec = get_gpt_decoder_block_spec(
            TransformerConfig(**config), use_transformer_engine=False, normalization=args.normalization
        )
    model = GPTModel(
        TransformerConfig(**config),
        spec,
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
    output = model(tokens(), positions(), None)
    if not model.post_process:
        dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    return output[..., :VOCAB_SIZE]


def our_logits(description: Description, tensors: Mapping[str, LazyTensor]) -> Tensor:
    """Logits [B, S, V] of our model."""
    gpt = GPT(description.model, vocab_size=description.vocab_size, num_positions=description.num_positions).eval()
    for name, state in gpt.state().items():
        state.copy_(tensors[name].read())
    for name, parameter in gpt.named_parameters():
        values = tensors[name].read()
        parameter.data.zero_()
        parameter.data[tuple(map(slice, values.shape))] = values
    batch = MicroBatch(tokens(), tokens(), torch.ones_like(tokens(), dtype=torch.bool), positions(), torch.arange(2))
    with torch.no_grad():
        logits = gpt.logits(gpt.hidden(None, batch, step=None)).transpose(0, 1)
    return logits[..., : description.vocab_size]


def in_our_names(folder: Path, **how: Any) -> tuple[Description, dict[str, LazyTensor]]:
    description, theirs = megatron.read(folder, **how)
    ours = to_ours(theirs, megatron.rules(description))
    assert not ours.missing and not ours.left_over
    return description, ours.tensors


def path_of_rank(folder: Path, args: Namespace) -> Path:
    """Where megatron-core's rank saves, or finds, its part."""
    rank = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if args.pipeline_model_parallel_size > 1:
        rank += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    return folder / rank / "model_optim_rng.pt"


def save_as_they_do(folder: Path, model: Any, args: Namespace) -> None:
    """All that Megatron-LM saves with a model, which its reader has to pass over."""
    path = path_of_rank(folder / "iter_0000007", args)
    path.parent.mkdir(parents=True, exist_ok=True)
    parameter = next(model.parameters())
    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": ("MT19937", np.arange(4, dtype=np.uint32), 4, 0, 0.0),
        "torch_rng_state": torch.zeros(4, dtype=torch.uint8),
        "rng_tracker_states": {"model-parallel-rng": torch.zeros(4, dtype=torch.uint8)},
    }
    content = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model.state_dict_for_save_checkpoint(),
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(3), "step": np.float64(7)}}, "param_groups": [{"lr": 0.1}]},
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 7},
        "rng_state": [states],
        "num_floating_point_operations_so_far": 7e15,
        "parameter": parameter,
    }
    torch.save(content, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


@pytest.mark.parametrize("name", TYPED)
def test_what_the_peer_saved_has_its_logits_here(tmp_path: Path, alone: None, name: str) -> None:
    args = arguments(name, 1, 1)
    model = their_model(args)
    save_as_they_do(tmp_path, model, args)
    torch.testing.assert_close(our_logits(*in_our_names(tmp_path)), their_logits(model, args), rtol=1e-5, atol=1e-5)


def test_a_bert_of_the_peer_is_refused_by_name(tmp_path: Path, alone: None) -> None:
    """It has all that our sentence and COMING_FROM say of it: a norm after the layers, none after the embedding."""
    args = arguments("gpt2", 1, 1)
    config = {
        field.name: getattr(args, field.name) for field in dataclasses.fields(TransformerConfig) if field.name in args
    }
    config |= {"layernorm_epsilon": args.norm_epsilon, "num_query_groups": None, "use_cpu_initialization": True}
    bert = BertModel(
        TransformerConfig(**config),
        2,
        bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=SEQ_LENGTH,
        share_embeddings_and_output_weights=True,
    )
    names = set(bert.state_dict_for_save_checkpoint())
    assert {"encoder.final_layernorm.weight", "encoder.layers.0.input_layernorm.weight", "lm_head.dense.bias"} <= names
    assert "embedding.tokentype_embeddings.weight" in names and not [name for name in names if "embedding.norm" in name]
    save_as_they_do(tmp_path, bert, args)
    with pytest.raises(UserError, match="holds a BERT of Megatron-LM, which normalises before a sublayer"):
        megatron.read(tmp_path)


@pytest.mark.parametrize("name", TYPED)
def test_what_is_written_here_has_our_logits_in_the_peer(tmp_path: Path, alone: None, name: str) -> None:
    ours = write_here(tmp_path / "ours", name)
    found = load_there(tmp_path / "ours")
    torch.testing.assert_close(found, ours, rtol=1e-5, atol=1e-5)


def write_here(folder: Path, name: str, tp_size: int = 1, pp_size: int = 1) -> Tensor:
    """Write a model of our own with random weights; its logits."""
    args = arguments(name, tp_size, pp_size)
    model = model_of(vars(args), before_core=False)
    description = Description(model, vocab_size=VOCAB_SIZE, seq_length=SEQ_LENGTH)
    draw = torch.Generator().manual_seed(2)
    tensors = {
        ours: 0.5 * torch.randn(sharding.shape, generator=draw) for ours, sharding in description.shardings().items()
    }
    ours = {name: LazyTensor(tuple(t.shape), t.dtype, partial(torch.clone, t)) for name, t in tensors.items()}
    theirs = from_ours(ours, megatron.rules(description)).tensors
    layout = {"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size}
    megatron.write(folder, Model(description, theirs), transformer_impl="local", **layout)
    return our_logits(description, ours)


def load_there(folder: Path) -> Tensor | None:
    """The peer's logits of a checkpoint written here, from nothing but its file: every tensor must have its place."""
    size = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    args = Namespace(pipeline_model_parallel_size=size[1])
    content = torch.load(path_of_rank(folder / "release", args), weights_only=False)
    args = content["args"]
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == size
    model = their_model(args)
    model.load_state_dict(content["model"], strict=True)
    return their_logits(model, args)


def load_on_rank(place: Place, folder: Path, tp_size: int, pp_size: int) -> Tensor | None:
    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)
    with the_peer(tp_size, pp_size):
        return load_there(folder)


def save_on_rank(
    place: Place, folder: Path, name: str, tp_size: int, pp_size: int, num_layers: int = 4
) -> Tensor | None:
    dist.init_process_group("gloo", init_method=place.rendezvous, rank=place.rank, world_size=place.world_size)
    torch.manual_seed(3)  # all ranks cut the same whole weights
    with the_peer(tp_size, pp_size):
        args = arguments(name, tp_size, pp_size, num_layers=num_layers)
        model = their_model(args)
        save_as_they_do(folder, model, args)
        return their_logits(model, args)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["gpt2", "llama 3", "multi-query", "qwen", "gpt-oss"])
def test_so_it_is_in_layouts_of_two_ranks(tmp_path: Path, name: str, tp_size: int, pp_size: int) -> None:
    ours = write_here(tmp_path / "ours", name, tp_size, pp_size)
    theirs = run_ranks(2, load_on_rank, tmp_path / "ours", tp_size, pp_size)[-1]
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)
    (tmp_path / "theirs").mkdir()
    theirs = run_ranks(2, save_on_rank, tmp_path / "theirs", name, tp_size, pp_size)[-1]
    torch.testing.assert_close(our_logits(*in_our_names(tmp_path / "theirs")), theirs, rtol=1e-5, atol=1e-5)


def test_the_peer_names_the_norms_of_transformer_engine_so() -> None:
    names = get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map
    assert {theirs: local for local, theirs in names.items()} == LOCAL


if __name__ == "__main__":
    for name, tp_size, pp_size in (("gpt2", 1, 2), ("llama 3", 2, 1)):
        target = Path(sys.argv[1]) / name.replace(" ", "_")
        logits = run_ranks(2, save_on_rank, target, name, tp_size, pp_size, 2)[-1]
        torch.save({"tokens": tokens(), "logits": logits}, target / "logits.pt")
