"""Tests of the rules on norms, factors and caps of a layer: what does not go together is refused in a sentence."""

import pytest

from megatronish.commands.configuration import read_config
from megatronish.core.errors import UserError

SIZES = (
    "--mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --vocab-size 64"
)
BERT = "--model-type bert --objective masked_lm --dataset-type sentences"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (f"{BERT} --norm-placement output", "norm_placement=output is of the layers of a GPT, and model_type=bert has"),
        (f"{BERT} --embedding-multiplier 2", "embedding_multiplier=2.0 is of the layers of a GPT, and model_type=bert"),
        (
            "--attn-logit-softcapping 50 --attention-backend flash",
            "attention_backend=flash knows no attn_logit_softcapping=50.0, which needs explicit scores; use "
            "--attention-backend unfused",
        ),
        (
            "--attn-logit-softcapping 50 --attention-backend fused_softmax",
            "attention_backend=fused_softmax knows no attn_logit_softcapping=50.0",
        ),
        (
            "--attn-logit-softcapping 50 --cp 2",
            "attn_logit_softcapping=50.0 needs the scores of whole rows, and with cp_comm_type=p2p",
        ),
        (
            "--norm-parameters weight --normalization RMSNorm",
            "norm_parameters=weight takes the bias from LayerNorm, and normalization=RMSNorm has none",
        ),
        ("--norm-parameters none --apply-layernorm-1p", "norm_parameters=none leaves norms no weight that apply_"),
        ("--qk-layernorm-1p", "qk_layernorm_1p says how --qk-layernorm stores its weights; add --qk-layernorm"),
        ("--qk-layernorm --qk-layernorm-by-head --qk-layernorm-1p", "qk_layernorm_1p with qk_layernorm_by_head is not"),
        (
            "--position-embedding-type rope --qk-layernorm --qk-layernorm-after-rope --qk-layernorm-across-heads",
            "qk_layernorm_after_rope normalises each head by itself, and qk_layernorm_across_heads all heads at once",
        ),
        ("--qk-layernorm-after-rope", "qk_layernorm_after_rope says where --qk-layernorm is; add --qk-layernorm"),
        (
            "--qk-layernorm --qk-layernorm-after-rope",
            "qk_layernorm_after_rope needs position_embedding_type=rope, not learned_absolute; add --",
        ),
        ("--window-rotary-base 10000 --window-size 4", "window_rotary_base=10000 needs position_embedding_type=rope"),
        (
            "--window-rotary-base 10000 --position-embedding-type rope",
            "window_rotary_base=10000 needs layers with window_size or attention_pattern; add --window-size",
        ),
        ("--qk-layernorm-by-head", "qk_layernorm_by_head says how --qk-layernorm normalises; add --qk-layernorm"),
        (
            "--qk-layernorm --qk-layernorm-by-head --qk-layernorm-across-heads --normalization RMSNorm",
            "qk_layernorm_by_head normalises each head and qk_layernorm_across_heads all at once",
        ),
        (
            "--position-offset 2 --position-embedding-type rope",
            "position_offset=2 is about rows of a learned table, and position_embedding_type=rope has none",
        ),
        (
            "--qk-l2-norm",
            "qk_l2_norm is of layers with RoPE, and position_embedding_type=learned_absolute has none; add",
        ),
        (
            "--qk-l2-norm --qk-layernorm --position-embedding-type rope",
            "qk_l2_norm and qk_layernorm are two norms of queries and keys; leave one of them out",
        ),
        (
            "--attn-temperature-scale 0.1 --position-embedding-type rope",
            "attn_temperature_scale=0.1 is of layers without RoPE, and all layers have it; add --no-rope-freq 4",
        ),
        ("--softmax-scale 0", "softmax_scale=0.0 must be greater than 0"),
        ("--final-logit-softcapping -1", "final_logit_softcapping=-1.0 must be greater than 0"),
        ("--residual-multiplier 0", "residual_multiplier=0.0 must be greater than 0"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        read_config(f"{SIZES} {flags}".split())
    assert sentence in str(refused.value)


def test_a_cap_goes_with_the_other_way_of_context_parallelism() -> None:
    config = read_config(f"{SIZES} --attn-logit-softcapping 50 --cp 2 --cp-comm-type a2a".split()).config
    assert config.model.attn_logit_softcapping == 50.0


def test_a_scale_that_is_the_usual_one_changes_nothing() -> None:
    usual = read_config(f"{SIZES} --softmax-scale {8**-0.5}".split()).config.model
    assert usual.score_factor is None
    other = read_config(f"{SIZES} --softmax-scale 0.5".split()).config.model
    assert other.score_factor == pytest.approx(0.5 * 8**0.5)
