"""Megatron-LM's flags of data, tokenizers, checkpoints, logs and profiles."""

from megatronish.compat.megatron_flags.families import Known, all_idle, idle, instead, means, refused, renamed

_SPEED = "it changes speed alone"
_CHECKPOINTS = "checkpoints are written by all ranks together and load in every layout"
_FORMAT = "checkpoints are in the format of torch.distributed.checkpoint; tools/convert_checkpoint.py has others"
_NOT_LOGGED = "it is not logged; no number of the run depends on it"
_LOGGED = "it is always logged"
_NVIDIA = "it reports to a service of NVIDIA's"
_PROFILE = "what a profile holds is decided by --profile"
_HUGGING_FACE = "tokenizers are read from their files; no code of a model folder runs"
_SAMPLES = "samples are filled with tokens up to --seq-length"

DATA: dict[str, Known] = {
    **all_idle(
        "it changes speed alone; files are memory-mapped",
        switches="no-mmap-bin-files dataloader-defer-npy-index-mmap dataloader-fast-cache-load "
        "disable-mmap disable-msc",
        valued="num-dataset-builder-threads mid-level-dataset-surplus per-dataset-sequences-path valid-num-workers",
    ),
    "data-impl": refused("make the data again with tools/preprocess_data.py", 1, ("mmap", "infer")),
    "dataset-impl": refused("make the data again with tools/preprocess_data.py", 1, ("mmap", "infer")),
    "dataloader-type": Known(
        "refused", "samples come in one seeded random order; leave it out", 1, ("single", "cyclic")
    ),
    "no-create-attention-mask-in-dataloader": idle("masks are always made where attention needs them"),
    "dataloader-inter-document-masking": refused("use --reset-attention-mask, with --reset-position-ids if wanted"),
    "allow-ambiguous-pad-tokens": idle("no token of the data is taken for padding"),
    "enable-msc": idle("a data path that is a URL, as s3://bucket/prefix, is read from there"),
    "object-storage-cache-path": renamed("data_store_cache_path"),
    "s3-cache-path": renamed("data_store_cache_path"),
    "hybrid-context-parallel": refused("all samples have one length; leave it out"),
    "max-seqlen-per-dp-cp-rank": refused("all samples have one length; leave it out", 1),
    # Alibaba's Pai-Megatron-Patch
    "extra-vocab-size": instead(
        "the vocabulary is the tokenizer's with all its added tokens; rows beyond them are padding, which takes no "
        "part in the softmax",
        1,
        ("0",),
    ),
    "max-padding-length": idle(_SAMPLES, 1),
    "patch-tokenizer-type": Known("means", "--tokenizer-type huggingface", 1, (), (("tokenizer_type", "huggingface"),)),
    "dataset": refused(
        "use --data-path with .bin/.idx pairs of tools/preprocess_data.py", 1, ("MMAP", "LLama-Pretrain-Idxmap")
    ),
    "train-mode": refused("it is not there yet; --finetune takes weights, and trains on text", 1, ("pretrain",)),
    # BigScience's Megatron-DeepSpeed
    "tokenizer-name-or-path": renamed("tokenizer_model"),
}

TOKENIZER: dict[str, Known] = {
    **all_idle(
        _HUGGING_FACE,
        switches="trust-remote-code legacy-tokenizer tokenizer-hf-use-fast tokenizer-hf-no-use-fast "
        "tokenizer-hf-include-special-tokens tokenizer-hf-no-include-special-tokens",
        valued="tokenizer-metadata null-tokenizer-eod-id null-tokenizer-pad-id tokenizer-prompt-format",
        lists="tokenizer-special-tokens",
    ),
    **all_idle(
        "--use-checkpoint-args says whether a tokenizer comes from the checkpoint",
        switches="use-tokenizer-model-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args",
    ),
}

CHECKPOINT: dict[str, Known] = {
    "pretrained-checkpoint": refused("use --load DIR --finetune: a run's own checkpoints come before those", 1),
    "ckpt-format": Known("idle", _FORMAT, 1, ("torch_dist",)),
    "dist-ckpt-format": Known("idle", _FORMAT, 1, ("torch_dist",)),
    **all_idle(
        _CHECKPOINTS,
        switches="dist-ckpt-optim-fully-reshardable use-dist-ckpt auto-detect-ckpt-format ckpt-fully-parallel-load "
        "ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-assume-constant-structure "
        "use-persistent-ckpt-worker async-ckpt-use-cpu-shm async-ckpt-use-cached-metadata "
        "ckpt-drop-redundant-extra-state hetereogenous-dist-checkpoint dist-ckpt-optim-fully-reshardable-mem-efficient "
        "dist-ckpt-save-pre-mcore-014 strict-fsdp-dtensor-load use-mp-args-from-checkpoint-args "
        "distrib-optim-fully-reshardable-mem-efficient",
        valued="async-strategy dist-ckpt-workers ckpt-fully-parallel-load-exchange-algo",
    ),
    "dist-ckpt-strictness": idle("a checkpoint must hold every tensor of the model; it may hold more", 1),
    "verify-integrity": idle("checksums are always written, and checked on loading"),
    "load-main-params-from-ckpt": idle("masters always come from the checkpoint"),
    "ckpt-convert-format": refused("use tools/convert_checkpoint.py", 1),
    "ckpt-convert-save": refused("use tools/convert_checkpoint.py", 1),
    "ckpt-convert-update-legacy-dist-opt-format": refused("use tools/convert_checkpoint.py"),
    "override-ckpt-iteration": refused("use --ckpt-step to choose a checkpoint", 1),
    "non-persistent-save-interval": refused("use --save-replicated-interval N, with --local-save DIR if need be", 1),
    **all_idle(
        "it belongs to --non-persistent-save-interval, which is not there",
        switches="replication",
        valued="non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir "
        "non-persistent-local-ckpt-algo replication-jump replication-factor",
    ),
}

