"""Remarks of docs/FLAGS.md on Megatron-LM's flags: those that mean something else here, and launch scripts tried."""

from typing import NamedTuple

from megatronish.tokenizer.names import MEGATRON_TOKENIZERS

# Where a flag of the same name starts from another value, or reads its value otherwise, than in Megatron-LM.
DIFFERENCES: dict[str, str] = {
    "log_interval": "Megatron-LM's default is 100; here every step is logged.",
    "overlap_grad_reduce": "Off by default in Megatron-LM; here on, `--no-overlap-grad-reduce` switches it off.",
    "distributed_backend": "Megatron-LM's default is nccl; here `auto` takes gloo on CPU.",
    "tokenizer_type": "No default in Megatron-LM. "
    "Its names are accepted: "
    + ", ".join(f"`{theirs}` = `{ours}`" for theirs, ours in MEGATRON_TOKENIZERS.items())
    + ".",
    "num_query_groups": "Without `--group-query-attention` Megatron-LM ignores it silently; here that is an error.",
    "max_position_embeddings": "Required in Megatron-LM; here it is the sequence length where it is not given.",
    "loss_scale": "Megatron-LM applies it to bf16, too; here it is idle without `--fp16`.",
    "rampup_batch_size": "Refused together with --train-iters by Megatron-LM; here accepted with either. Lengths given "
    "in steps (`--train-iters`, `--lr-warmup-iters`, ...) count the samples that these steps consume.",
    "openai_gelu": "Megatron-LM's default activation is the exact GELU without its bias-GELU fusion and the tanh form "
    "with it; here it is exact unless this flag is given.",
    "cp_comm_type": "Megatron-LM's all_gather and a2a+p2p are computed as p2p, with a note: the numbers are the same. "
    "It has a value for each layer, too; here there is one.",
    "recompute_method": "No default in Megatron-LM, which wants it with full; here uniform.",
    "recompute_num_layers": "No default in Megatron-LM, which wants it with full; here 1.",
    "pipeline_schedule": "Not in Megatron-LM, where the schedule follows from virtual stages alone.",
    **dict.fromkeys(
        ("rope_short_factor", "rope_long_factor", "rope_short_mscale", "rope_long_mscale"),
        "Not in Megatron-LM, which has no LongRoPE.",
    ),
    "window_size": "One number counts the token itself: Megatron-LM's `--window-size W,0` is `--window-size W+1`.",
    "attention_backend": "Megatron-LM's `fused` (cuDNN's attention) is `flash` here, where SDPA chooses for the "
    "device; its `local` is `fused_softmax`. Its `unfused` is TransformerEngine's, with a fused softmax too; here it "
    "is plain torch.",
    "position_embedding_type": "`alibi` is Megatron-DeepSpeed's; Megatron-LM has MRoPE and YaRN here, too.",
    "multi_latent_attention": "It turns a part of each head by RoPE in any case, as in Megatron-LM, but wants "
    "`--position-embedding-type rope`: learned positions in addition are not there.",
    "mtp_num_layers": "Each depth is a layer as the last of the model, and its loss a mean over its own predictions, "
    "of which none crosses a document where documents are apart; Megatron-LM divides by other numbers.",
    "latent_norm_epsilon": "Not in Megatron-LM, whose norms have one epsilon.",
    "qk_layernorm_across_heads": "Not in Megatron-LM, whose norm is that of each head.",
    "clip_qkv": "Not in Megatron-LM: values are clipped, and no weights as with `--qk-clip`.",
    "embed_layernorm": "Not in Megatron-LM; Megatron-DeepSpeed has it.",
    **dict.fromkeys(
        ("norm_placement", "norm_parameters", "embedding_multiplier", "residual_multiplier", "logits_multiplier"),
        "Not in Megatron-LM.",
    ),
    **dict.fromkeys(
        (
            "attn_logit_softcapping",
            "final_logit_softcapping",
            "add_output_bias",
            "position_offset",
            "window_rotary_base",
        ),
        "Not in Megatron-LM.",
    ),
    "use_mup": "Megatron-LM has rates for more optimizers, and divides Adam's epsilon by w, too; here it is one. "
    "The output layer is that of table 8 of the paper: weights and rate of any width, logits divided by w.",
    "mup_width_mult": "Derived in Megatron-LM; here it may be given in the place of `--mup-base-hidden-size`.",
    "mup_output_mult": "Megatron-LM takes another value than 1 in the place of 1 / w; here w divides, too.",
    "moe_router_score_function": "Megatron-LM has no sparsemixer, and sqrtsoftplus in addition.",
    **dict.fromkeys(("attn_temperature_scale", "attn_temperature_floor"), "Not in Megatron-LM."),
    "qk_clip": "Refused with a norm of queries and keys, which Megatron-LM clips the weights before to no effect.",
    "qk_l2_norm": "Of layers with RoPE alone.",
    "moe_sparsemixer_eps": "Not in Megatron-LM.",
    "moe_add_bias_linear": "Not in Megatron-LM, where routers and experts have biases unless `--disable-bias-linear` "
    "is given; here they have none unless this flag is.",
    "qk_layernorm_1p": "In Megatron-LM `--apply-layernorm-1p` is of these norms, too; conversions know it.",
    "qk_layernorm_after_rope": "Not in Megatron-LM, whose norm comes before RoPE.",
    "qk_layernorm_by_head": "Not in Megatron-LM, whose heads share a weight.",
    "xielu": "Not in Megatron-LM.",
    "glu_linear_offset": "With `--swiglu` Megatron-LM wants `--no-bias-swiglu-fusion` for it; here it is always there.",
    "activation_func_clamp_value": "With `--swiglu` Megatron-LM's fused activation ignores it silently; here it "
    "clamps either gated activation.",
    "no_rope_freq": "A number N must divide the number of layers in Megatron-LM; here it need not.",
    "decoupled_min_lr": "Ignored silently by Megatron-LM without `--decoupled-lr`; here that is an error.",
    "muon_fp32_matmul_prec": "Megatron-LM's default is medium; here it is highest.",
    "muon_coefficient_type": "Megatron-LM has more sets; here a set beyond the last repeats the last.",
    "use_checkpoint_args": "In Megatron-LM the checkpoint wins silently; here what contradicts it is an error.",
    "num_workers": "Batches prepared ahead by a thread, where Megatron-LM starts processes.",
}


