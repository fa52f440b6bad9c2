"""Bytes of a micro-batch in each kind of layer, by the formulas of the exact peak (estimate/costs/at_work.py)."""

from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.estimate.costs.activations import Instant, StageLoad
from megatronish.estimate.costs.at_work import StageWork
from megatronish.estimate.costs.memory_table import Memory
from megatronish.estimate.planner.candidate import Candidate
from megatronish.estimate.planner.layout_config import config_of
from megatronish.estimate.planner.workload import Workload


class KindBytes(NamedTuple):
    """Bytes of one micro-batch: for each kind of layer, and of hidden states and logits.

    `live` wait for the backward of a layer, `deferred` for its weight gradients; `again` are there while it is computed
    again, `work` while its backward runs. `tables` are those of rotary embeddings and of a micro-batch's masks, once
    for each chunk.
    """

    live: tuple[float, ...]
    deferred: tuple[float, ...]
    again: tuple[float, ...]
    work: tuple[float, ...]
    sharded_work: tuple[float, ...]
    """The same with ZeRO-3, which adds no gradient to a sum."""
    sizes: tuple[int, ...]
    """Parameters of a layer on this rank."""
    largest_unit: int
    """Parameters of the largest part that ZeRO-3 reduces at once."""
    matrix: int
    """Elements of the largest weight."""
    tables: float
    hidden: float
    residual: float
    logits: float
    table: int
    gathers: bool
    gradient_width: int
    defers: bool
    shared_masks: float


def bytes_of_kinds(base: Config, work: Workload, candidate: Candidate, *, defers: bool) -> KindBytes:
    """Bytes of each kind of layer in a layout whose weight gradients wait for actions of their own, or do not."""
    alone = Candidate(
        candidate.mesh._replace(pp=1, dp=1),
        candidate.micro_batch,
        recompute=candidate.recompute,
        sequence_parallel=candidate.sequence_parallel,
    )
    number = len(work.kinds)
    first = [range(layer, layer + 1) for layer in map(work.layers.index, range(number))]
    instant = Instant((1,) * number, (int(defers),) * number)
    stage = StageLoad(tuple(first), frozenset({instant}), is_first=True, is_last=True)
    sizes, sharded = (
        StageWork(config_of(base, alone._replace(zero=zero)), stage, Memory(0, 0, 0), work.vocab_size, kernels=True)
        for zero in (0, 3)
    )
    specs = [chunk[0] for chunk in sizes.specs]
    recomputes = candidate.recompute == "full"
    model = work.model
    tables = 4.0 * sizes.tokens * model.head_size if model.position_embedding_type == "rope" else 0.0
    return KindBytes(
        tuple(sizes.of_chunk(kind) - tables for kind in range(number)),
        tuple(sizes.deferred_of_chunk(kind) for kind in range(number)),
        tuple(sizes.of_layer(spec) if recomputes else 0.0 for spec in specs),
        tuple(sizes.of_layers(kind) for kind in range(number)),
        tuple(sharded.of_layers(kind) for kind in range(number)),
        tuple(map(sizes.parameters_of, specs)),
        sizes.largest_unit,
        max(map(sizes.matrix_of, specs)),
        tables + sizes.own_masks,
        sizes.hidden,
        sizes.residual,
        sizes.logits,
        sizes.table,
        sizes.cuts_sequence,
        sizes.gradient_width,
        sizes.defers,
        sizes.shared_masks,
    )
