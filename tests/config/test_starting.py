"""Tests of the model that a run starts from: which of its fields are fixed, and how its reader is passed in."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from megatronish.config.fields import FIELDS
from megatronish.config.marks import TRAINING_ONLY
from megatronish.config.model_source import Start, function_of
from megatronish.config.read import ConfigError, read_config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.run import CheckpointConfig
from megatronish.core.errors import UserError

GPT = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
ROPE = replace(GPT, position_embedding_type="rope")
YARN = replace(ROPE, rope_scaling_type="yarn")
LONGROPE = replace(ROPE, rope_scaling_type="longrope")
GATED = replace(GPT, swiglu=True)
MODELS = (
    *(
        GPT,
        ROPE,
        YARN,
        LONGROPE,
        replace(ROPE, rope_scaling_type="llama3"),
        replace(GPT, disable_bias_linear=True),
        GATED,
    ),
    *(replace(GPT, window_size=3), replace(ROPE, window_size=3)),
    replace(GPT, attention_pattern="bigbird"),
    replace(GPT, num_experts=4),
    replace(GPT, num_experts=8, moe_router_topk=4, moe_router_num_groups=4, moe_router_group_topk=2),
    replace(GPT, num_experts=4, moe_router_topk_scaling_factor=2.5),
    replace(ROPE, attn_temperature_scale=0.1, no_rope_freq="2"),
    replace(GPT, num_experts=4, moe_router_score_function="sparsemixer"),
    replace(GPT, num_experts=4, moe_add_bias_linear=True),
    replace(LONGROPE, rope_short_mscale=1.2, rope_long_mscale=1.3),
    replace(YARN, yarn_correction_range_round_to_int=False),
    replace(GPT, qk_layernorm=True),
    replace(ROPE, qk_layernorm=True),
    replace(YARN, multi_latent_attention=True),
    replace(GPT, use_mup=True),
    replace(GPT, use_mup=True, mup_base_head_dim=4.0),
)
NAMES = [field.name for field in fields(ModelConfig)]
RUN = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 1 --train-iters 2 --lr 1 --mock-data"


def other(name: str, value: Any) -> Any:
    """Another value of a field's type."""
    field = FIELDS[name]
    if field.choices:
        return next((choice for choice in field.choices if choice != value), "a plug-in's")
    if field.type is bool:
        return not value
    if field.type is str:
        return "2"
    return 2 * value if value else 1


def changes_function(model: ModelConfig, name: str) -> bool:
    changed = replace(model, **{name: other(name, getattr(model, name))})
    return function_of(changed, seq_length=64) != function_of(model, seq_length=64)


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_a_model_changes_what_it_computes_or_is_excluded_by_name(name: str) -> None:
    assert any(changes_function(model, name) for model in MODELS) != (TRAINING_ONLY in FIELDS[name].marks)


def test_the_fields_that_training_alone_reads_are_these() -> None:
    excluded = {name for name in NAMES if TRAINING_ONLY in FIELDS[name].marks}
    assert excluded == {
        *("attention_dropout", "hidden_dropout", "init_method_std", "make_vocab_size_divisible_by"),
        *("moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_z_loss_coeff", "moe_router_bias_update_rate"),
        *("moe_input_jitter_eps", "moe_router_force_load_balancing", "encoder_seq_length", "decoder_seq_length"),
        *("mtp_num_layers", "mtp_loss_scaling_factor"),
    }


@pytest.mark.parametrize(
    ("model", "idle"),
    [
        (GPT, {"rotary_base": 5.0, "rotary_percent": 0.5, "rope_scaling_type": "yarn", "rope_beta_fast": 3.0}),
        (ROPE, {"max_position_embeddings": 128, "rope_scaling_factor": 3.0, "rope_low_freq_factor": 2.0}),
        (YARN, {"rope_short_factor": (2.0,), "rope_long_factor": (2.0,)}),
        (LONGROPE, {"rope_low_freq_factor": 2.0, "rope_beta_fast": 3.0}),
        (YARN, {"rope_low_freq_factor": 2.0, "rope_high_freq_factor": 3.0}),
        (GPT, {"ffn_hidden_size": 128, "kv_channels": 8, "num_query_groups": 4, "max_position_embeddings": 64}),
        (GPT, {"group_query_attention": True, "num_query_groups": 4}),
        (GPT, {"add_qkv_bias": True}),
        (GPT, {"add_attention_bias": True, "add_mlp_bias": True}),
        (GPT, {"no_rope_freq": "2", "window_attn_skip_freq": "2", "glu_linear_offset": 1.0}),
        (GPT, {"activation_func_clamp_value": 7.0}),
        (replace(GPT, qk_layernorm=True), {"qk_layernorm_after_rope": True}),
        (ROPE, {"no_rope_freq": "[0]*2"}),
        (replace(GPT, window_size=3), {"window_attn_skip_freq": "[1, 1]"}),
        (GPT, {"attention_block_size": 16, "attention_local_blocks": 2, "attention_pattern_seed": 3}),
        (replace(GPT, attention_pattern="fixed"), {"attention_random_blocks": 3, "attention_pattern_seed": 3}),
        (replace(GPT, attention_pattern="sliding"), {"attention_global_blocks": 3}),
    ],
)
def test_fields_that_a_model_does_not_read_or_that_repeat_derived_sizes_change_nothing(
    model: ModelConfig, idle: dict[str, Any]
) -> None:
    assert function_of(replace(model, **idle), seq_length=64) == function_of(model, seq_length=64)


def test_the_reader_of_the_model_to_start_from_is_passed_in() -> None:
    asked = []

    def read_start(checkpoint: CheckpointConfig) -> Start:
        asked.append(checkpoint.load_hf)
        return Start("--load-hf here", GPT, vocab_size=100, seq_length=16, tokenizer={})

    config = read_config([*RUN.split(), "--load-hf", "here"], read_start=read_start).config
    assert asked == ["here"]
    assert (config.training.seq_length, config.data.vocab_size) == (16, 100)
    with pytest.raises(ConfigError, match="--swiglu contradicts --load-hf here, which has swiglu=false; leave it out"):
        read_config([*RUN.split(), "--load-hf", "here", "--swiglu"], read_start=read_start)


def test_a_model_that_cannot_be_read_is_one_of_the_problems(tmp_path: Path) -> None:
    def read_start(checkpoint: CheckpointConfig) -> Start:
        raise UserError(f"{checkpoint.load_hf} is damaged; fetch it anew")

    with pytest.raises(ConfigError) as error:
        read_config([*RUN.split(), "--load-hf", str(tmp_path), "--lrr", "1"], read_start=read_start)
    assert error.value.problems[0] == f"{tmp_path} is damaged; fetch it anew"
    assert len(error.value.problems) == 2
