"""Rules on experts: how many, which layers, how they are chosen, and how they lie over the ranks."""

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, one_of
from megatronish.config.layer_pattern import parse_frequency
from megatronish.config.rules.rule import MESH, ConfigRule, divide
from megatronish.config.sections.model import ModelConfig

_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"


def _experts_over_ep(config: Config) -> str | None:
    number, ep = config.model.num_experts, config.parallel.expert_model_parallel_size
    return None if number is None else divide("num_experts", number, _EP, ep)


def _width_over_etp(config: Config) -> str | None:
    if config.model.num_experts is None:
        return None
    etp = config.parallel.expert_layout.etp
    if (width := config.model.expert_ffn_size) % etp == 0:
        return None
    sizes = [size for size in range(1, etp) if width % size == 0]
    return f"moe_ffn_hidden_size={width} must be divisible by {_ETP}={etp}; use --etp {one_of(sizes)}"


def _grid(config: Config) -> str | None:
    """Complaint about a grid of experts that does not fit the ranks of a stage."""
    if config.model.num_experts is None:
        return None
    layout, (ep, etp) = config.layout, config.parallel.expert_layout
    width = layout.dp * layout.cp * layout.tp
    if layout.tp % etp:
        sizes = [size for size in range(1, layout.tp + 1) if layout.tp % size == 0]
        return f"{_ETP}={etp} must divide tensor_model_parallel_size={layout.tp}; use --etp {one_of(sizes)}"
    if width % (ep * etp) == 0:
        return None
    sizes = [size for size in range(1, width + 1) if width % (size * etp) == 0]
    return (
        f"{_EP}={ep} x {_ETP}={etp} must divide the ranks of a stage, data_parallel_size={layout.dp} x "
        f"context_parallel_size={layout.cp} x tensor_model_parallel_size={layout.tp} = {width}; "
        f"use --ep {one_of(sizes)}, or --etp 1"
    )


def _copies(config: Config) -> str | None:
    """Complaint about copies of shards (HSDP) that the experts' own data ranks cannot form."""
    copies = config.parallel.num_distributed_optimizer_instances
    if config.model.num_experts is None or copies == 1:
        return None
    layout, (ep, etp) = config.layout, config.parallel.expert_layout
    edp = layout.dp * layout.cp * layout.tp // (ep * etp)
    if edp % copies == 0:
        return None
    return (
        f"num_distributed_optimizer_instances={copies} must divide the {edp} ranks that hold copies of an expert; "
        f"use {one_of(size for size in range(1, edp + 1) if edp % size == 0)}, or a smaller --ep"
    )


def _neighbours(config: Config) -> str | None:
    """Complaint about neighbours (hpZ) that do not hold every expert alike, and more than once."""
    number = config.parallel.zero_hpz_partition_size
    if config.model.num_experts is None or number is None or config.parallel.zero < 3:
        return None
    layout, (ep, etp) = config.layout, config.parallel.expert_layout
    ranks, grid = number * layout.tp, ep * etp
    if ranks % grid == 0 and ranks > grid:
        return None
    shared = layout.dp * layout.cp // config.parallel.num_distributed_optimizer_instances
    sizes = [
        size
        for size in range(2, shared)
        if shared % size == 0 and size * layout.tp % grid == 0 and size * layout.tp > grid
    ]
    remedy = f"use --zero-hpz-partition-size {one_of(sizes)}, or" if sizes else "use"
    return (
        f"zero_hpz_partition_size={number} x tensor_model_parallel_size={layout.tp} = {ranks} ranks must hold each "
        f"expert several times, and {_EP}={ep} x {_ETP}={etp} = {grid} hold it once; {remedy} a smaller --ep, or leave "
        "--zero-hpz-partition-size out"
    )


def _sequence_over_tp(config: Config) -> str | None:
    """Complaint about tokens that tp ranks cannot share out for the router."""
    layout, length = config.layout, config.training.seq_length
    if config.model.num_experts is None or length % (layout.cp * layout.tp) == 0:
        return None
    return (
        f"seq_length={length} must be divisible by context_parallel_size={layout.cp} x "
        f"tensor_model_parallel_size={layout.tp}, as each rank routes a part of the tokens; "
        f"use --seq-length {-(-length // (layout.cp * layout.tp)) * layout.cp * layout.tp}"
    )


