"""Tests of newer families with experts against transformers: logits, gradients and text, in both directions.

Run by `make test-peers`. Their weights on several ranks are in test_transformers_experts.py.
"""

from pathlib import Path
from typing import Any

import pytest

from megatronish.formats.hf.quantised import from_mxfp4
from megatronish.formats.weights import LazyTensor

pytestmark = pytest.mark.peers("transformers")
peer: Any = pytest.importorskip(
    "random_models",
    reason="transformers is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)
latent: Any = pytest.importorskip("test_transformers_latent", exc_type=ImportError)

_SIZES: dict[str, Any] = {
    "vocab_size": peer.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GLM = _SIZES | {
    "model_type": "glm4_moe",
    "head_dim": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "attention_bias": True,
    "num_mtp_layers": 0,
}
_MINIMAX = _SIZES | {"model_type": "minimax_m2", "head_dim": 8, "num_local_experts": 4}
_FACTORS = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7, "logits_scaling": 3.0}
_GRANITE = _SIZES | {"num_local_experts": 4} | _FACTORS
_YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "glm": _GLM,
    "glm, norms of heads": _GLM | {"use_qk_norm": True, "attention_bias": False, "routed_scaling_factor": 2.5},
    "glm, groups": _GLM | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    "glm, yarn, tied": _GLM
    | {"rope_parameters": _YARN | {"partial_rotary_factor": 1.0}, "tie_word_embeddings": True, "n_shared_experts": 1},
    "minimax": _MINIMAX | {"rotary_dim": 4},
    "minimax, whole heads": _MINIMAX,
    "granite": _GRANITE | {"model_type": "granitemoe"},
    "granite, biases, tied": _GRANITE
    | {"model_type": "granitemoe", "attention_bias": True, "tie_word_embeddings": True},
    "granite, shared": _GRANITE | {"model_type": "granitemoeshared", "shared_intermediate_size": 10},
    "granite, none shared": _GRANITE | {"model_type": "granitemoeshared", "shared_intermediate_size": 0},
}

_CHUNKED = "chunked_attention"
_LLAMA4 = _SIZES | {
    "model_type": "llama4_text",
    "head_dim": 8,
    "intermediate_size_mlp": 20,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layers": [0, 1],
    "attention_chunk_size": 5,
    "floor_scale": 4,
    "attn_scale": 0.5,
}


def _longrope(long: list[float], *, original: int) -> dict[str, Any]:
    """LongRoPE of a PhiMoE, whose scales are not those that follow from its lengths."""
    lengths = {"original_max_position_embeddings": original, "factor": 64 / original}
    factors = {"short_factor": [1.0, 1.3], "long_factor": long, "short_mscale": 1.2, "long_mscale": 1.4}
    return {"rope_type": "longrope", "rope_theta": 50.0, **lengths, **factors}


_PHI = _SIZES | {"model_type": "phimoe", "num_local_experts": 4, "router_jitter_noise": 0.3}
_OSS = _SIZES | {
    "model_type": "gpt_oss",
    "head_dim": 8,
    "num_local_experts": 4,
    "sliding_window": 5,
    "swiglu_limit": 0.4,
    "rope_parameters": _YARN | {"truncate": False, "beta_fast": 2.0},
}
CONFIGS |= {
    "phi": _PHI,
    "phi, biases, window": _PHI | {"attention_bias": True, "lm_head_bias": True, "sliding_window": 5},
    # Beyond the original context transformers keeps the short factors; the models' own code takes the long ones.
    "phi, longrope": _PHI | {"rope_parameters": _longrope([1.5, 4.0], original=48)},
    "phi, longrope, outgrown": _PHI | {"rope_parameters": _longrope([1.0, 1.3], original=8), "attention_bias": True},
    "phi, few rivals": _PHI | {"router_jitter_noise": 0.01, "num_local_experts": 8},
    "llama4": _LLAMA4,
    "llama4, biases, no norm": _LLAMA4
    | {"use_qk_norm": False, "attention_bias": True, "attn_temperature_tuning": False},
    "llama4, all experts": _LLAMA4
    | {"interleave_moe_layer_step": 1, "no_rope_layers": [1, 1], "layer_types": [_CHUNKED, "full_attention"]},
    "llama4, tied": _LLAMA4 | {"moe_layers": [0], "tie_word_embeddings": True, "no_rope_layers": [1, 0]},
    "gpt-oss": _OSS,
    "gpt-oss, plain": _OSS
    | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        "attention_bias": False,
        "num_local_experts": 8,
    },
    "gpt-oss, tied": _OSS | {"tie_word_embeddings": True, "layer_types": ["full_attention"] * 2, "swiglu_limit": 7.0},
    "phi, tied": _PHI | {"tie_word_embeddings": True, "lm_head_bias": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_equal_in_both_directions(tmp_path: Path, name: str) -> None:
    latent.check_logits(tmp_path, latent.random_decoder(CONFIGS[name]))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_and_the_gradients_of_a_step_are_equal(tmp_path: Path, name: str) -> None:
    latent.check_gradients(tmp_path, latent.random_decoder(CONFIGS[name]))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_likeliest_text_is_the_same(tmp_path: Path, name: str) -> None:
    latent.check_text(tmp_path, latent.random_decoder(CONFIGS[name]))


@pytest.mark.parametrize("name", ["glm", "glm, norms of heads", "glm, groups"])
def test_further_predictions_are_those_of_its_own_modules(tmp_path: Path, name: str) -> None:
    latent.check_predictions(tmp_path, latent.random_decoder(CONFIGS[name]))


def test_weights_in_4_bits_are_those_of_transformers() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", exc_type=ImportError)
    made = peer.torch.Generator().manual_seed(3)
    blocks = peer.torch.randint(0, 256, (3, 10, 2, 16), generator=made, dtype=peer.torch.uint8)
    scales = peer.torch.randint(90, 160, (3, 10, 2), generator=made, dtype=peer.torch.uint8)
    tensors = {
        f"w{kind}": LazyTensor(
            tuple(each.shape), each.dtype, each.clone, lambda start, stop, each=each: each[start:stop]
        )
        for kind, each in (("_blocks", blocks), ("_scales", scales))
    }
    found = from_mxfp4(Path("folder"), tensors)["w"].read()
    assert peer.torch.equal(found, mxfp4.convert_moe_packed_tensors(blocks, scales))
