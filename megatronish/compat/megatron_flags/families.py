"""What is known of a flag of Megatron-LM that is no field here (`Known`), and families: many flags with one reason.

A family with switches is a part that a run either has or not: a switch is refused (or something else is computed
instead), and the other flags of the family say nothing without it. A family without switches is refused as a whole.
Every flag is listed by its full name: by its beginning, a misspelled flag would be taken for one of the family.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Status = Literal["means", "idle", "instead", "refused"]
"""means: fields of other names; idle: changes no number; instead: done otherwise, with a note; refused: an error."""

Pairs = tuple[tuple[str, str], ...]
"""(field, value) pairs."""

ANY = None  # a number of values that is not checked
GIVEN = "{}"  # in a setting's value: the value that the flag was given


class Known(NamedTuple):
    """Flag of Megatron-LM that is not a field."""

    status: Status
    text: str  # why it is idle, or what to do instead
    num_values: int | None = 0
    harmless: tuple[str, ...] = ()  # values that ask for what is done anyway
    settings: Pairs = ()  # fields that it means
    by_value: Mapping[str, Pairs] = {}  # fields that it means, by the value given
    yields: bool = False  # to a field that is set by its own flag
    replaces: str = ""  # value of its fields that `settings` replace, of a flag that is done otherwise
    family: str = ""  # name of the `Family` that it belongs to
    why_harmless: str = "it asks for what is done anyway"
    note: str = ""  # what a run says of a flag that means a field, where a script may mean something else by it


def by_value(text: str, values: Mapping[str, Pairs], *, harmless: tuple[str, ...] = ()) -> Known:
    """Flag that sets fields according to its value; any value that is not listed is refused with `text`."""
    return Known("means", text, 1, harmless, by_value=values)


class Family(NamedTuple):
    """Flags that belong together. `text` is the reason and the remedy, for all of them at once."""

    title: str
    text: str
    switches: str = ""
    names: str = ""
    status: Status = "refused"

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names that stand in the family's lists."""
        return (*self.switches.split(), *self.names.split())

    def known(self, name: str) -> Known:
        """What a flag of the family is: a setting of a part that has a switch says nothing alone."""
        if not self.switches or name in self.switches.split():
            harmless = ("0", "none", "None") if self.switches else ()
            return Known(self.status, self.text, ANY, harmless, family=self.title)
        switch = self.switches.split()[0]
        return Known("idle", f"it belongs to {self.title}, and --{switch} is not given", ANY, family=self.title)


_LOW_PRECISION = (
    "low precision (fp8, fp4) is not there yet: matrix products are computed in the precision of the run, which is "
    "more exact, slower, and takes more memory"
)

