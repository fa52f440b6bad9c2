"""Rules on layouts of ranks: what tp and cp cut, the backend, and ZeRO: shares, copies of them, and offloading."""

import math

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, one_of
from megatronish.config.rules.rule import LARGEST_NAMED, MESH, ConfigRule, divide
from megatronish.config.sections.model import ModelConfig
from megatronish.parallel.schedules.table import SCHEDULES

_TP = "tensor_model_parallel_size"
_CP = "context_parallel_size"


def _heads_over_tp(config: Config) -> str | None:
    tp = config.parallel.tensor_model_parallel_size
    return divide("num_attention_heads", config.model.num_attention_heads, "tensor_model_parallel_size", tp)


def _key_value_heads_over_tp(config: Config) -> str | None:
    """Complaint about key/value heads that ranks can neither share out nor share, a head for several of them."""
    tp, model = config.parallel.tensor_model_parallel_size, config.model
    heads, sharers = model.num_kv_heads, tp // model.num_kv_heads
    if model.multi_latent_attention or heads == model.num_attention_heads or heads % tp == 0:
        return None
    size = model.head_size
    setting, remedy = f"num_query_groups={heads}", f"use --tensor-model-parallel-size {_smaller(model, tp)}"
    if tp % heads:
        return (
            f"one of {setting} and tensor_model_parallel_size={tp} must divide the other: a rank has whole key/value "
            f"heads, or several ranks share one; {remedy}"
        )
    if size % sharers == 0:
        return None
    return (
        f"with {setting} and tensor_model_parallel_size={tp} {sharers} ranks share a key/value head, so they must "
        f"divide its {size} channels; {remedy}"
    )


