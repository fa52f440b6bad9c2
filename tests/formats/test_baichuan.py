"""Tests of Baichuan against a plain model with its own names of tensors, as transformers has no such family."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conversions import logits_of, to_hf, to_ours
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.hf.config import hf_config_of, read_hf_config

D, N, FFN, V, LAYERS = 24, 6, 20, 19, 2  # six heads: ALiBi has slopes of two series
KEYS: dict[str, Any] = {
    "model_type": "baichuan",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": N,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "7B": KEYS | {"architectures": ["BaiChuanForCausalLM"], "max_position_embeddings": 64},
    "13B": KEYS | {"architectures": ["BaichuanForCausalLM"], "model_max_length": 64},
}


def write_model(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """A folder with random weights, which are returned."""
    layer = {
        "input_layernorm": (D,),
        "self_attn.W_pack": (3 * D, D),
        "self_attn.o_proj": (D, D),
        "post_attention_layernorm": (D,),
        "mlp.gate_proj": (FFN, D),
        "mlp.up_proj": (FFN, D),
        "mlp.down_proj": (D, FFN),
    }
    shapes = {"model.embed_tokens": (V, D), "model.norm": (D,), "lm_head": (V, D)}
    shapes |= {f"model.layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(4)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def plain_logits(w: dict[str, Tensor], tokens: Tensor, *, alibi: bool) -> Tensor:
    """[S] -> [S, V], from the papers' formulas."""
    w = {name: tensor.double() for name, tensor in w.items()}
    x = w["model.embed_tokens.weight"][tokens]
    for n in range(LAYERS):
        layer = {name.removeprefix(f"model.layers.{n}."): value for name, value in w.items()}
        x = x + plain_attention(layer, normal(layer["input_layernorm.weight"], x), alibi=alibi)
        y = normal(layer["post_attention_layernorm.weight"], x)
        up = F.silu(y @ layer["mlp.gate_proj.weight"].T) * (y @ layer["mlp.up_proj.weight"].T)
        x = x + up @ layer["mlp.down_proj.weight"].T
    return normal(w["model.norm.weight"], x) @ w["lm_head.weight"].T


def normal(weight: Tensor, x: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def plain_attention(w: dict[str, Tensor], x: Tensor, *, alibi: bool) -> Tensor:
    length, size = len(x), D // N
    q, k, v = (x @ part.T for part in w["self_attn.W_pack.weight"].chunk(3))
    # Four heads have the slopes of four, the others every second one of eight.
    slopes = [2.0 ** (-2 * head) for head in (1, 2, 3, 4)] + [2.0**-head for head in (1, 3)]
    outputs = []
    for head in range(N):
        of_q, of_k, of_v = (part[:, head * size : (head + 1) * size] for part in (q, k, v))
        if not alibi:
            of_q, of_k = turned(of_q), turned(of_k)
        scores = of_q @ of_k.T / math.sqrt(size)
        places = torch.arange(length)
        if alibi:
            scores = scores - slopes[head] * (places[:, None] - places)
        scores = scores.masked_fill(places > places[:, None], -math.inf)
        outputs.append(scores.softmax(-1) @ of_v)
    return torch.cat(outputs, -1) @ w["self_attn.o_proj.weight"].T


def turned(x: Tensor) -> Tensor:
    size = x.shape[-1]
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    return (
        torch.view_as_real(
            torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles).double(), angles.double())
        )
        .movedim(-1, 1)
        .flatten(1)
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_a_plain_model_and_weights_come_back(tmp_path: Path, name: str) -> None:
    weights = write_model(tmp_path / "theirs", MODELS[name])
    tokens = torch.randint(0, V, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([plain_logits(weights, row, alibi=name == "13B") for row in tokens]).float()
    to_ours(tmp_path / "theirs", tmp_path / "ours")
    for tp in (1, 2):
        torch.testing.assert_close(logits_of(tmp_path / "ours", tokens, tp=tp), expected, rtol=1e-5, atol=1e-5)
    to_hf(tmp_path / "ours", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys() and all(torch.equal(back[key], weights[key]) for key in weights)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: value for key, value in config.items() if "dtype" not in key} == MODELS[name]


def model_of(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(**read_hf_config(folder).model)


def test_a_llama_with_alibi_is_a_baichuan_of_13b_and_one_with_rope_a_llama(tmp_path: Path) -> None:
    models = {name: model_of(tmp_path, config) for name, config in MODELS.items()}
    assert {name: model.position_embedding_type for name, model in models.items()} == {"7B": "rope", "13B": "alibi"}
    small, large = (hf_config_of(models[name], vocab_size=V, seq_length=64) for name in ("7B", "13B"))
    assert small["model_type"] == "llama"
    assert (large["model_type"], large["architectures"]) == ("baichuan", ["BaichuanForCausalLM"])
    assert large["model_max_length"] == 64 and "max_position_embeddings" not in large
    assert model_of(tmp_path, large) == models["13B"]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"z_loss_weight": 0}, "z_loss_weight=0 is of Baichuan 2, whose output layer has rows of length 1"),
        ({"vocab_size": 125696}, "vocab_size=125696 is of Baichuan 2, whose output layer"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "is not there in this family"),
        ({"rope_theta": 5e5}, "rope_theta=500000.0 is not there in this family, whose RoPE has a base of 10000"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not there in this family"),
    ],
)
def test_what_is_not_there_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as refused:
        model_of(tmp_path, MODELS["7B"] | keys)
    assert told in str(refused.value)