def _layers(config: Config) -> str | None:
    model = config.model
    if model.num_experts is None:
        return None
    try:
        pattern = parse_frequency(model.moe_layer_freq)
    except ValueError as error:
        return f"moe_layer_freq={error}"
    if isinstance(pattern, int):
        return (
            None if pattern >= 1 else f"moe_layer_freq={pattern} must be at least 1; use 1 for experts in every layer"
        )
    if len(pattern) != model.num_layers or not set(pattern) <= {0, 1}:
        return (
            f"moe_layer_freq={model.moe_layer_freq} must have num_layers={model.num_layers} entries of 0 or 1; "
            f"use ([0]*1+[1]*{model.num_layers - 1}) for a first dense layer"
        )
    if not any(pattern):
        return f"moe_layer_freq={model.moe_layer_freq} has no layer with experts; leave --num-experts out"
    return None


def _chosen(config: Config) -> str | None:
    model = config.model
    if model.num_experts is None:
        return None
    chosen, groups, kept = model.moe_router_topk, model.moe_router_num_groups, model.moe_router_group_topk
    best = model.moe_router_scores_per_group
    if chosen > model.num_experts:
        return f"moe_router_topk={chosen} must be at most num_experts={model.num_experts}; choose fewer"
    if groups is None and kept is None:
        lost = "moe_router_scores_per_group is of groups of experts; add --moe-router-num-groups, or leave it out"
        return None if best is None else lost
    if groups is None or kept is None:
        return "moe_router_num_groups and moe_router_group_topk belong together; add the other"
    if model.num_experts % groups:
        return divide("num_experts", model.num_experts, "moe_router_num_groups", groups)
    size = model.num_experts // groups
    if best is not None:
        return _limited_choice(model, size)
    fitting = [kept for kept in range(1, groups + 1) if chosen % kept == 0 and chosen // kept <= size]
    if kept not in fitting:
        remedy = f"use --moe-router-group-topk {one_of(fitting)}" if fitting else "use fewer groups"
        return (
            f"moe_router_group_topk={kept} of moe_router_num_groups={groups}, of {size} experts each, must divide "
            f"moe_router_topk={chosen} into parts that a group can give; {remedy}"
        )
    return None


def _limited_choice(model: ModelConfig, size: int) -> str | None:
    """Complaint about groups of this size, with a number of scores of their own, that cannot give so many experts."""
    chosen, groups, kept = model.moe_router_topk, model.moe_router_num_groups, model.moe_router_group_topk
    best = model.moe_router_scores_per_group
    assert groups is not None and kept is not None and best is not None
    if best > size:
        return f"moe_router_scores_per_group={best} must be at most the {size} experts of a group; use a smaller one"
    if not -(-chosen // size) <= kept <= groups:
        return (
            f"moe_router_group_topk={kept} of moe_router_num_groups={groups}, of {size} experts each, must leave "
            f"moe_router_topk={chosen} experts to choose; use {-(-chosen // size)} to {groups}"
        )
    return None


def _idle_choices(config: Config) -> str | None:
    """Complaint about options of one kind of score with another."""
    model = config.model
    if model.num_experts is None:
        return None
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        return "moe_router_enable_expert_bias is added to sigmoid scores; add --moe-router-score-function sigmoid"
    if model.moe_router_norm_topk_prob and not model.moe_router_pre_softmax:
        return "moe_router_norm_topk_prob belongs to --moe-router-pre-softmax; without it the weights sum to 1 anyway"
    if model.moe_router_score_function == "sparsemixer":
        names = ("moe_router_pre_softmax", "moe_router_num_groups")
        other = next((name for name in names if getattr(model, name)), None)
        if other is not None:
            return (
                f"{other} is not for moe_router_score_function=sparsemixer, whose experts are compared by their "
                f"logits, one after the other; leave {FIELDS[other].flag} out"
            )
    if model.moe_apply_probs_on_input and model.moe_router_topk != 1:
        return (
            f"moe_apply_probs_on_input is for one expert a token, and moe_router_topk={model.moe_router_topk}; use "
            "--moe-router-topk 1, or leave it out"
        )
    if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is None:
        return "moe_shared_expert_gate gates shared experts; add --moe-shared-expert-intermediate-size"
    return None


def _upcycling(config: Config) -> str | None:
    """Complaint about experts that cannot be copies of a dense MLP."""
    keep, model = config.checkpoint, config.model
    if not keep.moe_use_upcycling:
        return None
    if model.num_experts is None:
        return "moe_use_upcycling makes experts of a dense model; add --num-experts, or leave it out"
    if keep.load is None and keep.load_hf is None:
        return "moe_use_upcycling starts from a dense model, and none is given; add --load DIR or --load-hf DIR"
    if model.expert_ffn_size != model.ffn_size:
        return (
            f"moe_ffn_hidden_size={model.expert_ffn_size} must be ffn_hidden_size={model.ffn_size} with "
            "moe_use_upcycling, as each expert is a copy of the MLP; leave --moe-ffn-hidden-size out"
        )
    if (shared := model.moe_shared_expert_intermediate_size) is not None:
        return (
            f"moe_shared_expert_intermediate_size={shared} with moe_use_upcycling would be experts without weights; "
            "leave one of the two out"
        )
    if model.moe_add_bias_linear:
        return "moe_use_upcycling makes experts without biases; leave --moe-add-bias-linear out"
    if model.mlp_bias:
        return "moe_use_upcycling cannot keep the biases of an MLP: experts have none; start from a model without them"
    return None


def _alike(config: Config) -> str | None:
    """Complaint about experts that start alike, of which nothing tells the router to choose one.

    Where the weights of a token sum to 1, the output is the same for every choice: the router's gradient is zero but
    for rounding, which Adam makes whole steps of, in each layout others. The global loss is zero in the first step.
    """
    model, is_balanced = config.model, config.model.moe_z_loss_coeff > 0
    if model.moe_router_load_balancing_type == "seq_aux_loss":
        is_balanced = is_balanced or model.moe_aux_loss_coeff > 0
    sums_to_one = not model.moe_router_pre_softmax or model.moe_router_norm_topk_prob
    sums_to_one = sums_to_one and model.moe_router_score_function != "sparsemixer"
    keep = config.checkpoint
    is_upcycled = keep.moe_use_upcycling and model.num_experts is not None and (keep.load or keep.load_hf) is not None
    if not is_upcycled or is_balanced or not sums_to_one:
        return None
    return (
        "moe_use_upcycling makes experts that are alike, and without a balancing loss from the first step on a router "
        "would follow rounding alone; add --moe-aux-loss-coeff 0.01 with seq_aux_loss, or --moe-z-loss-coeff 0.001"
    )


def _bias_over_etp(config: Config) -> str | None:
    """Complaint about biases of experts whose columns etp cannot share out."""
    model, etp = config.model, config.parallel.expert_layout.etp
    if model.num_experts is None or not model.moe_add_bias_linear or model.hidden_size % etp == 0:
        return None
    sizes = [size for size in range(1, etp) if model.hidden_size % size == 0]
    return (
        f"hidden_size={model.hidden_size} must be divisible by {_ETP}={etp} with moe_add_bias_linear, as each rank "
        f"adds a part of a bias; use --etp {one_of(sizes)}"
    )


def _shared_over_tp(config: Config) -> str | None:
    """Complaint about shared experts that tp cannot cut."""
    shared, tp = config.model.moe_shared_expert_intermediate_size, config.parallel.tensor_model_parallel_size
    if config.model.num_experts is None or shared is None:
        return None
    return divide("moe_shared_expert_intermediate_size", shared, "tensor_model_parallel_size", tp)


def _padding(config: Config) -> str | None:
    """Complaint about rows that are padded to a capacity that there is not."""
    if config.model.num_experts is None or not config.parallel.moe_pad_expert_input_to_capacity:
        return None
    if config.model.moe_expert_capacity_factor is not None:
        return None
    return (
        "moe_pad_expert_input_to_capacity sends as many rows as a capacity leaves, and none is given; add "
        "--moe-expert-capacity-factor, or use --moe-expert-rank-capacity-factor 1.5 instead, which drops no token"
    )


def _rooms_by_deep_ep(config: Config) -> str | None:
    """Complaint about rooms that DeepEP does not know."""
    parallel = config.parallel
    if config.model.num_experts is None or parallel.moe_token_dispatcher_type != "deepep":
        return None
    factor, pads = parallel.moe_expert_rank_capacity_factor, parallel.moe_pad_expert_input_to_capacity
    if factor is None and not pads:
        return None
    asked = "moe_pad_expert_input_to_capacity" if factor is None else f"moe_expert_rank_capacity_factor={factor:g}"
    return (
        f"{asked} is of all-to-all, and moe_token_dispatcher_type=deepep counts tokens before they go; leave one of "
        "both out"
    )


_FFN = ("ffn_hidden_size", "hidden_size", "swiglu", "geglu", "quick_geglu")
_ROUTER = (
    "moe_router_enable_expert_bias",
    "moe_router_score_function",
    "moe_router_norm_topk_prob",
    "moe_router_pre_softmax",
    "moe_router_num_groups",
)
_GRID = (*MESH, _EP, _ETP, "num_experts")

RULES = (
    ConfigRule((_EP, "num_experts"), _experts_over_ep),
    ConfigRule(
        (_ETP, _EP, "tensor_model_parallel_size", "num_experts", "moe_ffn_hidden_size", *_FFN),
        _width_over_etp,
    ),
    ConfigRule(_GRID, _grid),
    ConfigRule((*_GRID, "num_distributed_optimizer_instances"), _copies),
    ConfigRule(
        (
            *(*_GRID, "zero_stage", "use_distributed_optimizer"),
            *("num_distributed_optimizer_instances", "zero_hpz_partition_size"),
        ),
        _neighbours,
    ),
    ConfigRule((*MESH, "num_experts", "seq_length"), _sequence_over_tp),
    ConfigRule(("num_experts", "moe_layer_freq", "num_layers"), _layers),
    ConfigRule(
        (
            *("num_experts", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk"),
            "moe_router_scores_per_group",
        ),
        _chosen,
    ),
    ConfigRule(
        (
            *("moe_use_upcycling", "num_experts", "load", "load_hf", "moe_ffn_hidden_size", "disable_bias_linear"),
            "add_mlp_bias",
            *("moe_shared_expert_intermediate_size", "moe_add_bias_linear", *_FFN),
        ),
        _upcycling,
    ),
    ConfigRule(
        (
            *(
                "moe_use_upcycling",
                "load",
                "load_hf",
                "num_experts",
                "moe_router_load_balancing_type",
                "moe_aux_loss_coeff",
            ),
            *("moe_z_loss_coeff", "moe_router_pre_softmax", "moe_router_norm_topk_prob"),
            "moe_router_score_function",
        ),
        _alike,
    ),
    ConfigRule(
        ("moe_add_bias_linear", "hidden_size", _ETP, _EP, "tensor_model_parallel_size", "num_experts"),
        _bias_over_etp,
    ),
    ConfigRule(
        ("moe_shared_expert_intermediate_size", "tensor_model_parallel_size", "num_experts"),
        _shared_over_tp,
    ),
    ConfigRule(("moe_pad_expert_input_to_capacity", "moe_expert_capacity_factor", "num_experts"), _padding),
    ConfigRule(
        (
            *("moe_token_dispatcher_type", "moe_expert_rank_capacity_factor", "moe_pad_expert_input_to_capacity"),
            "num_experts",
        ),
        _rooms_by_deep_ep,
    ),
    ConfigRule(
        (
            *_ROUTER,
            "num_experts",
            "moe_apply_probs_on_input",
            "moe_router_topk",
            "moe_shared_expert_gate",
            "moe_shared_expert_intermediate_size",
        ),
        _idle_choices,
    ),
)