FAMILIES = (
    Family(
        "low precision",
        _LOW_PRECISION,
        switches="fp8-format fp8 fp4-format fp4",
        names="activation-func-fp8-input-store disable-parameter-transpose-cache first-last-layers-bf16 fp4-param "
        "fp4-param-gather fp4-quantizer-factory fp4-recipe fp8-amax-compute-algo fp8-amax-history-len "
        "fp8-dot-product-attention fp8-interval fp8-margin fp8-multi-head-attention fp8-output-proj fp8-param "
        "fp8-param-gather fp8-quantizer-factory fp8-recipe fp8-wgrad keep-fp8-transpose-cache "
        "num-layers-at-end-in-bf16 num-layers-at-start-in-bf16 reuse-grad-buf-for-mxfp8-param-ag "
        "tp-only-amax-red transformer-engine-precision",
        status="instead",
    ),
    Family(
        "quantisation recipes",
        "quantisation recipes (Kitchen, TransformerEngine) are not there; leave them out",
        switches="use-kitchen use-kitchen-attention kitchen-config-file kitchen-recipe-number te-precision-config-file "
        "quant-recipe",
        names="kitchen-attention-backend",
    ),
    Family(
        "other kinds of attention",
        "linear and sparse attention (gated delta net, DSA) is not there yet; leave these flags out",
        switches="experimental-attention-variant",
        names="dsa-indexer-head-dim dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32 dsa-indexer-loss-coeff "
        "dsa-indexer-n-heads dsa-indexer-rope-interleaved dsa-indexer-rotate-activation "
        "dsa-indexer-scoring-relu dsa-indexer-skip-topk-offset dsa-indexer-topk dsa-indexer-topk-freq "
        "dsa-indexer-use-sparse-loss dsa-kernel-backend experimental-attention-variant-loss-scale-func "
        "gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder linear-attention-freq "
        "linear-attention-type linear-conv-kernel-dim linear-key-head-dim linear-num-key-heads "
        "linear-num-value-heads linear-value-head-dim",
    ),
    Family(
        "hybrid models",
        "Mamba and hybrid layers are not there; leave these flags out",
        switches="hybrid-layer-pattern hybrid-override-pattern is-hybrid-model hybrid-attention-ratio hybrid-mlp-ratio",
        names="disable-mamba-mem-eff-path mamba-head-dim mamba-inference-conv-states-dtype "
        "mamba-inference-ssm-states-dtype mamba-num-groups mamba-num-heads mamba-state-dim "
        "mamba-training-ssm-states-dtype use-mamba-mem-eff-path",
    ),
    Family(
        "other kinds of multi-token prediction",
        "each depth of --mtp-num-layers has a layer of its own, whose loss reaches the whole model, on the last stage; "
        "leave these flags out",
        switches="mtp-use-repeated-layer mtp-detach-heads mtp-standalone",
        names="mtp-hsm mtp-hybrid-override-pattern",
    ),
    Family(
        "hyper-connections",
        "hyper-connections (mHC) are not there; leave these flags out",
        switches="enable-mhc-connections enable-hyper-connections",
        names="mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num mhc-sinkhorn-iterations",
    ),
    Family(
        "heterogeneous layers",
        "layers of different sizes are not there; leave these flags out",
        names="heterogeneous-block-specs heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path",
    ),
    Family(
        "distillation",
        "distillation and ModelOpt are not there; leave these flags out",
        names="export-default-te-spec export-kd-cfg export-kd-teacher-load export-num-medusa-heads "
        "export-qk-l2-norm export-quant-cfg logits-load-decode-threads logits-load-dir "
        "logits-load-ignore-errors logits-load-kd-loss-alpha logits-load-msc-prefetch-depth "
        "logits-load-prefetch-factor logits-save-dir logits-save-dtype logits-save-top-k logits-save-top-p "
        "logits-save-top-p-min-k",
    ),
    Family(
        "inference",
        "it belongs to Megatron-LM's inference server; leave it out, and use tools/generate.py to generate text",
        names="batch-invariant-backend batch-invariant-mode decode-only-cuda-graphs enable-chunked-prefill "
        "flash-decode inference-batch-times-seqlen-threshold inference-coordinator-port "
        "inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens inference-cuda-graph-scope "
        "inference-disable-ep-consensus inference-disable-triton-nvls-kernels inference-dynamic-batching "
        "inference-dynamic-batching-async-sched-mode inference-dynamic-batching-block-size "
        "inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-cuda-graph-mixed-prefill-count "
        "inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-logprobs-mode "
        "inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-max-requests "
        "inference-dynamic-batching-max-tokens inference-dynamic-batching-num-cuda-graphs "
        "inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-prefix-caching "
        "inference-dynamic-batching-prefix-caching-coordinator-policy "
        "inference-dynamic-batching-prefix-caching-eviction-policy "
        "inference-dynamic-batching-prefix-caching-mamba-gb "
        "inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-sampling-backend "
        "inference-dynamic-batching-track-generated-token-events "
        "inference-dynamic-batching-track-paused-request-events "
        "inference-dynamic-batching-unified-memory-level inference-fuse-tp-communication "
        "inference-grouped-gemm-backend inference-logging-step-interval inference-max-requests "
        "inference-max-seq-length inference-moe-disable-fused-quant-kernels "
        "inference-moe-token-dispatcher-type inference-rng-tracker inference-sampling-seed inference-shards "
        "inference-text-gen-server-logging inference-use-synchronous-zmq-collectives inference-wandb-logging "
        "max-tokens-to-oom mlp-chunks-for-prefill nccl-all-reduce-for-prefill num-speculative-tokens "
        "symmetric-ar-type use-inference-optimized-layers use-legacy-static-engine "
        "use-same-sampling-seed-across-dp-ranks",
    ),
    Family(
        "reinforcement learning",
        "reinforcement learning is not there; leave it out",
        names="grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight "
        "grpo-filter-groups-with-same-reward grpo-group-size grpo-iterations grpo-kl-beta "
        "grpo-prompts-per-step langrl-env-config perform-rl-step refit-method rl-consumption-granularity "
        "rl-default-temperature rl-default-top-k rl-default-top-p rl-durable-rollout-bank rl-generation-lag "
        "rl-importance-sampling-truncation-coef rl-inference-expert-model-parallel-size "
        "rl-inference-expert-tensor-model-parallel-size rl-inference-logprobs-is-correction "
        "rl-inference-model-unified-memory-level rl-inference-parsers "
        "rl-inference-pipeline-model-parallel-size rl-inference-tensor-model-parallel-size "
        "rl-kv-cache-management-mode rl-max-inflight-requests rl-offload-inference-model-weights-when-idle "
        "rl-offload-optimizer-during-inference rl-partial-rollouts rl-persist-cuda-graphs rl-profile "
        "rl-profile-dir rl-prompts-per-eval rl-rollout-bank-dir rl-rollout-bank-max-bytes "
        "rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token "
        "rl-submission-granularity rl-training-cuda-graphs rl-use-sequence-packing "
        "rl-verify-model-weights-swap",
    ),
    Family(
        "vision",
        "vision and multimodal models are not there; leave it out",
        names="classes-fraction data-per-class-fraction dino-bottleneck-size dino-freeze-last-layer "
        "dino-head-hidden-size dino-local-crops-number dino-local-img-size dino-norm-last-layer "
        "dino-teacher-temp dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs force-system-message "
        "head-lr-mult image-tag-type img-h img-w iter-per-epoch mask-factor mask-type no-data-sharding "
        "num-channels num-classes patch-dim sample-rate swin-backbone-type vision-backbone-type "
        "vision-pretraining vision-pretraining-type",
    ),
    Family(
        "retrieval",
        "models that retrieve text (RETRO, ICT) are not there; leave it out",
        names="bert-embedder-type bert-load biencoder-projection-dim "
        "biencoder-shared-query-context-model block-data-path embedding-path evidence-data-path ict-head-size "
        "ict-load indexer-batch-size indexer-log-interval max-mask-length output-bert-embeddings "
        "query-in-block-prob retriever-report-topk-accuracies retriever-score-scaling "
        "titles-data-path use-one-sent-docs",
    ),
    Family(
        "Python objects",
        "it is a Python object inside Megatron-LM's configuration, not a flag of its command line; leave it out",
        names="activation-func attr autocast-dtype cpu-offloading-context embedding-init-method enable-autocast "
        "finalize-model-grads-func fn grad-scale-func grad-sync-func init-method mtp-grad-scale-func name "
        "no-sync-func output-layer-init-method param-sync-func pipeline-dtype predicate timers "
        "with-name-predicate",
    ),
    Family(
        "Megatron-LM's test of GPUs",
        "it belongs to Megatron-LM's test of GPUs; leave it out",
        names="ep-size gemm-shapes skip-allreduce skip-alltoall skip-gemm skip-reducescatter skip-sendrecv tp-size",
    ),
)

