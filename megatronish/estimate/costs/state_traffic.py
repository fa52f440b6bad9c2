"""Bytes that data ranks, and others that share gradients or matrices, exchange of a model's state in a step.

Padding is counted: buckets of ZeRO 0 to 2 begin and end at multiples of 16 bytes on every rank, and of ZeRO-3 every
rank has as many rows of a parameter.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from math import lcm, prod
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.estimate.costs.candidate import MeshSizes, candidate_of
from megatronish.estimate.costs.layer_kinds import LayerKind
from megatronish.estimate.costs.stage_parameters import Source, StageParameter, StageParameters
from megatronish.estimate.costs.step_traffic import SCALAR, StepTraffic
from megatronish.parallel.bucketing import (
    CODE_BLOCK,
    WEIGHT_CODES,
    RoundSize,
    bytes_of_block,
    cut_into_buckets,
    padded_size,
    round_sizes,
    rounded_up,
)


class DataRanks(NamedTuple):
    """Data ranks of a domain: those that shard what ZeRO shards, and the copies of these, in one island (DiLoCo).

    `secondary` neighbours of the former keep what ZeRO-3 has gathered (hpZ); 1 if it is not kept.
    """

    shard: int
    copies: int
    secondary: int = 1

    @classmethod
    def of(cls, number: int, copies: int, secondary: int = 1) -> "DataRanks":
        """So many ranks in so many groups that are copies of each other."""
        return cls(number // copies, copies, secondary)


def data_ranks(config: Config) -> dict[str, DataRanks]:
    """Data ranks of each domain that the mesh of a config has."""
    parallel, layout = config.parallel, config.layout
    copies, islands = parallel.num_copies, parallel.num_islands
    grids = {"dense": layout.tp}  # ranks that have one copy of what a domain has
    if config.model.num_experts is not None:
        grids["experts"] = prod(parallel.expert_layout)
    ranks = layout.dp * layout.cp * layout.tp // islands
    kept_over = (parallel.zero_hpz_partition_size or 0) * layout.tp
    return {
        name: DataRanks.of(ranks // grid, copies if parallel.zero else ranks // grid, max(1, kept_over // grid))
        for name, grid in grids.items()
    }


def owners(mesh: MeshSizes, ranks: DataRanks, domain: str) -> list[tuple[str, int]]:
    """Axes of more than one rank over which Muon's matrices are spread, in the order in which rows are gathered."""
    of_model = [("tp", mesh.tp)] if domain == "dense" else [("etp", mesh.etp), ("ep", mesh.ep)]
    axes = (("replicate", ranks.copies), *of_model, ("shard", ranks.shard))
    return [(axis, number) for axis, number in axes if number > 1]


class MatrixGroup(NamedTuple):
    """Muon's matrices of one shape [rows, columns], rows <= columns, of a stage."""

    rows: int
    columns: int
    number: int

    @property
    def size(self) -> int:
        """Elements of a matrix."""
        return self.rows * self.columns


def matrix_groups(counts: Mapping[LayerKind, int], domain: str) -> tuple[MatrixGroup, ...]:
    """Matrices of a domain in a stage with so many layers of each kind, the largest first."""
    numbers: Counter[tuple[int, int]] = Counter()
    for kind, number in counts.items():
        for linear in kind.cost.linears if number else ():
            if (linear.copies > 1) == (domain == "experts"):
                for _, size in linear.sections:
                    numbers[min(linear.in_features, size), max(linear.in_features, size)] += number * linear.copies
    groups = (MatrixGroup(*shape, number) for shape, number in numbers.items())
    return tuple(sorted(groups, key=lambda group: -group.size))


@lru_cache(maxsize=10_000)
def matrix_rounds(groups: tuple[MatrixGroup, ...], num_ranks: int) -> tuple[RoundSize, ...]:
    """Rounds in which matrices are exchanged, one owner a rank."""
    largest_first = [group.size for group in groups for _ in range(group.number)]
    return tuple(round_sizes(largest_first, num_ranks=num_ranks))


