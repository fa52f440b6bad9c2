"""Memory of a device, estimated before any is allocated: model state, activations, and what is whole for a while.

Model state (model_state.py) is exact except for padding of what is shared. What ZeRO shares is divided by the ranks
that share it (docs/SHARDING.md has the table), and what is whole for a part of a step alone is called temporary. A
second model to compare with, of --reference model, counts as weights. Activations are those of activations.py, with an
even load of all experts. Not counted: buffers of communication, what one operation needs while it runs (with dropout of
attention, several times the scores of one layer), and what the allocator and the device's own libraries keep (on CUDA,
1 to 2 GiB).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatronish.config.config import Config
from megatronish.config.sections.adapter import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.core.names import OPTIMIZER_NAMES
from megatronish.estimate.costs.activations import Activations, StageLoad, bytes_per_score
from megatronish.estimate.costs.adapters import adapter_parameters
from megatronish.estimate.costs.memory_table import Memory
from megatronish.estimate.costs.model_state import ZeroSettings, frozen_state, model_state, temporary_bytes
from megatronish.estimate.costs.parameters import parameters_of_stage
from megatronish.estimate.costs.quantised import gathered_bytes, largest_dequantised, quantised
from megatronish.specs.costs import Count, DeviceType, NormShape, sum_counts
from megatronish.specs.layers import layer_specs


def expected_memory(
    config: Config, stages: Sequence[StageLoad], *, vocab_size: int, device: DeviceType = "cuda"
) -> list[Memory]:
    """Bytes on a device of each pipeline stage."""
    model, training, layout = config.model, config.training, config.layout
    specs, grid = layer_specs(model), math.prod(config.parallel.expert_layout)
    costs = [layer.cost(model) for layer in specs]
    padded_vocab_size = model.padded_vocab_size(vocab_size, layout.tp)
    tokens = training.seq_length * training.micro_batch_size // layout.cp
    zero, activations = ZeroSettings.of(config.parallel, layout), activations_of(config, device)
    # Dense parameters are shared over dp and cp, experts over the ranks that hold the same ones.
    domains = ((_dense_on(layout.tp), zero), (_experts_on(grid), zero.of_experts(layout, grid)))
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
        count, state = 0, Memory(0, 0, 0)
        for of, shared in domains:
            count += of(learned)
            moments = num_moments(count=of(learned), in_matrices=of(in_matrices))
            state = state.plus(model_state(of(learned), moments, shared, element_bytes=activations.element_bytes))
            state = state.plus(frozen_state(of(frozen), shared, element_bytes=activations.element_bytes))
            state = state.plus(frozen_state(of(in_blocks.stored), shared, element_bytes=1))
        in_activations, in_logits = activations.peak(stage, costs, padded_vocab_size=padded_vocab_size)
        table = padded_vocab_size * model.hidden_size // layout.tp if stage.is_first or stage.is_last else 0
        temporary = temporary_bytes(
            of_layers, zero, count=count, table=table, cut=(layout.tp, grid), element_bytes=activations.element_bytes
        )
        if config.adapter.is_used:
            more = _temporary_of_frozen(config, stage, held, zero, width=activations.element_bytes)
            temporary = more if zero.stage == 3 else more + temporary
        if config.reference == "model":
            reference = _reference_state(config, stage, held, domains, width=activations.element_bytes)
            state, temporary = state.plus(reference), max(temporary, reference.temporary)
        expected.append(
            state._replace(activations=tokens * in_activations, logits=tokens * in_logits, temporary=temporary)
        )
    return expected


def activations_of(config: Config, device: DeviceType) -> Activations:
    """Settings of a config that decide what layers keep of each token."""
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


def _temporary_of_frozen(config: Config, stage: StageLoad, held: Count, zero: ZeroSettings, *, width: int) -> int:
    """Bytes that are whole for a part of a step, of a frozen stage: what is gathered, and a dequantised matrix."""
    model, adapter, layers, found = config.model, config.adapter, stage.all_layers, 0
    tp, (ep, etp) = config.layout.tp, config.parallel.expert_layout
    if zero.stage == 3:
        found += gathered_bytes(model, held, layers, adapter, cut=(tp, ep * etp), width=width)
    if adapter.quantize_base is not None:
        found += width * largest_dequantised(model, layers, tp=tp, etp=etp)
    return found


def _reference_state(
    config: Config,
    stage: StageLoad,
    held: Count,
    domains: Sequence[tuple[Callable[[Count], int], ZeroSettings]],
    *,
    width: int,
) -> Memory:
    """Second model of --reference model: a frozen copy, whose forward is over before that of the step begins."""
    state = Memory(0, 0, 0)
    for of, shared in domains:
        state = state.plus(frozen_state(of(held), shared, element_bytes=width))
    _, zero = domains[0]
    alone = replace(config, adapter=AdapterConfig())
    return state._replace(temporary=_temporary_of_frozen(alone, stage, held, zero, width=width))
