"""What a plan is made for: a config, how a step computes it, and its pipeline stages."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatronish.config.config import Config
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.names import OBJECTIVE_NAMES
from megatronish.core.remembered import remembered
from megatronish.estimate.costs.candidate import Candidate, config_of
from megatronish.estimate.costs.disk_traffic import DiskTraffic, disk_traffic
from megatronish.estimate.costs.layer_kinds import ChunkKinds, LayerKind, LayerKinds, StageKinds
from megatronish.estimate.costs.micro_batch import MicroBatchSizes
from megatronish.parallel.bucketing import WEIGHT_CODES, bytes_of_block
from megatronish.parallel.schedules.live_activations import StageLoad, StagePlan
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.parallel.stages import Stages
from megatronish.specs.layers import attention_kind

Launches = Literal["eager", "compiled", "graph"]
Attention = Literal["flash", "fused_softmax", "unfused", "blocks"]
"""flash: scores are never in memory; fused_softmax: they are, and one kernel is their softmax; unfused: a chain of
operations in fp32 is; blocks: with dropout, block by block, computed twice."""
OPTIMIZER_BYTES = 40  # of a parameter, that the optimizer's step reads and writes


@dataclass(frozen=True)
class Workload:
    """A config, whatever its layout, and the kernels that a step computes it with."""

    config: Config
    vocab_size: int
    attention: Attention = "flash"
    fused_loss: bool = True
    """Whether the loss is a kernel forward and one backward, and not a chain of torch's operations in fp32."""

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> "Workload":
        """The workload of this project's own kernels."""
        model, backend = config.model, config.training.attention_backend
        attention: Attention = "blocks" if model.attention_dropout > 0 else "flash"
        spec = attention_kind(model).of(model)
        if spec.is_explicit(backend):
            is_fused = spec.is_softmax_fused(backend, has_alibi=model.position_embedding_type == "alibi")
            attention = "fused_softmax" if is_fused else "unfused"
        return cls(config, vocab_size, attention)

    @remembered
    def sizes(self, layer: Candidate) -> MicroBatchSizes:
        """Sizes of a micro-batch in a layout of a layer (`Candidate.of_a_layer`)."""
        return MicroBatchSizes(config_of(self.config, layer), self.vocab_size)

    @cached_property
    def layers(self) -> LayerKinds:
        """The layers of the model, by kind."""
        return LayerKinds(self.model, self.adapter)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different kinds of layers."""
        return self.layers.different

    @cached_property
    def model(self) -> ModelConfig:
        """Kinds and sizes of the model's layers, by the config."""
        return self.config.model

    @cached_property
    def adapter(self) -> AdapterConfig:
        """Adapters that learn in the place of the model, if there are any."""
        return self.config.adapter

    @cached_property
    def seq_length(self) -> int:
        """Tokens of a sample."""
        return self.config.training.seq_length

    @cached_property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.config.global_batch_size

    @cached_property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq_length

    @cached_property
    def precision(self) -> str:
        """The dtype that layers compute in."""
        return self.config.training.precision

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "fp32" else 2

    @cached_property
    def gathered_bytes(self) -> float:
        """Bytes of a parameter as data ranks gather it: those that a layer computes with, or of codes and scales."""
        parallel = self.config.parallel
        if parallel.zero_quantized_weights is None:
            return self.element_bytes
        block = parallel.zero_quantized_weights_block
        return bytes_of_block(WEIGHT_CODES, block) / block

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient as data ranks exchange it."""
        return 2 if self.config.parallel.grad_reduce_in_bf16 else 4

    @cached_property
    def launches(self) -> Launches:
        """How the host launches the kernels of a layer."""
        training = self.config.training
        return "graph" if training.cuda_graph else "compiled" if training.compile else "eager"

    @cached_property
    def by_deep_ep(self) -> bool:
        """Whether a token goes once to a rank with its experts, and not once for each of these."""
        return self.config.parallel.moe_token_dispatcher_type == "deepep" and self.precision == "bf16"

    @cached_property
    def disk(self) -> DiskTraffic:
        """Bytes of a parameter that a local disk reads and writes, where something is offloaded to it."""
        return disk_traffic(self.config)

    @cached_property
    def extra_forwards(self) -> int:
        """Forward passes over the micro-batches of a step besides its own: of a reference, and for KTO of the model."""
        has_labels = OBJECTIVE_NAMES[self.config.training.objective].learns_from == "labelled"
        return (self.config.reference in ("model", "adapters-off")) + has_labels


@dataclass(eq=False)
class StageLayers:
    """Layers of the stages of a pipeline, whatever else the layout has."""

    work: Workload
    loads: Sequence[StageLoad]

    @classmethod
    def of(cls, work: Workload, parallel: ParallelConfig) -> "StageLayers":
        """The stages that a config describes."""
        stages = Stages.of(parallel, work.model, vocab_size=work.vocab_size, seq_length=work.seq_length)
        return cls(work, stages.loads(1))

    @cached_property
    def stages(self) -> list[StageKinds]:
        """The layers of each stage, by kind."""
        return [self.work.layers.stage(load) for load in self.loads]

    @cached_property
    def numbers(self) -> Counter[StageKinds]:
        """How many stages there are of each kind."""
        return Counter(self.stages)

    @cached_property
    def longest(self) -> StageKinds:
        """The stage with most layers."""
        return max(self.stages, key=lambda stage: len(stage.kinds))

    @remembered
    def largest_parameters(self, tp: int, ep: int, etp: int, *, learned: bool = False) -> tuple[float, float]:
        """(dense parameters, experts) on a rank of the stage that has most of them, all or those that learn.

        Ranks of `tp` cut what is dense, and those of `ep` and `etp` the experts.
        """
        work = self.work
        sizes = {"vocab_size": work.model.padded_vocab_size(work.vocab_size, tp), "seq_length": work.seq_length}
        # Stages in the middle are alike: the ends and the fullest one are enough.
        fullest = {stage for stage in self.stages if stage.is_first or stage.is_last or stage is self.longest}
        only_adapters = learned and work.adapter.is_used
        counts = [stage.adapters if only_adapters else stage.parameters(work.model, **sizes) for stage in fullest]
        return (
            float(max(count.without_experts.per_rank(tp) for count in counts)),
            float(max(count.of_experts(ep * etp, etp) for count in counts)),
        )

    @cached_property
    def fullest(self) -> list[tuple[StagePlan, StageKinds]]:
        """Stages of which one needs most memory: both ends, and of those with the same layers first and last ones."""
        alike: dict[tuple[ChunkKinds, ...], list[int]] = {}
        for number, stage in enumerate(self.stages):
            alike.setdefault(stage.chunks, []).append(number)
        numbers = {number for number, stage in enumerate(self.stages) if stage.is_first or stage.is_last}
        numbers |= {stages[0] for stages in alike.values()}
        defers = SCHEDULES[self.loads[0].plan.schedule].has_weight_gradients
        if defers or any(stage.is_first and stage.is_last for stage in self.stages):
            # Later stages hold as much as earlier ones, or wait for more.
            numbers |= {stages[-1] for stages in alike.values()}
        return [(self.loads[number].plan, self.stages[number]) for number in sorted(numbers)]
