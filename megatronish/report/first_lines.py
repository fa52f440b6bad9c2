"""First lines of a run: layout, device, model, FLOPs and expected memory, printed before anything is allocated."""

import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from megatronish.config.config import Config
from megatronish.config.hub import name_of
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.errors import without_passwords
from megatronish.estimate.costs.layout_costs import LayoutCosts
from megatronish.estimate.costs.memory_table import format_bytes, memory_table
from megatronish.estimate.costs.parameters import parameters_of_adapter
from megatronish.estimate.disk_room import disk_lines
from megatronish.estimate.room import note_on_room
from megatronish.formats.load_sharded import open_hf
from megatronish.launch.device import choose_device
from megatronish.launch.place import Place, place_from_environment
from megatronish.model.compiled import why_not_compiled
from megatronish.ops.library import fuses_dropout
from megatronish.ops.report import kernels_line
from megatronish.optim.optimizer import optimizer_line
from megatronish.parallel.deep_ep import why_not_deep_ep
from megatronish.specs.adapter_targets import adapted_sections
from megatronish.specs.block_pattern import BlockPattern
from megatronish.specs.costs import DeviceType
from megatronish.specs.layers import attention_kind
from megatronish.tokenizer.build import build_tokenizer

OVER_CP = {
    "p2p": "ring attention over cp, ",
    "a2a": "all-to-all over cp, ",
}


def dry_run(config: Config, notes: Sequence[str]) -> int:
    """Print the first lines and start nothing; returns the exit status. UserError if a file is missing."""
    vocab_size = build_tokenizer(config.data).vocab_size
    load_hf = config.checkpoint.load_hf
    if load_hf is not None and name_of(load_hf) == load_hf:  # of what the hub has, weights are not fetched for that
        open_hf(Path(load_hf))
    uses_cuda, own_notes = config.parallel.device != "cpu" and torch.cuda.is_available(), [*notes]
    if uses_cuda and config.parallel.device == "auto":
        num_ranks = config.layout.world_size
        place = place_from_environment() or Place(0, num_ranks, 0, num_ranks)
        device, note = choose_device("auto", place)
        uses_cuda = device.type == "cuda"
        own_notes += [] if note is None else [note]
    name = torch.cuda.get_device_name() if uses_cuda else "cpu"
    note = note_on_room(config, "cuda" if uses_cuda else "cpu", vocab_size=vocab_size)
    own_notes += [] if note is None else [note]
    epochs = config.training.num_epochs
    length = None if epochs is None else f"num_epochs={epochs:g}: the steps are counted when a run opens its data"
    device_type: DeviceType = "cuda" if uses_cuda else "cpu"
    costs = LayoutCosts.of(config, vocab_size=vocab_size, device=device_type, kernels=fuses_dropout(device_type))
    print(first_lines(config, costs, device=name, notes=own_notes, length=length))
    return 0


def first_lines(
    config: Config, costs: LayoutCosts, *, device: str, notes: Sequence[str] = (), length: str | None = None
) -> str:
    """Layout, versions, device, kernels, parameters, tokens and FLOPs a step, `length` of the run, memory expected."""
    model, training, parallel, layout = config.model, config.training, config.parallel, config.layout
    tokens = config.global_batch_size * training.seq_length
    on_cpu = device == "cpu" or parallel.optimizer_cpu_offload or parallel.param_cpu_offload
    masters_on = torch.device("cpu" if on_cpu else "cuda")
    device_type: DeviceType = "cpu" if device == "cpu" else "cuda"
    lines = [
        f"megatronish on {layout.world_size} rank{'s' if layout.world_size > 1 else ''}: {layout}"
        + (f", experts {parallel.expert_layout.line(layout)}" if model.num_experts is not None else "")
        + (", sequence parallel" if parallel.sequence_parallel else "")
        + (
            f", {parallel.schedule} with {config.num_microbatches} micro-batches"
            if layout.pp > 1 or parallel.schedule not in ("gpipe", "1f1b")
            else ""
        ),
        f"torch {torch.__version__}, python {platform.python_version()}, device {device}, "
        f"{training.precision if training.precision == 'fp32' else f'{training.precision} with fp32 masters'}",
        f"attention: {_attention(config)}{_sparse(config, device_type)}; "
        f"optimizer: {optimizer_line(config.optimizer, masters_on)}",
        kernels_line(
            device_type,
            drops=model.hidden_dropout > 0 or model.attention_dropout > 0,
            has_windows=_has_plain_windows(config),
        )
        + _activation(config),
        f"parameters: {costs.parameters:,}"
        + (f", of which a token passes {costs.active_parameters:,}" if model.num_experts is not None else "")
        + (f" ({_stages(costs)})" if layout.pp > 1 else "")
        + f", vocabulary {costs.vocab_size:,} padded to {model.padded_vocab_size(costs.vocab_size, layout.tp):,}",
        *_adapters(config, costs.parameters),
        f"a step: {config.global_batch_size} samples of {training.seq_length}, {tokens:,} tokens, "
        f"{costs.model_flops:.3g} model FLOPs",
        *([] if length is None else [length]),
        "memory expected on a device:",
        memory_table(costs.memory),
        *_islands(parallel, costs.island_bytes),
        *disk_lines(
            costs,
            parallel,
            num_microbatches=config.num_microbatches,
            device=device,
            place=place_from_environment(),
        ),
        *_experts(config, costs.uneven_bytes),
        *_prediction(config),
        *(f"note: {note}" for note in [*notes, *_compiler(config, device_type), *_dispatcher(config, device_type)]),
    ]
    return without_passwords("\n".join(lines))


