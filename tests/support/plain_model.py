"""A plain float64 model written from the formulas, loops over heads, no fused operation; and variants to compare."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import AttentionBackend
from megatronish.model.batch import MicroBatch
from megatronish.model.gpt import GPT, Execution
from megatronish.parallel.mesh import dense_domain
from megatronish.parallel.sharding import collect_shardings, initialize
from megatronish.specs.block_pattern import BlockPattern

VOCABULARY = 37
S, B = 20, 2
GPT2 = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.3,
    make_vocab_size_divisible_by=8,
)
LLAMA = replace(
    GPT2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    ffn_hidden_size=40,
    disable_bias_linear=True,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=16,
    rope_scaling_factor=4.0,
    rope_original_max_positions=64,
    rotary_base=100.0,  # so that every variant of scaling has wavelengths to keep, to blend and to stretch
    untie_embeddings_and_output_weights=True,
)
VARIANTS = {
    "gpt2": GPT2,
    "gpt2 untied": replace(GPT2, untie_embeddings_and_output_weights=True),
    "gpt2 with the tanh gelu": replace(GPT2, openai_gelu=True),
    "squared relu": replace(GPT2, squared_relu=True),
    "layernorm 1p": replace(GPT2, apply_layernorm_1p=True),
    "no positions": replace(GPT2, position_embedding_type="none"),
    "one kv head": replace(GPT2, group_query_attention=True),
    "own head size": replace(GPT2, kv_channels=10),
    "llama": LLAMA,
    "llama tied": replace(LLAMA, untie_embeddings_and_output_weights=False),
    "rms 1p": replace(LLAMA, apply_layernorm_1p=True),
    "rope linear": replace(LLAMA, rope_scaling_type="linear"),
    "rope llama3": replace(LLAMA, rope_scaling_type="llama3"),
    "rope yarn": replace(LLAMA, rope_scaling_type="yarn", rope_beta_fast=8.0),
    "rope longrope": replace(
        LLAMA,
        rope_scaling_type="longrope",
        rope_original_max_positions=16,
        rope_short_factor=(1.0, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5),
        rope_long_factor=(1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0),
    ),
    "rope longrope, scaled": replace(
        LLAMA,
        rope_scaling_type="longrope",
        rope_original_max_positions=16,
        rope_short_factor=(1.0,) * 8,
        rope_long_factor=(1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0),
        rope_short_mscale=0.9,
        rope_long_mscale=1.3,
    ),
    "rope yarn, not rounded": replace(
        LLAMA, rope_scaling_type="yarn", rope_beta_fast=8.0, yarn_correction_range_round_to_int=False
    ),
    "rope interleaved": replace(LLAMA, rotary_interleaved=True),
    "rope on half of a head": replace(LLAMA, rotary_percent=0.5),
    "mistral": replace(LLAMA, window_size=6),
    "qwen": replace(LLAMA, add_qkv_bias=True, qk_layernorm=True),
    "olmoe": replace(LLAMA, qk_layernorm=True, qk_layernorm_across_heads=True, clip_qkv=0.4),
    "hunyuan": replace(LLAMA, qk_layernorm=True, qk_layernorm_after_rope=True, clip_qkv=2.0),
    "bloom": replace(GPT2, position_embedding_type="alibi", embed_layernorm=True, openai_gelu=True),
    "alibi in a window": replace(LLAMA, position_embedding_type="alibi", window_size=6),
    "gpt-oss": replace(
        LLAMA,
        swiglu=False,
        quick_geglu=True,
        glu_linear_offset=1.0,
        activation_func_clamp_value=0.7,
        disable_bias_linear=False,
        softmax_type="learnable",
        window_size=4,
        window_attn_skip_freq="2",
    ),
    "fixed blocks": replace(LLAMA, attention_pattern="fixed", attention_block_size=2, attention_local_blocks=2),
    "bigbird": replace(
        GPT2, attention_pattern="bigbird", attention_block_size=3, attention_local_blocks=1, window_attn_skip_freq="2"
    ),
    "smollm": replace(LLAMA, no_rope_freq="[0, 1]", activation_func_clamp_value=0.5),
    "off by one": replace(LLAMA, softmax_type="off-by-one", embed_layernorm=True, apply_layernorm_1p=True),
    "gpt2 with rope and qk layernorm": replace(GPT2, position_embedding_type="rope", qk_layernorm=True),
    "gemma": replace(LLAMA, swiglu=False, geglu=True, apply_layernorm_1p=True, embedding_multiplier=24**0.5),
    "gemma 2": replace(
        LLAMA,
        norm_placement="sandwich",
        softmax_scale=0.4,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.5,
        window_size=6,
        window_attn_skip_freq="2",
    ),
    "olmo 2": replace(LLAMA, norm_placement="output", qk_layernorm=True, qk_layernorm_across_heads=True),
    "gpt-j": replace(
        GPT2,
        norm_placement="parallel",
        disable_bias_linear=True,
        add_mlp_bias=True,
        add_output_bias=True,
        untie_embeddings_and_output_weights=True,
    ),
    "gpt-neox": replace(GPT2, norm_placement="parallel_norms", add_output_bias=True),
    "granite": replace(
        LLAMA, embedding_multiplier=3.0, residual_multiplier=0.4, softmax_scale=0.3, logits_multiplier=0.7
    ),
    "cohere": replace(
        LLAMA, norm_placement="parallel", normalization="LayerNorm", norm_parameters="weight", logits_multiplier=0.5
    ),
    "stablelm": replace(LLAMA, normalization="LayerNorm", qk_layernorm=True, qk_layernorm_by_head=True),
    "olmo": replace(LLAMA, normalization="LayerNorm", norm_parameters="none", clip_qkv=0.6),
    "rms by head": replace(LLAMA, qk_layernorm=True, qk_layernorm_by_head=True, norm_parameters="none"),
    "apertus": replace(LLAMA, swiglu=False, xielu=True, qk_layernorm=True),
    "xielu with biases": replace(GPT2, xielu=True),
    "opt": replace(GPT2, relu=True, position_offset=2),
    "llama 4": replace(
        LLAMA,
        rotary_interleaved=True,
        no_rope_freq="[0, 1]",
        attention_pattern="fixed",
        attention_block_size=5,
        attention_local_blocks=1,
        attention_global_blocks=0,
        window_attn_skip_freq="2",
        qk_l2_norm=True,
        attn_temperature_scale=0.6,
        attn_temperature_floor=3,
    ),
    "a sandwich with sinks": replace(
        GPT2, norm_placement="sandwich", residual_multiplier=0.6, attn_logit_softcapping=2.0, softmax_type="learnable"
    ),
}


def model_of(config: ModelConfig, *, attention_backend: AttentionBackend = "auto") -> GPT:
    """With every parameter far from zero and one, so that none can be forgotten."""
    execution = Execution(attention_backend=attention_backend, dropout_seed=5)
    model = GPT(config, vocab_size=VOCABULARY, num_positions=S, execution=execution)
    initialize(model, collect_shardings(model), seed=5, domains=dense_domain(model.tp.axis))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def batch_of(*, documents: bool = False, seed: int = 0) -> MicroBatch:
    """Random tokens; with documents, they end after 7 and 12 tokens in one sample, after 1 in the other."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (B, S + 1), generator=generator)
    position_ids, document_ids = torch.arange(S).repeat(B, 1), None
    if documents:
        document_ids = torch.tensor([[0] * 7 + [1] * 5 + [2] * 8, [0] + [1] * 19])
        position_ids = torch.tensor([[*range(7), *range(5), *range(8)], [0, *range(19)]])
    return MicroBatch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:].contiguous(),
        loss_mask=torch.rand(B, S, generator=generator) < 0.7,
        position_ids=position_ids,
        sample_ids=torch.arange(B) + 10,
        document_ids=document_ids,
    )


