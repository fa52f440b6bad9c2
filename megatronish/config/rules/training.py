"""Rules on training: batches and precision, recomputation of activations, and CUDA graphs."""

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, one_of
from megatronish.config.rules.rule import LARGEST_NAMED, MESH, ConfigRule
from megatronish.config.sections.training import parse_batch_sizes

_BATCH = (*MESH, "global_batch_size", "micro_batch_size")


def _batches(config: Config) -> str | None:
    batch, micro, dp = config.global_batch_size, config.training.micro_batch_size, config.layout.dp
    if batch % (micro * dp) == 0:
        return None
    nearest = max(1, round(batch / (micro * dp))) * micro * dp
    sizes = [size for size in range(1, min(batch, LARGEST_NAMED) + 1) if batch % (size * dp) == 0]
    other = f" or --micro-batch-size {one_of(sizes[:12])}" if sizes else ""
    return (
        f"global_batch_size={batch} must be divisible by micro_batch_size={micro} x data_parallel_size={dp}; "
        f"use --global-batch-size {nearest}{other}"
    )


def _ramp_up(config: Config) -> str | None:
    if config.training.rampup_batch_size is None:
        return None
    start, increment, samples = config.training.rampup_batch_size
    setting = f"rampup_batch_size={start} {increment} {samples}"
    batch, micro, dp = config.global_batch_size, config.training.micro_batch_size, config.layout.dp
    if start < 1 or increment < 1 or samples < 0:
        return f"{setting}: START and INCREMENT must be at least 1, SAMPLES not negative; start from {micro * dp}"
    if start % (micro * dp) or increment % (micro * dp):
        return (
            f"{setting}: START and INCREMENT must be divisible by micro_batch_size={micro} x data_parallel_size={dp}; "
            f"use multiples of {micro * dp}"
        )
    if start > batch or (batch - start) % increment:
        return (
            f"{setting}: global_batch_size={batch} must be START plus a whole number of INCREMENTs; "
            f"use --global-batch-size {start + max(1, round((batch - start) / increment)) * increment}"
        )
    return None


def _step_wise(config: Config) -> str | None:
    training = config.training
    if not training.step_batch_size_schedule:
        return None
    try:
        steps = parse_batch_sizes(training.step_batch_size_schedule, seq_length=training.seq_length)
    except ValueError as error:
        return f"step_batch_size_schedule={error}"
    setting, micro, dp = (
        f"step_batch_size_schedule={' '.join(training.step_batch_size_schedule)}",
        training.micro_batch_size,
        config.layout.dp,
    )
    for _, size in steps:
        if size % (micro * dp):
            return (
                f"{setting}: {size} must be divisible by micro_batch_size={micro} x data_parallel_size={dp}; "
                f"use multiples of {micro * dp}"
            )
    if config.global_batch_size != steps[-1][1]:
        return (
            f"{setting} ends with {steps[-1][1]}, and global_batch_size={config.global_batch_size}; leave "
            "--global-batch-size out, or use the same"
        )
    return None


def _evaluation_batch(config: Config) -> str | None:
    size, micro, dp = config.training.eval_global_batch_size, config.training.micro_batch_size, config.layout.dp
    if size is None or size % (micro * dp) == 0:
        return None
    return (
        f"eval_global_batch_size={size} must be divisible by micro_batch_size={micro} x data_parallel_size={dp}; "
        f"use --eval-global-batch-size {max(1, round(size / (micro * dp))) * micro * dp}"
    )


def _length_of_run(config: Config) -> str | None:
    training = config.training
    if training.train_iters is not None or training.train_samples is not None or training.num_epochs is not None:
        return None
    for name in _IN_SAMPLES:
        if given := getattr(config.optimizer, name):
            return (
                f"{name}={given} counts samples, so the length of the run is one in samples, and none is given; add "
                f"--train-samples, or use {FIELDS[name.replace('_samples', '_iters')].flag}"
            )
    return "the length of the run is not given; add --train-iters, --train-samples or --num-epochs"


_IN_SAMPLES = ("lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples")


