"""First lines of a run: layout, device, model, FLOPs and expected memory, printed before anything is allocated."""

import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from megatronish.config.config import Config
from megatronish.config.hub import name_of
from megatronish.core.errors import without_passwords
from megatronish.estimate.costs.flops import model_flops_per_token
from megatronish.estimate.costs.memory import bytes_of_uneven_load, expected_memory
from megatronish.estimate.costs.memory_table import format_bytes, memory_table
from megatronish.estimate.costs.outer_traffic import bytes_to_islands
from megatronish.estimate.costs.parameters import (
    num_active_parameters,
    num_parameters,
    parameters_of_adapter,
    parameters_of_stage,
)
from megatronish.estimate.costs.traffic import why_no_traffic
from megatronish.estimate.planner.disk_room import disk_lines
from megatronish.estimate.room import note_on_room
from megatronish.formats.load_sharded import open_hf
from megatronish.launch.device import choose_device
from megatronish.launch.place import Place, place_from_environment
from megatronish.model.compiled import why_not_compiled
from megatronish.ops.library import load_kernels
from megatronish.ops.report import kernels_line
from megatronish.optim.optimizer import optimizer_line
from megatronish.parallel.pipeline.stages import Stages
from megatronish.parallel.schedules.live_activations import StageLoad
from megatronish.specs.adapter_targets import adapted_sections
from megatronish.specs.block_pattern import BlockPattern
from megatronish.specs.costs import DeviceType
from megatronish.specs.layers import layer_specs
from megatronish.tokenizer.tokenizer import build_tokenizer

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
    print(first_lines(config, vocab_size=vocab_size, device=name, notes=own_notes, length=length))
    return 0


def first_lines(
    config: Config, *, vocab_size: int, device: str, notes: Sequence[str] = (), length: str | None = None
) -> str:
    """Layout, versions, device, kernels, parameters, tokens and FLOPs a step, `length` of the run, memory expected."""
    model, training, parallel, layout = config.model, config.training, config.parallel, config.layout
    tokens = config.global_batch_size * training.seq_length
    num_microbatches = config.global_batch_size // (training.micro_batch_size * layout.dp)
    flops = tokens * model_flops_per_token(
        model, vocab_size=vocab_size, seq_length=training.seq_length, is_frozen=config.adapter.is_used
    )
    stages = Stages.of(parallel, model, vocab_size=vocab_size, seq_length=training.seq_length)
    on_cpu = device == "cpu" or parallel.optimizer_cpu_offload or parallel.param_cpu_offload
    masters_on = torch.device("cpu" if on_cpu else "cuda")
    loads = stages.loads(num_microbatches)
    device_type: DeviceType = "cpu" if device == "cpu" else "cuda"
    lines = [
        f"megatronish on {layout.world_size} rank{'s' if layout.world_size > 1 else ''}: {layout}"
        + (f", experts {parallel.expert_layout.line(layout)}" if model.num_experts is not None else "")
        + (", sequence parallel" if parallel.sequence_parallel else "")
        + (
            f", {parallel.schedule} with {num_microbatches} micro-batches"
            if layout.pp > 1 or stages.schedule.name not in ("gpipe", "1f1b")
            else ""
        ),
        f"torch {torch.__version__}, python {platform.python_version()}, device {device}, "
        f"{training.precision if training.precision == 'fp32' else f'{training.precision} with fp32 masters'}",
        f"attention: {_attention(config)}{_pattern(config)}; optimizer: {optimizer_line(config.optimizer, masters_on)}",
        kernels_line(device_type, drops=model.hidden_dropout > 0 or model.attention_dropout > 0) + _activation(config),
        f"parameters: {num_parameters(model, vocab_size=vocab_size, seq_length=training.seq_length):,}"
        + _active(config, vocab_size)
        + (f" ({_stages(config, stages, vocab_size)})" if layout.pp > 1 else "")
        + f", vocabulary {vocab_size:,} padded to {model.padded_vocab_size(vocab_size, layout.tp):,}",
        *_adapters(config, vocab_size),
        f"a step: {config.global_batch_size} samples of {training.seq_length}, {tokens:,} tokens, "
        f"{flops:.3g} model FLOPs",
        *([] if length is None else [length]),
        "memory expected on a device:",
        memory_table(
            expected_memory(config, loads, vocab_size=vocab_size, device=device_type, kernels=load_kernels() is None)
        ),
        *_islands(config, loads, vocab_size),
        *disk_lines(config, vocab_size=vocab_size, device=device, place=place_from_environment()),
        *_experts(config, partial(bytes_of_uneven_load, config, loads, vocab_size=vocab_size, device=device_type)),
        *(f"note: {note}" for note in [*notes, *_compiler(config, device_type)]),
    ]
    return without_passwords("\n".join(lines))


