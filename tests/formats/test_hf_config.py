"""Tests of Hugging Face's config.json: read as transformers reads it; what our model cannot do is refused."""

from pathlib import Path
from typing import Any

import pytest
from hf_configs import (
    BLOOM_7B,
    GPT2,
    LLAMA_2_7B,
    LLAMA_31_8B,
    MISTRAL_7B,
    QWEN2_7B,
    QWEN3_06B,
    QWEN25_YARN,
    YARN,
    folder_of,
    model_of,
)

from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.hf.config import hf_config_of, read_hf_config

SLIDING = ["sliding_attention"]


def refusal(tmp_path: Path, config: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        read_hf_config(folder_of(tmp_path, config))
    return str(error.value)


def test_gpt2_is_understood(tmp_path: Path) -> None:
    found = read_hf_config(folder_of(tmp_path, GPT2))
    assert ModelConfig(**found.model) == ModelConfig(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        ffn_hidden_size=3072,
        max_position_embeddings=1024,
        openai_gelu=True,
    )
    assert (found.vocab_size, found.seq_length, found.eos_token_ids) == (50257, 1024, (50256,))
    assert found.origin == GPT2


def test_gpt2_is_understood_under_the_names_of_the_others_too(tmp_path: Path) -> None:
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
    other = {names.get(key, key): value for key, value in {**GPT2, "n_layer": 3, "n_head": 16}.items()}
    model = model_of(tmp_path, other)
    assert (model.num_layers, model.num_attention_heads, model.hidden_size) == (3, 16, 768)


def test_llama_2_is_understood(tmp_path: Path) -> None:
    model = model_of(tmp_path, LLAMA_2_7B)
    assert (model.head_size, model.num_kv_heads, model.ffn_size) == (128, 32, 11008)
    assert (model.rotary_base, model.rope_scaling, model.norm_epsilon) == (10000.0, "none", 1e-5)
    assert (model.normalization, model.swiglu, model.tied, model.linear_bias) == ("RMSNorm", True, False, False)


def test_llama_3_is_understood_with_its_stretched_positions(tmp_path: Path) -> None:
    found = read_hf_config(folder_of(tmp_path, LLAMA_31_8B))
    model = ModelConfig(**found.model)
    assert (model.rotary_base, model.rope_scaling, model.num_kv_heads) == (500000.0, "llama3", 8)
    assert (model.rope_scaling_factor, model.rope_original_max_positions) == (8.0, 8192)
    assert (model.rope_low_freq_factor, model.rope_high_freq_factor) == (1.0, 4.0)
    assert (found.seq_length, found.eos_token_ids) == (131072, (128001, 128008, 128009))


def test_mistral_is_understood_with_its_window(tmp_path: Path) -> None:
    assert model_of(tmp_path, MISTRAL_7B).window_size == 4096
    assert model_of(tmp_path, MISTRAL_7B | {"sliding_window": None}).window_size is None
    absent = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert model_of(tmp_path, absent).window_size == 4096


def test_qwen2_is_understood_with_its_bias(tmp_path: Path) -> None:
    model = model_of(tmp_path, QWEN2_7B)
    assert (model.qkv_bias, model.linear_bias, model.window_size, model.tied) == (True, False, None, False)


def test_yarn_is_understood_as_qwen_writes_it(tmp_path: Path) -> None:
    model = model_of(tmp_path, QWEN25_YARN)
    assert (model.rope_scaling, model.rope_scaling_factor, model.rope_original_max_positions) == ("yarn", 4.0, 32768)
    assert (model.rope_beta_fast, model.rope_beta_slow) == (32.0, 1.0)


def test_qwen3_is_understood_with_its_norms_and_head_size(tmp_path: Path) -> None:
    model = model_of(tmp_path, QWEN3_06B)
    assert (model.head_size, model.qk_layernorm, model.qkv_bias, model.tied) == (128, True, False, True)


def test_bloom_is_understood_with_its_biases_on_distance_and_its_norm(tmp_path: Path) -> None:
    found = read_hf_config(folder_of(tmp_path, BLOOM_7B))
    assert ModelConfig(**found.model) == ModelConfig(
        num_layers=30,
        hidden_size=4096,
        num_attention_heads=32,
        ffn_hidden_size=16384,
        max_position_embeddings=2048,
        position_embedding_type="alibi",
        embed_layernorm=True,
        openai_gelu=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    assert (found.vocab_size, found.seq_length, found.eos_token_ids) == (250880, 2048, (2,))
    message = refusal(tmp_path, BLOOM_7B | {"apply_residual_connection_post_layernorm": True})
    assert "apply_residual_connection_post_layernorm=true is not there" in message
    assert "must divide hidden_size=4096; correct config.json" in refusal(tmp_path, BLOOM_7B | {"n_head": 12})


@pytest.mark.parametrize(
    ("kind", "heads", "sizes", "epsilon", "tied", "window", "seq_length", "vocab_size"),
    [
        ("gpt2", "12 of 12 heads of 64", (12, 768, 3072), 1e-5, True, None, 1024, 50257),
        ("llama", "32 of 32 heads of 128", (32, 4096, 11008), 1e-6, False, None, 2048, 32000),
        ("mistral", "8 of 32 heads of 128", (32, 4096, 14336), 1e-6, False, 4096, 131072, 32000),
        ("qwen2", "32 of 32 heads of 128", (32, 4096, 22016), 1e-6, False, None, 32768, 151936),
        ("qwen3", "32 of 32 heads of 128", (32, 4096, 22016), 1e-6, False, None, 32768, 151936),
        ("bloom", "8 of 8 heads of 8", (2, 64, 256), 1e-5, True, None, 2048, 250880),
    ],
)
def test_an_absent_key_has_the_default_of_transformers(
    tmp_path: Path,
    kind: str,
    heads: str,
    sizes: tuple[int, ...],
    epsilon: float,
    tied: bool,
    window: int | None,
    seq_length: int,
    vocab_size: int,
) -> None:
    found = read_hf_config(folder_of(tmp_path, {"model_type": kind}))
    model = ModelConfig(**found.model)
    assert f"{model.num_kv_heads} of {model.num_attention_heads} heads of {model.head_size}" == heads
    assert (model.num_layers, model.hidden_size, model.ffn_size) == sizes
    assert (model.norm_epsilon, model.tied, model.window_size) == (epsilon, tied, window)
    assert (found.seq_length, found.vocab_size) == (seq_length, vocab_size)


SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    LLAMA_31_8B["rope_scaling"],
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.138629436},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.0, "original_max_position_embeddings": 64},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_both_spellings_of_rope_mean_the_same(tmp_path: Path, scaling: dict[str, Any]) -> None:
    plain = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope")}
    older = plain | {"rope_theta": 5e5, "rope_scaling": scaling}
    oldest = plain | {"rope_theta": 5e5, "rope_scaling": {**scaling, "type": scaling["rope_type"]}}
    newer = plain | {"rope_parameters": {"rope_theta": 5e5, **scaling}}
    assert model_of(tmp_path, older) == model_of(tmp_path, newer) == model_of(tmp_path, oldest)
    model = model_of(tmp_path, newer)
    assert model.rotary_base == 5e5
    assert model.rope_scaling == scaling["rope_type"].replace("default", "none")