class GradientBucket(NamedTuple):
    """Bucket: its parameters, its elements with all padding, where gradients come from and are summed besides.

    `in_transfer` are bytes that its reduction holds after the gradients are sent: all of it, or codes that go and come,
    and this rank's own part. `gathered` are the bytes of the parameters, or of their codes, on their way back.
    """

    names: tuple[str, ...]
    size: int
    domain: str
    sources: frozenset[Source]
    sums_over: tuple[str, ...]
    coded: bool
    in_transfer: int
    gathered: int


@dataclass
class StateTraffic(StepTraffic):
    """Traffic of gradients, parameters, norms of the gradient and Muon's matrices.

    `shard_ranks` are this rank's places among those that shard each domain, 0 by default. `only` is the domain whose
    state is counted; by default all are.
    """

    shard_ranks: Mapping[str, int] = field(default_factory=dict)
    only: str | None = None

    @cached_property
    def parameters(self) -> list[StageParameter]:
        """All parameters of the stage."""
        parameters = StageParameters(self.config, self.load, self.vocab_size).all()
        return [parameter for parameter in parameters if self.only in (None, parameter.domain)]

    @cached_property
    def data_ranks(self) -> dict[str, DataRanks]:
        """Data ranks of each domain that the mesh has."""
        ranks_by_domain = data_ranks(self.config)
        return ranks_by_domain if self.only is None else {self.only: ranks_by_domain[self.only]}

    @property
    def reduced_width(self) -> int:
        """Bytes of an element of a gradient on its way."""
        return 2 if self.config.parallel.grad_reduce_in_bf16 else 4

    def state(self) -> None:
        """All that is exchanged of the state."""
        if self.config.parallel.zero == 3:
            self._rows()
        else:
            self._buckets()
        for ranks in self.data_ranks.values():
            if ranks.shard > 1:
                self.add("shard", "all-reduce", SCALAR)  # of the gradient's norm
        if self.config.optimizer.optimizer == "muon":
            for name in self.data_ranks:
                self._matrices(name)

    def _buckets(self) -> None:
        """ZeRO 0 to 2: gradients are reduced, once a step or with ZeRO-2 once a backward, and parameters gathered."""
        zero, times = self.config.parallel.zero, self.num_microbatches
        for bucket in self.buckets():
            shard, copies, _ = self.data_ranks[bucket.domain]
            reductions = times * len(bucket.sources) if zero == 2 else 1
            if shard > 1:
                if bucket.coded:
                    self.add("shard", "all-to-all", reductions * self.coded_bytes(bucket.size))
                else:
                    self.add("shard", "reduce-scatter", reductions * self.reduced_width * bucket.size)
                self.add("shard", "all-gather", bucket.gathered)
            if copies > 1:
                self.add("replicate", "all-reduce", self.reduced_width * bucket.size // shard)
            for axis in bucket.sums_over:
                self.add(axis, "all-reduce", 4 * bucket.size // shard)

    def buckets(self, *, padded: bool = True) -> Iterator[GradientBucket]:
        """Buckets of the parameters that learn: of one domain, summed over the same axes, from the same actions.

        Those of a GPU, perhaps without padding for the ranks that share them. On a CPU ranks that share nothing cut
        smaller ones (`plan_buckets`), in as many bytes.
        """
        alike: dict[tuple[object, ...], list[StageParameter]] = {}
        for parameter in reversed(self.parameters):
            if parameter.learns:
                sums_over = self.sums_over(parameter)
                codes = self.is_coded(parameter), self.weight_block(parameter)
                alone = parameter.name if parameter.tied == "stages" else ""
                key = (parameter.domain, sums_over, parameter.cut, parameter.sources, codes, alone)
                alike.setdefault(key, []).append(parameter)
        for group in alike.values():
            sizes, first = [parameter.size for parameter in group], group[0]
            coded, block = self.is_coded(first), self.weight_block(first)
            alignment = lcm(16 // self.element, CODE_BLOCK if coded else 1, block or 1)
            for part in cut_into_buckets(sizes, self.config.parallel.ddp_bucket_size):
                ranks = self.data_ranks[first.domain].shard if padded else 1
                size = padded_size([sizes[number] for number in part], alignment=alignment, ranks=ranks)
                names = tuple(group[number].name for number in part)
                shares = self.data_ranks[first.domain].shard
                held = 2 * self.coded_bytes(size) + 4 * size // shares if coded else 4 * size
                gathered = self.bytes_of(size, block)
                yield GradientBucket(
                    names, size, first.domain, first.sources, self.sums_over(first), coded, held, gathered
                )

    def is_coded(self, parameter: StageParameter) -> bool:
        """Whether data ranks send the gradient of a parameter as codes (qgZ)."""
        by_codes = self.config.parallel.zero_quantized_gradients is not None
        return by_codes and not parameter.is_vector and self.data_ranks[parameter.domain].shard > 1

    def weight_block(self, parameter: StageParameter) -> int | None:
        """Elements of the blocks of codes as which a parameter is sent, if it is (qwZ)."""
        parallel = self.config.parallel
        by_codes = parallel.zero_quantized_weights and parameter.learns and parameter.is_rounded
        return parallel.zero_quantized_weights_block if by_codes else None

    def bytes_of(self, size: int, block: int | None) -> int:
        """Bytes of so many elements of parameters on their way, as codes in such blocks or in the run's precision."""
        return self.element * size if block is None else size // block * bytes_of_block(WEIGHT_CODES, block)

    def coded_bytes(self, size: int) -> int:
        """Bytes of the codes of so many elements, whole blocks, and of their scales."""
        return size // CODE_BLOCK * bytes_of_block(self.config.parallel.zero_quantized_gradients or "int8")

    def sums_over(self, parameter: StageParameter) -> tuple[str, ...]:
        """Axes over which a gradient is summed besides its data ranks."""
        holders = {
            "ends": ("embedding",) if self.load.is_first != self.load.is_last else (),
            "stages": ("pp",),
        }
        tied = holders[parameter.tied] if parameter.tied is not None and self.config.layout.pp > 1 else ()
        return (*(axis for axis in parameter.partial if self.ranks[axis] > 1), *tied)

    def _rows(self) -> None:
        """ZeRO-3: parameters are gathered before every forward and backward, gradients reduced after every backward."""
        times, chunks = self.num_microbatches, len(self.load.layers)
        for parameter in self.parameters:
            shard, copies, secondary = self.data_ranks[parameter.domain]
            size = rounded_up(parameter.rows, shard) * parameter.columns
            # What is left of the stage around its layers is gathered for every chunk.
            gathers = 2 * times * (1 if parameter.name.startswith("layers.") else chunks)
            if secondary > 1:  # neighbours keep it from the first time on
                self.add("secondary", "all-gather", (gathers - 1) * self.element * size)
                gathers = 1
            if shard > 1:
                self.add("shard", "all-gather", gathers * self.bytes_of(size, self.weight_block(parameter)))
            if not parameter.learns:
                continue
            part = rounded_up(parameter.rows, shard) // shard
            if self.is_coded(parameter):
                padded = shard * rounded_up(part * parameter.columns, CODE_BLOCK)
                self.add("shard", "all-to-all", times * self.coded_bytes(padded))
            elif shard > 1:
                self.add("shard", "reduce-scatter", times * self.reduced_width * size)
            own = parameter.own_rows(shard, self.shard_ranks.get(parameter.domain, 0))  # without padding
            if copies > 1:
                self.add("replicate", "all-reduce", self.reduced_width * own * parameter.columns)
            for axis in self.sums_over(parameter):
                self.add(axis, "all-reduce", 4 * own * parameter.columns)

    def _matrices(self, domain: str) -> None:
        """Muon: pieces of matrices are reduce-scattered to their owners, and the updates gathered back."""
        axes = owners(candidate_of(self.config).mesh, self.data_ranks[domain], domain)
        learning = (each.matrices for each in self.parameters if each.learns and each.domain == domain)
        largest_first = sorted(chain.from_iterable(learning), reverse=True)
        for round_size in round_sizes(largest_first, num_ranks=prod(ranks for _, ranks in axes)):
            # A row of an owner grows, as the ranks of one axis after the other gather it, to the whole buffer.
            size = 4 * round_size.width
            for axis, ranks in axes:
                size *= ranks
                self.add(axis, "all-gather", size)
                if axis != "replicate":
                    self.add(axis, "reduce-scatter", size)
