"""Tests of GLM-4.5, MiniMax-M2 and Granite's experts from Hugging Face: their keys, tensors, adapters and runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import to_hf, to_ours
from engines import world_size_of
from expert_models import D, E, F, tensors_of_family, write_family
from jobs import MOCK, steps_of, train_on_ranks
from safetensors.torch import load_file, save_file
from sweeps import some_of
from test_deepseek import further_tensors, in_fp8

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.adapters import SavedAdapter
from megatronish.formats.hf import tensors as hf
from megatronish.formats.hf.config import hf_config_of, read_hf_config
from megatronish.formats.peft import folder as peft
from megatronish.formats.safetensors import FILE
from megatronish.formats.weights import LazyTensor, from_ours
from megatronish.formats.weights import to_ours as rename
from megatronish.specs.adapter_targets import adapted_sections

LONGROPE = {
    "long_factor": [2.0, 4.0, 8.0],
    "long_mscale": 1.3,
    "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.1, 1.2],
    "short_mscale": 1.243163121016122,
    "type": "longrope",
}
"""Of a tiny PhiMoE."""
FAMILIES = ("glm4_moe", "minimax_m2", "granitemoe", "granitemoeshared", "phimoe", "llama4_text", "gpt_oss")
PUBLISHED: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "attention_bias": True,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "num_hidden_layers": 92,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    "minimax_m2": {
        "attn_type_list": [1] * 62,
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "granitemoe": {
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_size": 1536,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "num_attention_heads": 24,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 40,
        "residual_multiplier": 0.22,
        "tie_word_embeddings": True,
    },
    "granitemoeshared": {"shared_intermediate_size": 1024, "num_local_experts": 40},
    "llama4_text": {
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [],
        "num_local_experts": 128,
        "rope_scaling": None,
        "use_qk_norm": False,
        "router_aux_loss_coef": 0.001,
        "for_llm_compressor": False,
    },
    "gpt_oss": {
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "output_router_logits": False,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "phimoe": {
        "attention_bias": True,
        "hidden_size": 4096,
        "input_jitter_noise": 0.01,
        "lm_head_bias": True,
        "original_max_position_embeddings": 4096,
        "rope_scaling": LONGROPE
        | {"long_factor": [8.0] * 64, "short_factor": [1.05] * 64, "original_max_position_embeddings": 4096},
        "sliding_window": 131072,
    },
}
"""Keys of the published models in which they differ from the defaults, or which change nothing here."""


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(**read_hf_config(folder).model)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("glm4_moe", {"qkv_bias": True, "attention_bias": False, "qk_layernorm": True, "rotary_percent": 0.5}),
        ("glm4_moe", {"expert_layers": (False,) * 3 + (True,) * 89, "moe_router_topk_scaling_factor": 2.5}),
        ("glm4_moe", {"moe_router_score_function": "sigmoid", "moe_shared_expert_intermediate_size": 1536}),
        (
            "minimax_m2",
            {"rotary_percent": 0.5, "rotary_base": 5e6, "qk_layernorm_across_heads": True, "head_size": 128},
        ),
        ("minimax_m2", {"moe_router_enable_expert_bias": True, "num_experts": 256, "expert_ffn_size": 1536}),
        ("granitemoe", {"embedding_multiplier": 12.0, "softmax_scale": 0.015625, "logits_multiplier": 1 / 6}),
        ("granitemoe", {"moe_router_pre_softmax": False, "moe_router_topk": 8, "tied": True, "expert_ffn_size": 512}),
        ("granitemoeshared", {"moe_shared_expert_intermediate_size": 1024, "moe_shared_expert_gate": False}),
        ("llama4_text", {"expert_layers": (False, True) * 24, "expert_ffn_size": 8192, "ffn_size": 16384}),
        (
            "llama4_text",
            {"rotated_layers": (True, True, True, False) * 12, "moe_shared_expert_intermediate_size": 8192},
        ),
        ("llama4_text", {"windowed_layers": (True, True, True, False) * 12, "attention_block_size": 8192}),
        ("llama4_text", {"attn_temperature_scale": 0.1, "attn_temperature_floor": 8192, "qk_l2_norm": False}),
        ("llama4_text", {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "rotary_base": 5e5}),
        ("gpt_oss", {"moe_add_bias_linear": True, "moe_router_topk": 4, "num_experts": 32, "attention_bias": True}),
        ("gpt_oss", {"activation": "quick_geglu", "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}),
        ("gpt_oss", {"windowed_layers": (True, False) * 12, "window_size": 128, "softmax_type": "learnable"}),
        ("gpt_oss", {"rope_scaling": "yarn", "yarn_correction_range_round_to_int": False, "rotary_base": 150000.0}),
        ("phimoe", {"moe_router_score_function": "sparsemixer", "moe_sparsemixer_eps": 0.01, "rotary_base": 1e6}),
        ("phimoe", {"rope_scaling": "longrope", "rotary_growths": (1.243163121016122, 1.3), "short_context": 4096}),
        ("phimoe", {"normalization": "LayerNorm", "attention_bias": True, "mlp_bias": False, "add_output_bias": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_keys_are_understood(tmp_path: Path, kind: str, expected: dict[str, Any]) -> None:
    model = read(tmp_path, {"model_type": kind, **PUBLISHED[kind]})
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_published_config_comes_back(tmp_path: Path, kind: str) -> None:
    origin = {"model_type": kind, **PUBLISHED[kind]}
    model = read(tmp_path, origin)
    known = read_hf_config(tmp_path)
    written = hf_config_of(model, vocab_size=known.vocab_size, seq_length=known.seq_length, origin=origin)
    kept = {key: value for key, value in origin.items() if key != "quantization_config"}
    assert written == kept
    assert read(tmp_path, written) == model


def test_a_part_of_a_head_in_either_spelling_is_changed_as_a_whole(tmp_path: Path) -> None:
    by_size = {"model_type": "minimax_m2", "rotary_dim": 64}
    by_part = {"model_type": "minimax_m2", "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}
    model = read(tmp_path, by_size)
    assert model == read(tmp_path, by_part)
    for origin in (by_size, by_part):
        for fields in ({"rotary_base": 1e4}, {"rotary_percent": 1.0}):
            changed = ModelConfig(**vars(model) | fields)
            written = hf_config_of(changed, vocab_size=200064, seq_length=196608, origin=origin)
            assert read(tmp_path, written) == changed


@pytest.mark.parametrize(
    ("kind", "config", "told"),
    [
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=false is not supported: weights sum to one"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts=0 must be a whole number of at least 1"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "first_k_dense_replace=2 leaves none of 2 layers with experts"),
        ("glm4_moe", {"n_group": 3}, "n_group=3 must divide n_routed_experts=4; correct that line"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, 'qk_norm_type="per_head" is not supported in this family'),
        ("minimax_m2", {"scoring_func": "softmax"}, 'scoring_func="softmax" is not supported in this family'),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=false is not supported in this family"),
        ("minimax_m2", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported in this family"),
        ("minimax_m2", {"attn_type_list": [0, 1]}, r"attn_type_list=\[0, 1\] has layers with another attention"),
        ("minimax_m2", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 gives the one expert a weight of 1"),
        (
            "minimax_m2",
            {"partial_rotary_factor": 0.25},
            "rotary_dim=4 contradicts partial_rotary_factor of a head of 8",
        ),
        ("minimax_m2", {"rotary_dim": 16}, "its rotary_percent=2.0 must be greater than 0 and at most 1"),
        ("granitemoe", {"mlp_bias": True}, "mlp_bias=true is not supported: experts have no biases"),
        ("granitemoe", {"logits_scaling": 0.0}, "logits_scaling=0.0 leaves nothing of what it multiplies"),
        ("granitemoeshared", {"shared_intermediate_size": -1}, "shared_intermediate_size=-1 must be a whole number"),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok=2 is not supported: weights of several"),
        ("llama4_text", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 adds noise to the router in training"),
        ("llama4_text", {"moe_layers": []}, r"moe_layers=\[\] leaves no layer with experts"),
        ("llama4_text", {"moe_layers": [2]}, r"moe_layers=\[2\] must be a list of layers from 0 to 1"),
        ("llama4_text", {"interleave_moe_layer_step": 3}, "interleave_moe_layer_step=3 leaves no layer with experts"),
        (
            "llama4_text",
            {"layer_types": ["chunked_attention"]},
            "layer_types=.* must be a list of chunked_attention and",
        ),
        (
            "llama4_text",
            {"attention_chunk_size": None},
            "attention_chunk_size=null must be a whole number of at least 1",
        ),
        ("llama4_text", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\] must be a list of 0 and 1 for the 2 layers"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported: gates are multiplied by 1.702"),
        ("gpt_oss", {"swiglu_limit": 0}, "its activation_func_clamp_value=0.0 must be greater than 0"),
        ("gpt_oss", {"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported; silu is'),
        (
            "gpt_oss",
            {"experts_per_token": 3},
            "experts_per_token=3 contradicts num_experts_per_tok=2; correct that line",
        ),
        (
            "gpt_oss",
            {"initial_context_length": 64},
            "initial_context_length=64 contradicts original_max_position_embed",
        ),
        ("gpt_oss", {"sliding_window": None}, "sliding_window=null must be a whole number of at least 1"),
        ("phimoe", {"quantization_config": {"quant_method": "mxfp4"}}, "quantized other than in fp8"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3 is not supported: SparseMixer chooses two"),
        ("phimoe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "which this family does by LongRoPE alone"),
        ("phimoe", {"rope_scaling": LONGROPE | {"long_mscale": None}}, "long_mscale=null must be a number that is not"),
        (
            "phimoe",
            {"rope_scaling": LONGROPE | {"short_mscale": 0}},
            "its rope_short_mscale=0.0 must be greater than 0",
        ),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, kind: str, config: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        hf.read(write_family(tmp_path / "theirs", kind, **config))


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        ("glm4_moe", {"moe_shared_expert_intermediate_size": None}, "glm4_moe not no shared expert"),
        ("glm4_moe", {"rotary_interleaved": True}, "glm4_moe not rotary_interleaved=True"),
        ("glm4_moe", {"moe_router_scores_per_group": 1}, "glm4_moe not moe_router_scores_per_group=1"),
        ("minimax_m2", {"moe_layer_freq": "[0, 1]"}, "minimax_m2 not moe_layer_freq="),
        ("minimax_m2", {"moe_router_enable_expert_bias": False}, "minimax_m2 not moe_router_enable_expert_bias=False"),
        ("granitemoe", {"moe_router_pre_softmax": True}, "granitemoe not moe_router_pre_softmax without"),
        ("granitemoe", {"moe_router_topk_scaling_factor": 2.0}, "granitemoe not moe_router_topk_scaling_factor=2.0"),
        ("llama4_text", {"moe_shared_expert_intermediate_size": 13}, "llama4_text not moe_shared_expert_intermediate_"),
        ("llama4_text", {"moe_apply_probs_on_input": False}, "llama4_text not moe_apply_probs_on_input=False"),
        (
            "llama4_text",
            {"window_attn_skip_freq": None, "attention_block_size": 7, "clip_qkv": 1.0},
            "not clip_qkv=1.0",
        ),
        ("gpt_oss", {"moe_add_bias_linear": False}, "gpt_oss not moe_add_bias_linear=False"),
        ("gpt_oss", {"softmax_type": "vanilla"}, "gpt_oss not softmax_type=vanilla"),
        ("gpt_oss", {"glu_linear_offset": 0.0}, "gpt_oss not glu_linear_offset=0.0"),
        ("gpt_oss", {"activation_func_clamp_value": None}, "gpt_oss not no activation_func_clamp_value"),
        ("phimoe", {"moe_router_score_function": "softmax"}, "phimoe not moe_router_score_function=softmax"),
        ("phimoe", {"moe_router_topk": 1}, "phimoe not config.json: num_experts_per_tok=1 is not supported"),
        ("granitemoeshared", {"moe_shared_expert_gate": True}, "granitemoeshared not moe_shared_expert_gate=True"),
    ],
    ids=str,
)
def test_a_model_of_no_family_is_told_why(tmp_path: Path, kind: str, fields: dict[str, Any], told: str) -> None:
    before = hf.describe(write_family(tmp_path / "theirs", kind)).model
    with pytest.raises(UserError) as refused:
        hf_config_of(ModelConfig(**vars(before) | fields), vocab_size=101, seq_length=16)
    assert told in str(refused.value)


# Tensors


def test_the_weights_of_a_minimax_in_fp8_are_read_block_by_block(tmp_path: Path) -> None:
    settings = PUBLISHED["minimax_m2"]["quantization_config"] | {"weight_block_size": [8, 8]}
    folder = write_family(tmp_path / "theirs", "minimax_m2", quantization_config=settings)
    stored, expected = in_fp8(tensors_of_family("minimax_m2"), 8, 8)
    save_file(stored, folder / FILE, metadata={"format": "pt"})
    to_ours(folder, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    back = load_file(tmp_path / "back" / FILE)
    assert back.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(back[name], tensor), name


def test_the_layer_of_multi_token_prediction_comes_back(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "theirs", "glm4_moe", num_nextn_predict_layers=1)
    save_file(tensors_of_family("glm4_moe") | further_tensors("glm4_moe"), folder / FILE)
    assert hf.describe(folder).model.num_depths == 1
    to_ours(folder, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "back")
    before, after = (load_file(path / FILE) for path in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_a_layer_of_multi_token_prediction_that_config_does_not_count_is_left_out_in_one_line(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "theirs", "glm4_moe", num_nextn_predict_layers=0)
    further = {f"model.layers.2.{name}.weight": torch.ones(D) for name in ("enorm", "hnorm")}
    save_file(tensors_of_family("glm4_moe") | further, folder / FILE)
    lines = str(to_ours(folder, tmp_path / "ours")).splitlines()
    assert [line for line in lines if "multi-token" in line] == [
        "left out on purpose: model.layers.2.enorm.weight and 1 more, of multi-token prediction, which the model is "
        "read without"
    ]


def test_packed_experts_are_taken_by_rows_in_both_directions(tmp_path: Path) -> None:
    """Of a stack that is one tensor in the files, a rank reads its experts, and nothing reads it whole."""
    theirs = hf.read(write_family(tmp_path / "theirs", "granitemoe"))
    seen: list[tuple[int, int]] = []

    def rows_alone(tensor: LazyTensor) -> LazyTensor:
        def whole() -> torch.Tensor:
            raise AssertionError("the stack is read whole")

        def part(start: int, stop: int) -> torch.Tensor:
            seen.append((start, stop))
            return tensor.rows(start, stop)

        return LazyTensor(tensor.shape, tensor.dtype, whole, part)

    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    tensors = theirs.tensors | {name: rows_alone(theirs.tensors[name])}
    rules = hf.rules(theirs.description)
    ours = rename(tensors, rules).tensors
    stack = ours["layers.1.mlp.experts.gate_up.weight"]
    assert stack.shape == (E, 2, F, D)
    again = from_ours(ours, rules).tensors[name]
    expected = theirs.tensors[name].read()
    assert torch.equal(stack.rows(2, 3), expected[2:3].view(1, 2, F, D))
    assert torch.equal(again.rows(1, 3), expected[1:3])
    assert seen == [(2, 3), (1, 3)]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_has_the_names_of_peft_and_comes_back(tmp_path: Path, name: str) -> None:
    folder = write_family(tmp_path / "theirs", name)
    description = hf.describe(folder)
    config = AdapterConfig(adapter_type="lora", lora_rank=2, adapter_targets=("q", "v", "o", "layers.*.experts.*"))
    generator = torch.Generator().manual_seed(3)
    parts = {}
    for each in adapted_sections(description.model, config):
        stack = (each.copies,) if each.copies > 1 else ()
        for part, shape in (("A", (2, each.in_features)), ("B", (each.out_features, 2))):
            parts[f"{each.name}.{part}"] = torch.randn((*stack, *shape), generator=generator)
    tensors = {key: LazyTensor(tuple(part.shape), part.dtype, part.clone) for key, part in parts.items()}
    peft.write(tmp_path / "adapter", SavedAdapter(folder, config, tensors), description, base=str(folder))
    written = load_file(tmp_path / "adapter" / peft.FILE)
    layer = "base_model.model.model.layers.1"
    part = "block_sparse_moe" if "granite" in name else "feed_forward" if name == "llama4_text" else "mlp"
    experts = f"{layer}.{part}.experts"
    names = [f"{layer}.self_attn.{kind}_proj" for kind in "qvo"] + [experts, f"{experts}.base_layer"]
    assert {key for key in written if key.startswith(layer)} == {
        f"{module}.lora_{part}.weight" for module in names for part in "AB"
    }
    back = peft.read(tmp_path / "adapter", description)
    assert back.tensors.keys() == parts.keys()
    for key, part in parts.items():
        assert torch.equal(back.tensors[key].read(), part), key


# Runs

LAYOUTS = ["--tp 2 --sequence-parallel --pp 2", "--dp 2 --ep 2 --zero-stage 3"]
COMMON = f"{MOCK} --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --eval-iters 0 --device cpu"


@pytest.mark.parametrize("name", some_of(FAMILIES, ["glm4_moe"]))
def test_twenty_steps_are_equal_in_two_layouts(tmp_path: Path, name: str) -> None:
    folder = write_family(tmp_path / "theirs", name)
    seen = []
    for number, layout in enumerate(LAYOUTS):
        flags = f"{COMMON} --train-iters 20 --load-hf {folder} --run-dir {tmp_path / str(number)} {layout}"
        train_on_ranks(flags.split(), world_size=world_size_of(layout))
        seen.append(steps_of(tmp_path / str(number)))
    assert len(seen[0]) == 20
    for step, metrics in seen[0].items():
        assert seen[1][step] == pytest.approx(metrics, rel=1e-5), f"step {step}"
