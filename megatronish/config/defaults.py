"""Fields of a config that follow from other fields, and notes about fields that nothing reads."""

import math
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.config.conflicts import LOSS_SCALE_RULE, TOKENS
from megatronish.config.fields import FIELDS
from megatronish.config.rules.rule import MESH
from megatronish.config.rules.t5 import SIDES
from megatronish.config.sections.data import MOCK_VOCAB_SIZE
from megatronish.config.sections.latent import SIZES
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.pattern import READ_BY
from megatronish.config.sections.run import LogConfig
from megatronish.config.sections.training import TrainingConfig, parse_batch_sizes
from megatronish.config.sections.width import OF_MUP
from megatronish.config.vocabulary_size import vocabulary_of_files
from megatronish.core.names import OPTIMIZER_NAMES

SHARED_OVER_TP = {"sequence_parallel": "shares norms and dropout", "tp_comm_overlap": "hides exchanges"}
EXPERT_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size")
EXPERT_ROWS = ("moe_expert_rank_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_dispatcher_type")


class Derived(NamedTuple):
    """Config with derived fields filled in, notes for the user, and complaints."""

    config: Config
    notes: list[str]
    problems: list[str]


def derive(config: Config, *, path: Path | None, world_size: int | None, invalid: Collection[str]) -> Derived:
    """Config with its derived fields filled in: data-parallel size, schedule, run folder and others."""
    # 1. The mesh. dp is what the world size leaves over; a plain start has no world size yet and takes the smallest
    # legal dp. With invalid sizes there would be a division by zero, and their complaint exists already.
    notes, problems = [], []
    if world_size is None and "world_size" not in invalid:
        world_size = config.log.world_size  # of a dry run
    sizes = {name: getattr(config.parallel, name) for name in MESH}
    if not set(MESH) & set(invalid) and all(size is None or size >= 1 for size in sizes.values()):
        problem = _world_size_complaint(config.parallel, world_size)
        problems += [problem] if problem else []
        model = config.parallel.model_parallel_size
        derived = smallest_dp(config) if world_size is None else max(1, world_size // model)
        config = config.with_fields(data_parallel_size=config.parallel.data_parallel_size or derived)
    # 2. Settings that have another meaning, or none, next to the rest: they are replaced, so that no later reader sees
    # both.
    if config.parallel.tensor_model_parallel_size == 1:
        for name, does in SHARED_OVER_TP.items():
            if getattr(config.parallel, name):
                config = config.with_fields(**{name: False})
                notes.append(f"{name} is off: it {does} over tensor_model_parallel_size, which is 1")
    config, of_tokens = _tokens_as_samples(_sums_of_sides(config), invalid)
    config, of_width = _factors_of_width(_objective_of_model(_last_batch_size(config, invalid)), invalid)
    notes += [*of_tokens, *of_width, *_idle_loss_scale(config.training)]
    config = config.with_fields(pipeline_schedule=config.parallel.schedule)
    # 3. Notes about what no part of this run reads. None of them changes the config, except for the sizes of a grid of
    # experts.
    parallel = config.parallel
    if parallel.context_parallel_size == 1 and parallel.cp_comm_type != "p2p":
        notes.append(f"cp_comm_type={parallel.cp_comm_type} is idle: context_parallel_size is 1")
    if parallel.pipeline_model_parallel_size == 1 and parallel.pipeline_split != "even":
        notes.append(f"pipeline_split={parallel.pipeline_split} is idle: pipeline_model_parallel_size is 1")
    counted = [
        name
        for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        if parallel.pipeline_model_parallel_size == 1 and getattr(parallel, name)
    ]
    if counted:
        notes.append(f"{', '.join(counted)}: idle, as pipeline_model_parallel_size is 1")
    if parallel.device == "cpu" and config.recompute.offload_saved_activations:
        notes.append("offload_saved_activations gains nothing: the device's memory is the CPU's")
    notes += _idle_sharing(config) + _idle_optimizer(config.optimizer) + _idle_log(config.log)
    notes += _idle_experts(config) + _idle_model(config.model) + _idle_recompute(config, invalid)
    if config.model.num_experts is None:  # no size of a grid that there is not: costs divide by them
        config = config.with_fields(expert_model_parallel_size=1, expert_tensor_parallel_size=None)
    # 4. Made-up tokens stand in for all files; the vocabulary remains, as the model's size depends on it.
    if config.data.mock_data:
        stand_ins = {"tokenizer_type": "null", "tokenizer_model": None, "vocab_file": None, "merge_file": None}
        given = config.data.vocab_size
        # A plan is of the run with its tokenizer; what trains on made-up tokens is quick.
        named = vocabulary_of_files(config.data) if given is None and config.log.dry_run else None
        config = config.with_fields(**stand_ins, vocab_size=given or named or MOCK_VOCAB_SIZE)
        ending = ", as many as the tokenizer has" if named else ""
        if given is None and named is None:
            ending = "; with --vocab-size it has yours, which memory and times depend on"
        size = f"{config.data.vocab_size} made-up tokens{ending}"
        notes.append(f"mock_data needs no file and no tokenizer: the vocabulary is {size}")
    if config.log.run_dir is None:
        config = config.with_fields(run_dir=f"runs/{path.stem if path else 'pretrain_gpt'}")
    return Derived(config, notes, problems)


def smallest_dp(config: Config) -> int:
    """Fewest copies of the model on a plain start: 1, or as many as hybrid sharding or the grid of experts needs."""
    parallel = config.parallel
    # Hybrid sharding cuts dp cp into groups, and the grid of experts cuts dp cp tp: each of the two must divide, so dp
    # must hold the factors that cp (and tp) do not have.
    groups = parallel.num_distributed_optimizer_instances if parallel.zero else 1
    fewest = max(1, groups // math.gcd(groups, parallel.context_parallel_size))
    if parallel.outer_optimizer is not None:  # islands have whole sequences
        fewest = parallel.num_distributed_optimizer_instances
    if config.model.num_experts is None:
        return fewest
    grid = math.prod(parallel.expert_layout)
    width = parallel.context_parallel_size * parallel.tensor_model_parallel_size
    return math.lcm(fewest, grid // math.gcd(grid, width))


def _tokens_as_samples(config: Config, invalid: Collection[str]) -> tuple[Config, list[str]]:
    """Config with lengths in samples for those in tokens, and a note. Of two lengths of a run the shorter counts."""
    tokens = {
        name: getattr(section, name)
        for name in TOKENS
        for section in (config.training, config.optimizer)
        if hasattr(section, name)
    }
    if all(value is None for value in tokens.values()) or {"seq_length", *TOKENS} & set(invalid):
        return config, []
    # Rounded down to whole samples, but a length above 0 stays above 0: no run becomes empty, and no warm-up
    # disappears.
    length, fields = max(1, config.training.seq_length), {}
    for name, value in tokens.items():
        if value is not None:
            fields[name.replace("tokens", "samples")] = value // length or min(1, value)
    if (samples := config.training.train_samples) is not None and "train_samples" in fields:
        fields["train_samples"] = min(samples, fields["train_samples"])
    note = f"of --seq-length {length} tokens each: {', '.join(f'{name}={value}' for name, value in fields.items())}"
    return config.with_fields(**dict.fromkeys(TOKENS), **fields), [note]


def _sums_of_sides(config: Config) -> Config:
    """Config of a T5 with the layers and the length that both sides have together, where they are not given."""
    for name, sides in SIDES.items():
        sizes = [getattr(config.model, side) for side in sides]
        section = config.model if name == "num_layers" else config.training
        if config.model.has_encoder and None not in sizes and not getattr(section, name):
            config = config.with_fields(**{name: sum(sizes)})
    return config


def _last_batch_size(config: Config, invalid: Collection[str]) -> Config:
    """Config whose global batch size, where it is not given, is the last of --step-batch-size-schedule."""
    training = config.training
    if not training.step_batch_size_schedule or training.global_batch_size or "seq_length" in invalid:
        return config
    try:
        steps = parse_batch_sizes(training.step_batch_size_schedule, seq_length=max(1, training.seq_length))
    except ValueError:  # the rules say so
        return config
    return config.with_fields(global_batch_size=steps[-1][1])


def _objective_of_model(config: Config) -> Config:
    """Config whose objective, where it is not given, is one that its kind of model is trained for."""
    if config.model.is_causal or config.training.objective != TrainingConfig.objective:
        return config
    return config.with_fields(objective="masked_lm")


def _factors_of_width(config: Config, invalid: Collection[str]) -> tuple[Config, list[str]]:
    """Config with the factors that muP gives its model, and a note."""
    model = config.model
    if not model.use_mup or {*OF_MUP, "hidden_size", "num_attention_heads", "kv_channels"} & set(invalid):
        return config, []
    if not all(math.isfinite(getattr(model, name) or 0.0) for name in OF_MUP):  # it has a complaint of its own
        return config, []
    with suppress(ArithmeticError, ValueError):  # of sizes and factors that the rules complain about
        factors = model.factors_of_width
        values = ", ".join(f"{name}={value:g}" for name, value in factors.items())
        note = f"use_mup: hidden matrices have their initial std / {math.sqrt(model.width_mult):g}, {values}"
        return replace(config, model=model.written_out), [note] if factors else []
    return config, []


def _idle_experts(config: Config) -> list[str]:
    """Notes about settings of experts in a model without experts, and about those of another kind of router."""
    if config.model.num_experts is not None:
        return _idle_router(config.model) + _idle_rooms(config.parallel)
    # Compared with the defaults: a field that was set to its default asks for nothing, so it needs no note.
    names = [*(name for name in vars(config.model) if name.startswith("moe_")), *EXPERT_SIZES, *EXPERT_ROWS]
    values = vars(config.model) | vars(config.parallel)
    given = [f"{name}={values[name]}" for name in names if values[name] != FIELDS[name].default]
    return [f"{', '.join(given)}: idle, as --num-experts is not given"] if given else []


def _idle_recompute(config: Config, invalid: Collection[str]) -> list[str]:
    """Note about MLPs to compute again in a model that has experts in their place."""
    model, of_layers = config.model, {"num_experts", "num_layers", "moe_layer_freq"}
    if of_layers & set(invalid) or "mlp" not in config.recompute.recompute_modules:
        return []
    with suppress(ArithmeticError, ValueError):  # of a pattern that the rules complain about
        if model.expert_layers and all(model.expert_layers):
            return ["recompute_modules=mlp: idle, as every layer has experts; moe computes those again"]
    return []


def _idle_rooms(parallel: ParallelConfig) -> list[str]:
    """Note about ways for rows that go nowhere."""
    given = [name for name in EXPERT_ROWS if getattr(parallel, name) != FIELDS[name].default]
    if not given or parallel.expert_model_parallel_size > 1:
        return []
    return [f"{', '.join(given)}: idle, as expert_model_parallel_size is 1, and no row leaves its rank"]


def _idle_model(model: ModelConfig) -> list[str]:
    """Notes about other options of the model that it does not read."""
    return [
        *(_idle_pattern(model) + _idle_latent(model) + _idle_temperature(model)),
        *(_idle_prediction(model) + _idle_mup(model)),
    ]


def _idle_pattern(model: ModelConfig) -> list[str]:
    """Note about options of block-sparse attention that this pattern, or none, does not read."""
    idle = [name for name in READ_BY["bigbird"] if name not in READ_BY[model.attention_pattern]]
    given = [f"{name}={getattr(model, name)}" for name in idle if getattr(model, name) != FIELDS[name].default]
    return [f"{', '.join(given)}: idle, as attention_pattern={model.attention_pattern}"] if given else []


def _idle_latent(model: ModelConfig) -> list[str]:
    """Note about sizes of latent attention in a model without it, and about the other way round."""
    if model.multi_latent_attention:
        if model.kv_channels is None:
            return []
        return [
            f"kv_channels={model.kv_channels}: idle, as the size of a head is --qk-head-dim and --qk-pos-emb-head-dim"
        ]
    given = [f"{name}={getattr(model, name)}" for name in SIZES if getattr(model, name) != FIELDS[name].default]
    return [f"{', '.join(given)}: idle, as --multi-latent-attention is not given"] if given else []


def _idle_temperature(model: ModelConfig) -> list[str]:
    """Note about a floor of a temperature that is not there."""
    name = "attn_temperature_floor"
    if model.attn_temperature_scale is not None or getattr(model, name) == FIELDS[name].default:
        return []
    return [f"{name}={getattr(model, name)}: idle, as --attn-temperature-scale is not given"]


def _idle_prediction(model: ModelConfig) -> list[str]:
    """Note about the weight of losses that the model does not have."""
    name = "mtp_loss_scaling_factor"
    if model.num_depths or (value := getattr(model, name)) == FIELDS[name].default:
        return []
    return [f"{name}={value}: idle, as --mtp-num-layers is not given"]


def _idle_mup(model: ModelConfig) -> list[str]:
    """Note about a base model that no width is compared with."""
    given = [f"{name}={getattr(model, name)}" for name in OF_MUP if getattr(model, name) != FIELDS[name].default]
    return [f"{', '.join(given)}: idle, as --use-mup is not given"] if given and not model.use_mup else []


def _idle_router(model: ModelConfig) -> list[str]:
    """Notes about settings that this kind of router does not read."""
    is_sigmoid, notes = model.moe_router_score_function == "sigmoid", []
    names = ("moe_router_pre_softmax", "moe_router_norm_topk_prob")
    if is_sigmoid and (given := [name for name in names if getattr(model, name)]):
        notes.append(f"{', '.join(given)}: idle, as the scores of experts are sigmoids")
    epsilon = "moe_sparsemixer_eps"
    if model.moe_router_score_function != "sparsemixer" and getattr(model, epsilon) != FIELDS[epsilon].default:
        notes.append(f"{epsilon}={getattr(model, epsilon)}: idle, as the scores of experts are no sparsemixer's")
    rate = "moe_router_bias_update_rate"
    if not model.moe_router_enable_expert_bias and getattr(model, rate) != FIELDS[rate].default:
        notes.append(f"{rate}={getattr(model, rate)}: idle, as --moe-router-enable-expert-bias is not given")
    return notes


def _idle_loss_scale(training: TrainingConfig) -> list[str]:
    """Note about a loss scale in a run without fp16."""
    names = ("loss_scale", *LOSS_SCALE_RULE)
    given = [f"{name}={value}" for name in names if (value := getattr(training, name)) != FIELDS[name].default]
    if training.fp16 or not given:
        return []
    return [f"{', '.join(given)}: idle, as {training.precision} needs no loss scale; --fp16 would use it"]


def _idle_sharing(config: Config) -> list[str]:
    """Notes about settings that the stage of ZeRO, or what is quantised, does not read."""
    parallel, notes = config.parallel, []
    if parallel.tp_comm_overlap and config.adapter.quantize_base is not None:
        notes.append("tp_comm_overlap is idle: quantize_base would be dequantised once a piece")
    if parallel.tp_comm_overlap_backend != "p2p" and not parallel.tp_comm_overlap:
        notes.append("tp_comm_overlap_backend is idle, as --tp-comm-overlap is not given")
    if parallel.zero == 3 and not (parallel.overlap_grad_reduce and parallel.overlap_param_gather):
        notes.append(
            "overlap_grad_reduce and overlap_param_gather are idle: with zero_stage=3 fully_shard overlaps both"
        )
    if parallel.optimizer_cpu_offload and parallel.param_cpu_offload:
        notes.append("optimizer_cpu_offload is idle: param_cpu_offload takes masters and states along")
    return notes


def _idle_optimizer(optimizer: OptimizerConfig) -> list[str]:
    """Note about settings of other optimizers."""
    used = OPTIMIZER_NAMES[optimizer.optimizer].reads
    given = [
        f"{name}={getattr(optimizer, name)}"
        for name in vars(optimizer)
        if name.startswith(("adam_", "sgd_", "muon_"))
        and not name.startswith(used)
        and getattr(optimizer, name) != FIELDS[name].default
    ]
    return [f"{', '.join(given)}: idle with optimizer={optimizer.optimizer}"] if given else []


def _idle_log(log: LogConfig) -> list[str]:
    """Notes about options of trackers and recordings that are not asked for."""
    # What switches each of these on. Memory snapshots and torch's profiler share the list of ranks.
    needs = {
        "wandb_project": ("wandb_exp_name", "wandb_save_dir", "wandb_entity"),
        "mlflow_experiment": ("mlflow_run_name", "mlflow_tracking_uri"),
        "record_memory_history": ("memory_snapshot_path",),
        "profile": (
            *("use_pytorch_profiler", "pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack"),
            *(() if log.record_memory_history else ("profile_ranks",)),
        ),
    }
    return [
        f"{name}={getattr(log, name)} is idle without --{needed.replace('_', '-')}"
        for needed, names in needs.items()
        for name in names
        if getattr(log, name) and not getattr(log, needed)
    ]


def _world_size_complaint(parallel: ParallelConfig, world_size: int | None) -> str | None:
    """Complaint about a number of processes that does not fit the sizes of the mesh."""
    # A world size without dp determines it; with dp it must be the product of all sizes.
    model, dp = parallel.model_parallel_size, parallel.data_parallel_size
    if world_size is None or world_size == model * (dp or 0):
        return None
    sizes = (
        f"tp {parallel.tensor_model_parallel_size} x pp {parallel.pipeline_model_parallel_size} "
        f"x cp {parallel.context_parallel_size}"
    )
    # The remedy differs: here no dp would do, below only the given one is wrong.
    if world_size % model:
        return (
            f"world size {world_size} must be divisible by {sizes} = {model}; start {model} processes or a multiple of "
            "that, or change --tp and --pp"
        )
    if dp is None:
        return None
    return (
        f"world size {world_size} must be dp {dp} x {sizes} = {dp * model}; start {dp * model} processes, "
        f"or use --dp {world_size // model}"
    )