def _at_least_a_step(config: Config) -> str | None:
    samples, batch = config.training.train_samples, config.global_batch_size
    if samples is None or samples >= batch:
        return None
    return f"train_samples={samples} must be at least global_batch_size={batch}; train longer, or on smaller batches"


def _loss_scales(config: Config) -> str | None:
    training = config.training
    if not training.fp16 or training.min_loss_scale <= training.initial_loss_scale:
        return None
    return (
        f"min_loss_scale={training.min_loss_scale} must not exceed initial_loss_scale={training.initial_loss_scale}; "
        "use a smaller one, or a larger --initial-loss-scale"
    )


def _reduction_in_bf16(config: Config) -> str | None:
    if not config.parallel.grad_reduce_in_bf16 or config.training.bf16:
        return None
    return (
        f"grad_reduce_in_bf16 rounds gradients further than a run in {config.training.precision} does; "
        "add --bf16, or leave it out"
    )


BATCH_RULES = (
    ConfigRule(_BATCH, _batches),
    ConfigRule((*_BATCH, "rampup_batch_size"), _ramp_up),
    ConfigRule((*_BATCH, "step_batch_size_schedule", "seq_length"), _step_wise),
    ConfigRule((*_BATCH, "eval_global_batch_size"), _evaluation_batch),
    ConfigRule(("train_iters", "train_samples", "num_epochs", *_IN_SAMPLES), _length_of_run),
    ConfigRule((*_BATCH, "train_samples"), _at_least_a_step),
)

PRECISION_RULES = (
    ConfigRule(("fp16", "initial_loss_scale", "min_loss_scale"), _loss_scales),
    ConfigRule(("bf16", "fp16", "grad_reduce_in_bf16"), _reduction_in_bf16),
)

_FULL_ONLY = (
    "recompute_method",
    "recompute_num_layers",
    "distribute_saved_activations",
    "offload_saved_activations",
)


def _recompute(config: Config) -> str | None:
    recompute, parallel = config.recompute, config.parallel
    granularity, setting = recompute.recompute_granularity, f"recompute_granularity={recompute.recompute_granularity}"
    if granularity != "full":
        for name in _FULL_ONLY:
            if (value := getattr(recompute, name)) != FIELDS[name].default:
                return (
                    f"{name}={str(value).lower()} belongs to full recomputation, not to {setting.lower()}; "
                    f"add --recompute-granularity full, or leave {FIELDS[name].flag} out"
                )
    if recompute.distribute_saved_activations:
        rule = "distribute_saved_activations shares them over tensor_model_parallel_size"
        if parallel.tensor_model_parallel_size == 1:
            return f"{rule}, which is 1; add --tp 2, or leave it out"
        if parallel.sequence_parallel:
            return f"{rule}, which --sequence-parallel does already; leave one of them out"
    return None


_OF_MOE = ("moe_act", "shared_experts")


def _recompute_modules(config: Config) -> str | None:
    recompute, model, flag = config.recompute, config.model, FIELDS["recompute_modules"].flag
    named = recompute.recompute_modules
    if not named:
        return None
    if recompute.recompute_granularity is None:
        return (
            f"recompute_modules={','.join(named)} belongs to selective recomputation, and recompute_granularity=none; "
            f"add --recompute-granularity selective, or leave {flag} out"
        )
    if recompute.recompute_granularity == "full":  # as in Megatron-LM: whole layers have these parts
        return None
    placement = model.placement
    has_norms = placement not in ("post", "output")
    needs = {
        "moe": ("experts", model.num_experts is not None, "num_experts=none"),
        "moe_act": ("experts", model.num_experts is not None, "num_experts=none"),
        "shared_experts": (
            "shared experts",
            model.moe_shared_expert_intermediate_size is not None,
            "moe_shared_expert_intermediate_size=none",
        ),
        "mla_up_proj": ("latent attention", model.multi_latent_attention, "multi_latent_attention=false"),
        "layernorm": ("norms before attention and MLP", has_norms, f"their norms are placed {placement}"),
    }
    for name in named:
        if named.count(name) > 1:
            return f"recompute_modules has {name} {named.count(name)} times; name it once"
        what, is_there, setting = needs.get(name, ("", True, ""))
        if not is_there:
            return f"recompute_modules={name} needs {what}, and {setting}; leave it out of {flag}"
        if name in _OF_MOE and "moe" in named:
            return f"recompute_modules=moe computes {name} again, too; leave one of them out of {flag}"
    return None


