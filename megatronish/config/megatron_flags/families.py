"""Families of Megatron-LM's flags: many flags with one reason, known by names and by how names begin.

A family with switches is a part that a run either has or not: a switch is refused (or something else is computed
instead), and the other flags of the family say nothing without it. A family without switches is refused as a whole.
"""

from typing import NamedTuple

from megatronish.config.megatron_flags.known import ANY, Known, Status


class Family(NamedTuple):
    """Flags that belong together. `text` is the reason and the remedy, for all of them at once."""

    title: str
    text: str
    switches: str = ""
    names: str = ""
    prefixes: str = ""
    status: Status = "refused"

    def holds(self, name: str) -> bool:
        """Whether a flag is one of the family's switches or settings, by its name alone."""
        return name in self.all_names or name.startswith(tuple(self.prefixes.split()))

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
        names="first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 "
        "keep-fp8-transpose-cache reuse-grad-buf-for-mxfp8-param-ag activation-func-fp8-input-store "
        "disable-parameter-transpose-cache tp-only-amax-red transformer-engine-precision",
        prefixes="fp8- fp4- no-fp8- no-fp4-",
        status="instead",
    ),
    Family(
        "quantisation recipes",
        "quantisation recipes (Kitchen, TransformerEngine) are not there; leave them out",
        switches="use-kitchen use-kitchen-attention kitchen-config-file kitchen-recipe-number te-precision-config-file "
        "quant-recipe",
        prefixes="kitchen-",
    ),
    Family(
        "multi-latent attention",
        "multi-latent attention (MLA) is not there yet; leave these flags out",
        switches="multi-latent-attention",
        names="q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim mscale mscale-all-dim "
        "rotary-scaling-factor beta-fast beta-slow original-max-position-embeddings cache-mla-latents qk-pos-emb-dim",
        prefixes="mla-",
    ),
    Family(
        "other kinds of attention",
        "linear and sparse attention (gated delta net, DSA) is not there yet; leave these flags out",
        switches="experimental-attention-variant",
        names="linear-attention-freq linear-attention-type linear-conv-kernel-dim linear-key-head-dim "
        "linear-num-key-heads linear-num-value-heads linear-value-head-dim "
        "experimental-attention-variant-loss-scale-func",
        prefixes="dsa- gdp- linear-",
    ),
    Family(
        "hybrid models",
        "Mamba and hybrid layers are not there; leave these flags out",
        switches="hybrid-layer-pattern hybrid-override-pattern is-hybrid-model hybrid-attention-ratio hybrid-mlp-ratio",
        names="use-mamba-mem-eff-path disable-mamba-mem-eff-path",
        prefixes="mamba-",
    ),
    Family(
        "multi-token prediction",
        "multi-token prediction is not there yet; leave these flags out",
        switches="mtp-num-layers",
        prefixes="mtp-",
    ),
    Family(
        "hyper-connections",
        "hyper-connections (mHC) are not there; leave these flags out",
        switches="enable-mhc-connections enable-hyper-connections",
        prefixes="mhc-",
    ),
    Family(
        "muP",
        "width-independent hyperparameters (muP) are not there; leave these flags out, and give --lr and "
        "--init-method-std for this width",
        switches="use-mup",
        prefixes="mup-",
    ),
    Family(
        "clipping of attention scores",
        "clipping of attention scores (QK-clip) is not there; use --qk-layernorm, or leave these flags out",
        switches="qk-clip",
        prefixes="qk-clip-",
    ),
    Family(
        "fill-in-the-middle",
        "fill-in-the-middle data is not there; leave these flags out, or transform the text before preprocessing",
        switches="fim-data",
        prefixes="fim-",
    ),
    Family(
        "heterogeneous layers",
        "layers of different sizes are not there; leave these flags out",
        prefixes="heterogeneous-",
    ),
    Family(
        "distillation",
        "distillation and ModelOpt are not there; leave these flags out",
        names="export-quant-cfg export-default-te-spec export-qk-l2-norm export-num-medusa-heads",
        prefixes="export-kd- logits- kd- modelopt-",
    ),
    Family(
        "inference",
        "it belongs to Megatron-LM's inference server; leave it out, and use tools/generate.py to generate text",
        names="enable-chunked-prefill decode-only-cuda-graphs max-tokens-to-oom num-speculative-tokens flash-decode "
        "mlp-chunks-for-prefill nccl-all-reduce-for-prefill symmetric-ar-type use-inference-optimized-layers "
        "use-legacy-static-engine batch-invariant-mode batch-invariant-backend use-same-sampling-seed-across-dp-ranks",
        prefixes="inference- no-inference- enable-inference-",
    ),
    Family(
        "reinforcement learning",
        "reinforcement learning is not there; leave it out",
        names="perform-rl-step langrl-env-config refit-method",
        prefixes="rl- grpo- no-rl-",
    ),
    Family(
        "vision",
        "vision and multimodal models are not there; leave it out",
        names="img-h img-w num-channels num-classes patch-dim classes-fraction data-per-class-fraction "
        "no-data-sharding head-lr-mult iter-per-epoch mask-type mask-factor sample-rate image-tag-type "
        "force-system-message",
        prefixes="vision- dino- swin- no-vision-",
    ),
    Family(
        "BERT, T5 and retrieval",
        "BERT, T5 and models that retrieve text (RETRO, ICT) are not there; leave it out",
        names="block-data-path titles-data-path evidence-data-path embedding-path indexer-batch-size "
        "indexer-log-interval query-in-block-prob use-one-sent-docs output-bert-embeddings mask-prob short-seq-prob "
        "max-mask-length",
        prefixes="bert- biencoder- ict- retriever- retro-",
    ),
    Family(
        "Python objects",
        "it is a Python object inside Megatron-LM's configuration, not a flag of its command line; leave it out",
        names="activation-func attr autocast-dtype cpu-offloading-context embedding-init-method enable-autocast "
        "finalize-model-grads-func fn grad-scale-func grad-sync-func init-method mtp-grad-scale-func name "
        "no-sync-func output-layer-init-method param-sync-func pipeline-dtype predicate timers with-name-predicate",
    ),
    Family(
        "Megatron-LM's test of GPUs",
        "it belongs to Megatron-LM's test of GPUs; leave it out",
        names="ep-size tp-size gemm-shapes skip-allreduce skip-alltoall skip-gemm skip-reducescatter skip-sendrecv",
    ),
)

FAMILY_FLAGS = {name: family.known(name) for family in FAMILIES for name in family.all_names}


def family_flag(name: str) -> Known | None:
    """What a flag is that belongs to a family by the beginning of its name."""
    return next((family.known(name) for family in FAMILIES if family.holds(name)), None)
