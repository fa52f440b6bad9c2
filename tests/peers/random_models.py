"""Tiny random models of every supported family of transformers, for comparison.

`python tests/peers/random_models.py` writes them to tests/golden/hf, with what transformers makes of some tokens, so
that `make test` can compare too. Done once, in the environment of `make test-peers`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from paths import GOLDEN
from safetensors.torch import save_file
from torch import Tensor

HF = GOLDEN / "hf"
VOCABULARY = 19
S = 12

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}


def _rope(kind: str, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 50.0, "factor": 4.0, **others}}


def configs() -> dict[str, transformers.PreTrainedConfig]:
    """By the names of the cases. Windows, and the contexts from before stretching, are shorter than S."""
    gpt2 = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 4}
    bloom = {"vocab_size": VOCABULARY, "hidden_size": 12, "n_layer": 2, "bos_token_id": 1, "eos_token_id": 2}
    ends = {"bos_token_id": 2, "eos_token_id": 2}
    return {
        "gpt2": transformers.GPT2Config(**gpt2, **ends),
        "gpt2-untied": transformers.GPT2Config(**gpt2, **ends, n_inner=20, tie_word_embeddings=False),
        "llama": transformers.LlamaConfig(**_SIZES),
        "llama-biases": transformers.LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
        "llama-attention-biases": transformers.LlamaConfig(**_SIZES, attention_bias=True),
        "llama-mlp-biases": transformers.LlamaConfig(**_SIZES, mlp_bias=True),
        "llama3": transformers.LlamaConfig(**_SIZES, **_rope("llama3", **_LLAMA3), tie_word_embeddings=True),
        "llama-linear": transformers.LlamaConfig(**_SIZES, **_rope("linear")),
        "llama-yarn": transformers.LlamaConfig(**_SIZES, **_rope("yarn", original_max_position_embeddings=16)),
        "mistral": transformers.MistralConfig(**_SIZES, sliding_window=5),
        "mistral-whole": transformers.MistralConfig(**_SIZES, sliding_window=None),
        "qwen2": transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True),
        "qwen2-window": transformers.Qwen2Config(
            **_SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=0
        ),
        "qwen2-some": transformers.Qwen2Config(
            **_SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
        ),
        "qwen3": transformers.Qwen3Config(**_SIZES),
        "qwen3-some": transformers.Qwen3Config(
            **_SIZES,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
        ),
        **newer_configs(),
        "bloom": transformers.BloomConfig(**bloom, n_head=4),
        "bloom-untied": transformers.BloomConfig(**bloom, n_head=6, tie_word_embeddings=False),
    }


SLIDES = ["sliding_attention", "full_attention"]


def newer_configs() -> dict[str, transformers.PreTrainedConfig]:
    """Families of 2021 to 2026, each with what makes it another."""
    small = {key: value for key, value in _SIZES.items() if key != "head_dim"} | {"hidden_size": 16}
    whole = {key: value for key, value in small.items() if key != "num_key_value_heads"}
    factors = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7}
    opt = {key: value for key, value in whole.items() if key != "intermediate_size"} | {"ffn_dim": 12}
    gptj = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    falcon = {key: value for key, value in whole.items() if key not in (*ends, "intermediate_size")}
    mpt = {"vocab_size": VOCABULARY, "d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
    clipped = {"clip_qkv": 0.6, "softmax_scale": 0.8}
    t = transformers
    return {
        "gemma": t.GemmaConfig(**_SIZES, pad_token_id=None),
        "gpt_neox": t.GPTNeoXConfig(**whole, rotary_pct=0.5),
        "gpt_neox-serial": t.GPTNeoXConfig(**whole, use_parallel_residual=False, attention_bias=False, rotary_pct=1.0),
        "olmo2": t.Olmo2Config(**small, pad_token_id=None),
        "granite": t.GraniteConfig(**small, **factors, logits_scaling=3.0),
        "gemma2": t.Gemma2Config(
            **_SIZES,
            query_pre_attn_scalar=7,
            sliding_window=5,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=2.0,
            pad_token_id=None,
        ),
        "gemma2-uncapped": t.Gemma2Config(
            **_SIZES, attn_logit_softcapping=None, final_logit_softcapping=None, pad_token_id=None
        ),
        "gemma3_text": t.Gemma3TextConfig(
            **_SIZES,
            query_pre_attn_scalar=7,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
            },
            pad_token_id=None,
        ),
        "glm4": t.Glm4Config(**_SIZES, pad_token_id=None),
        "starcoder2": t.Starcoder2Config(**small, sliding_window=5),
        "starcoder2-unbiased": t.Starcoder2Config(**small, use_bias=False),
        "smollm3": t.SmolLM3Config(**small, no_rope_layer_interval=2, pad_token_id=None),
        "phi": t.PhiConfig(**small),
        "phi-qk": t.PhiConfig(**small, qk_layernorm=True, partial_rotary_factor=1.0),
        "phi3": t.Phi3Config(**small, sliding_window=5, pad_token_id=None),
        "olmo": t.OlmoConfig(**small, clip_qkv=0.7, pad_token_id=None),
        "stablelm": t.StableLmConfig(**small, partial_rotary_factor=0.5),
        "stablelm-parallel": t.StableLmConfig(
            **small, partial_rotary_factor=0.5, use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True
        ),
        "cohere": t.CohereConfig(**small, logit_scale=0.3, pad_token_id=None),
        "cohere-qk": t.CohereConfig(**small, logit_scale=0.3, use_qk_norm=True, pad_token_id=None),
        "gptj": t.GPTJConfig(**gptj, **ends, rotary_dim=4),
        "opt": t.OPTConfig(**opt, pad_token_id=None, dropout=0.0),
        "nemotron": t.NemotronConfig(**_SIZES),
        "helium": t.HeliumConfig(**small, head_dim=4, pad_token_id=None),
        "seed_oss": t.SeedOssConfig(**_SIZES, pad_token_id=None),
        "seed_oss-biases": t.SeedOssConfig(**_SIZES, attention_out_bias=True, mlp_bias=True, pad_token_id=None),
        "exaone4": t.Exaone4Config(**small, sliding_window=5, layer_types=SLIDES),
        "exaone4-whole": t.Exaone4Config(**small, sliding_window=None, layer_types=["full_attention"] * 2),
        "ernie4_5": t.Ernie4_5Config(**_SIZES, pad_token_id=None),
        "ernie4_5-biases": t.Ernie4_5Config(**_SIZES, use_bias=True, pad_token_id=None),
        "cohere2": t.Cohere2Config(**small, logit_scale=0.3, sliding_window=5, layer_types=SLIDES, pad_token_id=None),
        "falcon": t.FalconConfig(**falcon, **ends),
        "falcon-groups": t.FalconConfig(**falcon, **ends, new_decoder_architecture=True, num_kv_heads=2),
        "falcon-groups-norm": t.FalconConfig(
            **falcon, **ends, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
        ),
        "falcon-serial": t.FalconConfig(**falcon, **ends, parallel_attn=False, bias=True, multi_query=False),
        "mpt": t.MptConfig(**mpt, **ends),
        "mpt-clipped": t.MptConfig(**{**mpt, "d_model": 18, "n_heads": 6}, **ends, attn_config=clipped),
        "olmo3": t.Olmo3Config(**small, sliding_window=5, layer_types=SLIDES, pad_token_id=None),
        **dense_configs(),
    }


def dense_configs() -> dict[str, transformers.PreTrainedConfig]:
    """Families of 2024 to 2026, each with an MLP, a RoPE or a norm that no other has."""
    t = transformers
    phi3 = {key: value for key, value in _SIZES.items() if key != "head_dim"} | {"hidden_size": 32}
    factors = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.0, 4.0]}
    longrope = {"rope_type": "longrope", "rope_theta": 50.0, **factors}
    return {
        "phi3-longrope": t.Phi3Config(
            **phi3,
            original_max_position_embeddings=8,
            rope_parameters={**longrope, "partial_rotary_factor": 0.75},
            pad_token_id=None,
        ),
        "phi3-longrope-short": t.Phi3Config(
            **phi3,
            original_max_position_embeddings=32,
            rope_parameters={**longrope, "partial_rotary_factor": 0.75},
            pad_token_id=None,
        ),
        "llama-proportional": t.LlamaConfig(
            **(_SIZES | {"head_dim": 8}),
            rope_parameters={"rope_type": "proportional", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        ),
        "llama-longrope": t.LlamaConfig(
            **(_SIZES | {"head_dim": 6}),
            rope_parameters={**longrope, "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        "apertus": t.ApertusConfig(
            **_SIZES,
            rope_parameters={"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, **_LLAMA3},
            pad_token_id=None,
        ),
        "apertus-relu2": t.ApertusConfig(
            **_SIZES,
            hidden_act="relu2",
            attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 50.0},
            pad_token_id=None,
        ),
        "arcee": t.ArceeConfig(**_SIZES),
        "arcee-biases": t.ArceeConfig(**_SIZES, attention_bias=True, mlp_bias=True, hidden_act="gelu"),
        "hunyuan_v1_dense": t.HunYuanDenseV1Config(**_SIZES, pad_token_id=None),
        "hunyuan_v1_dense-alpha": t.HunYuanDenseV1Config(
            **_SIZES,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 50.0, "factor": 1.0, "alpha": 1000.0},
            attention_bias=True,
            tie_word_embeddings=True,
            pad_token_id=None,
        ),
    }


IN_GOLDEN = ("gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3", "bloom")


def tokens() -> Tensor:
    """Token ids [2, S] for a model."""
    return torch.randint(0, VOCABULARY, (2, S), generator=torch.Generator().manual_seed(1))


def random_model(name: str) -> Any:
    """A model of `configs()`, in fp32. Weights are larger than at the start of a training: every path counts."""
    model = transformers.AutoModelForCausalLM.from_config(configs()[name], attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    # With norms of heads near 2, transformers in fp32 is 4.4e-5 off itself in fp64.
    mean = 0.0 if name == "gemma3_text" else 1.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return model.float().eval()


@torch.no_grad()
def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """[B, S, V] in fp32."""
    return model(tokens, use_cache=False).logits.float()


def load(folder: Path) -> Any:
    """What transformers makes of a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def write_golden() -> None:
    """All cases of `make test`."""
    shutil.rmtree(HF, ignore_errors=True)
    for name in IN_GOLDEN:
        model = random_model(name)
        model.save_pretrained(HF / name)
        (HF / name / "generation_config.json").unlink()
        found = {"tokens": tokens(), "logits": logits_of(model, tokens())}
        save_file(found, HF / name / "expected.safetensors")
    (HF / "versions.json").write_text(
        json.dumps({"transformers": transformers.__version__, "torch": torch.__version__}) + "\n"
    )


if __name__ == "__main__":
    write_golden()
