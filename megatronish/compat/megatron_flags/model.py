"""Megatron-LM's flags of the model, of precision, of recomputation and of fused kernels."""

from megatronish.compat.megatron_flags.families import (
    GIVEN,
    Known,
    all_idle,
    by_value,
    idle,
    instead,
    means,
    refused,
    renamed,
)

# Megatron-LM's flags of mixture of experts that are not fields here.


_SPEED = "it changes the speed of experts alone"
_FP8 = "experts are computed in the precision of the run"

EXPERTS: dict[str, Known] = {
    "num-moe-experts": renamed("num_experts"),
    **all_idle(
        _SPEED,
        switches="moe-grouped-gemm moe-permute-fusion moe-router-fusion "
        "moe-permute-fusion-into-hybridep moe-ncclep-zero-copy moe-single-grouped-weight moe-single-grouped-bias "
        "moe-use-grouped-tensor moe-hybridep-pad-uneven-dispatch-inputs use-grouped-gemm-for-shared-expert use-tutel "
        "overlap-moe-expert-parallel-comm overlap-dispatch-backward-with-experts-wgrad "
        "moe-pad-experts-for-cuda-graph-inference moe-paged-stash",
        valued="moe-flex-dispatcher-num-sms moe-deepep-num-sms "
        "moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing moe-hybridep-num-blocks-permute "
        "moe-hybridep-num-blocks-unpermute moe-paged-stash-page-size moe-paged-stash-buffer-size-factor-cuda "
        "moe-paged-stash-buffer-size-factor-cpu moe-mlp-glu-interleave-size moe-shared-expert-glu-interleave-size "
        "expert-tensor-parallel-num-weight-shards expert-gtp-weight-remat-size",
    ),
    "moe-enable-deepep": Known(
        "means",
        "--moe-token-dispatcher-type deepep",
        settings=(("moe_token_dispatcher_type", "deepep"),),
        yields=True,
    ),
    "moe-flex-dispatcher-backend": idle("--moe-token-dispatcher-type flex is DeepEP's Buffer, of each backend", 1),
    "moe-shared-expert-overlap": idle("shared experts are always computed while rows go to the other experts"),
    **all_idle(
        _FP8,
        switches="moe-router-padding-for-fp8 moe-router-padding-for-quantization",
        valued="moe-dispatch-fwd-dtype moe-combine-bwd-dtype",
    ),
    "moe-per-layer-logging": idle("the tokens of each expert of each layer are counted in any case"),
    "moe-router-dtype": instead("the router computes in fp32", 1, ("fp32",)),
    "moe-enable-routing-replay": idle("recomputation always replays the choices of the forward"),
    "moe-layer-recompute": Known(
        "means",
        "--recompute-granularity selective --recompute-modules core_attn moe",
        settings=(("recompute_granularity", "selective"), ("recompute_modules", "core_attn moe")),
        yields=True,
    ),
    "moe-token-drop-policy": refused(
        "a layout that cuts sequences cannot compare scores of other ranks; with --moe-expert-capacity-factor the "
        "tokens that come first in a sequence are kept; use position",
        1,
        ("position",),
    ),
    "moe-token-dropping": refused("use --moe-expert-capacity-factor, which drops tokens"),
    "disable-moe-token-dropping": idle("no token is dropped without --moe-expert-capacity-factor"),
    "moe-router-topk-limited-devices": refused("use --moe-router-num-groups with --moe-router-group-topk", 1),
    "moe-router-quantile-balancing-ema": refused(
        "use --moe-router-load-balancing-type seq_aux_loss or none with --moe-router-enable-expert-bias",
        1,
        ("0", "0.0"),
    ),
    "moe-grad-scale-func": idle("the loss scale of the run reaches the balancing losses, too", 1),
    "moe-router-force-biased": refused(
        "biased random routing is not there; use --moe-router-force-load-balancing, random and even",
        1,
    ),
    "moe-latent-size": refused(
        "experts compute on whole tokens: a projection before the dispatch is not there yet; leave it out", 1
    ),
    "moe-upcycling-granularity": refused("each expert is a copy of the whole MLP; use 1, or leave it out", 1, ("1",)),
    "topk": renamed("moe_router_topk"),
    # Pai-Megatron-Patch's first DeepSeek-V2
    "enable-shared-expert": idle("a size says that there is one: --moe-shared-expert-intermediate-size"),
    "num-shared-experts": refused(
        "use --moe-shared-expert-intermediate-size, so many times --moe-ffn-hidden-size", 1, ("0",)
    ),
    "create-moe-param-group": idle("experts have a reduction domain of their own in any case"),
    "enable-expert-tensor-parallelism": refused("use --expert-tensor-parallel-size"),
    "high-priority-a2a-comm-stream": idle(_SPEED),
    "ep-overlap-early-attn-memory-release": idle(_SPEED),
}