def _adapters(config: Config, num_parameters: int) -> list[str]:
    """Which sections have an adapter, and how many parameters learn."""
    if not config.adapter.is_used:
        return []
    table = adapter_table(config, num_parameters=num_parameters)
    base = config.checkpoint.load_hf or config.checkpoint.load
    return [f"{config.adapter.adapter_type} of the frozen model {base}:", table]


def _islands(parallel: ParallelConfig, island_bytes: int | None) -> list[str]:
    """How many islands there are (DiLoCo), and what a device sends to the others in an outer step at most."""
    if parallel.outer_optimizer is None:
        return []
    said = (
        f"islands: {parallel.num_islands}, joined after every {parallel.outer_interval} steps by Nesterov SGD, lr "
        f"{parallel.outer_lr:g}, momentum {parallel.outer_momentum:g}"
    )
    if parallel.num_islands == 1:
        return [f"{said}; --dp-replicate N makes N of the data ranks"]
    if island_bytes is None:
        return [said]
    return [f"{said}; a device then sends {format_bytes(island_bytes)} in {parallel.outer_move_dtype} to other islands"]


def _compiler(config: Config, device_type: DeviceType) -> list[str]:
    """Why --compile compiles nothing, if so."""
    note = why_not_compiled(device_type) if config.training.compile else None
    return [] if note is None else [note]


def _dispatcher(config: Config, device_type: DeviceType) -> list[str]:
    """Why DeepEP sends no tokens, if so."""
    note = why_not_deep_ep(config.deep_ep_needs, device_type) if config.parallel.wants_deep_ep else None
    return [] if note is None else [note]


def _experts(config: Config, uneven_bytes: int) -> list[str]:
    """Experts, where they are, and the rows that an even and the most uneven load sends to a device."""
    model, ep = config.model, config.parallel.expert_model_parallel_size
    if model.num_experts is None:
        return []
    rows, room = config.rows_of_experts
    more = f"for each mean load more, {format_bytes(uneven_bytes)}"
    line = (
        f"experts: {model.num_experts} in {sum(model.expert_layers)} of {model.num_layers} layers, "
        f"{model.num_experts // ep} on a device, {model.moe_router_topk} a token; of a micro-batch a device "
    )
    if config.parallel.has_rooms:
        return [f"{line}has {rows:,} rows a layer where the load is even, and room for {room:,}, as the memory above"]
    return [
        f"{line}computes {rows:,} rows a layer where the load is even, as the memory above, and at most {ep * rows:,}"
        + (f" ({more})" if ep > 1 else "")
    ]


def _prediction(config: Config) -> list[str]:
    """Layers of multi-token prediction, and what their losses weigh."""
    model = config.model
    if model.num_depths == 0:
        return []
    layers = "a layer" if model.num_depths == 1 else f"{model.num_depths} layers"
    return [
        f"multi-token prediction: {layers} after the last, in training alone, on the stage that ends the model; the "
        f"mean of their losses weighs {model.mtp_loss_scaling_factor:g}"
    ]


