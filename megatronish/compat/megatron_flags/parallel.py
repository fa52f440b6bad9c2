"""Megatron-LM's flags of parallelism: stages, communication, ZeRO and FSDP."""

from megatronish.compat.megatron_flags.families import Known, all_idle, by_value, idle, instead, means, refused, renamed

_SPEED = "it changes speed alone"
_OVERLAP = "it changes speed alone, and which collectives overlap is decided here"
_STAGES = "stages talk as their schedule says"
_SHARDS = "--zero-stage says what ranks share; it changes no number"
_FSDP_DTYPE = "fully sharded parameters have fp32 masters and fp32 gradients"

PIPELINE: dict[str, Known] = {
    "num-layers-in-first-pipeline-stage": renamed("decoder_first_pipeline_num_layers"),
    "num-layers-in-last-pipeline-stage": renamed("decoder_last_pipeline_num_layers"),
    "virtual-pipeline-model-parallel-size": renamed("num_virtual_stages_per_pipeline_rank"),
    "pipeline-model-parallel-layout": idle(
        "how layers are cut changes no number; --pipeline-split auto counts the embedding and the head by their cost",
        1,
    ),
    "pp-partition-method": by_value(
        "use --pipeline-split auto, or --account-for-embedding-in-pipeline-split",
        {
            "type:transformer|embedding": (
                ("account_for_embedding_in_pipeline_split", "true"),
                ("account_for_loss_in_pipeline_split", "true"),
            ),
        },
        harmless=("uniform", "type:transformer", "parameters"),
    ),
    "microbatch-group-size-per-virtual-pipeline-stage": idle(
        "it changes speed and memory alone; here it is the number of stages", 1
    ),
    "microbatch-group-size-per-vp-stage": idle("it changes speed and memory alone; here it is the number of stages", 1),
    **all_idle(
        _STAGES,
        switches="no-overlap-p2p-communication overlap-p2p-communication overlap-p2p-comm "
        "overlap-p2p-communication-warmup-flush overlap-p2p-comm-warmup-flush batch-p2p-comm batch-p2p-sync "
        "use-ring-exchange-p2p variable-seq-lengths deallocate-pipeline-outputs "
        "no-scatter-gather-tensors-in-pipeline scatter-gather-tensors-in-pipeline",
        valued="pipeline-model-parallel-comm-backend",
    ),
    **all_idle(
        "it changes speed and memory alone; --pipeline-schedule zb-h1 or zb-v computes weight gradients later",
        switches="defer-embedding-wgrad-compute delay-wgrad-compute",
        valued="wgrad-deferral-limit",
    ),
    "standalone-embedding-stage": refused("the embedding belongs to the first stage; leave it out"),
    "pipeline-model-parallel-split-rank": refused(
        "layers of encoder and decoder are shared out as one row of layers; leave it out", 1
    ),
    **{
        f"encoder-{kind}-model-parallel-size": refused(
            "encoder and decoder lie on the same ranks, cut by --tensor-model-parallel-size and "
            "--pipeline-model-parallel-size; leave it out",
            1,
        )
        for kind in ("tensor", "pipeline")
    },
    "no-pipeline-parallel": means("pipeline_model_parallel_size", "1"),
}

COMMUNICATION: dict[str, Known] = {
    "hierarchical-context-parallel-sizes": idle(
        "--cp-comm-type a2a+p2p is computed as p2p; it changes speed alone", None
    ),
    "use-tp-pp-dp-mapping": idle("it decides which rank does what, and changes no number"),
    **all_idle(
        _OVERLAP,
        switches="tp-comm-atomic-ag tp-comm-atomic-rs tp-comm-bulk-dgrad tp-comm-bulk-wgrad "
        "tp-comm-overlap-ag tp-comm-overlap-rs tp-comm-overlap-rs-dgrad tp-comm-overlap-disable-fc1 "
        "tp-comm-overlap-disable-qkv tp-comm-split-ag tp-comm-split-rs disable-tp-comm-overlap-ag "
        "disable-tp-comm-overlap-rs disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad "
        "disable-tp-comm-split-ag disable-tp-comm-split-rs no-async-tensor-model-parallel-allreduce "
        "async-tensor-model-parallel-allreduce",
        valued="tp-comm-overlap-cfg tp-comm-bootstrap-backend",
    ),
    **all_idle(
        _SPEED,
        switches="use-nccl-ub nccl-ub disable-symmetric-registration create-all-gather-group "
        "disable-gloo-process-groups enable-gloo-process-groups use-sharp no-align-grad-reduce align-grad-reduce "
        "no-align-param-gather align-param-gather delay-grad-reduce no-delay-grad-reduce "
        "ddp-average-in-collective average-in-collective ddp-pad-buckets-for-high-nccl-busbw "
        "pad-buckets-for-high-nccl-busbw overlap-param-gather-with-optimizer-step no-pin-cpu-grads "
        "no-pin-cpu-params pin-cpu-grads pin-cpu-params overlap-cpu-optimizer-d2h-h2d "
        "use-torch-optimizer-for-cpu-offload no-contiguous-buffers-in-local-ddp sync-tp-duplicated-parameters "
        "lazy-mpu-init use-pin-memory fsdp-all-gather-in-start-param-sync",
        valued="nccl-communicator-config-path high-priority-stream-groups sharp-enabled-group ddp-num-buckets "
        "num-buckets suggested-communication-unit-size optimizer-offload-fraction optimizer-offload-policy "
        "distributed-timeout-seconds-after-init local-rank",
    ),
    "bucket-size": renamed("ddp_bucket_size"),
    "DDP-impl": Known("refused", "use --zero-stage 0, 1, 2 or 3; leave it out", 1, ("local", "torch")),
    "fake-process-group": refused("a run communicates; leave it out"),
}

SHARDING: dict[str, Known] = {
    "data-parallel-sharding-strategy": by_value(
        "use --zero-stage 0, 1, 2 or 3 (no_shard, optim, optim_grads, optim_grads_params)",
        {
            "optim": (("zero_stage", "1"),),
            "optim_grads": (("zero_stage", "2"),),
            "optim_grads_params": (("zero_stage", "3"),),
        },
        harmless=("no_shard",),
    ),
    "use-torch-fsdp2": means("zero_stage", "3"),
    **all_idle(
        "--data-parallel-sharding-strategy, or --zero-stage, says what ranks share; it changes no number",
        switches="use-megatron-fsdp use-custom-fsdp",
    ),
    **all_idle(
        _SHARDS,
        switches="enable-full-sharding-in-hsdp torch-fsdp2-no-reshard-after-forward fsdp-double-buffer "
        "fsdp-manual-registration fsdp-db-use-persist-buf-on-alloc-fail megatron-fsdp-max-pool-double-buffer "
        "megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-use-decoupled-grad "
        "no-use-layer-wise-param-layout use-layer-wise-distributed-optimizer keep-fp8-weight-transpose-cache",
        valued="outer-dp-sharding-strategy megatron-fsdp-version",
    ),
    "megatron-fsdp-grad-comm-dtype": by_value(
        "use fp32, auto or bf16", {"bf16": (("grad_reduce_in_bf16", "true"),)}, harmless=("fp32", "auto")
    ),
    "megatron-fsdp-main-grads-dtype": instead(_FSDP_DTYPE, 1, ("fp32", "auto")),
    "megatron-fsdp-main-params-dtype": instead(_FSDP_DTYPE, 1, ("fp32", "auto")),
}