_ONE_IMPLEMENTATION = "there is one implementation, in torch"
_FUSION = "which operations are fused is decided at run time and printed in the first lines of a run"
_FP32 = "softmax and loss are always computed in fp32"
_RNG = "random values are functions of names; no generator has a state"
_PADDING = "the padded size is derived, and padding never reaches the loss"
_OFFLOADING = "it changes memory alone; --recompute-granularity full --offload-saved-activations saves memory here"
_GRADIENTS_IN_FP32 = "gradients are accumulated and reduced in fp32 unless --grad-reduce-in-bf16 says otherwise"

MODEL: dict[str, Known] = {
    "use-rotary-position-embeddings": means("position_embedding_type", "rope"),
    "no-position-embedding": Known(
        "means",
        "--position-embedding-type none, unless a type is given",
        settings=(("position_embedding_type", "none"),),
        yields=True,
    ),
    "use-rope-scaling": means("rope_scaling_type", "llama3"),
    "no-use-rope-scaling": means("rope_scaling_type", "none"),
    # Of latent attention, whose RoPE is YaRN's with a factor of --rotary-scaling-factor.
    "rope-type": Known(
        "means",
        "use --position-embedding-type rope with --rope-scaling-type",
        1,
        ("yarn",),
        by_value={"rope": (("rope_scaling_type", "none"),)},
        yields=True,
    ),
    "rotary-scaling-factor": Known(
        "means",
        "--rope-scaling-type yarn --rope-scaling-factor, of 4096 positions where no flag says how many",
        1,
        ("1", "1.0"),
        (
            ("rope_scaling_type", "yarn"),
            ("rope_scaling_factor", GIVEN),
            ("rope_original_max_positions", "4096"),
        ),
        yields=True,
    ),
    "original-max-position-embeddings": renamed("rope_original_max_positions"),
    "beta-fast": renamed("rope_beta_fast"),
    "beta-slow": renamed("rope_beta_slow"),
    "mscale": renamed("rope_mscale"),
    "mscale-all-dim": renamed("rope_mscale_all_dim"),
    "qk-pos-emb-dim": renamed("qk_pos_emb_head_dim"),
    # Pai-Megatron-Patch's first DeepSeek-V2, which is of latent attention without a switch.
    "qk-nope-head-dim": Known(
        "means",
        "--multi-latent-attention --qk-head-dim",
        1,
        settings=(("multi_latent_attention", "true"), ("qk_head_dim", GIVEN)),
    ),
    "qk-rope-head-dim": Known(
        "means",
        "--multi-latent-attention --qk-pos-emb-head-dim",
        1,
        settings=(("multi_latent_attention", "true"), ("qk_pos_emb_head_dim", GIVEN)),
    ),
    "cache-mla-latents": idle("a cache of latent attention always has latents"),
    "mla-down-proj-fusion": idle("it changes speed alone"),
    "rotary-seq-len-interpolation-factor": Known(
        "means",
        "--rope-scaling-type linear --rope-scaling-factor",
        1,
        ("1", "1.0"),
        (("rope_scaling_type", "linear"), ("rope_scaling_factor", GIVEN)),
    ),
    "yarn-rotary-scaling-factor": renamed("rope_scaling_factor"),
    "yarn-original-max-position-embeddings": renamed("rope_original_max_positions"),
    "yarn-beta-fast": renamed("rope_beta_fast"),
    "yarn-beta-slow": renamed("rope_beta_slow"),
    "mrope-section": refused("multimodal RoPE is not there; leave it out, or use --position-embedding-type rope", None),
    # Pai-Megatron-Patch's, with the meaning of Hugging Face's sliding_window. Some of its models hand (N, 0) to a
    # kernel that counts the tokens before, so there a token sees one more.
    "sliding-window": renamed(
        "window_size",
        note="a token sees so many tokens with itself, as in Hugging Face's models; some models of Pai-Megatron-Patch "
        "let it see one more: add 1 to continue one of these",
    ),
    "layernorm-epsilon": renamed("norm_epsilon"),
    "layernorm-zero-centered-gamma": means("apply_layernorm_1p", "true"),
    "add-bias-linear": means("disable_bias_linear", "false"),
    "gated-linear-unit": refused("the activation decides; use --swiglu"),
    "num-key-value-heads": Known(
        "means",
        "--group-query-attention --num-query-groups",
        1,
        (),
        (("group_query_attention", "true"), ("num_query_groups", GIVEN)),
    ),
    "mlp-type": Known("refused", "an MLP of experts is not there yet; leave it out", 1, ("standard",)),
    "glu-activation": by_value("use --swiglu", {"swiglu": (("swiglu", "true"),)}),
    **all_idle(_PADDING, valued="padded-vocab-size pad-vocab-size-to"),
    **all_idle(
        "it only moves fp16 rounding; the softmax is computed in fp32",
        switches="apply-query-key-layer-scaling no-query-key-layer-scaling",
    ),
    **all_idle(_FP32, switches="attention-softmax-in-fp32"),
    "output-logit-dtype": idle(_FP32, 1),
    "apply-residual-connection-post-layernorm": refused("residuals start before the norm (pre-LN); leave it out"),
    "attention-output-gate": refused("attention has no output gate; leave it out"),
    "embedding-init-method-std": refused("--init-method-std is of all weights; leave it out", 1),
    "init-method-xavier-uniform": refused("initial weights are normally distributed; use --init-method-std"),
    "spec": refused("a block of your own is registered in Python; see examples/custom_model.py", None),
    "use-mcore-models": idle(_ONE_IMPLEMENTATION),
    **all_idle(_ONE_IMPLEMENTATION, valued="transformer-impl flash-attention-version"),
    **all_idle(
        "the model is the one that the other flags describe",
        switches="enable-gpt-oss export-te-mcore-model export-force-local-attention export-legacy-megatron "
        "enable-experimental use-legacy-models test-mode",
        valued="export-model-type",
    ),
}

