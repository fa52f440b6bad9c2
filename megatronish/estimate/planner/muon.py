"""Muon in a plan: the ranks over which whole matrices are spread, and the time of their Newton-Schulz iterations.

Each iteration of a matrix [m, n], m <= n, has three products: of [m, n] with its transpose, of the square with itself,
and of the polynomial with the matrix (optim/muon.py). In a round each rank owns one matrix of nearly equal size, so a
rank computes every num_ranks-th of the matrices in the order of their sizes (bucketing.py).
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from megatronish.estimate.costs.candidate import MeshSizes
from megatronish.estimate.planner.device_speed import Links, Machine, product_seconds
from megatronish.estimate.planner.devices import Device
from megatronish.estimate.planner.efficiencies import Efficiencies
from megatronish.estimate.planner.workload import Workload
from megatronish.parallel.bucketing import RoundSize, round_sizes


class MatrixGroup(NamedTuple):
    """Matrices of one shape [rows, columns], rows <= columns, of a stage."""

    rows: int
    columns: int
    number: int

    @property
    def size(self) -> int:
        """Elements of a matrix."""
        return self.rows * self.columns


class MuonShare(NamedTuple):
    """Sizes of the axes over which matrices are spread: copies, the model's axes, the ranks that shard."""

    copies: int
    model: tuple[int, ...]
    shard: int

    @classmethod
    def of(cls, mesh: MeshSizes, *, is_experts: bool, shards: bool) -> "MuonShare":
        """The axes of dense layers, or of experts, with ZeRO or without."""
        ranks = mesh.edp if is_experts else mesh.dp * mesh.cp
        model = (mesh.etp, mesh.ep) if is_experts else (mesh.tp,)
        return cls(1 if shards else ranks, model, ranks if shards else 1)

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes of more than one rank, in the order in which rows are gathered."""
        return tuple(ranks for ranks in (self.copies, *self.model, self.shard) if ranks > 1)

    @property
    def num_ranks(self) -> int:
        """Ranks that own matrices."""
        return prod(self.axes)


def matrix_groups(work: Workload, counts: Sequence[int], *, is_experts: bool) -> list[MatrixGroup]:
    """Matrices of a stage with so many layers of each kind, the largest first."""
    found: dict[tuple[int, int], int] = {}
    for sections, count in zip(work.sections, counts, strict=True):
        for each in sections:
            if (each.copies > 1) == is_experts and count:
                shape = min(each.in_features, each.out_features), max(each.in_features, each.out_features)
                found[shape] = found.get(shape, 0) + count * each.copies
    groups = [MatrixGroup(*shape, number) for shape, number in found.items()]
    return sorted(groups, key=lambda group: -group.size)


def matrix_sizes(work: Workload, counts: Sequence[int], *, is_experts: bool) -> tuple[tuple[int, int], ...]:
    """(elements, number) of the matrices of a stage, the largest first."""
    return tuple((group.size, group.number) for group in matrix_groups(work, counts, is_experts=is_experts))


@lru_cache(maxsize=10_000)
def rounds_of(sizes: tuple[tuple[int, int], ...], num_ranks: int) -> tuple[RoundSize, ...]:
    """Rounds in which matrices of these sizes are exchanged."""
    flat = [size for size, number in sizes for _ in range(number)]
    return tuple(round_sizes(flat, num_ranks=num_ranks))


def muon_machine(device: Device, efficiencies: Efficiencies, precision: str) -> Machine:
    """Rates of the iterations' products: in fp32, in TF32 with half of the rate of 16 bits, or in bf16."""
    if precision == "medium":
        return Machine.of(device, efficiencies, "bf16")
    if precision == "highest":
        return Machine.of(device, efficiencies, "fp32")
    return Machine.of(device, efficiencies, "bf16")._replace(
        flops=max(device.flops("bf16") / 2, device.flops("fp32")) * efficiencies.gemm, element_bytes=4
    )


def muon_seconds(
    work: Workload, counts: Sequence[int], mesh: MeshSizes, *, machine: Machine, links: Links, shards: bool
) -> float:
    """Seconds of an update on a rank of a stage: its own matrices, and the exchange of all of them in fp32."""
    seconds = 0.0
    for is_experts in (False, True):
        share = MuonShare.of(mesh, is_experts=is_experts, shards=shards)
        groups, before = matrix_groups(work, counts, is_experts=is_experts), 0
        for rows, columns, number in groups:
            owned = -(-(before + number) // share.num_ranks) + (-before // share.num_ranks)
            before += number
            seconds += owned * work.optimizer.muon_num_ns_steps * _iteration(machine, rows, columns)
        rounds = rounds_of(matrix_sizes(work, counts, is_experts=is_experts), share.num_ranks)
        size = 4.0 * sum(each.width for each in rounds) / max(1, len(rounds))
        stride = mesh.ep * mesh.etp if is_experts else mesh.tp  # of data ranks; those of the model lie inside
        strides = (stride, 1, *((mesh.etp,) if is_experts else ()), stride)
        for place, (ranks, apart) in enumerate(zip((share.copies, *share.model, share.shard), strides, strict=True)):
            size *= ranks
            seconds += len(rounds) * (2 if place else 1) * links.gather(ranks, apart, size)  # copies are not reduced
    return seconds


def _iteration(machine: Machine, rows: int, columns: int) -> float:
    """Seconds of the three products of an iteration."""
    return (
        product_seconds(machine, rows, columns, rows)
        + product_seconds(machine, rows, rows, rows)
        + product_seconds(machine, rows, rows, columns)
    )
