"""Model state of a rank, what ZeRO shares of it, and what of it is whole for a part of a step.

In fp32 a parameter takes 4 bytes, its gradient 4 and Adam 8, 16 in all; in 16 bits it takes 2, a gradient in fp32 4,
master weight and Adam 12, 18 in all. A frozen parameter has neither gradient nor master.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.layout import Layout
from megatronish.estimate.costs.memory_table import Memory
from megatronish.specs.costs import LayerCost


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


def frozen_state(count: int, zero: ZeroSettings, *, element_bytes: int) -> Memory:
    """Frozen parameters of a rank, in the dtype that is computed in (`element_bytes` is 1 for bytes); no masters."""
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


def temporary_bytes(
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