def _adapters(config: Config, vocab_size: int) -> list[str]:
    """Which sections have an adapter, and how many parameters learn."""
    if not config.adapter.is_used:
        return []
    number = num_parameters(config.model, vocab_size=vocab_size, seq_length=config.training.seq_length)
    table = adapter_table(config, num_parameters=number)
    base = config.checkpoint.load_hf or config.checkpoint.load
    return [f"{config.adapter.adapter_type} of the frozen model {base}:", table]


def _islands(config: Config, loads: Sequence[StageLoad], vocab_size: int) -> list[str]:
    """How many islands there are (DiLoCo), and what a device sends to the others in an outer step at most."""
    parallel = config.parallel
    if parallel.outer_optimizer is None:
        return []
    said = (
        f"islands: {parallel.num_islands}, joined after every {parallel.outer_interval} steps by Nesterov SGD, lr "
        f"{parallel.outer_lr:g}, momentum {parallel.outer_momentum:g}"
    )
    if parallel.num_islands == 1:
        return [f"{said}; --dp-replicate N makes N of the data ranks"]
    if why_no_traffic(config) is not None:
        return [said]
    most = max(bytes_to_islands(config, load, stage, vocab_size=vocab_size) for stage, load in enumerate(loads))
    return [f"{said}; a device then sends {format_bytes(most)} in {parallel.outer_move_dtype} to other islands"]


def _compiler(config: Config, device_type: DeviceType) -> list[str]:
    """Why --compile compiles nothing, if so."""
    note = why_not_compiled(device_type) if config.training.compile else None
    return [] if note is None else [note]


def _active(config: Config, vocab_size: int) -> str:
    """Parameters that a token passes, in a model with experts."""
    if config.model.num_experts is None:
        return ""
    active = num_active_parameters(config.model, vocab_size=vocab_size, seq_length=config.training.seq_length)
    return f", of which a token passes {active:,}"


def _experts(config: Config, uneven: Callable[[], int]) -> list[str]:
    """Experts, where they are, and the rows that an even and the most uneven load sends to a device."""
    model, layout, (ep, etp) = config.model, config.layout, config.parallel.expert_layout
    if model.num_experts is None:
        return []
    sequences = config.training.micro_batch_size * config.training.seq_length // layout.cp
    rows = sequences * etp // layout.tp * model.moe_router_topk
    more = f"for each mean load more, {format_bytes(uneven())}"
    return [
        f"experts: {model.num_experts} in {sum(model.expert_layers)} of {model.num_layers} layers, "
        f"{model.num_experts // ep} on a device, {model.moe_router_topk} a token; of a micro-batch a device computes "
        f"{rows:,} rows a layer where the load is even, as the memory above, and at most {ep * rows:,}"
        + (f" ({more})" if ep > 1 else "")
    ]


def _attention(config: Config) -> str:
    """Implementation of attention that runs, and the reason for it."""
    parallel, model, backend = config.parallel, config.model, config.training.attention_backend
    over_cp, is_ring = "", False
    if config.layout.cp > 1:
        over_cp, is_ring = OVER_CP[parallel.cp_comm_type], parallel.cp_comm_type == "p2p"
    if model.has_encoder:
        return f"{over_cp}explicit probabilities by torch's softmax, of scores with a bias that learns"
    if model.attn_logit_softcapping is not None:
        return f"{over_cp}explicit probabilities by torch's softmax, of scores with a soft cap"
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


def _pattern(config: Config) -> str:
    """Pattern of blocks that sparse layers have, and what it saves."""
    pattern, length = BlockPattern.of(config.model), config.training.seq_length
    if pattern is None:
        return ""
    part = pattern.keys(length, "causal") / (length / 2)
    return f"; {pattern.name} blocks of {pattern.block_size}, {part:.0%} of the scores of a causal mask"


def _activation(config: Config) -> str:
    """Note about an activation of the MLP that has no kernel."""
    model = config.model
    clamped = model.is_gated and (model.glu_linear_offset != 0 or model.activation_func_clamp_value is not None)
    if model.activation in ("relu", "geglu", "squared_relu", "quick_geglu") or clamped:
        return f"; {model.activation}{' with offset or clamp' if clamped else ''} by torch, as it has no kernel"
    return ""


def _stages(config: Config, stages: Stages, vocab_size: int) -> str:
    """Layers of each chunk, and parameters, of each pipeline stage."""
    counts, specs = [], layer_specs(config.model)
    for stage, load in enumerate(stages.loads(1)):
        held = parameters_of_stage(
            config.model,
            [specs[layer] for layer in load.all_layers],
            vocab_size=vocab_size,
            seq_length=config.training.seq_length,
            is_first=load.is_first,
            is_last=load.is_last,
        )
        layers = " + ".join(str(len(chunk)) for chunk in load.layers)
        counts.append(f"stage {stage}: {layers} layers, {held.total:,}")
    return ", ".join(counts)


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
