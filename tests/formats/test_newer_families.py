"""Tests of the keys of decoders since 2021: what changes the computation is understood, or refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.hf.config import hf_config_of, read_hf_config
from megatronish.formats.hf.families import FAMILIES
from megatronish.formats.hf.family import ConfigJson

NEWER = (
    *(
        "gemma",
        "gpt_neox",
        "olmo2",
        "granite",
        "gemma2",
        "gemma3_text",
        "glm4",
        "starcoder2",
        "smollm3",
        "phi",
        "phi3",
        "olmo",
    ),
    *("stablelm", "cohere", "gptj", "opt", "nemotron", "helium", "seed_oss", "exaone4", "ernie4_5", "cohere2", "olmo3"),
    *("falcon", "mpt"),
    *("arcee", "hunyuan_v1_dense", "apertus", "baichuan"),
)
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.25] * 24, "long_factor": [1.5, 4] * 24}
CAPPED = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def model_of(tmp_path: Path, config: dict[str, Any]) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ModelConfig(**read_hf_config(tmp_path).model)


def test_every_family_here_is_in_the_table() -> None:
    assert FAMILIES.keys() >= set(NEWER)


@pytest.mark.parametrize("kind", NEWER)
def test_a_config_comes_back_as_it_was(tmp_path: Path, kind: str) -> None:
    origin = {"model_type": kind}
    model = model_of(tmp_path, origin)
    found = read_hf_config(tmp_path)
    assert hf_config_of(model, vocab_size=found.vocab_size, seq_length=found.seq_length, origin=origin) == origin


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gemma", {"embedding_multiplier": 3072**0.5, "apply_layernorm_1p": True, "geglu": True, "tied": True}),
        ("gpt_neox", {"norm_placement": "parallel_norms", "rotary_percent": 0.25, "linear_bias": True}),
        ("olmo2", {"norm_placement": "output", "qk_layernorm_across_heads": True}),
        ("granite", {"softmax_scale": 1.0, "residual_multiplier": 1.0, "logits_multiplier": 1.0}),
        ("gemma2", {"norm_placement": "sandwich", "window_size": 4096, "score_factor": None, **CAPPED}),
        ("gemma2", {"windowed_layers": (True, False) * 13}),
        ("gemma3_text", {"windowed_layers": ((True,) * 5 + (False,)) * 4 + (True, True), "qk_layernorm": True}),
        ("gemma3_text", {"rotary_base": 1e6, "window_rotary_base": 1e4, "has_window_rotation": True}),
        ("glm4", {"norm_placement": "sandwich", "rotary_percent": 0.5, "rotary_interleaved": True, "qkv_bias": True}),
        ("starcoder2", {"activation": "gelu_tanh", "normalization": "LayerNorm", "linear_bias": True}),
        ("smollm3", {"rotated_layers": (True, True, True, False) * 9, "rotary_base": 2e6}),
        ("phi", {"norm_placement": "parallel", "add_output_bias": True, "rotary_percent": 0.5, "tied": False}),
        ("olmo", {"norm_parameters": "none", "normalization": "LayerNorm"}),
        ("cohere", {"norm_parameters": "weight", "logits_multiplier": 0.0625, "rotary_base": 5e5}),
        ("gptj", {"rotary_percent": 0.25, "attention_bias": False, "mlp_bias": True, "add_output_bias": True}),
        ("opt", {"position_offset": 2, "activation": "relu", "max_position_embeddings": 2048}),
        ("nemotron", {"activation": "squared_relu", "apply_layernorm_1p": True, "rotary_percent": 0.5}),
        ("seed_oss", {"qkv_bias": True, "attention_bias": False, "head_size": 128}),
        ("exaone4", {"rotated_layers": (True, True, True, False) * 8, "norm_placement": "output"}),
        (
            "cohere2",
            {"windowed_layers": (True, True, True, False) * 10, "rotated_layers": (True, True, True, False) * 10},
        ),
        ("olmo3", {"windowed_layers": (True, True, True, False) * 8, "rotary_base": 5e5}),
        ("falcon", {"norm_placement": "parallel", "num_kv_heads": 1, "linear_bias": False, "tied": True}),
        ("mpt", {"position_embedding_type": "alibi", "norm_parameters": "weight", "activation": "gelu", "tied": True}),
        ("arcee", {"activation": "squared_relu", "normalization": "RMSNorm", "ffn_size": 18432, "mlp_bias": False}),
        ("apertus", {"activation": "xielu", "qk_layernorm": True, "rope_scaling": "llama3", "rotary_base": 1.2e7}),
        (
            "hunyuan_v1_dense",
            {"qk_layernorm": True, "qk_layernorm_after_rope": True, "rotary_base": 1e4, "tied": False},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_defaults_of_transformers_are_understood(tmp_path: Path, kind: str, expected: dict[str, Any]) -> None:
    model = model_of(tmp_path, {"model_type": kind})
    assert {name: getattr(model, name) for name in expected} == expected


def test_keys_that_switch_parts_are_understood(tmp_path: Path) -> None:
    assert model_of(tmp_path, {"model_type": "gemma", "hidden_act": "gelu"}).activation == "geglu"
    serial = model_of(tmp_path, {"model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 1.0})
    assert (serial.norm_placement, serial.rotary_percent) == ("pre", 1.0)
    uncapped = model_of(tmp_path, {"model_type": "gemma2", "attn_logit_softcapping": None, "query_pre_attn_scalar": 64})
    assert (uncapped.attn_logit_softcapping, uncapped.softmax_scale) == (None, 0.125)
    factors = {"embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "logits_scaling": 8.0}
    granite = model_of(tmp_path, {"model_type": "granite", **factors, "residual_multiplier": 0.22})
    assert (granite.embedding_multiplier, granite.residual_multiplier) == (12.0, 0.22)
    assert (granite.softmax_scale, granite.logits_multiplier) == (0.0078125, 0.125)
    groups = {"model_type": "falcon", "num_attention_heads": 64, "hidden_size": 4096, "num_kv_heads": 8}
    newer = model_of(tmp_path, {**groups, "new_decoder_architecture": True, "multi_query": False})
    assert (newer.norm_placement, newer.num_kv_heads) == ("parallel_norms", 8)
    one = model_of(tmp_path, {**groups, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1})
    assert (one.norm_placement, one.num_kv_heads) == ("parallel", 8)
    serial = model_of(tmp_path, {"model_type": "falcon", "parallel_attn": False, "multi_query": False, "bias": True})
    assert (serial.norm_placement, serial.num_kv_heads, serial.linear_bias) == ("pre", 71, True)
    clipped = model_of(tmp_path, {"model_type": "mpt", "attn_config": {"clip_qkv": 6.0, "softmax_scale": 0.1}})
    assert (clipped.clip_qkv, clipped.softmax_scale) == (6.0, 0.1)
    assert model_of(tmp_path, {"model_type": "mpt", "attn_config": {"clip_qkv": 0}}).clip_qkv is None
    for kind in ("olmo", "olmoe"):
        assert model_of(tmp_path, {"model_type": kind, "clip_qkv": 6.0}).clip_qkv == 6.0
    both = model_of(tmp_path, {"model_type": "stablelm", "use_parallel_residual": True, "qk_layernorm": True})
    assert (both.norm_placement, both.qk_layernorm_by_head) == ("parallel", True)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_the_longrope_of_phi_3_is_read_and_written(tmp_path: Path, name: str) -> None:
    lengths = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    heads = {"num_attention_heads": 24, "partial_rotary_factor": 0.75}  # as Phi-4 mini has them
    origin = {"model_type": "phi3", **lengths, **heads, "rope_scaling": LONGROPE | {"type": name}}
    model = model_of(tmp_path, origin)
    assert (model.rope_scaling, model.short_context, model.rope_scaling_factor) == ("longrope", 4096, 32.0)
    assert model.rope_long_factor == (1.5, 4.0) * 24
    assert model.rotary_growths[0] == pytest.approx((1 + 5 / 12) ** 0.5)
    assert hf_config_of(model, vocab_size=32064, seq_length=131072, origin=origin) == origin
    again = hf_config_of(model, vocab_size=32064, seq_length=131072)
    assert {key: again[key] for key in (*lengths, "rope_scaling")} == {**lengths, "rope_scaling": LONGROPE}
    longer = hf_config_of(model, vocab_size=32064, seq_length=262144)
    assert (longer["max_position_embeddings"], longer["rope_scaling"]["factor"]) == (262144, 32.0)
    assert model_of(tmp_path, longer) == replace(model, max_position_embeddings=262144)


def test_the_rope_of_apertus_means_the_same_in_both_versions(tmp_path: Path) -> None:
    """Where it is plain, a null would be the default of transformers 5, which is stretched."""
    plain = {"rope_type": "default", "rope_theta": 5e4}
    model = model_of(tmp_path, {"model_type": "apertus", "rope_parameters": plain})
    assert (model.rope_scaling, model.rotary_base) == ("none", 5e4)
    again = hf_config_of(model, vocab_size=131072, seq_length=65536)
    assert (again["rope_theta"], again["rope_scaling"], again["rope_parameters"]) == (5e4, None, plain)
    assert model_of(tmp_path, again) == model
    older = {"rope_theta": 12000000, "rope_scaling": {"rope_type": "llama3", "factor": 8.0} | LLAMA3}
    assert model_of(tmp_path, {"model_type": "apertus", **older}) == model_of(tmp_path, {"model_type": "apertus"})


def test_longrope_is_in_other_families_too(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    scaling = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 2048, **factors}
    model = model_of(tmp_path, {"model_type": "llama", "rope_scaling": scaling})
    assert (model.short_context, model.rope_long_factor) == (2048, (2.0,) * 64)
    again = hf_config_of(model, vocab_size=32000, seq_length=8192)
    assert (again["model_type"], again["rope_scaling"]) == ("llama", scaling)


def test_the_alpha_of_hunyuan_is_a_larger_base(tmp_path: Path) -> None:
    scaling = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "type": "dynamic"}
    origin = {"model_type": "hunyuan_v1_dense", "head_dim": 128, "rope_scaling": scaling, "use_qk_norm": True}
    model = model_of(tmp_path, origin)
    assert (model.rope_scaling, model.rotary_base) == ("none", pytest.approx(1e4 * 1000 ** (128 / 126), rel=1e-15))
    newer = {**origin, "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 1e4}}
    del newer["rope_scaling"]
    assert model_of(tmp_path, newer) == model
    again = hf_config_of(model, vocab_size=290943, seq_length=2048)
    assert (again["rope_theta"], again["rope_scaling"]) == (model.rotary_base, None)
    assert hf_config_of(model, vocab_size=290943, seq_length=2048, origin=origin) == origin


def test_keys_that_transformers_does_not_read_are_not_read(tmp_path: Path) -> None:
    neox = model_of(tmp_path, {"model_type": "gpt_neox", "rope_theta": 5e4, "partial_rotary_factor": 0.5})
    assert (neox.rotary_base, neox.rotary_percent) == (1e4, 0.25)
    kinds = [*["sliding_attention"] * 3, "full_attention"]
    named = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window_pattern": "LLLG"}
    for kind in ("exaone4", "cohere2"):
        assert model_of(tmp_path, {"model_type": kind, **named}).windowed_layers == (True, True, True, False)


def written(kind: str, **fields: Any) -> dict[str, Any]:
    """The config.json of a tiny model of a family, with other fields."""
    keys = {"hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = ConfigJson(Path("config.json"), {"model_type": kind, **keys}, FAMILIES[kind].defaults)
    model = replace(ModelConfig(**FAMILIES[kind].read(config)), **fields)
    return hf_config_of(model, vocab_size=9, seq_length=64)


def test_what_is_written_has_no_meaning_of_a_default() -> None:
    """A base of RoPE for both kinds of layers, no token that is filler by a family's default, inverses as they are."""
    olmo3 = written("olmo3", rotary_base=3e4)
    assert olmo3["model_type"] == "olmo3" and olmo3["rope_theta"] == 3e4
    assert {rope["rope_theta"] for rope in olmo3["rope_parameters"].values()} == {3e4}
    for kind in ("olmo3", "glm4", "gemma2", "cohere"):
        assert written(kind)["pad_token_id"] is None
    assert written("granite", logits_multiplier=0.22, softmax_scale=0.1)["model_type"] == "granite"
    with pytest.raises(UserError, match=r"gemma2 not softmax_scale=0\.08"):
        written("gemma2", softmax_scale=0.08)


