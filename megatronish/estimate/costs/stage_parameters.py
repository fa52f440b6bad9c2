"""Parameters of a pipeline stage on one rank, in the model's order: names, local sizes, and how they are cut.

The list is that of the model that is built from the same specs (a test compares the two). Where bytes depend on single
parameters (padding of gradient buckets and of rows, rounds of Muon) it says more than the counts of a cost row.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megatronish.config.config import Config
from megatronish.parallel.schedules.live_activations import StageLoad
from megatronish.parallel.schedules.table import SCHEDULES
from megatronish.specs.adapter_targets import all_patterns, is_target
from megatronish.specs.costs import LayerCost, LinearShape, NormShape
from megatronish.specs.ends import ModelEnds, ends_of
from megatronish.specs.layers import layer_specs

Source = tuple[int, str]
"""A chunk, and the kind of its actions from which a gradient comes."""


class StageParameter(NamedTuple):
    """A parameter as a rank holds it, [rows, columns], before ZeRO shares it.

    `cut` are the axes that cut it, `partial` those over which ranks have parts of its gradient although they hold the
    whole of it. `tied` says which stages hold it, if they are several, as of a `Sharding`. `matrices` are the elements
    of each matrix of the whole parameter that Muon updates.
    """

    name: str
    rows: int
    columns: int = 1
    cut: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    domain: str = "dense"
    tied: str | None = None
    sources: frozenset[Source] = frozenset()
    matrices: tuple[int, ...] = ()
    learns: bool = True

    @property
    def size(self) -> int:
        """Elements on this rank."""
        return self.rows * self.columns

    def own_rows(self, ranks: int, place: int) -> int:
        """Rows of its own that ZeRO-3 leaves the rank at a place of so many: the last ones may have fewer, or none."""
        part = -(-self.rows // ranks)
        return min(max(self.rows - part * place, 0), part)

    @property
    def is_vector(self) -> bool:
        """Whether it is a norm's, a bias or IA3's, as `Sharding.is_vector` has it. LoRA's B is none, of rank 1 too."""
        return self.name.endswith((".l", ".bias")) or (self.columns == 1 and not self.name.endswith(".B"))

    @property
    def is_rounded(self) -> bool:
        """Whether a model with weights as codes (qwZ) rounds it, as `Sharding.is_rounded` has it."""
        return not self.is_vector and self.tied != "stages"


