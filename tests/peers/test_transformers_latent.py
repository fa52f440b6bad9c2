"""Tests of latent attention against transformers: logits, gradients and text of DeepSeek-V2 and V3, in both directions.

Run by `make test-peers`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import logits_of, to_hf, to_ours
from ranks import run_ranks

from megatronish.core.layout import Layout
from megatronish.formats.load_sharded import open_hf
from megatronish.formats.weights import is_bias

pytestmark = pytest.mark.peers("transformers")
peer: Any = pytest.importorskip(
    "random_models",
    reason="transformers is not installed here; `make test-peers` runs this in an environment that has it",
    exc_type=ImportError,
)
dense: Any = pytest.importorskip("test_transformers", exc_type=ImportError)
generation: Any = pytest.importorskip("test_generation", exc_type=ImportError)

_SIZES: dict[str, Any] = {
    "vocab_size": peer.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 12,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_V3 = _SIZES | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "num_mtp_layers": 0}
_V2 = _SIZES | {"model_type": "deepseek_v2", "routed_scaling_factor": 1.5}


def _yarn(mscale: float, mscale_all_dim: float) -> dict[str, Any]:
    sizes = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 16}
    return {"rope_parameters": {**sizes, "mscale": mscale, "mscale_all_dim": mscale_all_dim}}


CONFIGS: dict[str, dict[str, Any]] = {
    "v3": _V3,
    "v3, queries at once": _V3 | {"q_lora_rank": None},
    "v3, yarn": _V3 | _yarn(1.0, 1.0),
    "v3, halves": _V3 | {"rope_interleave": False},
    "v3, three groups": _V3 | {"topk_group": 3},
    "kimi": _V3 | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827} | _yarn(1.0, 1.0),
    "v2, greedy": _V2 | {"q_lora_rank": None, "topk_method": "greedy"} | _yarn(0.707, 0.707),
    "v2, groups": _V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2} | _yarn(1.2, 0.5),
}


def random_decoder(config: dict[str, Any]) -> Any:
    """A model in fp32 whose biases of routers count, too."""
    model = peer.transformers.AutoModelForCausalLM.from_config(
        peer.transformers.AutoConfig.for_model(**config), attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3, generator=generator)
    return model.float().eval()


def check_logits(folder: Path, model: Any) -> None:
    """Logits are equal in both directions, and weights and config.json come back."""
    tokens = peer.tokens()
    expected = peer.logits_of(model, tokens)
    model.save_pretrained(folder / "theirs")
    to_ours(folder / "theirs", folder / "ours")
    for tp in (1, 2):
        torch.testing.assert_close(logits_of(folder / "ours", tokens, tp=tp), expected, rtol=1e-5, atol=1e-5)
    to_hf(folder / "ours", folder / "back")
    back = peer.load(folder / "back")
    torch.testing.assert_close(peer.logits_of(back, tokens), expected, rtol=0, atol=0)
    assert (folder / "back" / "config.json").read_text() == (folder / "theirs" / "config.json").read_text()
    for key, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key


def check_gradients(folder: Path, theirs: Any) -> None:
    """The loss and the gradients of a step are equal."""
    tokens = peer.tokens()
    theirs.save_pretrained(folder / "theirs")
    to_ours(folder / "theirs", folder / "ours")
    loss, grads = dense.our_gradients(folder / "ours", tokens)
    expected = theirs(tokens, labels=tokens, use_cache=False).loss
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    for parameter in theirs.parameters():
        parameter.data.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(folder / "gradients")
    tensors = {key: each for key, each in open_hf(folder / "gradients").tensors.items() if not is_bias(key)}
    assert grads.keys() == tensors.keys()
    for key, tensor in tensors.items():
        exact = tensor.read()
        mine = grads[key][tuple(slice(size) for size in exact.shape)]
        assert float((mine - exact).abs().max()) <= 1e-5 * float(exact.abs().max()) + 1e-7, key


def check_text(folder: Path, model: Any) -> None:
    """The likeliest text of each prompt is the same."""
    prompts = [row[:size] for row, size in zip(peer.tokens().repeat(2, 1).tolist(), (1, 6, 5, 4), strict=True)]
    expected = [generation.written_there(model, prompt, 30) for prompt in prompts]
    model.save_pretrained(folder / "theirs")
    to_ours(folder / "theirs", folder / "ours")
    assert run_ranks(1, generation.written_by, folder / "ours", Layout(), prompts, 30)[0] == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_equal_in_both_directions(tmp_path: Path, name: str) -> None:
    check_logits(tmp_path, random_decoder(CONFIGS[name]))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_and_the_gradients_of_a_step_are_equal(tmp_path: Path, name: str) -> None:
    check_gradients(tmp_path, random_decoder(CONFIGS[name]))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_likeliest_text_is_the_same(tmp_path: Path, name: str) -> None:
    check_text(tmp_path, random_decoder(CONFIGS[name]))
