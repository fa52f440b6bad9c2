"""What a plan is made for: a model's layers by kind, its batch, precision and attention, and its pipeline stages.

Layers of a stage are counts by kind, from which the parameters of a rank of the fullest stage follow.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from megatronish.config.config import Config
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import CORE, RecomputeModule
from megatronish.core.layout import RowRoom
from megatronish.core.names import OBJECTIVE_NAMES
from megatronish.core.remembered import remembered
from megatronish.estimate.costs.disk_traffic import DiskTraffic, disk_traffic
from megatronish.estimate.costs.layer_kind_memory import LayerKind, layer_kinds
from megatronish.estimate.costs.parameters import parameters_of_stage
from megatronish.parallel.bucketing import WEIGHT_CODES, bytes_of_block
from megatronish.parallel.schedules.live_activations import StageLoad
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.parallel.stages import Stages
from megatronish.specs.attention import AttentionSpec
from megatronish.specs.costs import Count, sum_counts

Launches = Literal["eager", "compiled", "graph"]
Attention = Literal["flash", "fused_softmax", "unfused", "blocks"]
"""flash: scores are never in memory; fused_softmax: they are, and one kernel is their softmax; unfused: a chain of
operations in fp32 is; blocks: with dropout, block by block, computed twice."""


@dataclass(frozen=True)
class Workload:
    """A model with its batch, and how a step computes it."""

    model: ModelConfig
    vocab_size: int
    seq_length: int
    global_batch: int
    precision: str = "bf16"
    attention: Attention = "flash"
    fused: bool = False
    """Whether pointwise operations are fused, by kernels or by a compiler."""
    fused_loss: bool = True
    """Whether the loss is a kernel forward and one backward, and not a chain of torch's operations in fp32."""
    launches: Launches = "eager"
    """How the host launches the kernels of a layer."""
    gradient_bytes: int = 4
    """Bytes of a gradient as data-parallel ranks exchange it."""
    codes: str | None = None
    """Form in which they exchange it under ZeRO, if it is one of codes (qgZ)."""
    weight_block: int | None = None
    """Elements of the blocks of codes as which they gather weights, if they are codes (qwZ)."""
    recomputed: frozenset[RecomputeModule] = CORE
    """Parts of layers that selective recomputation computes again."""
    ring: bool = True
    """Whether cp sends keys and values round a ring, and does not trade heads."""
    optimizer_bytes: int = 40
    """Bytes a parameter that the optimizer step reads and writes."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """Adapters that learn in the place of the model, if there are any."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer, of which Muon has matrix products of its own."""
    disk: DiskTraffic = field(default_factory=DiskTraffic)
    """Bytes of a parameter that a local disk reads and writes, where something is offloaded to it."""
    measures_logits: bool = False
    """Whether each forward finds the largest logits of attention (QK-clip)."""
    row_room: RowRoom = field(default_factory=RowRoom)
    """Rows of tokens that ranks of ep send each other, where those are as many in every step."""
    by_deep_ep: bool = False
    """Whether a token goes once to a rank with its experts, and not once for each of these."""
    extra_forwards: int = 0
    """Forward passes over the micro-batches of a step besides its own: of a reference, and for KTO of the model."""

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> "Workload":
        """The workload that a config describes."""
        training, model, parallel = config.training, config.model, config.parallel
        attention: Attention = "blocks" if model.attention_dropout > 0 else "flash"
        spec, backend = AttentionSpec.of(model), training.attention_backend
        if spec.is_explicit(backend):
            is_fused = spec.is_softmax_fused(backend, has_alibi=model.position_embedding_type == "alibi")
            attention = "fused_softmax" if is_fused else "unfused"
        return cls(
            model=model,
            vocab_size=vocab_size,
            seq_length=training.seq_length,
            global_batch=config.global_batch_size,
            precision=training.precision,
            attention=attention,
            fused=training.compile,
            launches="graph" if training.cuda_graph else "compiled" if training.compile else "eager",
            gradient_bytes=2 if parallel.grad_reduce_in_bf16 else 4,
            codes=parallel.zero_quantized_gradients,
            weight_block=parallel.zero_quantized_weights_block if parallel.zero_quantized_weights else None,
            recomputed=config.recompute.named_modules,
            ring=parallel.cp_comm_type == "p2p",
            adapter=config.adapter,
            optimizer=config.optimizer,
            disk=disk_traffic(config),
            measures_logits=config.measures_logits,
            row_room=parallel.row_room,
            by_deep_ep=parallel.moe_token_dispatcher_type == "deepep" and training.precision == "bf16",
            extra_forwards=(config.reference in ("model", "adapters-off"))
            + (OBJECTIVE_NAMES[training.objective].learns_from == "labelled"),
        )

    @cached_property
    def layers(self) -> list[LayerKind]:
        """The kind of each layer."""
        return layer_kinds(self.model, self.adapter)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different kinds of layers."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gathered_bytes(self) -> float:
        """Bytes of a parameter as data ranks gather it: those that a layer computes with, or of codes and scales."""
        if self.weight_block is None:
            return self.element_bytes
        return bytes_of_block(WEIGHT_CODES, self.weight_block) / self.weight_block

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq_length

    @property
    def has_dropout(self) -> bool:
        """Whether hidden states are dropped."""
        return self.model.hidden_dropout > 0