PRECISION: dict[str, Known] = {
    **all_idle(
        _GRADIENTS_IN_FP32,
        switches="accumulate-allreduce-grads-in-fp32 fp32-allreduce",
        lists="ddp-param-name-patterns-for-fp32-local-accumulation param-name-patterns-for-fp32-local-accumulation",
    ),
    "grad-reduce-in-fp32": means("grad_reduce_in_bf16", "false"),
    "ddp-reduce-scatter-with-fp32-accumulation": refused(
        "gradients are reduced in fp32 already; leave it out, and --grad-reduce-in-bf16 too"
    ),
    "reduce-scatter-with-fp32-accumulation": refused(
        "gradients are reduced in fp32 already; leave it out, and --grad-reduce-in-bf16 too"
    ),
    "fp32-residual-connection": refused("it is not there yet; leave it out, or train in fp32 without --bf16"),
    "fp16-lm-cross-entropy": instead("the loss is computed in fp32"),
    "dynamic-loss-scale": idle("the loss scale of --fp16 is dynamic unless --loss-scale is given"),
    "params-dtype": refused("use --bf16 or --fp16, or neither for fp32", 1),
}

RECOMPUTE: dict[str, Known] = {
    "recompute-activations": means("recompute_granularity", "selective"),
    "checkpoint-activations": means("recompute_granularity", "full"),
    "activations-checkpoint-method": Known(
        "means",
        "--recompute-granularity full --recompute-method",
        1,
        (),
        (("recompute_granularity", "full"), ("recompute_method", GIVEN)),
    ),
    "activations-checkpoint-num-layers": renamed("recompute_num_layers"),
    "checkpoint-num-layers": renamed("recompute_num_layers"),
    "distribute-checkpointed-activations": means("distribute_saved_activations", "true"),
    **all_idle(
        _OFFLOADING,
        switches="cpu-offloading cpu-offloading-activations cpu-offloading-weights cpu-offloading-double-buffering "
        "cpu-offloading-retain-pinned-cpu-buffers fine-grained-activation-offloading delay-offload-until-cuda-graph",
        valued="cpu-offloading-num-layers activation-offload-fraction min-offloaded-tensor-size "
        "fine-grained-offloading-max-inflight-offloads delta-offload-bytes-across-pp-ranks",
        lists="offload-modules",
    ),
    **all_idle(
        "it changes memory alone; --recompute-granularity saves memory here",
        switches="clone-scatter-output-in-embedding memory-efficient-layer-norm init-model-with-meta-device",
        valued="num-microbatches-with-partial-activation-checkpoints mlp-chunks-for-training "
        "gtp-weight-remat-size tensor-parallel-num-weight-shards",
        lists="gtp-remat-opt-in-modules",
    ),
    **all_idle(
        "it changes memory alone",
        switches="gtp-remat-nccl-ub gtp-expert-remat-nccl-ub gtp-remat-reduce-scatter-with-fp32-accumulation",
    ),
}

