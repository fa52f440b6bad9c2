"""Rule on --cuda-graph: micro-batches of which a graph can be replayed."""

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS
from megatronish.config.rules.rule import MESH, ConfigRule

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


RULES = (
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
