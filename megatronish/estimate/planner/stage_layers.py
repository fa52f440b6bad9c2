"""Layers of pipeline stages as counts by kind, and the parameters that a rank of the fullest stage holds."""

from dataclasses import dataclass, field
from functools import cached_property

from megatronish.config.sections.parallel import ParallelConfig
from megatronish.estimate.costs.candidate import MeshSizes
from megatronish.estimate.costs.parameters import parameters_of_stage
from megatronish.estimate.planner.workload import Workload
from megatronish.parallel.pipeline.stages import Stages
from megatronish.parallel.schedules.live_activations import StageLoad
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.specs.costs import Count, sum_counts


@dataclass(eq=False)
class StageLayers:
    """Layers of each stage.

    `counts[stage][kind]` are numbers of layers; `first` and `last` are the stages of embedding and head.
    """

    work: Workload
    counts: tuple[tuple[int, ...], ...]
    first: int
    last: int
    chunks: list[list[tuple[int, ...]]]
    """The counts of each chunk of each stage."""
    layers: tuple[tuple[int, ...], ...] = ()
    """Numbers of the layers of each stage."""
    loads: tuple[StageLoad, ...] = ()
    defers: bool = False
    """Whether weight gradients wait for actions of their own."""
    _largest: dict[tuple[MeshSizes, bool], tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, work: Workload, parallel: ParallelConfig) -> "StageLayers":
        """The stages that a config describes."""
        stages = Stages.of(parallel, work.model, vocab_size=work.vocab_size, seq_length=work.seq_length)
        chunks: list[list[tuple[int, ...]]] = [[] for _ in range(stages.num_stages)]
        numbers: list[list[int]] = [[] for _ in range(stages.num_stages)]
        for place, layers in zip(stages.placement, stages.layers, strict=True):
            chunks[place.stage].append(counted(work, layers))
            numbers[place.stage] += layers
        counts = tuple(tuple(map(sum, zip(*each, strict=True))) for each in chunks)
        ends = stages.placement[0].stage, stages.placement[-1].stage
        return cls(
            work,
            counts,
            *ends,
            chunks,
            tuple(map(tuple, numbers)),
            tuple(stages.loads(1)),
            SCHEDULES[parallel.schedule].has_weight_gradients,
        )

    @classmethod
    def by_hand(cls, work: Workload, sizes: tuple[int, ...]) -> "StageLayers":
        """Stages of one chunk with these numbers of layers, as published runs state them."""
        starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
        counts = tuple(counted(work, range(a, a + n)) for a, n in zip(starts, sizes, strict=True))
        return cls(work, counts, 0, len(sizes) - 1, [[each] for each in counts])

    def parameters(self, stage: int, tp: int) -> Count:
        """Parameters of a stage by how they are cut, with a vocabulary padded for tp."""
        model = self.work.model
        of_ends = parameters_of_stage(
            model,
            (),
            vocab_size=model.padded_vocab_size(self.work.vocab_size, tp),
            seq_length=self.work.seq_length,
            is_first=stage == self.first,
            is_last=stage == self.last,
        )
        return of_ends + sum_counts(
            count * size for count, size in zip(self._of_kinds, self.counts[stage], strict=True)
        )

    def learned(self, stage: int, tp: int) -> Count:
        """Parameters of a stage that learn: all of them, or those of its adapters."""
        if not self.work.adapter.is_used:
            return self.parameters(stage, tp)
        return sum_counts(self.work.adapters_of_layers[layer] for layer in self.layers[stage])

    def largest_parameters(self, mesh: MeshSizes, *, learned: bool = False) -> tuple[float, float]:
        """(dense parameters, experts) on a rank of the stage that has most of them, all or those that learn."""
        key = mesh._replace(dp=1, cp=1, pp=1), learned
        if key not in self._largest:
            # Stages in the middle are alike: the ends and the fullest one are enough.
            fullest = max(range(len(self.counts)), key=lambda stage: sum(self.counts[stage]))
            of = self.learned if learned else self.parameters
            counts = [of(stage, mesh.tp) for stage in sorted({self.first, self.last, fullest})]
            ranks = mesh.ep * mesh.etp
            self._largest[key] = (
                float(max(count.without_experts.per_rank(mesh.tp) for count in counts)),
                float(max(count.experts // ranks for count in counts)),
            )
        return self._largest[key]

    @cached_property
    def ends(self) -> list[int]:
        """Stages of which one is the fullest: both ends, and of stages with the same chunks the first and the last."""
        found = {self.first, self.last}
        alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for stage, chunks in enumerate(self.chunks):
            alike.setdefault(tuple(chunks), []).append(stage)
        found |= {stages[0] for stages in alike.values()}
        if self.first == self.last or self.defers:  # later stages hold as much as earlier ones, or wait for more
            found |= {stages[-1] for stages in alike.values()}
        return sorted(found)

    @cached_property
    def shapes(self) -> list[tuple[tuple[int, ...], bool, bool, int]]:
        """Different stages: counts by kind, whether it is the first, whether the last, and how many there are."""
        found: dict[tuple[tuple[int, ...], bool, bool], int] = {}
        for stage, counts in enumerate(self.counts):
            key = (counts, stage == self.first, stage == self.last)
            found[key] = found.get(key, 0) + 1
        return [(*key, number) for key, number in found.items()]

    @cached_property
    def _of_kinds(self) -> list[Count]:
        return [row.parameters for row in self.work.kinds]


def counted(work: Workload, layers: range) -> tuple[int, ...]:
    """Numbers of layers of each kind."""
    kinds = [work.layers[layer] for layer in layers]
    return tuple(kinds.count(kind) for kind in range(len(work.kinds)))