def _attention(config: Config) -> str:
    """Implementation of attention that runs, and the reason for it."""
    parallel, model, backend = config.parallel, config.model, config.training.attention_backend
    over_cp, is_ring = "", False
    if config.layout.cp > 1:
        over_cp, is_ring = OVER_CP[parallel.cp_comm_type], parallel.cp_comm_type == "p2p"
    of_scores = "a bias that learns" if model.has_encoder else attention_kind(model).of(model).of_scores
    if of_scores is not None:
        return f"{over_cp}explicit probabilities by torch's softmax, of scores with {of_scores}"
    # What the fused softmax does not know.
    unknown = (
        "sinks" if model.softmax_type != "vanilla" else "ALiBi" if model.position_embedding_type == "alibi" else ""
    )
    by_torch = f"by torch's softmax (the fused one has no {unknown})"
    if backend in ("auto", "flash") and model.attention_dropout > 0:
        return f"{over_cp}dropout block by block, by masks that do not depend on the layout; no probabilities are kept"
    if backend in ("auto", "flash"):
        sdpa = "scaled_dot_product_attention"
        if is_ring or unknown == "sinks":
            return f"{over_cp}{sdpa}'s flash operations"
        return f"{over_cp}{sdpa} (flash where the device has it)"
    if backend == "fused_softmax" and unknown:
        return f"{over_cp}explicit probabilities {by_torch}"
    softmax = "the fused" if backend == "fused_softmax" else "torch's"
    return f"{over_cp}explicit probabilities by {softmax} softmax, as requested"


def _sparse(config: Config, device_type: DeviceType) -> str:
    """What computes layers in which a token does not see all before it, and what a pattern of blocks saves."""
    model, length = config.model, config.training.seq_length
    pattern, text = BlockPattern.of(model), ""
    if pattern is not None:
        part = pattern.keys(length, "causal") / (length / 2)
        text = f"; {pattern.name} blocks of {pattern.block_size}, {part:.0%} of the scores of a causal mask"
    is_sparse = any(model.windowed_layers) and (model.window_size is None or model.window_size < length)
    if is_sparse and device_type == "cpu" and _is_implicit(config) and model.attention_dropout == 0:
        text += "; in layers with a window or pattern, blocks of queries with the keys that they see"
    return text


def _is_implicit(config: Config) -> bool:
    """Whether a rank attends without a ring, and with probabilities that are not all in memory."""
    if config.layout.cp > 1 and config.parallel.cp_comm_type == "p2p":
        return False
    return not attention_kind(config.model).of(config.model).is_explicit(config.training.attention_backend)


def _has_plain_windows(config: Config) -> bool:
    """Whether layers have a window and nothing else, which has an operator of its own on a CPU."""
    model = config.model
    is_plain = model.position_embedding_type != "alibi" and model.softmax_type == "vanilla"
    is_alone = model.attention_dropout == 0 and not config.data.packs_documents and _is_implicit(config)
    length = model.window_size
    return is_plain and is_alone and length is not None and length < config.training.seq_length


def _activation(config: Config) -> str:
    """Note about an activation of the MLP that has no kernel."""
    model = config.model
    clamped = model.is_gated and (model.glu_linear_offset != 0 or model.activation_func_clamp_value is not None)
    if model.activation in ("relu", "geglu", "squared_relu", "quick_geglu", "xielu") or clamped:
        return f"; {model.activation}{' with offset or clamp' if clamped else ''} by torch, as it has no kernel"
    return ""


def _stages(costs: LayoutCosts) -> str:
    """Layers of each chunk, and parameters, of each pipeline stage."""
    return ", ".join(
        f"stage {stage}: {' + '.join(str(len(chunk)) for chunk in load.layers)} layers, {number:,}"
        for stage, (load, number) in enumerate(zip(costs.loads, costs.stage_parameters, strict=True))
    )


def adapter_table(config: Config, *, num_parameters: int) -> str:
    """What has an adapter, a row for each section, and how many parameters learn of how many."""
    counts: dict[str, tuple[int, int]] = {}
    for section in adapted_sections(config.model, config.adapter):
        kind = f"{section.section} of {section.copies} experts" if section.copies > 1 else section.section
        number, learned = counts.get(kind, (0, 0))
        counts[kind] = number + 1, learned + parameters_of_adapter(section, config.adapter).total
    total = sum(learned for _, learned in counts.values())
    rows = [f"  {kind:<20}{number:>8}{learned:>16,}" for kind, (number, learned) in counts.items()]
    head = f"  {'adapters of':<20}{'layers':>8}{'parameters':>16}"
    share = 100 * total / (num_parameters + total)
    return "\n".join([head, *rows, f"  {total:,} parameters learn, {share:.3g} % of {num_parameters + total:,}"])
