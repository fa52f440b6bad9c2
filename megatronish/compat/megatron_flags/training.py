"""Megatron-LM's flags of the loop, the optimizer and the checks of a run."""

from megatronish.compat.megatron_flags.families import Known, all_idle, idle, instead, means, refused, renamed

_SPEED = "it changes speed alone"
_FAULTS = "faulty hardware is not searched for; a rank that fails ends the run, which resumes from its checkpoint"
_RESTART = "nothing restarts inside a run; --save-interval, and a launcher that starts the run again, do"
_OTHER_OPTIMIZER = "it belongs to an optimizer that --optimizer does not name"
_FP32_STATES = "optimizer states, master weights and gradients are in fp32"

LOOP: dict[str, Known] = {
    "exit-signal-handler": idle("SIGTERM always saves and leaves"),
    "override-opt-param-scheduler": idle(
        "the schedule of the config counts unless --use-checkpoint-opt-param-scheduler is given"
    ),
    "calculate-per-token-loss": idle("the loss is always a mean over all unmasked tokens of a step"),
    **all_idle(
        _SPEED,
        switches="manual-gc no-manual-gc-eval",
        valued="manual-gc-interval train-sync-interval empty-unused-memory-level eval-micro-batch-size",
    ),
    "check-for-nan-in-grad": means("check_for_nan_in_loss_and_grad", "true"),
    "skip-train": refused("use tools/evaluate.py to evaluate a checkpoint"),
    "full-validation": refused("use --eval-iters N, or tools/evaluate.py, which reads a whole data set"),
    "iterations-to-skip": refused("every step is taken; leave it out", None),
    "skip-train-iteration-range": refused("every step is taken; leave it out", None),
    "phase-transition-iterations": refused("use --blend-schedule, which names the weights from each step on", None),
    "freeze-all-layers": refused("a model without a layer that learns trains nothing; leave it out"),
    "sft": refused("use --dataset-type chat, which trains on chats; --finetune takes weights"),
    "sft-tokenizer-prompt-format": idle("it belongs to --sft; --chat-template names a template here", 1),
    "adlr-autoresume": idle("SIGTERM always saves and leaves, SIGUSR1 saves"),
    "adlr-autoresume-interval": idle("SIGTERM always saves and leaves, SIGUSR1 saves", 1),
    # removed or renamed by Megatron-LM itself
    "batch-size": renamed("micro_batch_size"),
    "model-parallel-size": renamed("tensor_model_parallel_size"),
    "warmup": renamed("lr_warmup_fraction"),
    "yaml-cfg": refused("use --config FILE.toml", 1),
}

OPTIMIZER: dict[str, Known] = {
    "decoupled-weight-decay": idle("adam is AdamW: weight decay is decoupled"),
    "no-decoupled-weight-decay": refused("adam is AdamW: weight decay is decoupled; leave it out"),
    "use-precision-aware-optimizer": idle(_FP32_STATES),
    "main-grads-dtype": instead(_FP32_STATES, 1, ("fp32",)),
    "main-params-dtype": instead(_FP32_STATES, 1, ("fp32",)),
    "exp-avg-dtype": instead(_FP32_STATES, 1, ("fp32",)),
    "exp-avg-sq-dtype": instead(_FP32_STATES, 1, ("fp32",)),
    "offload-optimizer-states": idle("it changes memory alone; --optimizer-cpu-offload saves memory here"),
    "store-param-remainders": idle("it changes memory alone; masters are whole fp32 tensors"),
    "no-weight-decay-cond-type": refused("use --apply-wd-to-qk-layernorm", 1),
    "grad-norm-skip-threshold": refused("every step is taken; use --clip-grad", 1, ("inf",)),
    "cpu-optimizer": means("optimizer_cpu_offload", "true"),
    "cpu-torch-adam": means("optimizer_cpu_offload", "true"),
    "muon-use-nesterov": means("muon_nesterov", "true"),
    "muon-split-qkv": idle("queries, keys and values are matrices of their own"),
    "muon-no-split-qkv": refused("queries, keys and values are matrices of their own; leave it out"),
    "no-muon-split-qkv": refused("queries, keys and values are matrices of their own; leave it out"),
    "muon-tp-mode": refused(
        "a matrix is made orthogonal as a whole, however it is cut; leave it out", 1, ("duplicated", "distributed")
    ),
    "muon-scalar-optimizer": refused("what is no matrix of a layer is adam's; leave it out", 1, ("adam",)),
    "muon-use-syrk": idle(_SPEED),
    **all_idle(
        _OTHER_OPTIMIZER,
        switches="soap-use-kl-shampoo",
        valued="lion-beta1 lion-beta2 adaptive-muon-beta2 adaptive-muon-eps adaptive-muon-moment2-method "
        "soap-shampoo-beta",
    ),
}

RESILIENCE: dict[str, Known] = {
    "rerun-mode": Known("idle", _FAULTS, 1, ("disabled",)),
    **all_idle(
        "it tests Megatron-LM's search for faulty hardware, which is not done here",
        valued="error-injection-rate error-injection-type",
    ),
    **all_idle(
        _FAULTS,
        switches="check-for-spiky-loss check-for-large-grads run-workload-inspector-server",
        valued="check-weight-hash-across-dp-replicas-interval result-rejected-tracker-filename",
    ),
    **all_idle(
        _RESTART,
        switches="enable-ft-package calc-ft-timeouts inprocess-restart inprocess-empty-cuda-cache",
        valued="ft-num-warmup-iters inprocess-active-world-size inprocess-barrier-timeout "
        "inprocess-completion-timeout inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval "
        "inprocess-heartbeat-timeout inprocess-last-call-wait inprocess-max-iterations "
        "inprocess-monitor-process-interval inprocess-monitor-thread-interval "
        "inprocess-progress-watchdog-interval inprocess-soft-timeout inprocess-termination-grace-time",
    ),
}