FUSION: dict[str, Known] = {
    "no-masked-softmax-fusion": idle("the softmax is fused with --attention-backend auto or fused_softmax alone"),
    **all_idle(
        "--attention-backend auto takes it; with attention dropout attention is computed block by block, and a T5's, "
        "whose bias learns, without it",
        switches="use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton use-flash-attn-builder",
    ),
    **all_idle(
        _FUSION,
        switches="no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion "
        "no-gradient-accumulation-fusion cross-entropy-loss-fusion apply-rope-fusion bias-activation-fusion "
        "fused-residual-rmsnorm fused-single-qkv-rope no-persist-layer-norm use-te-activation-func "
        "use-transformer-engine-op-fuser use-fused-weighted-squared-relu use-grouped-gemm-for-dense-mlp "
        "disable-jit-fuser no-gradient-reduce-div-fusion no-scaled-masked-softmax-fusion "
        "abort-on-unmet-fused-kernel-constraints",
        valued="cross-entropy-fusion-impl",
    ),
    **all_idle(
        "they change speed alone; --cuda-graph replays micro-batches from one graph here",
        switches="enable-cuda-graph external-cuda-graph cuda-graph-retain-backward-graph "
        "cuda-graph-use-single-mempool optimizer-cuda-graph megatron-fsdp-cuda-graph-mode",
        valued="cuda-graph-impl cuda-graph-warmup-steps",
        lists="cuda-graph-modules cuda-graph-scope",
    ),
    **all_idle(_RNG, switches="use-cpu-initialization use-te-rng-tracker te-rng-tracker no-save-rng no-load-rng"),
    "perform-initialization": idle("weights always have initial values"),
    "no-initialization": idle("weights always have initial values, also where a checkpoint replaces them"),
}