LOG: dict[str, Known] = {
    **all_idle(
        _LOGGED,
        switches="log-throughput log-memory-to-tensorboard log-validation-ppl-to-tensorboard "
        "log-batch-size-to-tensorboard log-loss-scale-to-tensorboard no-log-loss-scale-to-tensorboard "
        "no-log-learning-rate-to-tensorboard no-log-learnig-rate-to-tensorboard log-timers-to-tensorboard "
        "log-optimizer-states-to-tensorboard log-progress",
    ),
    **all_idle(
        "a step is timed as a whole",
        switches="no-barrier-with-level-1-timing barrier-with-L1-time",
        valued="timing-log-level timing-log-option",
    ),
    **all_idle(
        _NOT_LOGGED,
        switches="log-straggler log-energy "
        "disable-straggler-on-startup log-device-memory-used log-l2-norm-grad-to-tensorboard onnx-safe",
        valued="straggler-ctrlr-port straggler-minmax-count logging-level config-logger-dir "
        "dump-param-to-param-group-map log-level log-level-replica codecarbon-dir log-path",
    ),
    **all_idle(
        _NVIDIA,
        switches="no-one-logger enable-one-logger one-logger-async otel-enabled",
        valued="one-logger-project one-logger-run-name app-tag-run-name app-tag-run-version otel-service-name "
        "otel-span-groups",
    ),
    **all_idle(
        _PROFILE,
        switches="pytorch-profiler-collect-chakra nvtx-ranges",
    ),
}

# DeepSpeed's own flags, in addition to Megatron-LM's.
DEEPSPEED: dict[str, Known] = {
    **all_idle(
        "there is one engine; the flags of this command line decide",
        switches="deepspeed deepspeed-mpi deepscale ds-fused-adam ds-inference force-ds-sequence-parallel",
        valued="deepscale-config",
    ),
    "deepspeed-config": instead(
        "DeepSpeed's JSON file is not read, the flags of this command line decide; megatronish from-deepspeed "
        "FILE.json turns it into a config of this project",
        1,
    ),
    "deepspeed-activation-checkpointing": idle("--checkpoint-activations or --recompute-granularity full decides"),
    **all_idle(
        "it changes memory and speed alone",
        switches="zero-contigious-gradients zero-reduce-scatter contigious-checkpointing synchronize-each-layer "
        "profile-backward memory-centric-tiled-linear checkpoint-in-cpu",
        valued="zero-reduce-bucket-size zero-allgather-bucket-size tile-factor remote-device",
    ),
    "partition-activations": idle("it changes memory alone; --distribute-saved-activations does this"),
    "ds-sequence-parallel-size": refused("use --context-parallel-size with --cp-comm-type a2a", 1, ("1",)),
    "universal-checkpoint": idle(_CHECKPOINTS),
    "load-tag": refused("use --ckpt-step to choose a checkpoint", 1),
    "tensorboard": idle("TensorBoard's files are always written, into --tensorboard-dir"),
    "no-load-lr-state": idle("the schedule of the config counts unless --use-checkpoint-opt-param-scheduler is given"),
    "curriculum-learning": refused("all samples have one length; leave it out"),
}

# Hugging Face's Trainer.
TRAINER: dict[str, Known] = {
    "learning-rate": renamed("lr"),
    "max-steps": renamed("train_iters"),
    "save-steps": renamed("save_interval"),
    "eval-steps": renamed("eval_interval"),
    "logging-steps": renamed("log_interval"),
    "output-dir": renamed("run_dir"),
    "max-grad-norm": renamed("clip_grad"),
    "adam-epsilon": renamed("adam_eps"),
    "warmup-steps": renamed("lr_warmup_iters"),
    "warmup-ratio": renamed("lr_warmup_fraction"),
    "per-device-train-batch-size": renamed("micro_batch_size"),
    "gradient-checkpointing": means("recompute_granularity", "full"),
    "gradient-accumulation-steps": refused(
        "use --global-batch-size, which is --micro-batch-size times this times the data-parallel size", 1
    ),
    "num-train-epochs": renamed("num_epochs"),
    "model-name-or-path": renamed("load_hf"),
}