@pytest.mark.parametrize("base", [LLAMA_31_8B, QWEN25_YARN], ids=["llama3", "yarn"])
def test_the_context_before_it_was_stretched_may_stand_outside(tmp_path: Path, base: dict[str, Any]) -> None:
    key = "original_max_position_embeddings"
    inner = {name: value for name, value in base["rope_scaling"].items() if name != key}
    outside = base | {"rope_scaling": inner, key: 4096}
    model = model_of(tmp_path, outside)
    assert model.rope_original_max_positions == 4096
    written = hf_config_of(model, vocab_size=base["vocab_size"], seq_length=64, origin=outside)
    assert written == outside
    changed = ModelConfig(**{**vars(model), "rope_original_max_positions": 64})
    written = hf_config_of(changed, vocab_size=base["vocab_size"], seq_length=64, origin=outside)
    assert key not in written and written["rope_scaling"][key] == 64


def test_mistral_obeys_its_list_of_layers_as_transformers_does(tmp_path: Path) -> None:
    full, sliding = (MISTRAL_7B | {"layer_types": kind * 32} for kind in (["full_attention"], SLIDING))
    assert model_of(tmp_path, full).window_size is None
    assert model_of(tmp_path, sliding).window_size == 4096
    assert model_of(tmp_path, full | {"layer_types": None}).window_size == 4096