FAMILY_FLAGS = {name: family.known(name) for family in FAMILIES for name in family.all_names}


def means(field: str, value: str) -> Known:
    """Switch that sets a field."""
    return Known("means", f"--{field.replace('_', '-')} {value}", settings=((field, value),))


def renamed(field: str, *, note: str = "") -> Known:
    """Flag whose value is the value of a field of another name."""
    return Known("means", f"--{field.replace('_', '-')}", 1, settings=((field, GIVEN),), note=note)


def idle(text: str, num_values: int | None = 0) -> Known:
    """Flag that changes no number of a run here."""
    return Known("idle", text, num_values)


def instead(text: str, num_values: int | None = 0, harmless: tuple[str, ...] = ()) -> Known:
    """Flag in whose place something else is done, more exactly than asked; the run says so in a line of its own."""
    return Known("instead", text, num_values, harmless)


def refused(text: str, num_values: int | None = 0, harmless: tuple[str, ...] = ()) -> Known:
    """Flag that would change what is computed, and is not there."""
    return Known("refused", text, num_values, harmless)


def all_idle(text: str, *, switches: str = "", valued: str = "", lists: str = "") -> dict[str, Known]:
    """Flags with one reason to be idle: names of those without a value, with one, and with any number of values."""
    return {
        **dict.fromkeys(switches.split(), idle(text)),
        **dict.fromkeys(valued.split(), idle(text, 1)),
        **dict.fromkeys(lists.split(), idle(text, ANY)),
    }


def negation(known: Known) -> Known | None:
    """What --no-FLAG says, for a switch; None where it says nothing."""
    if known.num_values != 0:
        return None
    if known.status == "means":
        flipped = {"true": "false", "false": "true"}
        if not all(value in flipped for _, value in known.settings):
            return idle("it is off unless it is asked for")
        settings = tuple((field, flipped[value]) for field, value in known.settings)
        return known._replace(settings=settings, text=" ".join(f"--{f.replace('_', '-')} {v}" for f, v in settings))
    return known if known.status == "idle" else idle("it is off in any case")