class StageParameters(NamedTuple):
    """Parameters of a stage, whose layers `load` has."""

    config: Config
    load: StageLoad
    vocab_size: int

    def all(self) -> Iterator[StageParameter]:
        """Embedding, layers, head; frozen with adapters, which learn in their place."""
        specs = layer_specs(self.config.model)
        costs = {spec: spec.cost(self.config.model) for spec in set(specs)}
        yield from self.shared()
        yield from self.embedding()
        for chunk, layers in enumerate(self.load.layers):
            for number in layers:
                yield from self.layer(f"layers.{number}", costs[specs[number]], chunk)
        if self.load.is_last:
            yield from self.head()

    def used(self, parameter: StageParameter, *sources: Source) -> StageParameter:
        """The parameter with the sources of its gradient; with adapters it learns if it is one of theirs."""
        learns = ".adapters." in parameter.name or not self.config.adapter.is_used
        return parameter._replace(sources=frozenset(sources), learns=learns)

    def shared(self) -> Iterator[StageParameter]:
        """Tables that every stage has, read in every chunk."""
        sources = [(chunk, "B") for chunk in range(len(self.load.layers))]
        for table in self.model_ends.shared:
            parameter = StageParameter(table.name, table.rows, table.columns // self.tp, ("tp",), tied="stages")
            yield self.used(parameter, *sources)

    def layer(self, name: str, cost: LayerCost, chunk: int) -> Iterator[StageParameter]:
        """A layer of a chunk."""
        for parameter in self.pieces(name, cost):
            yield self.used(parameter, (chunk, self.deferred if parameter.matrices else "B"))

    def head(self) -> Iterator[StageParameter]:
        """What comes before the output layer, the output layer if it is not the embedding's table, and what is left."""
        last = len(self.load.layers) - 1
        yield from self.dense(self.model_ends.head)
        if not self.config.model.tied:
            yield self.used(self.table("head.weight"), (last, self.deferred))
        if self.model_ends.has_bias:
            yield self.used(self.table("head.bias")._replace(columns=1), (last, "B"))
        yield from self.dense(self.model_ends.of_sequence)

    def dense(self, cost: LayerCost) -> Iterator[StageParameter]:
        """Linear layers and norms of the end, under their own names."""
        last = len(self.load.layers) - 1
        for linear in cost.linears:
            for parameter in self.linear(linear.name, linear):
                yield self.used(parameter, (last, self.deferred if parameter.columns > 1 else "B"))
        for norm in cost.norms:
            for parameter in self.norm(norm.name, norm):
                yield self.used(parameter, (last, "B"))

    @property
    def model_ends(self) -> ModelEnds:
        """What the model has before its layers and after them."""
        return ends_of(self.config.model, seq_length=self.config.training.seq_length)

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
        """Table of words, a norm, small tables; a stage that only ends the model may have the table of words."""
        model, first = self.config.model, (0, "B")
        if not self.load.is_first and not (self.load.is_last and model.embeds_at_end):
            return
        sources, last = [first] * self.load.is_first, len(self.load.layers) - 1
        if model.tied and self.load.is_last:
            sources.append((last, self.deferred))
        if model.num_depths and self.load.is_last:
            sources.append((last, "B"))
        tokens = self.table("embedding.tokens.weight")
        yield self.used(tokens._replace(tied="ends" if model.embeds_at_end else None), *sources)
        if not self.load.is_first:
            return
        if self.model_ends.norm is not None:
            for parameter in self.norm("embedding.norm", self.model_ends.norm):
                yield self.used(parameter, first)
        for each in self.model_ends.tables:
            table = StageParameter(f"embedding.{each.name}.weight", each.rows, model.hidden_size)
            yield self.used(table._replace(partial=self.over_sequence), first)

    def table(self, name: str) -> StageParameter:
        """Embedding of tokens, or the head."""
        model = self.config.model
        return StageParameter(
            name, model.padded_vocab_size(self.vocab_size, self.tp) // self.tp, model.hidden_size, ("tp",)
        )

    def norm(self, name: str, shape: NormShape) -> Iterator[StageParameter]:
        """Weight of a norm, and LayerNorm's bias."""
        if shape.cuts_weight or shape.each_weight:
            yield StageParameter(f"{name}.weight", shape.size * shape.vectors // self.tp, cut=("tp",))
            return
        partial = self.over_sequence if not shape.is_split else ("tp",) if self.tp > 1 else ()
        if shape.has_weight:
            yield StageParameter(f"{name}.weight", shape.size, partial=partial)
        if shape.has_bias:
            yield StageParameter(f"{name}.bias", shape.size, partial=partial)

    def pieces(self, name: str, cost: LayerCost) -> Iterator[StageParameter]:
        """One layer: what the pieces of its cost row have."""
        for piece in cost.pieces or (cost,):
            vectors = f"{name}.{piece.vectors_name}"
            if piece.vectors.split:
                yield StageParameter(vectors, piece.vectors.split // self.tp, cut=("tp",))
            if piece.vectors.whole:
                over_features = ("tp",) if piece.vectors_see_parts and self.tp > 1 else ()
                yield StageParameter(vectors, piece.vectors.whole, partial=over_features or self.over_sequence)
            for number, linear in enumerate(piece.linears):
                yield from self.linear(f"{name}.{linear.name or number}", linear)
            for number, norm in enumerate(piece.norms):
                yield from self.norm(f"{name}.{norm.name or f'norm.{number}'}", norm)

    def linear(self, name: str, shape: LinearShape) -> Iterator[StageParameter]:
        """Weight and bias of a linear layer, or of all its copies, and their adapters."""
        sections = dict(shape.sections) or {"": shape.out_features}
        if shape.copies > 1:
            yield from self.stacked(name, shape, sections)
            return
        # Those cut along the inputs, along the outputs, and whole: what is whole has parts of gradients.
        is_row, is_column, width = shape.cut == "row", shape.cut == "column", shape.in_features
        over = ("tp",) if shape.splits_tokens else self.over_sequence
        cut = StageParameter("", 1, cut=("tp",))
        whole = StageParameter("", 1, partial=over)
        inputs, outputs = cut if is_row else whole, cut if is_column else whole
        inner, parts = width // self.tp if is_row else width, self.tp if is_column else 1
        # No router and no gate is a matrix.
        matrices = tuple(width * size for size in sections.values()) if shape.sections or shape.cut != "none" else ()
        weight = (whole if shape.cut == "none" else cut)._replace(columns=inner, matrices=matrices)
        yield weight._replace(name=f"{name}.weight", rows=sum(sections.values()) // parts)
        if shape.bias:
            yield outputs._replace(name=f"{name}.{shape.bias_name}", rows=sum(sections.values()) // parts)
        rank = self.config.adapter.lora_rank
        for section, size in self.adapted(name, sections):
            adapter = f"{name}.adapters.default.{section}"
            if self.config.adapter.adapter_type == "ia3":
                scaled, rows = (inputs, inner) if section == "down" else (outputs, size // parts)
                yield scaled._replace(name=f"{adapter}.l", rows=rows)
            else:
                yield inputs._replace(name=f"{adapter}.A", rows=rank, columns=inner)
                yield outputs._replace(name=f"{adapter}.B", rows=size // parts, columns=rank)

    def stacked(self, name: str, shape: LinearShape, sections: dict[str, int]) -> Iterator[StageParameter]:
        """One weight for each expert, perhaps a bias, and their adapters."""
        (ep, etp), experts, width = self.config.parallel.expert_layout, shape.copies, shape.in_features
        size = shape.out_features // len(sections)
        cut = StageParameter(name, experts // ep, cut=("ep", "etp"), domain="experts")
        whole = cut._replace(cut=("ep",), partial=("etp",))
        matrices = (width * size,) * (experts * len(sections))
        yield cut._replace(name=f"{name}.weight", columns=len(sections) * width * size // etp, matrices=matrices)
        if shape.bias:
            yield cut._replace(name=f"{name}.bias", columns=shape.out_features // etp)
        is_down, rank = shape.cut == "row", self.config.adapter.lora_rank
        for section, _ in self.adapted(name, sections):
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
        yield from ((section, size) for section, size in sections.items() if is_target(f"{name}.{section}", patterns))