@dataclass(eq=False)
class StageLayers:
    """Layers of each stage: `first` and `last` are the stages of embedding and head."""

    work: Workload
    chunks: list[list[tuple[int, ...]]]
    """Numbers of layers of each kind, of each chunk of each stage."""
    first: int
    last: int
    loads: tuple[StageLoad, ...] = ()
    defers: bool = False
    """Whether weight gradients wait for actions of their own."""

    @classmethod
    def of(cls, work: Workload, parallel: ParallelConfig) -> "StageLayers":
        """The stages that a config describes."""
        stages = Stages.of(parallel, work.model, vocab_size=work.vocab_size, seq_length=work.seq_length)
        chunks: list[list[tuple[int, ...]]] = [[] for _ in range(stages.num_stages)]
        for place, layers in zip(stages.placement, stages.layers, strict=True):
            chunks[place.stage].append(counted(work, layers))
        ends = stages.placement[0].stage, stages.placement[-1].stage
        return cls(work, chunks, *ends, tuple(stages.loads(1)), SCHEDULES[parallel.schedule].has_weight_gradients)

    @classmethod
    def by_hand(cls, work: Workload, sizes: tuple[int, ...]) -> "StageLayers":
        """Stages of one chunk with these numbers of layers, as published runs state them."""
        starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
        chunks = [[counted(work, range(a, a + n))] for a, n in zip(starts, sizes, strict=True)]
        return cls(work, chunks, 0, len(sizes) - 1)

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of layers of each kind, of each stage."""
        return tuple(tuple(map(sum, zip(*chunks, strict=True))) for chunks in self.chunks)

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
        return of_ends + sum_counts(kind.parameters * number for kind, number in self.kinds(stage).items())

    def learned(self, stage: int, tp: int) -> Count:
        """Parameters of a stage that learn: all of them, or those of its adapters."""
        if not self.work.adapter.is_used:
            return self.parameters(stage, tp)
        return sum_counts(kind.adapters * number for kind, number in self.kinds(stage).items())

    def kinds(self, stage: int) -> dict[LayerKind, int]:
        """Numbers of layers of a stage, by kind."""
        return dict(zip(self.work.kinds, self.counts[stage], strict=True))

    @remembered
    def largest_parameters(self, tp: int, ep: int, etp: int, *, learned: bool = False) -> tuple[float, float]:
        """(dense parameters, experts) on a rank of the stage that has most of them, all or those that learn.

        Ranks of `tp` cut what is dense, and those of `ep` and `etp` the experts.
        """
        # Stages in the middle are alike: the ends and the fullest one are enough.
        fullest = max(range(len(self.counts)), key=lambda stage: sum(self.counts[stage]))
        of = self.learned if learned else self.parameters
        counts = [of(stage, tp) for stage in sorted({self.first, self.last, fullest})]
        return (
            float(max(count.without_experts.per_rank(tp) for count in counts)),
            float(max(count.of_experts(ep * etp, etp) for count in counts)),
        )

    @cached_property
    def ends(self) -> list[int]:
        """Stages of which one is the fullest: both ends, and of stages with the same chunks the first and the last."""
        ends = {self.first, self.last}
        alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for stage, chunks in enumerate(self.chunks):
            alike.setdefault(tuple(chunks), []).append(stage)
        ends |= {stages[0] for stages in alike.values()}
        if self.first == self.last or self.defers:  # later stages hold as much as earlier ones, or wait for more
            ends |= {stages[-1] for stages in alike.values()}
        return sorted(ends)

    @cached_property
    def shapes(self) -> list[tuple[tuple[int, ...], bool, bool, int]]:
        """Different stages: counts by kind, whether it is the first, whether the last, and how many there are."""
        number_by_shape: dict[tuple[tuple[int, ...], bool, bool], int] = {}
        for stage, counts in enumerate(self.counts):
            key = (counts, stage == self.first, stage == self.last)
            number_by_shape[key] = number_by_shape.get(key, 0) + 1
        return [(*key, number) for key, number in number_by_shape.items()]


def counted(work: Workload, layers: range) -> tuple[int, ...]:
    """Numbers of layers of each kind."""
    kinds = [work.layers[layer] for layer in layers]
    return tuple(kinds.count(kind) for kind in work.kinds)
