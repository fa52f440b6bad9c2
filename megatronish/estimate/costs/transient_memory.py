"""Transient memory of a step: gradients on their way, parameters that ZeRO-3 has gathered, matrices of Muon.

What layers need is in layer_memory.py. Here is what a stage needs besides, at three moments of a backward:

    its begin      gradients of the output layer's weight and input; with ZeRO-3 embedding and head are gathered
    a layer        with ZeRO-2 buckets that fill or are reduced; with ZeRO-3 the layer and the next one are gathered
    its end        the gradient of the embedding

and with hpZ, at all three, the parts that neighbours keep of what is not gathered just then.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.estimate.costs.candidate import candidate_of
from megatronish.estimate.costs.layer_kinds import ChunkKinds, LayerKind, StageKinds
from megatronish.estimate.costs.layer_memory import LayerMemory
from megatronish.estimate.costs.model_state import Rows
from megatronish.estimate.costs.stage_parameters import StageParameter
from megatronish.estimate.costs.state_traffic import (
    GradientBucket,
    StateTraffic,
    data_ranks,
    matrix_groups,
    matrix_rounds,
    owners,
)
from megatronish.parallel.bucketing import MAX_PENDING
from megatronish.parallel.schedules.live_activations import StageLoad, StagePlan
from megatronish.specs.costs import ADDED_AT_ONCE, WeightGradientBytes

TABLE = "embedding.tokens.weight"
NEWTON_SCHULZ = 4
"""Matrices at once in a step of Muon's iterations: the matrix, two of its steps and its square."""


class BufferBytes(NamedTuple):
    """Bytes of buffers as a backward of a chunk begins, at most while its layers are at work, and at its end.

    `head` are those while the output layer's gradient is copied there. `first` are those while the first of these
    layers is at work, the last of the chunk: where reductions wait for the end there are fewer than later, when fewer
    activations wait. `table` are those of the embedding's bucket, if nothing before its gradient has made it.
    """

    before: int
    head: int
    first: int
    layers: int
    end: int
    table: int


class Zero2Buffers:
    """Gradient buffers of ZeRO-2 in the course of a backward. It begins with what the one before has left.

    A bucket has a buffer from its first gradient on. It is reduced once it is full and in its turn, and its buffer is
    there until the reduction after the next one begins, perhaps in the next backward. Without overlap all buckets of a
    backward wait for its end. `opens_table`: the output layer's product adds to the gradient of a table that is the
    embedding's, too, whose bucket is there from the begin.
    """

    def __init__(
        self,
        parameters: Sequence[StageParameter],
        buckets: Sequence[GradientBucket],
        *,
        overlaps: bool,
        is_first: bool,
        opens_table: bool = False,
    ) -> None:
        self._overlaps, self._opens_table = overlaps, opens_table
        self._arrivals = [parameter.name for parameter in reversed(parameters) if parameter.learns]
        if not is_first and TABLE in self._arrivals:  # it is the head's alone
            self._arrivals.remove(TABLE)
            self._arrivals.insert(0, TABLE)
        place = {parameter.name: number for number, parameter in enumerate(parameters)}
        self._turns = sorted(buckets, key=lambda bucket: -min(place[name] for name in bucket.names))
        self._pending: deque[int] = deque()

    def backward(self, chunk: int) -> BufferBytes:
        """The next backward is one of this chunk."""
        queue = deque(bucket for bucket in self._turns if (chunk, "B") in bucket.sources)
        bucket_of = {name: bucket for bucket in queue for name in bucket.names}
        missing = {bucket.names: set(bucket.names) for bucket in queue}
        filling: dict[tuple[str, ...], int] = {}
        before = layers = end = sum(self._pending)
        table = 0
        if self._opens_table and TABLE in bucket_of:
            filling[bucket_of[TABLE].names] = 4 * bucket_of[TABLE].size
        head, first, at_first = before + sum(filling.values()), 0, ""
        for name in self._arrivals:
            if name not in bucket_of:
                continue
            bucket = bucket_of[name]
            if name == TABLE and bucket.names not in filling:
                table = 4 * bucket.size
            filling[bucket.names] = 4 * bucket.size
            end = sum(self._pending) + sum(filling.values())
            if name.startswith("layers."):
                layers = max(layers, end)
                layer = ".".join(name.split(".")[:2])
                at_first = at_first or layer
                first = layers if self._overlaps or layer == at_first else first
            elif not at_first:
                head = max(head, end)
            missing[bucket.names].discard(name)
            while self._overlaps and queue and not missing[queue[0].names]:
                bucket = queue.popleft()
                self._reduce(bucket.in_transfer if filling.pop(bucket.names) else 0)
        for bucket in queue:
            self._reduce(bucket.in_transfer if bucket.names in filling else 0)
        return BufferBytes(before, head, first, layers, end, table)

    def _reduce(self, size: int) -> None:
        if len(self._pending) == MAX_PENDING:
            self._pending.popleft()
        self._pending.append(size)


