"""Tests of latent attention on one process: against a plain reference, and generation from a cache of latents."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatronish.attention.cached import KeyValueCache
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.inference.generate import Sampling, generate
from megatronish.model.adapters import add_adapters
from megatronish.model.attention import CoreAttention
from megatronish.model.batch import MicroBatch
from megatronish.model.context import Context, Masks, make_context
from megatronish.model.gpt import GPT, Execution
from megatronish.model.latent_attention import LatentAttention
from megatronish.model.rope import RotaryEmbedding
from megatronish.parallel.mesh import Axis, TensorParallel, dense_domain
from megatronish.parallel.sharding import collect_shardings, initialize
from megatronish.specs.latent_attention import LatentAttentionSpec

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    multi_latent_attention=True,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=6,
    latent_norm_epsilon=1e-6,
    qk_layernorm=True,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.3,
    make_vocab_size_divisible_by=1,
)
YARN = replace(
    MODEL,
    rope_scaling_type="yarn",
    rope_scaling_factor=4.0,
    rope_original_max_positions=8,
    rope_mscale=0.7,
    rope_mscale_all_dim=1.3,
)
MODELS = {
    "queries from a latent": MODEL,
    "queries at once": replace(MODEL, q_lora_rank=None),
    "pairs": replace(MODEL, rotary_interleaved=True),
    "without norms": replace(MODEL, qk_layernorm=False),
    "stretched": YARN,
}
S, B, V = 12, 2, 50


def batch_of(tokens: Tensor) -> MicroBatch:
    rows, length = tokens.shape
    mask = torch.ones(rows, length, dtype=torch.bool)
    return MicroBatch(tokens, tokens, mask, torch.arange(length).repeat(rows, 1), torch.arange(rows))


def built(model: ModelConfig, **how: object) -> GPT:
    gpt = GPT(model, vocab_size=V, num_positions=S, execution=Execution(**how))  # type: ignore[arg-type]
    initialize(gpt, collect_shardings(gpt), seed=1, domains=dense_domain(gpt.tp.axis))
    return gpt


def normalised(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turned(x: Tensor, model: ModelConfig) -> Tensor:
    """RoPE of [S, B, n, dr] as DeepSeek's files have it, without a stretch of the frequencies."""
    cos, sin = RotaryEmbedding(model)(torch.arange(x.shape[0]).expand(x.shape[1], -1)).everywhere
    if model.rotary_interleaved:
        pairs = x.unflatten(-1, (-1, 2))
        a, b = pairs[..., 0], pairs[..., 1]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def plain_attention(x: Tensor, w: dict[str, Tensor], model: ModelConfig) -> Tensor:
    """DeepSeek-V3's attention, head by head, in plain torch."""
    plain, rotary, size = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
    q = x
    if model.q_lora_rank is not None:
        q = normalised(x @ w["q_down.weight"].T, w.get("q_norm.weight"))
    q = (q @ w["q_up.weight" if model.q_lora_rank else "q.weight"].T).unflatten(-1, (4, plain + rotary))
    down = x @ w["kv_down.weight"].T
    latent = normalised(down[..., : model.kv_lora_rank], w.get("kv_norm.weight"))
    shared = turned(down[..., None, model.kv_lora_rank :], model)[..., 0, :]
    up = (latent @ w["kv_up.weight"].T).unflatten(-1, (4, plain + size))
    factor = model.rope_scaling_factor if model.rope_scaling == "yarn" else 1.0
    scale = (plain + rotary) ** -0.5 * (0.1 * model.rope_mscale_all_dim * math.log(factor) + 1) ** 2
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    heads = []
    for head in range(4):
        query = torch.cat((q[..., head, :plain], turned(q[..., plain:], model)[..., head, :]), -1)
        key = torch.cat((up[..., head, :plain], shared), -1)
        scores = torch.einsum("sbh,tbh->bst", query, key) * scale
        probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        heads.append(torch.einsum("bst,tbv->sbv", probabilities, up[..., head, plain:]))
    return torch.cat(heads, -1) @ w["out.weight"].T


def layer_of(model: ModelConfig) -> tuple[LatentAttention, Context]:
    alone = TensorParallel(Axis("tp"))
    spec = LatentAttentionSpec.of(model)
    layer = LatentAttention(model, spec, layer=0, tp=alone, core=CoreAttention(), output_std=0.3)
    initialize(layer, collect_shardings(layer), seed=3, domains=dense_domain(alone.axis))
    context = make_context(
        batch_of(torch.zeros(B, S, dtype=torch.int64)),
        tp=alone,
        cp=Axis("cp"),
        rotary=RotaryEmbedding(model),
        masks=Masks(),
    )
    return layer.double(), context


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_attention_of_deepseek(name: str) -> None:
    model = MODELS[name]
    layer, context = layer_of(model)
    x = torch.randn(S, B, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = plain_attention(x, dict(layer.named_parameters()), model)
    # Angles and turns are in fp32.
    assert torch.allclose(layer(x, context), expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_a_stretched_rope_grows_scores_by_one_factor_and_turned_parts_by_another() -> None:
    growth, all_dims = 0.07 * math.log(4) + 1, 0.13 * math.log(4) + 1
    assert pytest.approx(growth / all_dims) == YARN.rotary_growths[0]
    assert YARN.score_factor == pytest.approx(all_dims**2)
    usual = replace(YARN, rope_mscale=1.0, rope_mscale_all_dim=0.0)
    assert (usual.rotary_growths[0], usual.score_factor) == (pytest.approx(0.1 * math.log(4) + 1), None)


# Generation

PROMPTS = [[3, 7, 11, 2, 9], [4, 4, 8]]


def texts_of(gpt: GPT, num_tokens: int = 6) -> list[list[int]]:
    texts: list[list[int]] = [[] for _ in PROMPTS]
    greedy = Sampling(temperature=0.0)
    for text in generate(gpt, PROMPTS, num_tokens=num_tokens, seq_length=32, sampling=greedy):
        if text.token is not None:
            texts[text.number].append(text.token)
    return texts


def uncached(gpt: GPT, prompt: list[int], num_tokens: int = 6) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        batch = batch_of(torch.tensor([tokens]))
        tokens.append(int(gpt.logits(gpt.hidden(None, batch, step=None))[-1, 0].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_text_from_cached_latents_is_that_of_whole_forwards(name: str, backend: str) -> None:
    gpt = built(MODELS[name], attention_backend=backend)
    assert texts_of(gpt) == [uncached(gpt, prompt) for prompt in PROMPTS]


@torch.no_grad()
def test_adapters_of_the_way_up_are_part_of_what_is_generated() -> None:
    gpt = built(MODEL)
    without = texts_of(gpt)
    add_adapters(gpt, AdapterConfig(adapter_type="lora", lora_rank=2, lora_alpha=40.0, adapter_targets=("kv_up",)))
    for name, parameter in gpt.named_parameters():
        if ".adapters." in name:
            parameter.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(4))
    assert texts_of(gpt) == [uncached(gpt, prompt) for prompt in PROMPTS] != without


@torch.no_grad()
def test_a_cache_has_one_latent_and_one_key_of_each_token() -> None:
    gpt, cache = built(MODEL), KeyValueCache(8)
    gpt.hidden(None, batch_of(torch.tensor(PROMPTS[:1])), step=None, cache=cache)
    kept = [sum(part.numel() for part in layer) for layer in cache._layers.values()]
    assert kept == [8 * (10 + 4)] * 2