RECOMPUTE_RULES = (
    ConfigRule(("recompute_granularity", *_FULL_ONLY, "tensor_model_parallel_size", "sequence_parallel"), _recompute),
    ConfigRule(
        (
            *("recompute_granularity", "recompute_modules", "num_experts", "moe_shared_expert_intermediate_size"),
            *("multi_latent_attention", "norm_placement", "model_type"),
        ),
        _recompute_modules,
    ),
)

SCHEDULES_OF_ONE_CHUNK = ("1f1b", "gpipe")
_ZERO = ("zero_stage", "use_distributed_optimizer")
_REPLAYED = "cuda_graph replays micro-batches in which nothing is sent or waited for"


def _device(config: Config) -> str | None:
    if not config.training.cuda_graph or config.parallel.device != "cpu":
        return None
    return "cuda_graph needs a GPU, but device=cpu; leave --cuda-graph out, or leave --device out"


def _cuda_graph(config: Config) -> str | None:
    """Complaint about what a captured forward or backward would send, wait for, or freeze at its first value."""
    if not config.training.cuda_graph:
        return None
    parallel = config.parallel
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            return f"{_REPLAYED}, but {name}={size} sends in every one; use {FIELDS[name].flag} 1, or leave it out"
    if parallel.schedule not in SCHEDULES_OF_ONE_CHUNK:
        return (
            f"cuda_graph needs one chunk and its whole backward; use --pipeline-schedule 1f1b, not {parallel.schedule}"
        )
    if parallel.zero > 1:
        return (
            f"{_REPLAYED}, but zero_stage={parallel.zero} sends in every one; use --zero-stage 0 or 1, or leave it out"
        )
    model = config.model
    if model.num_experts is not None:
        return f"{_REPLAYED}, but experts tell the host how many rows they get; leave --cuda-graph out"
    rates = {name: getattr(model, name) for name in ("hidden_dropout", "attention_dropout")}
    if config.adapter.is_used:
        rates["lora_dropout"] = config.adapter.lora_dropout
    for name, rate in rates.items():
        if rate > 0:
            return f"cuda_graph would replay one dropout mask, but {name}={rate}; use {FIELDS[name].flag} 0"
    if config.recompute.offload_saved_activations:
        return f"{_REPLAYED}, but offload_saved_activations waits for the CPU's memory; leave one of them out"
    return None


def _something_left(config: Config) -> str | None:
    """Complaint about data ranks of which every micro-batch sends: the last one, and with ZeRO-1 the first one."""
    dp, zero = config.layout.dp, config.parallel.zero
    if not config.training.cuda_graph or dp == 1:
        return None
    least = 2 + (zero > 0)
    number = config.global_batch_size // (config.training.micro_batch_size * dp)
    if number >= least:
        return None
    size = least * config.training.micro_batch_size * dp
    return (
        f"{_REPLAYED}, but of {number} a step with data_parallel_size={dp} and zero_stage={zero} none is left; use "
        f"--global-batch-size {size} or more, or leave --cuda-graph out"
    )


CUDA_GRAPH_RULES = (
    ConfigRule(("cuda_graph", "device"), _device),
    ConfigRule(
        (
            *MESH,
            *("cuda_graph", *_ZERO, "num_experts", "hidden_dropout", "attention_dropout"),
            *("adapter_type", "lora_dropout"),
            *("pipeline_schedule", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
            "offload_saved_activations",
        ),
        _cuda_graph,
    ),
    ConfigRule((*MESH, "cuda_graph", *_ZERO, "global_batch_size", "micro_batch_size"), _something_left),
)
