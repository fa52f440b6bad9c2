"""Memory of a device, estimated before any is allocated: of each pipeline stage at the moment when most is held.

There is this one model: the first lines of a run, the refusal of a run without room, the forecast and the search over
layouts call it, and a test holds it to the dry run, within 5 %. The peak is the largest of the moments at which memory
may be fullest, three of each backward that live_activations.py names:

    its start     all activations and the logits are there, and what transient_memory.py adds
    a layer       the logits of the micro-batch are gone; of full recomputation the activations of a group of layers are
                  there once more, and the gradients of its weights, inputs and outputs (layer_memory.py), the
                  largest at a time
    its end       the activations of the micro-batch are gone

and weight gradients by themselves, and the update, where Muon's matrices are exchanged. Model state is that of
model_state.py. Layers are counted as on a GPU. A CPU's operators keep other tensors, so that for a CPU the most of each
kind of bytes is added up: a bound.

Experts are taken to get as many tokens each. A second model, of --reference model, counts as weights: its forward is
over when that of the step begins. Not counted: what the allocator and the device's libraries keep, 2 to 4 GiB on CUDA.

A search asks for tens of thousands of layouts. What depends on a kind of layer, a chunk, a stage or a mesh alone is
therefore computed once for all layouts that share it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.core.remembered import remembered
from megatronish.estimate.costs.candidate import Candidate, MeshSizes, candidate_of
from megatronish.estimate.costs.layer_kinds import ChunkKinds, LayerKind, LayerKinds, StageKinds
from megatronish.estimate.costs.layer_memory import LayerMemory
from megatronish.estimate.costs.memory_table import Memory
from megatronish.estimate.costs.model_state import Rows, StageCounts, stage_state, with_padding
from megatronish.estimate.costs.stage_parameters import StageParameters
from megatronish.estimate.costs.state_traffic import data_ranks
from megatronish.estimate.costs.transient_memory import ChunkBuckets, GatheredUnits, StageTransients, muon_bytes
from megatronish.parallel.schedules.live_activations import (
    Instant,
    StageLoad,
    StagePlan,
    fullest_backwards,
    fullest_instants,
)
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.specs.costs import DeviceType

DEFERRING = "zb-h1"
"""A schedule of those whose weight gradients wait, which are alike to a layer."""


def expected_memory(
    config: Config,
    stages: Sequence[StageLoad],
    *,
    vocab_size: int,
    device: DeviceType = "cuda",
    kernels: bool = True,
    shard_ranks: Mapping[str, int] = MappingProxyType({}),
) -> list[Memory]:
    """Bytes on a device of each pipeline stage when most is held, by owner; with `kernels` fused operators run.

    `shard_ranks` are the rank's places among those that shard each domain. By default it is the first one, which has
    most where ZeRO-3 has no even number of rows for each.
    """
    model = MemoryModel.alone(config, vocab_size, device, kernels=kernels, shard_ranks=shard_ranks)
    return model.of_stages(candidate_of(config), stages)


def bytes_of_uneven_load(
    config: Config, stages: Sequence[StageLoad], *, vocab_size: int, device: DeviceType = "cuda"
) -> int:
    """Bytes that the fullest device adds if its experts get twice the mean load that `expected_memory` has.

    A device may receive all rows of its ep group, ep times the mean, as no token is dropped.
    """
    model = config.model
    twice = replace(config, model=replace(model, moe_router_topk=2 * model.moe_router_topk))
    candidate, activations = candidate_of(config), list[list[int]]()
    for each in (config, twice):
        memory = MemoryModel.alone(each, vocab_size, device, kernels=False)
        activations.append(
            [memory.most_activations(candidate, memory.layers.stage(load), load.plan)[0] for load in stages]
        )
    return max(uneven - even for even, uneven in zip(*activations, strict=True))


class Moment(NamedTuple):
    """Bytes of activations, of logits and of what is at work, when a backward has come so far.

    `gradients` below zero are those of the step that have not come yet.
    """

    activations: float
    logits: float
    temporary: float
    gradients: float = 0.0


@dataclass
class MemoryModel:
    """Memory of the stages of all layouts of a config; `config_for` gives the config of a layout."""

    config: Config
    vocab_size: int
    layers: LayerKinds
    config_for: Callable[[Candidate], Config]
    device: DeviceType = "cuda"
    kernels: bool = True
    shard_ranks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def alone(
        cls,
        config: Config,
        vocab_size: int,
        device: DeviceType,
        *,
        kernels: bool = True,
        shard_ranks: Mapping[str, int] = MappingProxyType({}),
    ) -> "MemoryModel":
        """Of the layout that a config has itself."""
        layers = LayerKinds(config.model, config.adapter)
        return cls(config, vocab_size, layers, lambda _: config, device, kernels, shard_ranks)

    def of_stages(self, candidate: Candidate, loads: Sequence[StageLoad]) -> list[Memory]:
        """Bytes on a device of each stage when most is held, by owner."""
        return [self.peaks(candidate, self.layers.stage(load), load.plan, (candidate.zero,))[0] for load in loads]

    def peaks(self, candidate: Candidate, stage: StageKinds, plan: StagePlan, zeros: Sequence[int]) -> list[Memory]:
        """Bytes of a stage when most is held, for each stage of ZeRO; 0 and 1 differ in their model state alone."""
        sizes, peaks, fullest = self._layer_memory(candidate), list[Memory](), dict[int, Moment]()
        work = self._work(sizes, stage)
        for zero in zeros:
            state, units, of_update = self._state(candidate.mesh, stage, zero)
            if self.device == "cpu":
                # A CPU's bound: the most of each kind of bytes, which are not there at the same time.
                waiting, of_logits = self.most_activations(candidate, stage, plan)
                shared = self._transients(candidate, stage, sizes, zero, units, plan).shared()
                peaks.append(state._replace(activations=waiting, logits=of_logits, temporary=shared))
                continue
            alike = max(zero, 1)
            if alike not in fullest:
                transients = self._transients(candidate, stage, sizes, zero, units, plan)
                fullest[alike] = work.fullest(plan, transients)
            activations, logits, temporary, gradients = fullest[alike]
            if of_update > activations + logits + temporary + gradients:
                activations, logits, temporary, gradients = 0, 0, of_update, 0
            held = state._replace(gradients=state.gradients + round(gradients), activations=round(activations))
            peaks.append(held._replace(logits=round(logits), temporary=round(temporary)))
        return peaks

    def floor(self, candidate: Candidate, stage: StageKinds, plan: StagePlan, zero: int) -> float:
        """Bytes below which a peak cannot be: model state without gradients, and activations that wait.

        Gradients are not all there while the most activations wait for a step's first backward.
        """
        held = self._work(self._layer_memory(candidate), stage).waiting_most(plan).values()
        state = self._state(candidate.mesh, stage, zero)[0]
        return state.total - state.gradients + max(map(sum, held), default=0.0)

    def of_one_micro_batch(self, candidate: Candidate, stage: StageKinds) -> int:
        """Bytes of activations of a stage that one micro-batch at a time passes."""
        one = Instant((1,) * len(stage.chunks), (0,) * len(stage.chunks))
        work = self._work(self._layer_memory(candidate), stage)
        return round(work.waiting(one) + max(chunk.again for chunk in work.chunks))

    @remembered
    def _work(self, sizes: LayerMemory, stage: StageKinds) -> "StageWork":
        return StageWork(sizes, stage)

    @remembered
    def _layer_memory(self, candidate: Candidate) -> LayerMemory:
        defers = SCHEDULES[candidate.schedule].has_weight_gradients
        return self._memory_of(candidate.of_a_layer(DEFERRING if defers else "1f1b"))

    @remembered
    def _memory_of(self, layer: Candidate) -> LayerMemory:
        return LayerMemory(self.config_for(layer), self.vocab_size, self.device, self.kernels)

    # What does not depend on the micro-batch

    @remembered
    def _state(self, mesh: MeshSizes, stage: StageKinds, zero: int) -> tuple[Memory, GatheredUnits, float]:
        """Model state, what ZeRO-3 gathers, and Muon's largest buffer."""
        candidate, units = Candidate(mesh, zero=zero), GatheredUnits(0, 0, 0)
        config = self.config_for(candidate)
        state = stage_state(config, StageCounts.of(config, stage, vocab_size=self.vocab_size))
        if zero == 3:
            # Stages change nothing of a kind's rows, and a context rank shares them as a data rank does.
            rows = self._rows_of_kinds(mesh._replace(pp=1, dp=mesh.dp * mesh.cp, cp=1))
            of_ends = _load(is_first=stage.is_first, is_last=stage.is_last)
            ends = Rows.of(
                StageParameters(config, of_ends, self.vocab_size).all(), data_ranks(config), self.shard_ranks
            )
            units = GatheredUnits.of(self._layer_memory(candidate), stage, rows, ends)
            if not config.adapter.is_used:
                of_layers = [rows[kind].times(number) for kind, number in stage.counts.items()]
                state = with_padding(state, [*of_layers, ends])
        return state, units, muon_bytes(config, stage)

    @remembered
    def _rows_of_kinds(self, mesh: MeshSizes) -> dict[LayerKind, Rows]:
        config = self.config_for(Candidate(mesh, zero=3))
        parameters = StageParameters(config, _load(), self.vocab_size)
        return {
            kind: Rows.of(parameters.layer(f"layers.{kind.first}", kind.cost, 0), data_ranks(config), self.shard_ranks)
            for kind in self.layers.different
        }

    def _transients(
        self,
        candidate: Candidate,
        stage: StageKinds,
        sizes: LayerMemory,
        zero: int,
        units: GatheredUnits,
        plan: StagePlan,
    ) -> StageTransients:
        number, buckets, alike = len(stage.chunks), list[ChunkBuckets](), self._with_same_buckets(candidate)
        # Without ZeRO-2 buckets matter where the embedding is in one with the first layer, which is the first stage's.
        for place in range(number if zero == 2 else min(1, stage.is_first * number)):
            is_first, is_last = stage.is_first and place == 0, stage.is_last and place == number - 1
            ends = {"is_first": is_first, "is_last": is_last}
            buckets.append(self._buckets_of(alike, stage.chunks[place], **ends, adds_at_once=sizes.adds_at_once))
        is_only = plan.num_microbatches * number == 1
        return StageTransients(sizes, stage, zero, buckets, units, candidate.mesh.pp > 1, is_only)

    @remembered
    def _with_same_buckets(self, candidate: Candidate) -> Candidate:
        """What of a layout decides its buckets; data ranks do only where gradients are sent as codes (qgZ)."""
        tp, pp, dp, cp, ep, etp = candidate.mesh
        ranks = dp * cp if self.config.parallel.zero_quantized_gradients is not None else max(1, ep * etp // tp)
        schedule = DEFERRING if SCHEDULES[candidate.schedule].has_weight_gradients else "1f1b"
        mesh = MeshSizes(tp, min(pp, 2), ranks, 1, ep, etp)
        return Candidate(mesh, schedule=schedule, zero=2, sequence_parallel=candidate.sequence_parallel)

    @remembered
    def _buckets_of(
        self, candidate: Candidate, chunk: ChunkKinds, *, is_first: bool, is_last: bool, adds_at_once: bool
    ) -> ChunkBuckets:
        config, ends = self.config_for(candidate), {"is_first": is_first, "is_last": is_last}
        return ChunkBuckets.of(config, chunk, **ends, vocab_size=self.vocab_size, adds_at_once=adds_at_once)

    def most_activations(self, candidate: Candidate, stage: StageKinds, plan: StagePlan) -> tuple[int, int]:
        """The most bytes of activations that wait at once, with those that are computed again, and of logits."""
        work = self._work(self._layer_memory(candidate), stage)
        held = [(work.waiting(instant), work.of_logits(instant)) for instant in fullest_instants(plan)]
        activations, logits = max(held, key=sum)
        return round(activations + max(chunk.again for chunk in work.chunks)), round(logits)


@dataclass
class StageWork:
    """Moments of a stage's step; sizes are bytes of one micro-batch."""

    sizes: LayerMemory
    stage: StageKinds

    def __post_init__(self) -> None:
        sizes, stage = self.sizes, self.stage
        self.chunks = [sizes.of_chunk(chunk) for chunk in stage.chunks]
        self.shared_masks, self.own_masks = sizes.masks
        self._most: dict[StagePlan, dict[tuple[int, frozenset[int]], tuple[float, float]]] = {}
        # Bytes of a micro-batch that waits in a chunk, and of one that waits for its weight gradients alone.
        self._live, self._deferred = [each.live for each in self.chunks], [each.deferred for each in self.chunks]
        if stage.is_first:
            self._live[0] += sizes.of_embedding
            self._deferred[0] += sizes.of_embedding
        if stage.is_last:
            self._live[-1] += sizes.of_head
            self._deferred[-1] += sizes.of_head * sizes.defers

    def waiting(self, instant: Instant) -> float:
        """Activations of all micro-batches at an instant."""
        total = self.shared_masks
        for number, size in zip(instant.live, self._live, strict=True):
            total += number * size
        if self.sizes.defers:
            for number, size in zip(instant.deferred, self._deferred, strict=True):
                total += number * size
        return total + max(instant.live) * self.own_masks

    def losses(self, instant: Instant) -> int:
        """Micro-batches whose loss has a backward, or weight gradients, before it."""
        return instant.live[-1] + (instant.deferred[-1] if self.sizes.defers else 0)

    def of_logits(self, instant: Instant) -> float:
        """Logits of all micro-batches at an instant."""
        return self.losses(instant) * self.sizes.logits if self.stage.is_last else 0.0

    def fullest(self, plan: StagePlan, transients: StageTransients) -> Moment:
        """The moment of a step at which most is held."""
        # A tensor that arrives early and one that is sent.
        transfers = 2 * self.sizes.hidden / self.sizes.tp if plan.num_stages > 1 else 0.0
        gradients = self._gradients(transients)
        most, fullest = -inf, (0.0, 0.0, 0.0, 0.0)
        # What a backward holds in addition to all that waits depends on its chunk and on those that have begun: of the
        # backwards that have these in common, the one for which most waits is the fullest.
        for (chunk, begun), (waiting, logits) in self.waiting_most(plan).items():
            for added, freed_logits, temporary, arrived in self._of_backward(chunk, begun, gradients, transients):
                if waiting + logits + added - freed_logits + temporary + arrived > most:
                    most = waiting + logits + added - freed_logits + temporary + arrived
                    fullest = waiting + added, logits - freed_logits, temporary, arrived
        if self.sizes.defers:
            for instant in fullest_instants(plan):  # weight gradients by themselves
                waiting, logits, temporary = self.waiting(instant), self.of_logits(instant), transients.of_weight
                if any(instant.deferred) and waiting + logits + temporary > most:
                    most, fullest = waiting + logits + temporary, (waiting, logits, temporary, 0.0)
        activations, logits, temporary, arrived = fullest
        return Moment(activations, logits, temporary + transfers, arrived)

    def waiting_most(self, plan: StagePlan) -> dict[tuple[int, frozenset[int]], tuple[float, float]]:
        """{(chunk, chunks that have begun): activations and logits when most wait for a backward of that chunk}."""
        if plan not in self._most:
            most: dict[tuple[int, frozenset[int]], tuple[float, float]] = {}
            for instant, chunk, begun in fullest_backwards(plan):
                held, key = (self.waiting(instant), self.of_logits(instant)), (chunk, begun)
                if key not in most or sum(held) > sum(most[key]):
                    most[key] = held
            self._most[plan] = most
        return self._most[plan]

    def _of_backward(
        self, chunk: int, begun: frozenset[int], gradients: Sequence[float], transients: StageTransients
    ) -> Iterator[tuple[float, float, float, float]]:
        """(added activations, freed logits, temporaries, arrived gradients) of a backward, on top of all that waits.

        At the output layer, at the layer that needs most, at the embedding. Plain tuples are fast.
        """
        sizes, bytes_of = self.sizes, self.chunks[chunk]
        ends = self.stage.is_last and chunk == len(self.chunks) - 1
        missing = come = 0.0
        if gradients and len(begun) < len(gradients):  # of chunks without a backward, which have no memory yet
            missing = sum([size for other, size in enumerate(gradients) if other not in begun])
            come = 0.0 if chunk in begun else gradients[chunk]
        at_begin, work, at_last, at_end = transients.of_backward(chunk, bool(begun), ends=ends)
        late = transients.late if come and chunk == 0 else 0.0
        if ends or transients.zero == 3:
            yield 0.0, 0.0, at_begin, -missing
        # Layers of multi-token prediction come first, each once its own logits are gone.
        all_gone = sizes.logits if ends and not sizes.defers else 0.0
        gone = all_gone / (1 + sizes.config.model.num_depths)
        if bytes_of.keeps_last:  # of gradients a bucket has come, and the head's
            head = 4.0 * sizes.table if ends and not transients.tied_gradient else 0.0
            few = come and (come if transients.merges_table else min(come, transients.bucket + head))
            yield 0.0, gone, at_last, few - missing
        if bytes_of.recomputes:  # all have come but the embedding's
            yield bytes_of.more, gone, work, come - late - missing
        freed = 0.0 if sizes.defers else bytes_of.live + (sizes.of_head if ends else 0)
        # The embedding's bucket comes once the gradients of a tied table have become one.
        yield -freed, all_gone, max(at_end - late, transients.of_table(chunk)[0]) if late else at_end, come - missing

    def _gradients(self, transients: StageTransients) -> list[float]:
        """Bytes of the gradients of each chunk, if they are given back when a step begins."""
        sizes, stage = self.sizes, self.stage
        if transients.zero > 1 or sizes.config.training.cuda_graph:
            return []
        elements = [sizes.learned_by(chunk) for chunk in stage.chunks]
        if not sizes.freezes:
            is_one = len(elements) == 1 and transients.ties
            elements[0] += sizes.table if stage.is_first else 0
            elements[-1] += sizes.table if stage.is_last and not is_one else 0
            elements[-1] += sizes.learned_by_head if stage.is_last else 0
            has_both = sizes.config.model.num_depths > 0 and not sizes.config.model.tied
            elements[-1] += sizes.table if has_both and stage.is_last and not stage.is_first else 0
        return [4.0 * size for size in elements]


def _load(*, is_first: bool = False, is_last: bool = False) -> StageLoad:
    """A stage without layers."""
    return StageLoad((range(0),), is_first=is_first, is_last=is_last, plan=StagePlan("1f1b", 1, 1, 1, 0))
