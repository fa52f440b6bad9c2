"""Memory of a device, estimated before any is allocated: model state, activations, and what is whole for a while.

Model state is exact except for padding of what is shared: in fp32 a parameter takes 4 bytes, its gradient 4 and Adam
8, 16 in all; in 16 bits it takes 2, a gradient in fp32 4, master weight and Adam 12, 18 in all. What ZeRO shares is
divided by the ranks that share it (docs/SHARDING.md has the table), and what is whole for a part of a step alone is
called temporary. Activations are those of activations.py, with an even load of all experts. Not counted: buffers of
communication, what one operation needs while it runs (with dropout of attention, several times the scores of one
layer), and what the allocator and the device's own libraries keep (on CUDA, 1 to 2 GiB).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.config.model import ModelConfig
from megatronish.config.names import OPTIMIZER_NAMES
from megatronish.config.parallel import ParallelConfig
from megatronish.costs.activations import Activations, StageLoad, bytes_per_score
from megatronish.costs.adapters import adapter_parameters
from megatronish.costs.parameters import parameters_of_stage
from megatronish.costs.quantised import gathered_bytes, largest_dequantised, quantised
from megatronish.layer_costs import Count, DeviceType, LayerCost, NormShape, sum_counts
from megatronish.layer_specs import layer_specs
from megatronish.layout import Layout


class Memory(NamedTuple):
    """Bytes on one device, and on its `host`: the CPU's memory.

    `temporary` is what is whole for a part of a step: gradients of ZeRO-2 until they are exchanged, with ZeRO-3 the
    layers that were gathered and their gradients.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int = 0
    logits: int = 0
    temporary: int = 0
    host: int = 0

    def plus(self, other: "Memory") -> "Memory":
        """Bytes of two groups of parameters together."""
        return Memory(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return sum(self) - self.host


class ZeroSettings(NamedTuple):
    """What ZeRO shares among how many ranks, and what of it waits in the CPU's memory."""

    stage: int = 0
    ranks: int = 1
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    bucket_size: int = 0
    overlap: bool = True

    @classmethod
    def of(cls, parallel: ParallelConfig, layout: Layout) -> "ZeroSettings":
        """The settings that the flags give."""
        return cls(
            stage=parallel.zero,
            ranks=layout.dp * layout.cp // parallel.num_distributed_optimizer_instances if parallel.zero else 1,
            offloads_optimizer=parallel.optimizer_cpu_offload or parallel.param_cpu_offload,
            offloads_parameters=parallel.param_cpu_offload,
            bucket_size=parallel.ddp_bucket_size,
            overlap=parallel.overlap_grad_reduce,
        )

    def of_experts(self, layout: Layout, grid: int) -> "ZeroSettings":
        """The same for experts, which a grid of ranks shares out: the rest of dp x cp x tp holds copies."""
        copies = max(1, layout.dp * layout.cp // self.ranks)
        return self._replace(ranks=max(1, layout.dp * layout.cp * layout.tp // grid // copies) if self.stage else 1)


def expected_memory(
    config: Config, stages: Sequence[StageLoad], *, vocab_size: int, device: DeviceType = "cuda"
) -> list[Memory]:
    """Bytes on a device of each pipeline stage."""
    model, training, layout = config.model, config.training, config.layout
    specs, grid = layer_specs(model), math.prod(config.parallel.expert_layout)
    costs = [layer.cost(model) for layer in specs]
    padded_vocab_size = model.padded_vocab_size(vocab_size, layout.tp)
    tokens = training.seq_length * training.micro_batch_size // layout.cp
    zero, activations = ZeroSettings.of(config.parallel, layout), _activations(config, device)
    expected = []
    for stage in stages:
        held = parameters_of_stage(
            model,
            [specs[layer] for layer in stage.all_layers],
            vocab_size=padded_vocab_size,
            seq_length=training.seq_length,
            is_first=stage.is_first,
            is_last=stage.is_last,
        )
        of_layers = [costs[layer] for layer in stage.all_layers]
        in_matrices = sum_counts(cost.matrices for cost in of_layers)
        num_moments = OPTIMIZER_NAMES[config.optimizer.optimizer].num_moments
        frozen, learned, in_blocks = Count(), held, quantised(model, stage.all_layers, config.adapter)
        if config.adapter.is_used:
            frozen, learned = (
                held + in_blocks.parameters * -1,
                adapter_parameters(model, stage.all_layers, config.adapter),
            )
            in_matrices = Count()
        # Dense parameters are shared over dp and cp, experts over the ranks that hold the same ones.
        count, state = 0, Memory(0, 0, 0)
        for of, shared in ((_dense_on(layout.tp), zero), (_experts_on(grid), zero.of_experts(layout, grid))):
            count += of(learned)
            moments = num_moments(count=of(learned), in_matrices=of(in_matrices))
            state = state.plus(model_state(of(learned), moments, shared, element_bytes=activations.element_bytes))
            state = state.plus(frozen_state(of(frozen), shared, element_bytes=activations.element_bytes))
            state = state.plus(frozen_state(of(in_blocks.stored), shared, element_bytes=1))
        in_activations, in_logits = activations.peak(stage, costs, padded_vocab_size=padded_vocab_size)
        table = padded_vocab_size * model.hidden_size // layout.tp if stage.is_first or stage.is_last else 0
        temporary = _temporary(
            of_layers, zero, count=count, table=table, cut=(layout.tp, grid), element_bytes=activations.element_bytes
        )
        if config.adapter.is_used:
            more = _temporary_of_frozen(config, stage, held, zero, width=activations.element_bytes)
            temporary = more if zero.stage == 3 else more + temporary
        expected.append(
            state._replace(activations=tokens * in_activations, logits=tokens * in_logits, temporary=temporary)
        )
    return expected


def _activations(config: Config, device: DeviceType) -> Activations:
    parallel, layout = config.parallel, config.layout
    element_bytes = 4 if config.training.precision == "fp32" else 2
    is_ring = layout.cp > 1 and parallel.cp_comm_type == "p2p"  # which keeps no probabilities, whatever it drops
    return Activations(
        hidden_size=config.model.hidden_size,
        seq_length=config.training.seq_length,
        element_bytes=element_bytes,
        score_bytes=0 if is_ring else bytes_per_score(config.model, config.training.attention_backend, element_bytes),
        tp=layout.tp,
        sequence_parallel=parallel.sequence_parallel,
        recompute=config.recompute,
        device=device,
        embedding_bytes=_embedding_bytes(config.model, element_bytes, device),
        bias_bytes=0 if is_ring else _bias_bytes(config, element_bytes),
        shares_bias=not config.data.packs_documents,
        routed_over=layout.tp // parallel.expert_layout.etp,
    )


def bytes_of_uneven_load(
    config: Config, stages: Sequence[StageLoad], *, vocab_size: int, device: DeviceType = "cuda"
) -> int:
    """Bytes that the fullest device adds for a load of its experts of once more the mean: `expected_memory` has one.

    A device may receive all rows of its ep group, ep times the mean, as no token is dropped.
    """
    model = config.model
    twice = replace(config, model=replace(model, moe_router_topk=2 * model.moe_router_topk))
    even, uneven = (expected_memory(each, stages, vocab_size=vocab_size, device=device) for each in (config, twice))
    return max(b.activations - a.activations for a, b in zip(even, uneven, strict=True))


def _embedding_bytes(model: ModelConfig, element_bytes: int, device: DeviceType) -> int:
    """Bytes a token that the norm after the embedding keeps."""
    norm = NormShape(model.normalization, model.hidden_size, one_plus=model.apply_layernorm_1p)
    return norm.saved_bytes(element_bytes=element_bytes, device=device).total if model.embed_layernorm else 0


def _bias_bytes(config: Config, element_bytes: int) -> int:
    """Bytes a token of ALiBi's biases, S of each head: a square for all samples, or, with documents, one for each.

    Of a rank that trades heads for the sequence they are those of its heads, over the tokens of its part.
    """
    model, training = config.model, config.training
    if model.position_embedding_type != "alibi":
        return 0
    samples = 1 if config.data.packs_documents else training.micro_batch_size
    heads = model.num_attention_heads // config.layout.tp
    return heads * training.seq_length * element_bytes // samples


def _dense_on(tp: int) -> Callable[[Count], int]:
    return lambda count: count.without_experts.per_rank(tp)


def _experts_on(grid: int) -> Callable[[Count], int]:
    return lambda count: count.experts // grid


def frozen_state(count: int, zero: ZeroSettings, *, element_bytes: int) -> Memory:
    """Frozen parameters of a rank, in the dtype that is computed in: they have no masters."""
    size = element_bytes * (-(-count // zero.ranks) if zero.stage == 3 else count)
    return Memory(0, 0, 0, host=size) if zero.offloads_parameters else Memory(size, 0, 0)


def model_state(count: int, num_moments: int, zero: ZeroSettings, *, element_bytes: int) -> Memory:
    """Parameters, gradients and optimizer of a rank that computes with `count` parameters, padding left out.

    `num_moments` are the elements that its optimizer would keep with its masters if nothing were shared.
    `element_bytes` are those of the dtype that is computed in: 4 in fp32, else 2.
    """
    share, moments = (-(-each // zero.ranks) for each in (count, num_moments))
    parameters = 4 * share if zero.stage == 3 else element_bytes * count
    gradients = 4 * (count if zero.stage < 2 else share)
    if zero.offloads_parameters:
        return Memory(0, 0, 0, host=parameters + gradients + 4 * moments)
    if zero.offloads_optimizer:  # masters, and the gradients that they are stepped by
        return Memory(parameters, gradients, 0, host=(4 + 4) * share + 4 * moments)
    masters = 4 * share if element_bytes < 4 and zero.stage < 3 else 0  # in fp32 they are the parameters, as in ZeRO-3
    return Memory(parameters, gradients, masters + 4 * moments)


BUCKETS_AT_ONCE = 3  # of ZeRO-2: two are exchanged while one fills


def _temporary(
    costs: Sequence[LayerCost],
    zero: ZeroSettings,
    *,
    count: int,
    table: int,
    cut: tuple[int, int],
    element_bytes: int,
) -> int:
    """Bytes that are whole for a part of a step, on a rank of `count` parameters; `table` are those of an embedding.

    `cut` are the ranks that cut a layer (tp) and its experts (ep x etp).
    """
    tp, grid = cut
    if zero.stage == 2:
        if not zero.overlap:
            return 4 * count
        largest = max((cost.largest_matrix.per_rank(tp, experts=grid) for cost in costs), default=0)
        bucket = max(zero.bucket_size, largest)  # a matrix is never cut
        return 4 * min(count, (BUCKETS_AT_ONCE - 1) * bucket + max(bucket, table))
    if zero.stage == 3:
        # The layer at work, the next one, which is gathered meanwhile, and what is left of the stage around them; of
        # the gradients except the next one's.
        sizes = [cost.parameters.per_rank(tp, experts=grid) for cost in costs]
        rest = count - sum(sizes)
        at_work = max((a + b + max(a, b) for a, b in pairwise(sizes)), default=2 * sum(sizes))
        return element_bytes * (rest + rest + at_work)
    return 0


def _temporary_of_frozen(config: Config, stage: StageLoad, held: Count, zero: ZeroSettings, *, width: int) -> int:
    """Bytes that are whole for a part of a step, of a frozen stage: what is gathered, and a dequantised matrix."""
    model, adapter, layers, found = config.model, config.adapter, stage.all_layers, 0
    tp, (ep, etp) = config.layout.tp, config.parallel.expert_layout
    if zero.stage == 3:
        found += gathered_bytes(model, held, layers, adapter, cut=(tp, ep * etp), width=width)
    if adapter.quantize_base is not None:
        found += width * largest_dequantised(model, layers, tp=tp, etp=etp)
    return found


def format_bytes(size: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.{0 if unit == 'B' else 1}f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def memory_table(stages: list[Memory]) -> str:
    """A row for each stage, a column for each kind of bytes; what few runs have is there where there is any."""
    optional = {"temporary", "host"}
    names = [name for name in Memory._fields if name not in optional or any(getattr(each, name) for each in stages)]
    names.insert(len(names) - names.count("host"), "total")
    rows = [[f"stage {i}", *(format_bytes(getattr(each, name)) for name in names)] for i, each in enumerate(stages)]
    return "\n".join("".join(f"{cell:>12}" for cell in row).rstrip() for row in [["", *names], *rows])
