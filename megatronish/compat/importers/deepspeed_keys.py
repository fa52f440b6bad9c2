"""Keys of DeepSpeed's ds_config.json, section by section: the field that each is, or why it is not carried over."""

from megatronish.compat.importers.imported import Rule, dropped, field

SPEED = dropped("it changes speed and memory alone")
EXACT = dropped("rounding that saves messages is not there; the exact numbers are sent")
LOGGED = dropped("the time of a step, throughput and memory are always logged")
NOT_THERE = dropped("it is not there")

TOP: dict[str, Rule] = {
    "train_batch_size": field("global_batch_size"),
    "train_micro_batch_size_per_gpu": field("micro_batch_size"),
    "gradient_clipping": field("clip_grad"),
    "steps_per_print": field("log_interval"),
    "sequence_parallel_size": field("context_parallel_size"),
    "wall_clock_breakdown": LOGGED,
    "memory_breakdown": LOGGED,
    "dump_state": LOGGED,
    "comms_logger": LOGGED,
    "csv_monitor": dropped("metrics.jsonl in the run folder has every number"),
    "flops_profiler": dropped("throughput in TFLOP/s is always logged"),
    "prescale_gradients": SPEED,
    "gradient_predivide_factor": SPEED,
    "sparse_gradients": SPEED,
    "disable_allgather": SPEED,
    "aio": SPEED,
    "autotuning": SPEED,
    "use_node_local_storage": SPEED,
    "zero_allow_untested_optimizer": dropped("every optimizer works with every stage"),
    "zero_force_ds_cpu_optimizer": dropped("there is one optimizer on the CPU"),
    "checkpoint": dropped("every checkpoint loads in every layout"),
    "amp": dropped("use --bf16 or --fp16"),
    "elasticity": dropped("a run resumes on any number of ranks, with the same --global-batch-size"),
    "compression_training": NOT_THERE,
    "curriculum_learning": NOT_THERE,
    "data_efficiency": NOT_THERE,
    "sparse_attention": NOT_THERE,
    "progressive_layer_drop": NOT_THERE,
    "eigenvalue": NOT_THERE,
    "quantize_training": NOT_THERE,
    "pipeline": dropped("use --pipeline-model-parallel-size and --pipeline-schedule"),
    "data_types": dropped("gradients are accumulated in fp32"),
    "communication_data_type": dropped("gradients are reduced in fp32; --grad-reduce-in-bf16 with --bf16 halves that"),
}

ADAM: dict[str, Rule] = {
    "lr": field("lr"),
    "eps": field("adam_eps"),
    "weight_decay": field("weight_decay"),
    "momentum": field("sgd_momentum"),
    "torch_adam": dropped("there is one implementation"),
    "bias_correction": dropped("Adam always corrects its bias"),
    "freeze_step": EXACT,
    "amsgrad": NOT_THERE,
    "nesterov": NOT_THERE,
}
OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam"), "adam"),
    **{"sgd": "sgd", "muon": "muon"},
}

DEFAULTS: dict[str, dict[str, float | bool | str]] = {
    "adam": {"lr": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8},
    "sgd": {"lr": 1e-3, "sgd_momentum": 0.0},
    "muon": {
        "muon_momentum": 0.95,
        "muon_nesterov": True,
        "muon_scale_mode": "shape_scaling",
        "muon_coefficient_type": "simple",
    },
}
"""What parameters mean that an optimizer does not name."""
OF_ONE_RANK = "the global batch above is that of one data-parallel rank; import again with --dp N for N of them"

SCHEDULER_FLAGS = {
    "warmup_num_steps": "--lr-warmup-iters",
    "warmup_max_lr": "--lr",
    "warmup_min_lr": "--lr-warmup-init",
    "warmup_min_ratio": "--lr-warmup-init",
    "cos_min_ratio": "--min-lr",
    "total_num_steps": "--lr-decay-iters",
}
"""Flags to give where a parameter of the scheduler is "auto"."""

DEFAULT_WARMUP_STEPS = 1000
DEFAULT_PEAK = 0.001
"""What DeepSpeed's documentation says of a scheduler that does not name its warmup_num_steps, or warmup_max_lr."""

FP16: dict[str, Rule] = {
    "enabled": field("fp16"),
    "loss_scale": field("loss_scale"),
    "loss_scale_window": field("loss_scale_window"),
    "hysteresis": field("hysteresis"),
    "min_loss_scale": field("min_loss_scale"),
    "auto_cast": dropped("inputs are cast where a layer computes"),
    "consecutive_hysteresis": NOT_THERE,
    "fp16_master_weights_and_grads": dropped("master weights and gradients are in fp32, more exactly"),
}

FP16_DEFAULTS = {"loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1.0}

ZERO: dict[str, Rule] = {
    "stage": field("zero_stage"),
    "overlap_comm": field("overlap_grad_reduce"),
    "reduce_bucket_size": field("ddp_bucket_size"),
    "cpu_offload": field("optimizer_cpu_offload"),
    "stage3_gather_16bit_weights_on_model_save": dropped("tools/convert_checkpoint.py writes whole weights"),
    "gather_16bit_weights_on_model_save": dropped("tools/convert_checkpoint.py writes whole weights"),
    "zero_quantized_weights": EXACT,
    "zero_quantized_nontrainable_weights": EXACT,
    "zero_quantized_gradients": EXACT,
    "mics_shard_size": dropped("use --num-distributed-optimizer-instances, the number of groups"),
    **dict.fromkeys(
        (
            *("allgather_partitions", "allgather_bucket_size", "reduce_scatter", "contiguous_gradients"),
            *("round_robin_gradients", "sub_group_size", "ignore_unused_parameters", "legacy_stage1"),
            *(
                "elastic_checkpoint",
                "load_from_fp32_weights",
                "zero_hpz_partition_size",
                "use_multi_rank_bucket_allreduce",
            ),
            *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters"),
            *("stage3_max_reuse_distance", "stage3_model_persistence_threshold", "memory_efficient_linear"),
            *("mics_hierarchical_params_gather", "override_module_apply", "log_trace_cache_warnings"),
        ),
        SPEED,
    ),
}

ACTIVATIONS: dict[str, Rule] = {
    "partition_activations": dropped("add --distribute-saved-activations, with --tp 2 or more"),
    "number_checkpoints": dropped("use --recompute-num-layers, the layers of one group"),
    "contiguous_memory_optimization": SPEED,
    "synchronize_checkpoint_boundary": SPEED,
    "profile": SPEED,
}