class Tried(NamedTuple):
    """Launch script, or a set of configs, with the numbers of its uses of flags."""

    name: str
    counts: tuple[int, ...]  # used, work, idle, done otherwise, refused, unknown
    is_script: bool = True


TRIED = (
    Tried("Megatron-LM GPT-3 175B", (34, 34, 0, 0, 0, 0)),
    Tried("Megatron-LM gpt-oss", (86, 63, 19, 4, 0, 0)),
    Tried("Megatron-LM Llama 3 8B, fp8", (75, 62, 9, 4, 0, 0)),
    Tried("Megatron-LM Llama 3 8B, Megatron-FSDP", (80, 60, 16, 4, 0, 0)),
    Tried("Megatron-LM Mixtral 8x7B", (57, 53, 4, 0, 0, 0)),
    Tried("Megatron-LM GPT 345M (2021)", (29, 28, 1, 0, 0, 0)),
    Tried("Megatron-LM 76B of SC21", (28, 27, 1, 0, 0, 0)),
    Tried("BigScience BLOOM 176B", (56, 46, 9, 1, 0, 0)),
    Tried("Swiss AI Llama 3 8B", (68, 54, 13, 1, 0, 0)),
    Tried("ROCm Llama 3 8B", (61, 53, 8, 0, 0, 0)),
    Tried("Pai Qwen2.5 7B", (70, 60, 9, 1, 0, 0)),
    Tried("Pai Llama 3.1 8B", (65, 55, 9, 1, 0, 0)),
    Tried("NVIDIA DeepSeek-V3 on H100", (124, 89, 30, 5, 0, 0)),
    Tried("NVIDIA DeepSeek-V3 on GB200", (132, 92, 34, 6, 0, 0)),
    Tried("Pai DeepSeek-V2-Lite", (78, 66, 11, 1, 0, 0)),
    Tried("Pai DeepSeek-V2", (79, 67, 11, 1, 0, 0)),
    Tried("121 test configs of Megatron-LM", (6242, 4767, 1433, 3, 39, 0), is_script=False),
)
