"""Tests of config.json against transformers: the same fields, the same defaults, the same rotary angles.

Run by `make test-peers`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatronish.config.sections.model import ModelConfig
from megatronish.formats.hf.config import HfModel, _write, read_hf_config
from megatronish.formats.hf.families import FAMILIES
from megatronish.model.rope import RotaryEmbedding

pytestmark = pytest.mark.peers("transformers")
peer: Any = pytest.importorskip(
    "transformers",
    reason="transformers is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)
STRETCHED = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, of its length": {"rope_type": "yarn", "factor": 4.0},
    "yarn, other turns": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0},
}

KINDS = [kind for kind in FAMILIES if kind not in ("kimi_k2", "baichuan")]
"""Model types that transformers knows: these bring code of their own, and a Kimi K2 is a DeepSeek-V3."""
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128},
}
"""Keys without which a config.json describes no model there."""


def folder_of(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def said(found: HfModel) -> tuple[Any, ...]:
    return found.model, found.vocab_size, found.seq_length, found.eos_token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_means_the_same(tmp_path: Path, kind: str) -> None:
    bare = folder_of(tmp_path / "bare", {"model_type": kind, **NEEDED.get(kind, {})})
    whole = folder_of(tmp_path / "whole", peer.AutoConfig.from_pretrained(bare).to_dict())
    assert said(read_hf_config(bare)) == said(read_hf_config(whole))


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_write_is_read_as_the_same_model(tmp_path: Path, kind: str) -> None:
    bare = folder_of(tmp_path / "bare", {"model_type": kind, **NEEDED.get(kind, {})})
    found = read_hf_config(bare)
    # By the family itself: of two that describe a model, `hf_config_of` takes the first of the table.
    model = ModelConfig(**found.model)
    written = _write(kind, model, vocab_size=found.vocab_size, seq_length=found.seq_length, eos=1)
    theirs = peer.AutoConfig.from_pretrained(folder_of(tmp_path / "written", written)).to_dict()
    for key, default in peer.AutoConfig.from_pretrained(bare).to_dict().items():
        value = model.num_kv_heads if key == "num_key_value_heads" and default is None else default
        own = ("architectures", "_name_or_path", "bos_token_id", "eos_token_id", "n_inner", "max_window_layers")
        # A default of theirs would be a token of ours, or none of the table.
        assert key in (*own, "pad_token_id") or theirs[key] == value, key
    assert theirs["pad_token_id"] is None or kind == "t5"


@pytest.mark.parametrize("scaling", STRETCHED.values(), ids=STRETCHED)
def test_positions_turn_by_the_same_angles(tmp_path: Path, scaling: dict[str, Any]) -> None:
    config = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "rope_theta": 5e5}
    folder = folder_of(tmp_path / "model", config | {"max_position_embeddings": 4096, "rope_scaling": scaling})
    theirs = peer.AutoConfig.from_pretrained(folder)
    frequencies_of = peer.modeling_rope_utils.ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]]
    frequencies, factor = frequencies_of(theirs, "cpu")
    positions = torch.tensor([[0, 1, 17, 40]])
    turn = RotaryEmbedding(ModelConfig(**read_hf_config(folder).model))(positions).everywhere
    angles = positions[0, :, None] * frequencies
    torch.testing.assert_close(turn.cos[:, 0, 0], angles.cos() * factor, rtol=0, atol=2e-5)
    torch.testing.assert_close(turn.sin[:, 0, 0], angles.sin() * factor, rtol=0, atol=2e-5)
