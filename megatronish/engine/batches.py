"""Micro-batches of a step: the part of them that a rank holds, and the divisor of their sums."""

from collections.abc import Sequence

import torch

from megatronish.attention.zigzag import places_of
from megatronish.model.batch import MicroBatch
from megatronish.objectives.pairs import AnyObjective
from megatronish.parallel import comm
from megatronish.parallel.mesh import Mesh


def on_rank(micro_batches: Sequence[MicroBatch], mesh: Mesh) -> list[MicroBatch]:
    """What this cp rank holds of whole sequences, on its device."""
    cp, found = mesh.cp, list(micro_batches)
    if cp.size > 1:
        found = [each.at(places_of(each.tokens.shape[1], cp.rank, cp.size)) for each in found]
    return [each.to(mesh.device) for each in found]


def weight_of(micro_batches: Sequence[MicroBatch], objective: AnyObjective, mesh: Mesh) -> int:
    """The divisor of the step's sums, over all data ranks. It is counted and summed on the CPU.

    cp ranks have the same whole sequences, so only those of dp add up.
    """
    weight = torch.tensor(sum(objective.weight(batch) for batch in micro_batches))
    return int(comm.all_reduce(weight, mesh.dp))