class ChunkBuckets(NamedTuple):
    """Gradient buckets of a chunk: buffers of ZeRO-2 in a first backward and in later ones, padding left out.

    `late` are bytes of the embedding's bucket, if gradients of the first layer and its own alone are in it.
    """

    first: BufferBytes
    later: BufferBytes
    late: float

    @classmethod
    def of(
        cls, config: Config, chunk: ChunkKinds, *, is_first: bool, is_last: bool, vocab_size: int, adds_at_once: bool
    ) -> "ChunkBuckets":
        """Buckets of a chunk that has the embedding, or the head; those of others differ in their names alone.

        `adds_at_once`: products add gradients to their sums.
        """
        plan = StagePlan(config.parallel.schedule, 1, 1, 1, 0)
        load = StageLoad((chunk.layers,), is_first=is_first, is_last=is_last, plan=plan)
        traffic = StateTraffic(config, vocab_size, load, 0)
        buckets = list(traffic.buckets(padded=False))
        buffers = Zero2Buffers(
            traffic.parameters,
            buckets,
            overlaps=config.parallel.overlap_grad_reduce,
            is_first=is_first,
            opens_table=adds_at_once and config.model.tied and is_first and is_last,
        )
        first = buffers.backward(0)
        own = ("embedding.", f"layers.{chunk.layers.start}.")
        tables = [
            bucket for bucket in buckets if TABLE in bucket.names and all(name.startswith(own) for name in bucket.names)
        ]
        return cls(first, buffers.backward(0), 4.0 * tables[0].size if tables and chunk.layers else 0.0)


def muon_bytes(config: Config, stage: StageKinds) -> float:
    """Muon's largest buffer: the rows of some owners, and those of more of them as they are gathered."""
    if config.optimizer.optimizer != "muon" or config.adapter.is_used:
        return 0.0
    mesh, most = candidate_of(config).mesh, 0.0
    for domain, data in data_ranks(config).items():
        ranks = [number for _, number in owners(mesh, data, domain)]
        rounds = matrix_rounds(matrix_groups(stage.counts, domain), prod(ranks))
        before, rows = 1, NEWTON_SCHULZ
        for number in ranks:
            rows = max(rows, (1 + before + before * number) if before > 1 else 1 + number)
            before *= number
        most = max(most, 4.0 * max((each.width for each in rounds), default=0) * rows)
    return most


class GatheredUnits(NamedTuple):
    """Bytes that ZeRO-3 gathers: the largest layer ahead, or a layer with its gradient and the one ahead of it.

    `unit` are elements of the largest part that is reduced. A base in 4 bits is gathered as it is stored. `kept` are
    bytes that this rank keeps for its neighbours of all layers, `kept_least` those of one of them, and `kept_rest` of
    the rest of the stage (hpZ).
    """

    largest: int
    following: int
    unit: int
    kept: float = 0.0
    kept_least: float = 0.0
    kept_rest: float = 0.0

    @classmethod
    def of(cls, sizes: LayerMemory, stage: StageKinds, rows: Mapping[LayerKind, Rows], ends: Rows) -> "GatheredUnits":
        """Of a stage whose layers have these padded rows; a frozen one gathers them, and reduces its adapters."""
        if not stage.kinds:
            return cls(0, 0, 0, kept_rest=sizes.element * ends.kept)
        if sizes.freezes:
            unit, layers = max(map(sizes.learned, stage.counts)), [sizes.frozen(kind) for kind in stage.kinds]
        else:
            unit = max(chain.from_iterable(rows[kind].gathered for kind in stage.counts))
            layers = [sizes.element * sum(rows[kind].gathered) for kind in stage.kinds]
        again = 0 if sizes.freezes else 1
        # What is gathered ahead has no experts: those of a layer are a unit of their own.
        experts = [0 if sizes.freezes else sizes.element * rows[kind].gathered[1] for kind in stage.kinds]
        ahead = [layer - of_layer for layer, of_layer in zip(layers, experts, strict=True)]
        pairs = (a + b + again * b for a, b in zip(ahead, layers[1:], strict=False))
        parts = [size * rows[kind].part_kept for kind, size in zip(stage.kinds, layers, strict=True)]
        following = max(pairs, default=(1 + again) * max(layers))
        return cls(max(ahead), following, unit, sum(parts), min(parts), sizes.element * ends.kept)