@torch.no_grad()
def logits_of(model: GPT, batch: MicroBatch) -> Tensor:
    """[B, S, V], padding cut off."""
    x = model.hidden(None, batch, step=None)
    return model.logits(x).transpose(0, 1)[..., :VOCABULARY]


def plain_logits(config: ModelConfig, model: nn.Module, batch: MicroBatch) -> Tensor:
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    return torch.stack([_plain_sample(config, weights, batch, sample) for sample in range(len(batch.tokens))])


def _plain_sample(config: ModelConfig, w: dict[str, Tensor], batch: MicroBatch, sample: int) -> Tensor:
    positions = batch.position_ids[sample]
    documents = torch.zeros(S) if batch.document_ids is None else batch.document_ids[sample]
    x = w["embedding.tokens.weight"][batch.tokens[sample]] * config.embedding_multiplier
    if config.embed_layernorm:
        x = _plain_norm(config, w, "embedding.norm", x)
    if config.position_embedding_type == "learned_absolute":
        x = x + w["embedding.positions.weight"][positions + config.position_offset]
    for layer in range(config.num_layers):
        here = {name.removeprefix(f"layers.{layer}."): value for name, value in w.items()}
        of_layer, before = _of_layer(config, layer), x

        def normed(name: str, x: Tensor, *placements: str, w: dict[str, Tensor] = here) -> Tensor:
            return _plain_norm(config, w, name, x) if config.norm_placement in placements else x

        every_input = ("pre", "sandwich", "parallel", "parallel_norms")
        y = _plain_attention(of_layer, here, normed("attention_norm", x, *every_input), positions, documents)
        x = x + config.residual_multiplier * normed("attention_output_norm", y, "output", "sandwich")
        if config.norm_placement == "parallel":
            y = _plain_mlp(config, here, normed("attention_norm", before, "parallel"))
        elif config.norm_placement == "parallel_norms":
            y = _plain_mlp(config, here, normed("mlp_norm", before, "parallel_norms"))
        else:
            y = _plain_mlp(config, here, normed("mlp_norm", x, "pre", "sandwich"))
        x = x + config.residual_multiplier * normed("mlp_output_norm", y, "output", "sandwich")
    head = w["embedding.tokens.weight"] if config.tied else w["head.weight"]
    logits = _plain_norm(config, w, "final_norm", x) @ head[:VOCABULARY].T * config.logits_multiplier
    logits = logits + w.get("head.bias", torch.zeros(VOCABULARY))[:VOCABULARY]
    return _plain_cap(logits, config.final_logit_softcapping)