def test_two_ropes_are_read_in_each_spelling(tmp_path: Path) -> None:
    """That of transformers 4, where a scaling is of layers without a window, and the nested one of transformers 5."""
    linear = {"rope_type": "linear", "factor": 8.0}
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": linear}
    full, sliding = {**linear, "rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e4}
    newer = {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    models = [model_of(tmp_path, {"model_type": "gemma3_text", **keys}) for keys in (older, newer)]
    assert models[0] == models[1] and models[0].rope_scaling == "linear" and models[0].window_rotary_base == 1e4
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    stretched = model_of(tmp_path, {"model_type": "olmo3", "rope_scaling": yarn})
    assert (stretched.rope_scaling, stretched.window_rotary_base, stretched.rotary_base) == ("yarn", 5e5, 5e5)
    ropes = written("olmo3", rope_scaling_type="yarn", rope_scaling_factor=4.0, window_rotary_base=5e5)[
        "rope_parameters"
    ]
    assert ropes["full_attention"]["rope_type"] == "yarn" and ropes["sliding_attention"]["rope_type"] == "default"


def test_a_longer_model_keeps_the_length_that_a_scaling_begins_from(tmp_path: Path) -> None:
    scaled = {"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    origin = {"model_type": "llama", **scaled}
    model = model_of(tmp_path, origin)
    longer = hf_config_of(model, vocab_size=32000, seq_length=8192, origin=origin)
    assert longer["max_position_embeddings"] == 8192
    assert longer["rope_scaling"]["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("kind", "keys", "told"),
    [
        ("gemma", {"hidden_act": "relu"}, 'hidden_act="relu" is not supported; silu, swish, gelu_new, '),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported"),
        ("gemma2", {"hidden_activation": "gelu"}, 'hidden_activation="gelu" is not supported'),
        ("gemma2", {"layer_types": ["full_attention"]}, "must be a list with a kind for each of the 26 layers"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "must be a number that is not negative"),
        ("gpt_neox", {"hidden_act": "gelu_python"}, 'hidden_act="gelu_python" is not supported; gelu, gelu_new, '),
        ("gpt_neox", {"num_attention_heads": 7}, "num_attention_heads=7 must divide hidden_size=6144"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling=0.0 leaves nothing of what it multiplies"),
        ("granite", {"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported; silu is'),
        ("olmo", {"clip_qkv": 0.0}, "clip_qkv=0.0 makes all queries, keys and values zero"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window=true is not supported in this family"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "must be a list of 0 and 1 for the 36 layers"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "must have a list of numbers above 0 under short_factor"),
        ("phi3", {"rope_scaling": LONGROPE | {"long_factor": [0] * 48}}, "a list of numbers above 0 under long_factor"),
        (
            "phi3",
            {"rope_scaling": LONGROPE | {"long_factor": [1]}},
            "has 1 numbers under long_factor, and RoPE turns 48",
        ),
        ("phi3", {"rope_scaling": LONGROPE | {"attention_factor": 3}}, "multiplies attention by 3, and longrope with"),
        ("phi3", {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 8}}, "contradicts the 8 of RoPE's"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "where transformers has LongRoPE alone"),
        ("phi3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "in the way of 'dynamic'; none, linear"),
        ("cohere", {"logit_scale": 0.0}, "logit_scale=0.0 makes all logits zero"),
        ("gptj", {"rotary_dim": 512}, "rotary_dim=512 must be at most the 256 of a head"),
        ("gptj", {"n_head": 15}, "n_head=15 must divide n_embd=4096"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=false normalises after each sublayer"),
        ("opt", {"word_embed_proj_dim": 512}, "word_embed_proj_dim=512 projects embeddings"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm=true leaves out the final norm"),
        ("nemotron", {"hidden_act": "silu"}, 'hidden_act="silu" is not supported; gelu, '),
        ("helium", {"head_dim": 64}, "head_dim=64 must be hidden_size=2560 over num_attention_heads"),
        (
            "seed_oss",
            {"attention_bias": False, "attention_out_bias": True},
            "attention_out_bias=true without biases of queries, keys and values is not supported",
        ),
        ("exaone4", {"layer_types": ["full_attention"] * 32}, "leaves no layer with a window, and so none with RoPE"),
        ("cohere2", {"layer_types": ["full_attention"] * 40}, "leaves no layer with a window, and so none with RoPE"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "stretches RoPE in the layers with a window, which is not supported",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"chunked": {"rope_theta": 1.0}}},
            "must have an object for full_attention",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not supported"),
        ("gemma3_text", {"rope_local_base_freq": "ten"}, "must be a number that is not negative"),
        ("olmo3", {"rope_parameters": {"rope_theta": 1.0}}, "must have an object for each kind of layer"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 36}, "gives layers a window, which this family does not"),
        ("gptj", {"is_causal": False}, "is_causal=false is not supported: a decoder sees what comes before alone"),
        ("olmo", {"per_layer_config": {"0": {"hidden_act": "relu"}}}, "layers have the settings of the whole model"),
        ("glm4", {"partial_rotary_factor": None}, "partial_rotary_factor=null is no number"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be above 0"),
        ("exaone4", {"sliding_window": None, "layer_types": ["sliding_attention"] * 32}, "and sliding_window is null"),
        ("stablelm", {"use_qkv_bias": "yes"}, 'use_qkv_bias="yes" must be true or false'),
        ("glm4", {"partial_rotary_factor": "half"}, "must be a number that is not negative"),
        ("falcon", {"alibi": True}, "alibi=true adds distances that are rounded to bf16"),
        ("falcon", {"num_attention_heads": 70}, "num_attention_heads=70 must divide hidden_size=4544"),
        ("falcon", {"multi_query": False, "num_kv_heads": 8}, "num_kv_heads=8 must be num_attention_heads=71 without"),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8}, "num_kv_heads=8 must divide num_attention_"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=false has no meaning"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2 has no meaning with new_decoder_arch"),
        ("falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn=3 is not supported; 1 and 2 are"),
        ("falcon", {"activation": "silu"}, 'activation="silu" is not supported; gelu, '),
        ("falcon", {"apply_residual_connection_post_layernorm": True}, "post_layernorm=true is not there"),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max=16 is not supported: transformers computes"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi=false is not supported: transformers has ALiBi in every MPT"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln=true is passed over by transformers, and not by the models'"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "prefix_lm=true is passed over by transformers"),
        ("mpt", {"attn_config": {"attn_type": "multiquery_attention"}}, "is not supported: transformers has no other"),
        ("mpt", {"attn_config": {"softmax_scale": 0}}, "softmax_scale=0 makes all scores zero; set it to null"),
        ("mpt", {"attn_config": [1]}, "attn_config=[1] must be an object"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, 'logit_scale="inv_sqrt_d_model" is passed over by transformers'),
        ("mpt", {"expansion_ratio": 2}, "expansion_ratio=2 is not supported; transformers has 4"),
        ("mpt", {"no_bias": False}, "no_bias=false is not supported: transformers has no biases"),
        ("mpt", {"norm_type": "rmsnorm"}, 'norm_type="rmsnorm" is not supported; LayerNorm is'),
        ("mpt", {"n_heads": 15}, "n_heads=15 must divide d_model=2048"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla=true shares keys and values between layers"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm=false leaves out norms of queries and keys"),
        ("hunyuan_v1_dense", {"mlp_bias": True}, "mlp_bias=true is not there in this family"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "in the way of 'dynamic'; none"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": -1}}, "must be a number that is not nega"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 1e12}}, "has an alpha of more than"),
        ("hunyuan_v1_dense", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "alpha": 2}}, "and 2 is too small"),
        ("apertus", {"hidden_act": "silu"}, 'hidden_act="silu" is not supported; gelu, '),
        (
            "apertus",
            {"rope_scaling": None, "rope_theta": 1e4},
            "rope_scaling=null without a scaling of RoPE is ignored",
        ),
        ("apertus", {"rope_theta": 1e4}, "rope_theta=10000.0 without a scaling of RoPE is ignored by newer versions"),
        ("apertus", {"post_norm": True}, "post_norm=true has norms after sublayers"),
        ("apertus", {"qk_norm": False}, "qk_norm=false leaves out norms of queries and keys"),
        ("arcee", {"hidden_act": "silu"}, 'hidden_act="silu" is not supported; gelu, '),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, kind: str, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as refused:
        model_of(tmp_path, {"model_type": kind, **keys})
    assert told in str(refused.value)
