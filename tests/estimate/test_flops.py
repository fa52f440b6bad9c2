"""Tests of parameter and FLOP counts, against the built model, published numbers and formulas."""

from dataclasses import replace

import pytest
import torch
from models import GPT2, LLAMA3_8B, VARIANTS

from megatronish.attention.mask import AttentionMask
from megatronish.config.sections.model import ModelConfig
from megatronish.estimate.costs.parameters import num_parameters, parameters_of_stage
from megatronish.model.gpt import GPT, ModelChunk
from megatronish.specs.flops import forward_flops, hardware_flops_per_token, model_flops_per_token
from megatronish.specs.layers import layer_specs


@pytest.mark.parametrize("name", VARIANTS)
def test_the_count_of_parameters_is_the_real_models(name: str) -> None:
    model = VARIANTS[name]
    gpt = GPT(model, vocab_size=50, num_positions=model.max_position_embeddings or 16)
    assert num_parameters(model, vocab_size=50, seq_length=16) == sum(p.numel() for p in gpt.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_count_of_a_stage_is_the_real_stages(name: str) -> None:
    model = VARIANTS[name]
    for layers, is_first, is_last in [(range(0, 2), True, False), (range(2, 3), False, False), ([3], False, True)]:
        gpt = GPT(
            model,
            vocab_size=50,
            num_positions=model.max_position_embeddings or 16,
            chunks=[ModelChunk(layers, is_first, is_last)],
        )
        specs = [layer_specs(model)[layer] for layer in layers]
        counted = parameters_of_stage(model, specs, vocab_size=50, seq_length=16, is_first=is_first, is_last=is_last)
        assert counted.total == sum(p.numel() for p in gpt.parameters())


def test_published_models_have_their_published_sizes() -> None:
    assert num_parameters(GPT2, vocab_size=50257, seq_length=1024) == 124_439_808
    assert num_parameters(LLAMA3_8B, vocab_size=128256, seq_length=8192) == 8_030_261_248


def test_a_token_costs_six_flops_a_weight_and_attention() -> None:
    linear, scores, values, logits = forward_flops(LLAMA3_8B, vocab_size=128256, seq_length=8192, attention="full")
    norms = (2 * 32 + 1) * 4096
    assert linear + logits == 2 * (8_030_261_248 - 128256 * 4096 - norms)
    assert scores + values == 4 * 32 * 8192 * 4096  # 12 L S D, forward and backward


def test_full_attention_gives_the_formula_of_the_megatron_paper() -> None:
    L, S, D, V = 24, 2048, 2304, 51200
    model = ModelConfig(num_layers=L, hidden_size=D, num_attention_heads=24)
    per_token = model_flops_per_token(model, vocab_size=V, seq_length=S, attention="full")
    assert per_token == pytest.approx(72 * L * D**2 * (1 + S / (6 * D) + V / (12 * L * D)), rel=1e-12)


def test_a_causal_mask_halves_attention_and_a_window_cuts_it() -> None:
    full = forward_flops(LLAMA3_8B, vocab_size=1, seq_length=8192, attention="full").scores
    assert forward_flops(LLAMA3_8B, vocab_size=1, seq_length=8192).scores == full / 2
    windowed = replace(LLAMA3_8B, window_size=2048)
    assert forward_flops(windowed, vocab_size=1, seq_length=8192, attention="full").scores == full / 4
    seen = sum(min(i, 2048) for i in range(8192)) / 8192
    assert forward_flops(windowed, vocab_size=1, seq_length=8192).scores == pytest.approx(full * seen / 8192, rel=1e-3)
    wide = replace(LLAMA3_8B, window_size=10**6)
    assert forward_flops(wide, vocab_size=1, seq_length=8192).scores == full / 2


def test_a_pattern_cuts_attention_by_its_density() -> None:
    """Counted from the scores of a dense mask; the diagonal counts half, as for a causal mask."""
    options = {"attention_pattern": "bigbird", "attention_block_size": 16, "attention_local_blocks": 2}
    sparse = replace(LLAMA3_8B, **options)
    spec = layer_specs(sparse)[0].attention
    places = torch.arange(512)
    seen = int(AttentionMask(512, pattern=spec.pattern).dense(places, places).sum()) - 512 / 2
    plain, found = (forward_flops(model, vocab_size=1, seq_length=512) for model in (LLAMA3_8B, sparse))
    density = seen / (512 * 512 / 2)
    assert found.scores / plain.scores == pytest.approx(density) and density < 0.3
    assert found.values / plain.values == pytest.approx(density)
    some = replace(sparse, window_attn_skip_freq="2")
    mixed = forward_flops(some, vocab_size=1, seq_length=512)
    assert mixed.scores == pytest.approx((plain.scores + found.scores) / 2)
    assert (found.linear, found.logits) == (plain.linear, plain.logits)


def test_hardware_flops_add_padding_and_the_scores_of_the_backward() -> None:
    model_flops = model_flops_per_token(GPT2, vocab_size=50257, seq_length=1024)
    hardware = hardware_flops_per_token(GPT2, padded_vocab_size=50304, seq_length=1024)
    assert hardware - model_flops == 6 * 768 * (50304 - 50257) + 2 * 12 * 768 * 512