@dataclass
class StageTransients:
    """What is whole for a part of a backward of a stage, in bytes, besides what its layers need."""

    sizes: LayerMemory
    stage: StageKinds
    zero: int
    chunks: Sequence[ChunkBuckets]
    """Buckets of each chunk; needed under ZeRO-2."""
    units: GatheredUnits
    is_pipeline: bool
    is_only: bool
    """Whether a step has one backward."""

    def __post_init__(self) -> None:
        config, stage, sizes = self.sizes.config, self.stage, self.sizes
        model, width = config.model, sizes.element
        # Products add gradients to a sum in fp32 at once: those of factors in fp32, and in 16 bits those of a GPU, of
        # grouped ones few (ops/grouped_mm.py). Autograd hands on what a compiled layer computes, and ZeRO-3's layers.
        has_sums, is_compiled = self.zero < 3, config.training.compile and sizes.tp == 1
        self.gradient = 0 if sizes.freezes or (has_sums and sizes.adds_at_once) else width
        """Bytes of an element of a dense weight's gradient before it is in its sum."""
        self.of_layers = WeightGradientBytes(
            dense=width if is_compiled and not sizes.freezes else self.gradient,
            grouped=0 if sizes.freezes or (has_sums and (width == 4 or sizes.adds_by_expert)) else width,
        )
        self.reduced = 2 if config.parallel.grad_reduce_in_bf16 else 4
        self.ties = model.tied and stage.is_first and stage.is_last
        learned = model.position_embedding_type == "learned_absolute" and stage.is_first
        positions = (model.max_position_embeddings or config.training.seq_length) if learned else 0
        tables = (stage.is_first or (stage.is_last and model.embeds_at_end)) + (stage.is_last and not model.tied)
        self.rest = sizes.table * tables + positions * model.hidden_size
        """Elements of embedding and head."""
        self.learned_rest = 0 if sizes.freezes else self.rest
        output = float(sizes.hidden) + (0 if sizes.defers else sizes.table * self.gradient)
        output += sizes.hidden + sizes.residual if sizes.cuts_sequence else 0.0
        self.output = max(output - sizes.uncapped, sizes.uncapped, sizes.exponentials)
        """Gradients of the output layer's weight and input, or before them what the gradient of the logits needs.

        Behind a soft cap the tanh and one gradient of logits are gone when the output layer begins, and one is new.
        """
        self.bucket = 4.0 * config.parallel.ddp_bucket_size
        self.tied_gradient = self.gradient * sizes.table if self.ties else 0
        """The head's gradient of a tied table, which waits for the embedding's."""
        # Products that add to the sum need a tied table's bucket at once, and so do weight gradients of another chunk.
        waits = not self.ties or (self.gradient and len(stage.chunks) == 1)
        self.late = self.chunks[0].late if self.chunks and stage.is_first and waits else 0.0
        """Bytes of the embedding's bucket, if it comes after all layers of the first chunk."""
        deferred = self.of_layers._replace(dense=self.gradient)
        largest = max((sizes.largest_gradient(kind, deferred) for kind in stage.counts), default=0)
        largest = max(largest, self.gradient * sizes.table if stage.is_last else 0)
        self.of_weight = largest + (sizes.hidden if sizes.cuts_sequence else 0.0)
        """Weight gradient of an action of its own."""

    @cached_property
    def merges_table(self) -> bool:
        """Whether the embedding is in the bucket of layers, which alone do not fill one."""
        config = self.sizes.config
        is_apart = config.model.embeds_at_end and self.is_pipeline
        largest = max(map(self.sizes.learned_by, self.stage.chunks))
        return self.stage.is_first and not is_apart and largest < config.parallel.ddp_bucket_size

    def shared(self) -> int:
        """Bytes that are whole at most of what ZeRO shares, and those of a weight in 4 bits that is dequantised."""
        dequantised = max(map(self.sizes.dequantised, self.stage.counts), default=0)
        if self.zero == 2:
            # A step begins with no bucket in progress: the first of its backwards finds nothing that another has left.
            buffers = [
                buffer
                for chunk in self.chunks
                for buffer in (chunk.first, chunk.first if self.is_only else chunk.later)
            ]
            return dequantised + max(max(buffer.layers, buffer.end) for buffer in buffers)
        if self.zero < 3:
            return dequantised
        # The rest of the stage is gathered into one buffer, and then copied out of it.
        width, following = self.sizes.element, self.units.following
        if self.sizes.config.reference == "model":  # which no adapter changes, and which is in 4 bits nowhere
            layers = [width * self.sizes.held(kind) for kind in self.stage.kinds]
            following = max(following, max((a + b for a, b in pairwise(layers)), default=max(layers, default=0)))
        kept = round(self.units.kept + self.units.kept_rest)
        return dequantised + 2 * width * self.rest + following + kept

    def of_backward(self, chunk: int, is_later: bool, *, ends: bool) -> tuple[float, float, float, float]:
        """At the begin of a backward, while any layer is at work, the last one of the chunk, and at the end.

        `is_later` says that a chunk had a backward before; `ends` that this chunk ends the model.
        """
        of_layers = ADDED_AT_ONCE if self.zero == 3 else self.of_layers
        layer = self.sizes.of_layers(self.stage.chunks[chunk], of_layers)
        before, output = 0.0, self.output if ends else 0.0
        if self.zero == 2:
            # A chunk's first backward begins with what others have left, if there were any: as much as its own would.
            buffers = self.chunks[chunk].later if is_later else self.chunks[chunk].first
            at_work, last = self.tied_gradient + buffers.layers + layer, self.tied_gradient + buffers.first + layer
            # Unless the table's bucket is there already, it comes once the two gradients have become one.
            one, table = self.of_table(chunk)
            end = max(table + buffers.end - buffers.table, one + buffers.end)
            # The head's gradient is there while its bucket is filled, and logits of its micro-batch are not any more;
            # a product that adds to the bucket still reads those.
            gone = 0 if self.sizes.defers or not self.gradient else self.sizes.logits
            begin = max(buffers.before if is_later else 0.0, buffers.head - gone if ends else 0.0)
            return output + begin, at_work, last, end
        if self.zero < 2:
            at_work = self.tied_gradient + layer
            return output, at_work, at_work, self.of_table(chunk)[1]
        width, rest = self.sizes.element, self.sizes.element * self.rest
        if is_later:  # the last unit's: with several chunks it may be a layer's
            before = self.reduced * (self.learned_rest if len(self.stage.chunks) == 1 else self.units.unit)
        # The rest of the stage is gathered into one buffer, and then copied out of it; a layer is there, too.
        units = self.units
        begin = rest + before + max(rest, output) + units.largest + units.kept + units.kept_rest
        # Gathered: the rest of the stage, a layer and the next one; of the gradients the head's and the layer's.
        head = self.sizes.table if self.stage.is_last and not self.sizes.freezes else 0
        at_work = layer + width * (self.rest + head) + units.following + units.kept - units.kept_least
        at_work += max(before, self.reduced * units.unit) if self.stage.kinds else self.tied_gradient
        # What was gathered is freed before gradients are copied to where they are reduced.
        end = self.learned_rest * width + max(rest, self.learned_rest * self.reduced)
        end += 0.0 if self.is_only else units.kept + units.kept_rest
        return begin, at_work, at_work, end

    def of_table(self, chunk: int) -> tuple[float, float]:
        """Gradient of the embedding, and of a table that is also the head's two and their sum."""
        # It is an operator's output also where products add theirs to the sum at once.
        has_table = self.stage.is_first and chunk == 0 and not self.sizes.freezes
        one = float(self.sizes.element * self.sizes.table) if has_table else 0.0
        return one, one * (3 if self.ties and self.gradient else 1)