def _plain_cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * (1 - 2 / ((2 * x / cap).exp() + 1))


def _of_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """Config of a layer by itself: window and RoPE are left out where a pattern says so (last layer alone here)."""
    assert config.num_layers == 2
    if layer == 1 and config.window_attn_skip_freq == "2":
        config = replace(config, window_size=None, attention_pattern="none")
    if layer == 1 and config.no_rope_freq == "[0, 1]":
        config = replace(config, position_embedding_type="none")
    return config


def _plain_norm(config: ModelConfig, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    one_plus = config.apply_layernorm_1p and "q_norm" not in name and "k_norm" not in name
    weight = w.get(f"{name}.weight", torch.ones(x.shape[-1])) + (1 if one_plus else 0)
    if config.normalization == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
    return normal * weight + w.get(f"{name}.bias", torch.zeros(()))


def _plain_linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))


def _plain_mlp(config: ModelConfig, w: dict[str, Tensor], x: Tensor) -> Tensor:
    h = _plain_linear(w, "mlp.fc1", x)
    if config.geglu:
        gate, up = h[:, : config.ffn_size], h[:, config.ffn_size :]
        h = 0.5 * gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up
    elif config.relu:
        h = h.clamp(min=0)
    elif config.swiglu or config.quick_geglu:
        gate, up = h[:, : config.ffn_size], h[:, config.ffn_size :]
        if config.activation_func_clamp_value is not None:
            limit = torch.tensor(config.activation_func_clamp_value)
            gate, up = torch.minimum(gate, limit), torch.maximum(torch.minimum(up, limit), -limit)
        alpha = 1.702 if config.quick_geglu else 1.0
        h = gate / (1 + (-alpha * gate).exp()) * (up + config.glu_linear_offset)
    elif config.xielu:
        positive, negative = ((1 + w[f"mlp.xielu.alpha_{sign}"].exp()).log() for sign in "pn")
        h = torch.where(h > 0, positive * h * h + h / 2, (negative + 0.5) * (h.exp() - 1 - h) + h / 2)
    elif config.squared_relu:
        h = h.clamp(min=0) ** 2
    elif config.openai_gelu:
        h = 0.5 * h * (1 + (math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)).tanh())
    else:
        h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
    return _plain_linear(w, "mlp.fc2", h)


