"""Tests of Hugging Face's config.json as it is written: what was read comes back, a family follows from the model."""

from pathlib import Path
from typing import Any

import pytest
from hf_configs import KNOWN, LLAMA_31_8B, MISTRAL_7B, folder_of, model_of

from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.hf.config import hf_config_of, read_hf_config

BLOOM_PARTS = {"position_embedding_type": "alibi", "embed_layernorm": True, "openai_gelu": True, "swiglu": False}
BLOOM_PARTS |= {"normalization": "LayerNorm", "disable_bias_linear": False}
LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)


@pytest.mark.parametrize("name", KNOWN)
def test_a_config_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    found = read_hf_config(folder_of(tmp_path, KNOWN[name]))
    model = ModelConfig(**found.model)
    for eos in (None, *found.eos_token_ids):
        again = hf_config_of(model, vocab_size=found.vocab_size, seq_length=64, eos_token_id=eos, origin=found.origin)
        assert again == KNOWN[name]


@pytest.mark.parametrize("name", KNOWN)
def test_a_config_written_anew_means_the_same(tmp_path: Path, name: str) -> None:
    found = read_hf_config(folder_of(tmp_path, KNOWN[name]))
    (eos, *_) = found.eos_token_ids
    written = hf_config_of(
        ModelConfig(**found.model), vocab_size=found.vocab_size, seq_length=found.seq_length, eos_token_id=eos
    )
    assert written["model_type"] == KNOWN[name]["model_type"]
    assert written["architectures"] == KNOWN[name]["architectures"]
    again = read_hf_config(folder_of(tmp_path, written))
    assert (again.model, again.vocab_size, again.seq_length) == (found.model, found.vocab_size, found.seq_length)
    assert again.eos_token_ids == (eos,)


def test_what_a_run_changed_is_changed_and_no_more(tmp_path: Path) -> None:
    newer = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope")}
    newer |= {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    model = model_of(tmp_path, newer)
    same = hf_config_of(model, vocab_size=128256, seq_length=64, origin=newer)
    assert same == newer
    stretched = ModelConfig(**{**vars(model), "rope_scaling_type": "linear", "rope_scaling_factor": 2.0})
    written = hf_config_of(stretched, vocab_size=128256, seq_length=262144, eos_token_id=7, origin=newer)
    assert written == {key: value for key, value in newer.items() if key != "rope_parameters"} | {
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "max_position_embeddings": 262144,
        "eos_token_id": 7,
    }


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "llama"),
        ({"window_size": 8}, "mistral"),
        ({"add_qkv_bias": True}, "qwen2"),
        ({"add_qkv_bias": True, "window_size": 8}, "qwen2"),
        ({"qk_layernorm": True}, "qwen3"),
        ({"qk_layernorm": True, "window_size": 8}, "qwen3"),
        ({"qk_layernorm": True, "window_size": 8, "window_attn_skip_freq": "2"}, "qwen3"),
        ({"add_qkv_bias": True, "window_size": 8, "window_attn_skip_freq": "[0, 1]"}, "qwen2"),
        ({"disable_bias_linear": False}, "llama"),
        ({"add_attention_bias": True}, "llama"),
        ({"add_mlp_bias": True}, "llama"),
        (BLOOM_PARTS, "bloom"),
        ({"kv_channels": 16, "num_query_groups": 2, "group_query_attention": True}, "llama"),
        ({"no_rope_freq": "2"}, "smollm3"),
        ({"rotary_percent": 0.5}, "phi3"),
        ({"residual_multiplier": 0.5}, "granite"),
        ({"norm_placement": "output", "qk_layernorm": True}, "exaone4"),
        ({"norm_placement": "output", "qk_layernorm": True, "qk_layernorm_across_heads": True}, "olmo2"),
        ({"rotary_interleaved": True}, "helium"),
        ({"rotary_interleaved": True, "disable_bias_linear": False}, "ernie4_5"),
        ({"squared_relu": True, "swiglu": False}, "arcee"),
        ({"qk_layernorm": True, "qk_layernorm_after_rope": True}, "hunyuan_v1_dense"),
        ({"xielu": True, "swiglu": False, "qk_layernorm": True}, "apertus"),
    ],
    ids=str,
)
def test_the_family_follows_from_the_model(tmp_path: Path, fields: dict[str, Any], kind: str) -> None:
    model = ModelConfig(**{**vars(LLAMA), **fields})
    written = hf_config_of(model, vocab_size=100, seq_length=64)
    assert written["model_type"] == kind
    again = model_of(tmp_path, written)
    biases = ("linear_bias", "attention_bias", "mlp_bias", "qkv_bias")
    for name in ("head_size", "num_kv_heads", "ffn_size", *biases, "windowed_layers", "qk_layernorm"):
        assert getattr(again, name) == getattr(model, name), name


