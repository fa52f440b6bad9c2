"""Kinds of layers: those that are alike are one object, and so are chunks and stages that are.

What a search computes of a kind, a chunk or a stage it keeps with that object, for all layouts that have it.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.model import ModelConfig
from megatronish.core.remembered import remembered
from megatronish.estimate.costs.parameters import adapter_parameters, parameters_of_stage
from megatronish.parallel.schedules.live_activations import StageLoad
from megatronish.specs.adapter_targets import all_patterns, is_target
from megatronish.specs.costs import Count, LayerCost, sum_counts
from megatronish.specs.layers import LayerSpec, layer_specs


@dataclass(frozen=True, eq=False)
class LayerKind:
    """Layers that are alike: their spec, its cost row, and the sections with an adapter; `first` is one of them."""

    spec: LayerSpec
    cost: LayerCost
    adapted: frozenset[str]
    adapters: Count
    """Parameters of its adapters."""
    first: int
    is_ahead: bool
    """Whether it is of multi-token prediction."""

    @cached_property
    def parameters(self) -> Count:
        """Number of a layer's parameters, without adapters."""
        return self.cost.parameters

    @cached_property
    def deferred(self) -> tuple[Count, Count]:
        """Elements a token that weight gradients keep: of inputs, and of output gradients."""
        return self.cost.deferred_inputs, self.cost.deferred_gradients


def layer_kinds(model: ModelConfig, adapter: AdapterConfig) -> list[LayerKind]:
    """The kind of every layer of the model; layers that are alike have the same one."""
    kind_by_spec: dict[tuple[LayerSpec, frozenset[str]], LayerKind] = {}
    patterns = all_patterns(adapter) if adapter.is_used else ()
    costs: dict[LayerSpec, LayerCost] = {}
    kinds = []
    for number, spec in enumerate(layer_specs(model)):
        cost = costs.get(spec) or costs.setdefault(spec, spec.cost(model))
        names = (f"{linear.name}.{name}" for linear in cost.linears for name, _ in linear.sections)
        adapted = frozenset(name for name in names if patterns and is_target(f"layers.{number}.{name}", patterns))
        if (spec, adapted) not in kind_by_spec:
            adapters = adapter_parameters(model, [number], adapter)
            kind_by_spec[spec, adapted] = LayerKind(spec, cost, adapted, adapters, number, number >= model.num_layers)
        kinds.append(kind_by_spec[spec, adapted])
    return kinds


@dataclass(frozen=True, eq=False)
class ChunkKinds:
    """Kinds of the layers of a chunk; `layers` are those of one of the chunks that are alike."""

    kinds: tuple[LayerKind, ...]
    layers: range

    @cached_property
    def counts(self) -> Counter[LayerKind]:
        """Layers of each kind."""
        return Counter(self.kinds)


@dataclass(frozen=True, eq=False)
class StageKinds:
    """Chunks of a stage, and whether it has the embedding and the head."""

    chunks: tuple[ChunkKinds, ...]
    is_first: bool
    is_last: bool

    @cached_property
    def counts(self) -> Counter[LayerKind]:
        """Layers of each kind."""
        return Counter(self.kinds)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of all layers, in the order of a forward."""
        return tuple(kind for chunk in self.chunks for kind in chunk.kinds)

    @cached_property
    def adapters(self) -> Count:
        """Parameters of the adapters of all layers."""
        return sum_counts(kind.adapters * number for kind, number in self.counts.items())

    def parameters(self, model: ModelConfig, *, vocab_size: int, seq_length: int) -> Count:
        """Parameters of the stage by how they are cut, without adapters; `vocab_size` is that padded for tp."""
        ends = {"is_first": self.is_first, "is_last": self.is_last}
        of_ends = parameters_of_stage(model, (), vocab_size=vocab_size, seq_length=seq_length, **ends)
        return of_ends + sum_counts(kind.parameters * number for kind, number in self.counts.items())


@dataclass(eq=False)
class LayerKinds:
    """Kinds of the layers of a model with its adapters, and of its chunks and stages."""

    model: ModelConfig
    adapter: AdapterConfig
    _chunks: dict[tuple[LayerKind, ...], ChunkKinds] = field(default_factory=dict)

    @cached_property
    def of_layers(self) -> list[LayerKind]:
        """The kind of each layer."""
        return layer_kinds(self.model, self.adapter)

    @cached_property
    def different(self) -> tuple[LayerKind, ...]:
        """Every kind once, in the order of the layers."""
        return tuple(dict.fromkeys(self.of_layers))

    def chunk(self, layers: range) -> ChunkKinds:
        """Kinds of the layers of a chunk."""
        kinds = tuple(self.of_layers[layer] for layer in layers)
        return self._chunks.setdefault(kinds, ChunkKinds(kinds, layers))

    def stage(self, load: StageLoad) -> StageKinds:
        """Kinds of the layers of a stage."""
        return self._stage(tuple(map(self.chunk, load.layers)), is_first=load.is_first, is_last=load.is_last)

    @remembered
    def _stage(self, chunks: tuple[ChunkKinds, ...], *, is_first: bool, is_last: bool) -> StageKinds:
        return StageKinds(chunks, is_first, is_last)
