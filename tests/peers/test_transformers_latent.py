"""Tests of latent attention against transformers: logits, gradients and text of DeepSeek-V2 and V3, in both directions.

Run by `make test-peers`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import logits_of, to_hf, to_ours
from ranks import run_ranks

from megatronish.core.layout import ExpertLayout, Layout
from megatronish.formats import native
from megatronish.formats.load_sharded import open_hf
from megatronish.formats.weights import LazyTensor, Model, is_bias
from megatronish.inference.load import find_trained, load_found
from megatronish.model.batch import MicroBatch, TokensAhead
from megatronish.parallel.mesh import Mesh

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


def test_further_predictions_are_those_of_its_own_modules(tmp_path: Path) -> None:
    check_predictions(tmp_path, random_decoder(CONFIGS["v3, yarn"]))


def check_predictions(folder: Path, model: Any) -> None:
    """Losses of depth one and two are those of modules that transformers reads from our files; it computes none."""
    depths, tokens = 2, peer.tokens()
    model.save_pretrained(folder / "theirs")
    description, tensors = open_hf(folder / "theirs")
    description = replace(description, model=replace(description.model, mtp_num_layers=depths))
    generator = torch.Generator().manual_seed(1)
    weights = {name: tensor.read() for name, tensor in tensors.items()}
    for name, sharding in description.shardings().items():
        std, mean = (0.3, 1.0) if len(sharding.shape) == 1 and not is_bias(name) else (0.3, 0.0)
        weights.setdefault(name, torch.randn(sharding.shape, generator=generator) * std + mean)
    lazy = {name: LazyTensor(tuple(x.shape), x.dtype, x.clone) for name, x in weights.items()}
    native.write(folder / "ours", Model(description, lazy))
    to_hf(folder / "ours", folder / "back")

    theirs = peer.load(folder / "back")
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\..*"]  # where the published number of layers is
    modules = peer.transformers.modeling_layers.MtpModel.from_pretrained(theirs).eval()
    hidden = theirs.model(tokens, use_cache=False).last_hidden_state
    length, expected = tokens.shape[1], []
    for depth in range(1, depths + 1):
        # Of each position the token `depth` places later; the last places have none, and no other sees them.
        later = torch.nn.functional.pad(tokens[:, depth:], (0, depth))
        hidden = modules.forward_layer(
            depth - 1, hidden, torch.arange(length)[None].expand_as(tokens), None, input_ids=later
        )
        logits = theirs.lm_head(hidden)[:, : length - 1 - depth]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1 + depth :].flatten())
        expected.append(float(losses.detach()))
    assert losses_ahead(folder / "ours", tokens, depths) == pytest.approx(expected, rel=1e-5)


def losses_ahead(folder: Path, tokens: torch.Tensor, depths: int) -> list[float]:
    """The mean loss of each depth."""
    saved = find_trained(folder)
    mesh = Mesh.start(Layout(), rank=0, init_method="", experts=ExpertLayout(1, 1))
    whole = saved._replace(description=native.description_of(saved.checkpoint))
    gpt, labels = load_found(whole, mesh, dtype=torch.float32).model, tokens[:, 1:].contiguous()
    positions = torch.arange(labels.shape[1]).expand_as(labels)
    mask = torch.ones_like(labels, dtype=torch.bool)
    batch = MicroBatch(tokens[:, :-1].contiguous(), labels, mask, positions, torch.arange(len(labels)))
    ahead = TokensAhead.of(batch, depths)
    losses = gpt(None, batch.with_ahead(ahead), step=None)[1:].transpose(1, 2)
    return [float(each[inside].mean()) for each, inside in zip(losses, ahead.loss_mask, strict=True)]