def _plain_attention(
    config: ModelConfig, w: dict[str, Tensor], x: Tensor, positions: Tensor, documents: Tensor
) -> Tensor:
    heads, kv_heads, size = config.num_attention_heads, config.num_kv_heads, config.head_size
    qkv = _plain_linear(w, "attention.qkv", x)
    if config.qk_layernorm_across_heads:
        sections = [number * size for number in (heads, kv_heads, kv_heads)]
        q, k, v = qkv.split(sections, dim=-1)
        q, k = (_plain_norm(config, w, f"attention.{name}", part) for name, part in (("q_norm", q), ("k_norm", k)))
        qkv = torch.cat([q, k, v], dim=-1)
    if config.clip_qkv is not None:
        qkv = qkv.clamp(-config.clip_qkv, config.clip_qkv)
    qkv = qkv.view(S, heads + 2 * kv_heads, size)
    outputs = []
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        q, k, v = qkv[:, head], qkv[:, heads + kv_head], qkv[:, heads + kv_heads + kv_head]
        if config.position_embedding_type == "rope" and config.qk_layernorm_after_rope:
            q, k = _plain_rope(config, q, positions), _plain_rope(config, k, positions)
        if config.qk_layernorm and not config.qk_layernorm_across_heads:
            own = dict(w)
            if config.qk_layernorm_by_head:
                for name, number in (("q_norm", head), ("k_norm", kv_head)):
                    own[f"attention.{name}.weight"] = w[f"attention.{name}.weight"].view(-1, size)[number]
            q, k = (_plain_norm(config, own, f"attention.{n}_norm", part) for n, part in (("q", q), ("k", k)))
        if config.position_embedding_type == "rope" and not config.qk_layernorm_after_rope:
            q, k = _plain_rope(config, q, positions), _plain_rope(config, k, positions)
            if config.qk_l2_norm:  # after RoPE, as a Llama 4 has it
                q, k = (x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() for x in (q, k))
        elif (scale := config.attn_temperature_scale) is not None:
            q = q * (1 + scale * ((positions + 1) // config.attn_temperature_floor + 1).log())[:, None]
        rows = []
        for i in range(S):
            seen = [j for j in range(i + 1) if documents[i] == documents[j]]
            if config.window_size is not None:
                seen = [j for j in seen if i - j < config.window_size]
            if (pattern := BlockPattern.of(config)) is not None:
                blocks = pattern.row(i // pattern.block_size)
                seen = [j for j in seen if j // pattern.block_size in blocks]
            scores = (k[seen] @ q[i]) * (config.softmax_scale or 1 / math.sqrt(size))
            scores = _plain_cap(scores, config.attn_logit_softcapping)
            if config.position_embedding_type == "alibi":  # of 4 heads
                scores = scores - 2.0 ** (-2 * (head + 1)) * torch.tensor([i - j for j in seen])
            weights = scores.exp()
            if config.softmax_type != "vanilla":
                sink = w["attention.sinks"][head] if config.softmax_type == "learnable" else torch.zeros(())
                rows.append(weights @ v[seen] / (weights.sum() + sink.exp()))
                continue
            rows.append(weights / weights.sum() @ v[seen])
        outputs.append(torch.stack(rows))
    return _plain_linear(w, "attention.out", torch.cat(outputs, -1))


def _plain_rope(config: ModelConfig, x: Tensor, positions: Tensor) -> Tensor:
    """Pair (a, b) as the complex number a + ib, times exp(i angle)."""
    size = int(config.head_size * config.rotary_percent)
    x = x.clone()
    for pair in range(size // 2):
        a, b = (2 * pair, 2 * pair + 1) if config.rotary_interleaved else (pair, pair + size // 2)
        angle = positions * plain_frequency(config, pair, size)
        turned = torch.complex(x[:, a], x[:, b]) * torch.polar(torch.ones(S).double(), angle.double())
        if config.rope_scaling_type == "longrope":
            usual = math.sqrt(1 + math.log(config.rope_scaling_factor) / math.log(16))
            turned = turned * (config.rope_long_mscale or usual)
        if config.rope_scaling_type == "yarn":
            turned = turned * (1 + 0.1 * math.log(config.rope_scaling_factor))
        x[:, a], x[:, b] = turned.real, turned.imag
    return x


def plain_frequency(config: ModelConfig, pair: int, size: int) -> float:
    """Radians a position, as the papers and the models' own descriptions have it."""
    plain = config.rotary_base ** (-2 * pair / size)
    stretched, context = plain / config.rope_scaling_factor, config.rope_original_max_positions
    if config.rope_scaling_type == "linear":
        return stretched
    if config.rope_scaling_type == "longrope":
        return plain / (config.rope_long_factor if context < S else config.rope_short_factor)[pair]
    if config.rope_scaling_type == "llama3":
        wavelength = 2 * math.pi / plain
        if wavelength > context / config.rope_low_freq_factor:
            return stretched
        if wavelength < context / config.rope_high_freq_factor:
            return plain
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        smooth = (context / wavelength - low) / (high - low)
        return (1 - smooth) * stretched + smooth * plain
    if config.rope_scaling_type == "yarn":

        def pair_that_turns(times: float) -> float:
            return size * math.log(context / (times * 2 * math.pi)) / (2 * math.log(config.rotary_base))

        first, last = pair_that_turns(config.rope_beta_fast), pair_that_turns(config.rope_beta_slow)
        if config.yarn_correction_range_round_to_int:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        ramp = min(max((pair - first) / (last - first), 0), 1)
        return ramp * stretched + (1 - ramp) * plain
    return plain
