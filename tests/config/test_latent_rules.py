"""Tests of the rules on latent attention: what does not go together is refused in a sentence."""

import pytest

from megatronish.commands.configuration import read_config
from megatronish.core.errors import UserError

SIZES = (
    "--mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --vocab-size 64"
)
LATENT = f"{SIZES} --multi-latent-attention --position-embedding-type rope --disable-bias-linear"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--use-rope-scaling", "rope_scaling_type=llama3 is not for multi_latent_attention, whose RoPE YaRN stretches"),
        ("--rotary-percent 0.5", "rotary_percent=0.5 is not for multi_latent_attention: RoPE turns a part of its own"),
        (
            "--group-query-attention --num-query-groups 2",
            "num_query_groups=2 is not for multi_latent_attention: each head has a key and a value of its own",
        ),
        ("--group-query-attention", "group_query_attention=True is not for multi_latent_attention: each head has"),
        ("--softmax-type learnable", "softmax_type=learnable is not for multi_latent_attention: sinks of latent"),
        ("--clip-qkv 3", "clip_qkv=3.0 is not for multi_latent_attention: latents are not clipped; leave it out"),
        ("--attn-logit-softcapping 30", "attn_logit_softcapping=30.0 is not for multi_latent_attention: soft caps"),
        ("--add-qkv-bias", "add_qkv_bias=True is not for multi_latent_attention: projections to and from latents"),
        ("--add-attention-bias", "add_attention_bias=True is not for multi_latent_attention: projections to and"),
        ("--qk-layernorm --qk-layernorm-by-head", "qk_layernorm_by_head=True is not for multi_latent_attention"),
        ("--qk-l2-norm", "qk_l2_norm=True is not for multi_latent_attention: --qk-layernorm normalises latents"),
        ("--qk-layernorm --qk-layernorm-1p", "qk_layernorm_1p=True is not for multi_latent_attention: weights of the"),
        ("--qk-layernorm --qk-layernorm-after-rope", "latents, which RoPE does not turn; leave it out"),
        ("--position-embedding-type alibi", "position_embedding_type=alibi has none; add --position-embedding-type"),
        ("--qk-pos-emb-head-dim 5", "qk_pos_emb_head_dim=5 must be even, as RoPE turns pairs; use 64, for example"),
        ("--v-head-dim 193", "v_head_dim=193 must be at most qk_head_dim=128 plus qk_pos_emb_head_dim=64"),
        ("--rope-mscale-all-dim 1", "rope_mscale_all_dim=1.0 needs multi_latent_attention with rope_scaling_type=yarn"),
        (
            "--model-type bert --objective masked_lm --dataset-type sentences",
            "multi_latent_attention is of the layers of a GPT, and model_type=bert has others; leave it out",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        read_config(f"{LATENT} {flags}".split())
    assert sentence in str(refused.value)


def test_sizes_of_heads_need_not_divide_the_hidden_size() -> None:
    model = read_config(f"{LATENT} --num-attention-heads 5 --window-size 4".split()).config.model
    assert (model.head_size, model.rotary_size) == (192, 64)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--qk-clip --qk-layernorm", "qk_clip changes weights before a norm, and qk_layernorm would undo it"),
        ("--qk-clip --qk-clip-threshold 0", "qk_clip_threshold=0.0 must be"),
        ("--qk-clip --qk-clip-alpha 1", "qk_clip_alpha=1.0 must be"),
        ("--qk-clip --load x --adapter-type lora", "qk_clip changes weights of queries and keys, which are frozen"),
        (
            "--log-max-attention-logit --model-type t5 --encoder-seq-length 16 --decoder-seq-length 8",
            "log_max_attention_logit is for models without an encoder, and not for model_type=t5; leave it out",
        ),
    ],
)
def test_what_has_no_largest_logit_to_clip_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        read_config(f"{SIZES} {flags}".split())
    assert sentence in str(refused.value)


def test_latents_are_clipped_with_their_norms() -> None:
    assert read_config(f"{LATENT} --qk-clip --qk-layernorm".split()).config.measures_logits