def test_a_model_keeps_the_family_it_came_from_where_that_can_say_it(tmp_path: Path) -> None:
    origin = MISTRAL_7B | {"sliding_window": None}
    model = model_of(tmp_path, origin)
    assert hf_config_of(model, vocab_size=32000, seq_length=64, origin=origin) == origin
    assert hf_config_of(model, vocab_size=32000, seq_length=64)["model_type"] == "llama"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"rotary_percent": 0.5, "qk_layernorm": True}, "rotary_percent=0.5"),
        ({"softmax_scale": 0.5, "qk_layernorm": True}, "llama not qk_layernorm; "),
        ({"softmax_scale": 0.5, "qk_layernorm": True}, "qwen3 not softmax_scale=0.5"),
        ({"attn_logit_softcapping": 5.0}, "llama not attn_logit_softcapping=5.0"),
        ({"norm_placement": "sandwich"}, "llama not norm_placement=sandwich"),
        ({"multi_latent_attention": True}, "llama not multi_latent_attention"),
        ({"squared_relu": True, "swiglu": False, "window_size": 4}, "an MLP without swiglu"),
        ({"position_embedding_type": "none"}, "position_embedding_type=none"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, "qwen3 not biases of linear layers"),
        ({"window_size": 4, "disable_bias_linear": False}, "llama not window_size=4; mistral not biases"),
        ({"apply_layernorm_1p": True}, "apply_layernorm_1p"),
        ({"embed_layernorm": True}, "embed_layernorm"),
        (BLOOM_PARTS | {"ffn_hidden_size": 96}, "bloom not ffn_hidden_size=96"),
        ({"window_size": 4, "window_attn_skip_freq": "2"}, "mistral not window_attn_skip_freq=2; qwen2 not no bias"),
        (BLOOM_PARTS | {"qk_layernorm": True}, "bloom not qk_layernorm"),
        (BLOOM_PARTS | {"embed_layernorm": False}, "bloom not a model without embed_layernorm"),
        (BLOOM_PARTS | {"openai_gelu": False}, "bloom not the activation gelu"),
    ],
    ids=str,
)
def test_a_model_that_no_family_can_say_is_refused_by_name(fields: dict[str, Any], told: str) -> None:
    model = ModelConfig(**{**vars(LLAMA), **fields})
    with pytest.raises(UserError, match="no supported family of Hugging Face can express this model") as error:
        hf_config_of(model, vocab_size=100, seq_length=64)
    assert told in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"softmax_type": "learnable"},
        {"softmax_type": "off-by-one"},
        {"swiglu": False, "quick_geglu": True},
        {"glu_linear_offset": 1.0},
        {"activation_func_clamp_value": 7.0},
    ],
    ids=str,
)
def test_a_part_that_no_family_has_is_named_alone(fields: dict[str, Any]) -> None:
    name = list(fields)[-1]
    with pytest.raises(UserError, match=f"no family of Hugging Face that is known here has {name}"):
        hf_config_of(ModelConfig(**{**vars(LLAMA), **fields}), vocab_size=100, seq_length=64)


def test_a_pattern_that_changes_nothing_is_in_every_family() -> None:
    model = ModelConfig(**{**vars(LLAMA), "no_rope_freq": "[0]*2", "window_attn_skip_freq": "2"})
    assert hf_config_of(model, vocab_size=100, seq_length=64)["model_type"] == "llama"
