"""Megatron-LM's flags of mixture of experts that are not fields here."""

from megatronish.compat.megatron_flags.known import Known, all_idle, idle, instead, refused, renamed

_SPEED = "it changes the speed of experts alone"
_FP8 = "experts are computed in the precision of the run"

EXPERTS: dict[str, Known] = {
    "num-moe-experts": renamed("num_experts"),
    **all_idle(
        _SPEED,
        switches="moe-grouped-gemm moe-permute-fusion moe-router-fusion moe-shared-expert-overlap moe-enable-deepep "
        "moe-permute-fusion-into-hybridep moe-ncclep-zero-copy moe-single-grouped-weight moe-single-grouped-bias "
        "moe-use-grouped-tensor moe-hybridep-pad-uneven-dispatch-inputs use-grouped-gemm-for-shared-expert use-tutel "
        "overlap-moe-expert-parallel-comm overlap-dispatch-backward-with-experts-wgrad "
        "moe-pad-experts-for-cuda-graph-inference moe-paged-stash moe-pad-expert-input-to-capacity",
        valued="moe-token-dispatcher-type moe-flex-dispatcher-backend moe-flex-dispatcher-num-sms moe-deepep-num-sms "
        "moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing moe-hybridep-num-blocks-permute "
        "moe-hybridep-num-blocks-unpermute moe-paged-stash-page-size moe-paged-stash-buffer-size-factor-cuda "
        "moe-paged-stash-buffer-size-factor-cpu moe-mlp-glu-interleave-size moe-shared-expert-glu-interleave-size "
        "expert-tensor-parallel-num-weight-shards expert-gtp-weight-remat-size",
    ),
    **all_idle(
        _FP8,
        switches="moe-router-padding-for-fp8 moe-router-padding-for-quantization",
        valued="moe-dispatch-fwd-dtype moe-combine-bwd-dtype",
    ),
    "moe-per-layer-logging": idle("the tokens of each expert of each layer are counted in any case"),
    "moe-router-dtype": instead("the router computes in fp32", 1, ("fp32",)),
    "moe-enable-routing-replay": idle("recomputation always replays the choices of the forward"),
    "moe-layer-recompute": Known(
        "instead",
        "whole layers are computed again, as --recompute-granularity full does: no number changes, memory is less and "
        "time more than asked",
        settings=(("recompute_granularity", "full"),),
        replaces="selective",
    ),
    "moe-token-drop-policy": refused(
        "a layout that cuts sequences cannot compare scores of other ranks; with --moe-expert-capacity-factor the "
        "tokens that come first in a sequence are kept; use position",
        1,
        ("position",),
    ),
    "moe-token-dropping": refused("use --moe-expert-capacity-factor, which drops tokens"),
    "disable-moe-token-dropping": idle("no token is dropped without --moe-expert-capacity-factor"),
    "moe-expert-rank-capacity-factor": refused(
        "a limit of each rank is another model in every layout; leave it out", 1
    ),
    "moe-router-topk-limited-devices": refused("use --moe-router-num-groups with --moe-router-group-topk", 1),
    "moe-router-quantile-balancing-ema": refused(
        "use --moe-router-load-balancing-type seq_aux_loss or none with --moe-router-enable-expert-bias",
        1,
        ("0", "0.0"),
    ),
    "moe-grad-scale-func": idle("the loss scale of the run reaches the balancing losses, too", 1),
    "moe-apply-probs-on-input": refused(
        "the weights of experts are applied to their outputs, as all published models do; leave it out"
    ),
    "moe-router-force-biased": refused(
        "biased random routing is not there; use --moe-router-force-load-balancing, random and even",
        1,
    ),
    "moe-latent-size": refused(
        "experts compute on whole tokens: a projection before the dispatch is not there yet; leave it out", 1
    ),
    "moe-upcycling-granularity": refused("each expert is a copy of the whole MLP; use 1, or leave it out", 1, ("1",)),
    "topk": renamed("moe_router_topk"),
    "create-moe-param-group": idle("experts have a reduction domain of their own in any case"),
    "enable-expert-tensor-parallelism": refused("use --expert-tensor-parallel-size"),
    "high-priority-a2a-comm-stream": idle(_SPEED),
    "ep-overlap-early-attn-memory-release": idle(_SPEED),
}
