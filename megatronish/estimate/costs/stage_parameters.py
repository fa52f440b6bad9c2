"""Parameters of a pipeline stage on one rank, in the model's order: names, local sizes, and how they are cut.

The list is that of the model that is built from the same specs (a test compares the two). Where bytes depend on single
parameters (padding of gradient buckets and of rows, rounds of Muon) it says more than the counts of a cost row.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.estimate.costs.activations import StageLoad
from megatronish.estimate.costs.adapters import all_patterns, is_target
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.specs.costs import LayerCost
from megatronish.specs.layers import AttentionSpec, ExpertsSpec, LayerSpec, MLPSpec, layer_specs

Source = tuple[int, str]
"""A chunk, and the kind of its actions from which a gradient comes."""


class StageParameter(NamedTuple):
    """A parameter as a rank holds it, [rows, columns], before ZeRO shares it.

    `cut` are the axes that cut it, `partial` those over which ranks have parts of its gradient although they hold the
    whole of it. `matrices` are the elements of each matrix of the whole parameter that Muon updates.
    """

    name: str
    rows: int
    columns: int = 1
    cut: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    domain: str = "dense"
    tied: bool = False
    sources: frozenset[Source] = frozenset()
    matrices: tuple[int, ...] = ()
    learns: bool = True

    @property
    def size(self) -> int:
        """Elements on this rank."""
        return self.rows * self.columns


def stage_parameters(config: Config, load: StageLoad, *, vocab_size: int) -> list[StageParameter]:
    """All parameters of a stage, in the order of the model."""
    return list(_StageParameters(config, load, vocab_size).all())


class _StageParameters(NamedTuple):
    config: Config
    load: StageLoad
    vocab_size: int

    def all(self) -> Iterator[StageParameter]:
        """Embedding, layers, final norm, head; frozen with adapters, which learn in their place."""
        freezes, specs = self.config.adapter.is_used, layer_specs(self.config.model)
        for each in self.embedding():
            yield each._replace(learns=not freezes)
        for chunk, layers in enumerate(self.load.layers):
            for number in layers:
                for each in self.layer(f"layers.{number}", specs[number]):
                    source = (chunk, self.deferred if each.matrices else "B")
                    is_adapter = ".adapters." in each.name
                    yield each._replace(sources=frozenset({source}), learns=is_adapter or not freezes)
        if self.load.is_last:
            last = len(self.load.layers) - 1
            for each in self.norm("final_norm", self.config.model.hidden_size):
                yield each._replace(sources=frozenset({(last, "B")}), learns=not freezes)
            if not self.config.model.tied:
                head = self.table("head.weight")
                yield head._replace(sources=frozenset({(last, self.deferred)}), learns=not freezes)

    @property
    def deferred(self) -> str:
        """Kind of the actions that compute weight gradients of linear layers."""
        return "W" if SCHEDULES[self.config.parallel.schedule].has_weight_gradients else "B"

    @property
    def tp(self) -> int:
        """Ranks of tensor parallelism."""
        return self.config.layout.tp

    @property
    def over_sequence(self) -> tuple[str, ...]:
        """Axes over which ranks see different parts of the sequence."""
        return ("tp",) if self.config.parallel.sequence_parallel else ()

    def embedding(self) -> Iterator[StageParameter]:
        """Tables of tokens and positions, and a norm between; of a stage that only ends the model the tied table."""
        model, first = self.config.model, frozenset({(0, "B")})
        if not self.load.is_first and not (self.load.is_last and model.tied):
            return
        sources = first if self.load.is_first else frozenset[Source]()
        if model.tied and self.load.is_last:
            sources |= {(len(self.load.layers) - 1, self.deferred)}
        yield self.table("embedding.tokens.weight")._replace(tied=model.tied, sources=sources)
        if self.load.is_first and model.embed_layernorm:
            for each in self.norm("embedding.norm", model.hidden_size):
                yield each._replace(sources=first)
        if self.load.is_first and model.position_embedding_type == "learned_absolute":
            rows = model.max_position_embeddings or self.config.training.seq_length
            name = "embedding.positions.weight"
            yield StageParameter(name, rows, model.hidden_size, partial=self.over_sequence, sources=first)

    def table(self, name: str) -> StageParameter:
        """Embedding of tokens, or the head."""
        model = self.config.model
        return StageParameter(
            name, model.padded_vocab_size(self.vocab_size, self.tp) // self.tp, model.hidden_size, ("tp",)
        )

    def norm(self, name: str, size: int, *, of_heads: bool = False) -> Iterator[StageParameter]:
        """Weight of a norm, and LayerNorm's bias."""
        partial = self.over_sequence if not of_heads else ("tp",) if self.tp > 1 else ()
        yield StageParameter(f"{name}.weight", size, partial=partial)
        if self.config.model.normalization == "LayerNorm":
            yield StageParameter(f"{name}.bias", size, partial=partial)

    def layer(self, name: str, spec: LayerSpec) -> Iterator[StageParameter]:
        """One transformer layer; of a layer of another kind what its cost row has."""
        hidden = self.config.model.hidden_size
        if not isinstance(spec, LayerSpec):
            yield from self.row(name, spec.cost(self.config.model))
            return
        yield from self.norm(f"{name}.attention_norm", hidden)
        yield from self.attention(f"{name}.attention", spec.attention)
        yield from self.norm(f"{name}.mlp_norm", hidden)
        if isinstance(spec.mlp, ExpertsSpec):
            yield from self.experts(f"{name}.mlp", spec.mlp)
        else:
            yield from self.mlp(f"{name}.mlp", spec.mlp)

    def row(self, name: str, cost: LayerCost) -> Iterator[StageParameter]:
        """Linear layers, norms and vectors of a cost row."""
        for number, linear in enumerate(cost.linears):
            if linear.cut == "row":
                yield from self.row_parallel(f"{name}.{number}", linear.in_features, linear.out_features, linear.bias)
            else:
                features = {"": linear.out_features}
                yield from self.column_parallel(f"{name}.{number}", linear.in_features, features, linear.bias)
        for number, norm in enumerate(cost.norms):
            yield StageParameter(f"{name}.norm.{number}", norm.parameters.per_rank(self.tp), partial=self.over_sequence)
        if cost.vectors.total:
            yield StageParameter(f"{name}.vectors", cost.vectors.per_rank(self.tp), partial=self.over_sequence)

    def attention(self, name: str, spec: AttentionSpec) -> Iterator[StageParameter]:
        """Sinks, projections, and norms of queries and keys."""
        hidden, sections = self.config.model.hidden_size, spec.sections
        if spec.softmax == "learnable":
            yield StageParameter(f"{name}.sinks", spec.num_heads // self.tp, cut=("tp",))
        yield from self.column_parallel(f"{name}.qkv", hidden, sections, spec.qkv_bias)
        yield from self.row_parallel(f"{name}.out", sections["q"], hidden, spec.out_bias, section="o")
        for norm, size in (("q_norm", sections["q"]), ("k_norm", sections["k"])) if spec.qk_norm else ():
            if spec.norm_across_heads:
                yield StageParameter(f"{name}.{norm}.weight", size // self.tp, cut=("tp",))
            else:
                yield from self.norm(f"{name}.{norm}", spec.head_size, of_heads=True)

    def mlp(self, name: str, spec: MLPSpec) -> Iterator[StageParameter]:
        """Up-projection, with its gate if it has one, and down-projection."""
        hidden = self.config.model.hidden_size
        yield from self.column_parallel(f"{name}.fc1", hidden, spec.sections, spec.bias)
        yield from self.row_parallel(f"{name}.fc2", spec.ffn_size, hidden, spec.bias, section="down")

    def experts(self, name: str, spec: ExpertsSpec) -> Iterator[StageParameter]:
        """Router, experts and shared experts."""
        hidden, size, sections = self.config.model.hidden_size, spec.expert.ffn_size, tuple(spec.expert.sections)
        yield StageParameter(f"{name}.router.weight", spec.num_experts, hidden, partial=("tp",))
        yield from self.stacked(f"{name}.experts.gate_up", spec.num_experts, (hidden, size), sections)
        yield from self.stacked(f"{name}.experts.down", spec.num_experts, (size, hidden), ("down",))
        if spec.shared is not None:
            yield from self.mlp(f"{name}.shared", spec.shared)
        if spec.shared_gate:
            yield StageParameter(f"{name}.shared_gate.weight", 1, hidden, partial=self.over_sequence)

    def column_parallel(self, name: str, width: int, sections: dict[str, int], bias: bool) -> Iterator[StageParameter]:
        """Weight and bias cut along the outputs, and the adapters of its sections."""
        rows = sum(sections.values()) // self.tp
        matrices = tuple(width * size for size in sections.values())
        yield StageParameter(f"{name}.weight", rows, width, ("tp",), matrices=matrices)
        if bias:
            yield StageParameter(f"{name}.bias", rows, cut=("tp",))
        for section, size in self.adapted(name, sections):
            adapter = f"{name}.adapters.default.{section}"
            if self.config.adapter.adapter_type == "ia3":
                yield StageParameter(f"{adapter}.l", size // self.tp, cut=("tp",))
            else:
                rank = self.config.adapter.lora_rank
                yield StageParameter(f"{adapter}.A", rank, width, partial=self.over_sequence)
                yield StageParameter(f"{adapter}.B", size // self.tp, rank, ("tp",))

    def row_parallel(
        self, name: str, width: int, size: int, bias: bool, *, section: str = ""
    ) -> Iterator[StageParameter]:
        """Weight cut along the inputs, a whole bias, and its adapter."""
        yield StageParameter(f"{name}.weight", size, width // self.tp, ("tp",), matrices=(width * size,))
        if bias:
            yield StageParameter(f"{name}.bias", size, partial=self.over_sequence)
        for _ in self.adapted(name, {section: size}):
            adapter = f"{name}.adapters.default.{section}"
            if self.config.adapter.adapter_type == "ia3" and section == "down":
                yield StageParameter(f"{adapter}.l", width // self.tp, cut=("tp",))
            elif self.config.adapter.adapter_type == "ia3":
                yield StageParameter(f"{adapter}.l", size, partial=self.over_sequence)
            else:
                rank = self.config.adapter.lora_rank
                yield StageParameter(f"{adapter}.A", rank, width // self.tp, ("tp",))
                yield StageParameter(f"{adapter}.B", size, rank, partial=self.over_sequence)

    def stacked(
        self, name: str, experts: int, shape: tuple[int, int], sections: tuple[str, ...]
    ) -> Iterator[StageParameter]:
        """One weight for each expert, of `shape` (in, out of each section), and their adapters."""
        (width, size), (ep, etp) = shape, self.config.parallel.expert_layout
        cut = StageParameter(name, experts // ep, cut=("ep", "etp"), domain="experts")
        whole = cut._replace(cut=("ep",), partial=("etp",))
        matrices = (width * size,) * (experts * len(sections))
        yield cut._replace(name=f"{name}.weight", columns=len(sections) * width * size // etp, matrices=matrices)
        is_down, rank = sections == ("down",), self.config.adapter.lora_rank
        for section, _ in self.adapted(name, dict.fromkeys(sections, size)):
            adapter = f"{name}.adapters.default.{section}"
            if self.config.adapter.adapter_type == "ia3":
                yield cut._replace(name=f"{adapter}.l", columns=width // etp)
            elif is_down:
                yield cut._replace(name=f"{adapter}.A", columns=rank * width // etp)
                yield whole._replace(name=f"{adapter}.B", columns=rank * size)
            else:
                yield whole._replace(name=f"{adapter}.A", columns=rank * width)
                yield cut._replace(name=f"{adapter}.B", columns=rank * size // etp)

    def adapted(self, name: str, sections: dict[str, int]) -> Iterator[tuple[str, int]]:
        """Sections of a linear layer that have an adapter."""
        adapter = self.config.adapter
        patterns = all_patterns(adapter) if adapter.is_used else ()
        yield from ((each, size) for each, size in sections.items() if is_target(f"{name}.{each}", patterns))