def _smaller(model: ModelConfig, most: int) -> str:
    """Sizes of tp below `most` over which heads can be cut, as a remedy names them."""
    heads, groups, size = model.num_attention_heads, model.num_kv_heads, model.head_size
    below = [tp for tp in range(1, min(most, LARGEST_NAMED)) if heads % tp == 0]
    return one_of([tp for tp in below if groups % tp == 0 or (tp % groups == 0 and size % (tp // groups) == 0)])


def _ffn_over_tp(config: Config) -> str | None:
    model = config.model
    if model.ffn_size < 1:
        return (
            f"ffn_hidden_size derived from hidden_size={model.hidden_size} is 0, as swiglu's 8/3 of it is rounded down "
            "to a multiple of 64; add --ffn-hidden-size"
        )
    tp = config.parallel.tensor_model_parallel_size
    return divide("ffn_hidden_size", model.ffn_size, "tensor_model_parallel_size", tp)


def _multiple(config: Config, of: int, why: str) -> str | None:
    """Complaint about a sequence that is not cut into equal pieces; of two sides each has a rule of its own."""
    length = config.training.seq_length
    if length % of == 0 or config.model.has_encoder:
        return None
    return f"seq_length={length} must be divisible by {why} = {of}; use --seq-length {-(-length // of) * of}"


def _sequence_over_cp(config: Config) -> str | None:
    cp = config.parallel.context_parallel_size
    return _multiple(config, 2 * cp, f"2 x context_parallel_size={cp}") if cp > 1 else None


def _sequence_over_tp(config: Config) -> str | None:
    cp, tp = config.parallel.context_parallel_size, config.parallel.tensor_model_parallel_size
    if not config.parallel.sequence_parallel or _sequence_over_cp(config):
        return None
    cut = f"tensor_model_parallel_size={tp}"
    pieces = tp
    if cp > 1:
        pieces = math.lcm(2 * cp, cp * tp)
        cut = f"both 2 x context_parallel_size={cp} and context_parallel_size x {cut}"
    complaint = _multiple(config, pieces, cut)
    return f"{complaint}, or leave --sequence-parallel out" if complaint else None


def _pieces(config: Config) -> str | None:
    parallel = config.parallel
    if not parallel.tp_comm_overlap or parallel.sequence_parallel or parallel.tensor_model_parallel_size == 1:
        return None
    return "tp_comm_overlap cuts products where the sequence is cut; add --sequence-parallel"


def _heads_over_cp(config: Config) -> str | None:
    cp, tp = config.parallel.context_parallel_size, config.parallel.tensor_model_parallel_size
    heads = config.model.num_attention_heads
    if cp == 1 or config.parallel.cp_comm_type != "a2a" or heads % tp or heads // tp % cp == 0:
        return None
    return (
        f"cp_comm_type=a2a trades sequence for heads: num_attention_heads={heads} / tensor_model_parallel_size={tp} "
        f"= {heads // tp} must be divisible by context_parallel_size={cp}; use --cp-comm-type p2p, which cuts no heads"
    )


def _attention_over_cp(config: Config) -> str | None:
    backend, cp = config.training.attention_backend, config.parallel.context_parallel_size
    if cp == 1 or config.parallel.cp_comm_type == "a2a" or backend in ("auto", "flash"):
        return None
    return (
        f"attention_backend={backend} needs the scores of whole rows, and with context_parallel_size={cp} and "
        "cp_comm_type=p2p a rank sees them block by block; use --cp-comm-type a2a, or --attention-backend auto"
    )


def _backend(config: Config) -> str | None:
    if config.parallel.distributed_backend == "nccl" and config.parallel.device == "cpu":
        return "distributed_backend=nccl needs CUDA, but device=cpu; use --distributed-backend gloo, or --device cuda"
    return None


CUT_RULES = (
    ConfigRule(("num_attention_heads", _TP), _heads_over_tp),
    ConfigRule(
        (
            *("num_attention_heads", "num_query_groups", "group_query_attention", "multi_latent_attention"),
            *("kv_channels", "hidden_size", _TP),
        ),
        _key_value_heads_over_tp,
    ),
    ConfigRule(("ffn_hidden_size", "hidden_size", "swiglu", _TP), _ffn_over_tp),
    ConfigRule(("seq_length", "model_type", _CP), _sequence_over_cp),
    ConfigRule(("seq_length", "model_type", "sequence_parallel", _TP, _CP), _sequence_over_tp),
    ConfigRule(("tp_comm_overlap", "sequence_parallel", _TP), _pieces),
    ConfigRule(("num_attention_heads", "cp_comm_type", _TP, _CP), _heads_over_cp),
    ConfigRule(("attention_backend", "cp_comm_type", _CP), _attention_over_cp),
)

BACKEND_RULES = (ConfigRule(("distributed_backend", "device"), _backend),)

STREAMED_OPTIMIZERS = ("adam", "sgd", "muon")
"""Optimizers that go through masters and states on a disk chunk by chunk."""

_ZERO = ("zero_stage", "use_distributed_optimizer")
_SCHEDULE = ("pipeline_schedule", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


def _zero(config: Config) -> str | None:
    parallel = config.parallel
    stage, schedule = parallel.zero, parallel.schedule
    if parallel.use_distributed_optimizer and parallel.zero_stage == 0:
        return "use_distributed_optimizer=true is ZeRO-1 and contradicts zero_stage=0; leave one of them out"
    if stage >= 2 and SCHEDULES[schedule].has_weight_gradients:
        return (
            f"zero_stage={stage} exchanges gradients after every backward, but pipeline_schedule={schedule} computes "
            "those of weights later; use --zero-stage 1, or --pipeline-schedule 1f1b"
        )
    return None


def _copies(config: Config) -> str | None:
    copies, dp, cp = config.parallel.num_distributed_optimizer_instances, config.layout.dp, config.layout.cp
    setting = f"num_distributed_optimizer_instances={copies}"
    if config.parallel.outer_optimizer is not None:
        if dp % copies == 0:
            return None
        sizes = [size for size in range(1, dp + 1) if dp % size == 0]
        return (
            f"{setting} islands of outer_optimizer={config.parallel.outer_optimizer} must divide "
            f"data_parallel_size={dp}, as an island has whole sequences; use --dp-replicate {one_of(sizes)}"
        )
    if copies > 1 and config.parallel.zero == 0:
        return f"{setting} groups of ranks share nothing with zero_stage=0; add --zero-stage 1, 2 or 3, or leave it out"
    if dp * cp % copies == 0:
        return None
    sizes = [size for size in range(1, dp * cp + 1) if dp * cp % size == 0]
    return (
        f"{setting} must divide data_parallel_size={dp} x context_parallel_size={cp} = {dp * cp}, as groups are of one "
        f"size; use --num-distributed-optimizer-instances {one_of(sizes)}"
    )


def _codes(config: Config) -> str | None:
    """Complaint about gradients that cannot be sent as codes (qgZ)."""
    parallel = config.parallel
    setting = f"zero_quantized_gradients={parallel.zero_quantized_gradients}"
    if parallel.zero_quantized_gradients is None:
        return None
    if parallel.zero == 0:
        return (
            f"{setting} sends each rank the part that it keeps, and zero_stage=0 keeps all of it everywhere; add "
            + ("--zero-stage 1, 2 or 3, or leave --zero-quantized-gradients out")
        )
    if parallel.grad_reduce_in_bf16:
        return f"{setting} sends codes, and grad_reduce_in_bf16=true sends bf16; leave one of them out"
    return None


def _weights(config: Config) -> str | None:
    """Complaint about weights that cannot be codes (qwZ)."""
    parallel, block = config.parallel, config.parallel.zero_quantized_weights_block
    setting = f"zero_quantized_weights={parallel.zero_quantized_weights}"
    if parallel.zero_quantized_weights is None:
        if block == FIELDS["zero_quantized_weights_block"].default:
            return None
        return (
            f"zero_quantized_weights_block={block} is of weights as codes, and there are none; add "
            "--zero-quantized-weights int8, or leave it out"
        )
    if block % 8:
        nearest = max(8, block // 8 * 8)
        return (
            f"zero_quantized_weights_block={block} must be a multiple of 8, so that blocks begin where vector loads do"
            f"; use --zero-quantized-weights-block {nearest}"
        )
    if config.adapter.is_used:
        return (
            f"{setting} rounds what learns, and adapter_type={config.adapter.adapter_type} adds few weights to a "
            "frozen base; use --quantize-base int8 for the base, or leave --zero-quantized-weights out"
        )
    if config.reference == "model":
        return (
            f"{setting} rounds the model that learns, and not the frozen one of reference=model: they would differ "
            "from the first step on; use --reference stored, or leave --zero-quantized-weights out"
        )
    return None


def _neighbours(config: Config) -> str | None:
    """Complaint about neighbours that cannot keep what ZeRO-3 has gathered (hpZ)."""
    parallel, number = config.parallel, config.parallel.zero_hpz_partition_size
    if number is None:
        return None
    setting = f"zero_hpz_partition_size={number}"
    if parallel.zero < 3:
        return (
            f"{setting} ranks keep what has been gathered, and zero_stage={parallel.zero} shares no parameters; "
            "add --zero-stage 3, or leave it out"
        )
    ranks = config.layout.dp * config.layout.cp // parallel.num_distributed_optimizer_instances
    if 1 < number < ranks and ranks % number == 0:
        return None
    sizes = [size for size in range(2, ranks) if ranks % size == 0]
    return (
        f"{setting} must divide the {ranks} ranks that share a parameter, data_parallel_size x context_parallel_size / "
        f"num_distributed_optimizer_instances, into several groups of several ranks; "
        + (f"use --zero-hpz-partition-size {one_of(sizes)}" if sizes else "leave it out")
    )


def _offload(config: Config) -> str | None:
    parallel = config.parallel
    if parallel.param_cpu_offload and parallel.zero < 3:
        return (
            f"param_cpu_offload keeps shares of parameters in the CPU's memory, and zero_stage={parallel.zero} shares "
            "no parameters; add --zero-stage 3, or leave it out"
        )
    if parallel.optimizer_cpu_offload and parallel.zero == 0:
        return (
            "optimizer_cpu_offload lets the CPU of each rank step its share, and zero_stage=0 shares nothing; "
            "add --zero-stage 1, 2 or 3, or leave it out"
        )
    return None


def _offload_folder(config: Config) -> str | None:
    parallel, name = config.parallel, config.optimizer.optimizer
    folder = parallel.offload_folder
    if folder is None:
        return None
    if not folder.strip():
        return "offload_folder is empty; name a folder on a local disk, or leave --offload-folder out"
    if "://" in folder:
        return f"offload_folder={folder} is a URL, and is mapped into memory; name a folder on a local disk"
    if not (parallel.optimizer_cpu_offload or parallel.param_cpu_offload):
        return (
            f"offload_folder={folder} is where what is offloaded lives, and nothing is offloaded; add "
            "--optimizer-cpu-offload, or --param-cpu-offload with --zero-stage 3, or leave it out"
        )
    if name not in STREAMED_OPTIMIZERS:
        return (
            f"offload_folder={folder} holds the states of {one_of(STREAMED_OPTIMIZERS)}, and optimizer={name} of a "
            "plug-in keeps its own in memory; use one of these, or leave --offload-folder out"
        )
    return None


def _outer(config: Config) -> str | None:
    """Complaint about settings of an outer step that there is not, or that does not know what an island keeps."""
    parallel, model = config.parallel, config.model
    if parallel.outer_optimizer is None:
        given = [name for name in _OUTER if getattr(parallel, name) != FIELDS[name].default]
        if not given:
            return None
        return (
            f"{given[0]}={getattr(parallel, given[0])} is of an outer step, and there is none; add --outer-optimizer "
            f"nesterov, or leave {FIELDS[given[0]].flag} out"
        )
    if config.checkpoint.no_save_optim:
        return (
            f"no_save_optim leaves out what an island of outer_optimizer={parallel.outer_optimizer} has of its own, "
            "and so what it has learned since the last outer step; leave --no-save-optim out"
        )
    if model.num_experts is None:
        return None
    if model.moe_router_enable_expert_bias:
        return (
            f"outer_optimizer={parallel.outer_optimizer} joins what gradients have moved, and the biases of "
            "moe_router_enable_expert_bias move by counts, in each island otherwise; balance experts by "
            "--moe-router-load-balancing-type seq_aux_loss, or leave --outer-optimizer out"
        )
    if model.moe_router_load_balancing_type == "global_aux_loss":
        return (
            "moe_router_load_balancing_type=global_aux_loss counts the choices of the whole step, and the islands of "
            f"outer_optimizer={parallel.outer_optimizer} train alone; use seq_aux_loss"
        )
    return None


_OUTER = ("outer_interval", "outer_lr", "outer_momentum", "outer_move_dtype")

ZERO_RULES = (
    ConfigRule((*_ZERO, *_SCHEDULE), _zero),
    ConfigRule((*_ZERO, *MESH, "num_distributed_optimizer_instances", "outer_optimizer"), _copies),
    ConfigRule(
        (
            *("outer_optimizer", *_OUTER, "num_experts", "no_save_optim"),
            *("moe_router_enable_expert_bias", "moe_router_load_balancing_type"),
        ),
        _outer,
    ),
    ConfigRule((*_ZERO, *MESH, "num_distributed_optimizer_instances", "zero_hpz_partition_size"), _neighbours),
    ConfigRule((*_ZERO, "zero_quantized_gradients", "grad_reduce_in_bf16"), _codes),
    ConfigRule(
        (
            *("zero_quantized_weights", "zero_quantized_weights_block", "adapter_type", "objective", "reference"),
            *("load", "load_hf"),
        ),
        _weights,
    ),
    ConfigRule((*_ZERO, "optimizer_cpu_offload", "param_cpu_offload"), _offload),
    ConfigRule(("offload_folder", "optimizer", "optimizer_cpu_offload", "param_cpu_offload"), _offload_folder),
)