@pytest.mark.parametrize("key", ["layer_types", "max_window_layers"])
def test_a_window_in_every_layer_or_in_some_is_understood(tmp_path: Path, key: str) -> None:
    config = QWEN3_06B | {"use_sliding_window": True, "sliding_window": 512}

    def layers(sliding: int) -> dict[str, Any]:
        types = ["full_attention"] * (28 - sliding) + ["sliding_attention"] * sliding
        return config | ({"layer_types": types} if key == "layer_types" else {"max_window_layers": 28 - sliding})

    assert model_of(tmp_path, layers(28)).window_size == 512
    assert model_of(tmp_path, layers(0)).window_size is None
    some = model_of(tmp_path, layers(4))
    assert (some.window_size, some.windowed_layers) == (512, (False,) * 24 + (True,) * 4)
    config |= {"layer_types": layers(4)["layer_types"]} if key == "layer_types" else {"max_window_layers": 24}
    assert hf_config_of(some, vocab_size=151936, seq_length=40960, origin=config) == config


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true is not supported"),
        (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=true is not supported"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention=true is not supported"),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights=false leaves attention unscaled"),
        (GPT2 | {"activation_function": "swish"}, 'activation_function="swish" is not supported; gelu_new, '),
        (GPT2 | {"n_layer": "12"}, 'n_layer="12" must be a whole number of at least 1; correct that line'),
        (MISTRAL_7B | {"attention_bias": True}, "attention_bias=true is not there in this family"),
        (LLAMA_2_7B | {"hidden_act": "gelu"}, 'hidden_act="gelu" is not supported; silu is'),
        (LLAMA_2_7B | {"rms_norm_eps": None}, "rms_norm_eps=null must be a number that is not negative"),
        (LLAMA_2_7B | {"eos_token_id": "</s>"}, 'eos_token_id="</s>" must be a token id, or a list of them'),
        (LLAMA_2_7B | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (LLAMA_2_7B | {"quantization_config": {}}, "take the unquantized model"),
        (LLAMA_2_7B | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "in the way of 'dynamic'; none, linear"),
        (LLAMA_2_7B | {"rope_scaling": {"rope_type": "linear"}}, "factor, which is absent, must be a number"),
        (LLAMA_2_7B | {"rope_scaling": YARN | {"truncate": 0}}, "truncate=0 must be true or false"),
        (LLAMA_2_7B | {"rope_scaling": YARN | {"attention_factor": 1.0}}, "multiplies attention by 1, and yarn"),
        (LLAMA_2_7B | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0}}, "multiplies attention by"),
        (LLAMA_2_7B | {"rope_parameters": {"full_attention": {}}}, "gives some layers another RoPE"),
        (QWEN3_06B | {"attention_bias": True}, "attention_bias=true is not supported together with a norm"),
        (
            MISTRAL_7B | {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
            "some layers a window",
        ),
        (MISTRAL_7B | {"layer_types": 5}, "layer_types=5 must be a list with a kind for each of the 32 layers"),
        (MISTRAL_7B | {"layer_types": ["full_attention"]}, "must be a list with a kind for each of the 32 layers"),
        (MISTRAL_7B | {"num_hidden_layers": 2, "layer_types": [[1], [2]]}, "has [1]; full_attention and sliding_"),
        (MISTRAL_7B | {"layer_types": ["chunked_attention"] * 32}, "has 'chunked_attention'; full_attention and"),
        (MISTRAL_7B | {"layer_types": SLIDING * 32, "sliding_window": None}, "sliding_window=null must be a whole"),
        (QWEN2_7B | {"layer_types": 3}, "layer_types=3 must be a list with a kind for each of the 28 layers"),
        (QWEN2_7B | {"layer_types": ["chunked_attention"] * 28}, "has 'chunked_attention'; full_attention and"),
        (QWEN2_7B | {"layer_types": SLIDING * 28}, "gives layers a window, which use_sliding_window and sliding_"),
        (QWEN2_7B | {"use_sliding_window": True, "max_window_layers": "0"}, 'max_window_layers="0" must be a whole'),
        (QWEN2_7B | {"use_sliding_window": True, "max_window_layers": None}, "max_window_layers=null must be a whole"),
        (QWEN2_7B | {"use_sliding_window": True, "max_window_layers": -1}, "must be a whole number of at least 0"),
        (GPT2 | {"activation_function": ["gelu"]}, 'activation_function=["gelu"] is not supported; gelu_new, '),
        (LLAMA_2_7B | {"hidden_size": 10**30}, "000000 must be at most 2147483647; correct that line"),
        (LLAMA_2_7B | {"vocab_size": 10**19}, "vocab_size=10000000000000000000 must be at most 2147483647"),
        (LLAMA_2_7B | {"vocab_size": 2**31 - 1, "hidden_size": 2**30}, "its largest tensor would have "),
        (LLAMA_2_7B | {"num_hidden_layers": 10**6}, "num_layers=1000000 must be at most 100000; download it again"),
        (LLAMA_2_7B | {"rope_theta": 10**400}, "must be finite; correct that line"),
        (LLAMA_2_7B | {"rope_theta": float("inf")}, "rope_theta=Infinity must be finite; correct that line"),
        (
            LLAMA_31_8B | {"original_max_position_embeddings": 4096},
            "original_max_position_embeddings=4096 contradicts the 8192 of RoPE's other parameters",
        ),
        (
            {"model_type": "gemma3"},
            "model_type 'gemma3' is not supported; supported are gpt2, llama, mistral, ",
        ),
        ({}, "model_type None is not supported"),
        (
            {**LLAMA_31_8B, "rope_scaling": None, "rope_theta": 0.0},
            "its rotary_base=0.0 must be greater than 0; correct",
        ),
    ],
)
def test_what_our_model_cannot_do_is_refused_by_name(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    assert f"{tmp_path}/config.json: " in (sentence := refusal(tmp_path, config))
    assert told in sentence


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{tmp_path} holds no config.json; name the folder of a Hugging Face model"):
        read_hf_config(tmp_path)
    with pytest.raises(UserError, match=rf"{tmp_path}/none does not exist as a folder; name the folder of a Hugging"):
        read_hf_config(tmp_path / "none")
    texts = {
        "{": "is not JSON: .*download it again",
        "[" * 100_000: "is not JSON: .*again",
        "[]": "is not a JSON object",
    }
    for text, told in texts.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=told):
            read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("files", "kind", "path"),
    [
        (("tokenizer.json", "tokenizer.model"), "huggingface", ""),
        (("vocab.json", "merges.txt"), "huggingface", ""),
        (("vocab.json", "tokenizer.model"), "sentencepiece", "tokenizer.model"),
        (("special_tokens_map.json",), None, ""),
    ],
)
def test_the_tokenizer_that_lies_there_is_found(
    tmp_path: Path, files: tuple[str, ...], kind: str | None, path: str
) -> None:
    data = read_hf_config(folder_of(tmp_path, GPT2, *files)).data
    assert data == ({} if kind is None else {"tokenizer_type": kind, "tokenizer_model": str(tmp_path / path)})


def test_two_files_without_a_way_to_cut_words_are_no_tokenizer_but_gpt2s(tmp_path: Path) -> None:
    assert read_hf_config(folder_of(tmp_path, QWEN2_7B, "vocab.json", "merges.txt")).data == {}
    assert read_hf_config(folder_of(tmp_path, QWEN2_7B, "tokenizer.json")).data["tokenizer_type"] == "huggingface"
