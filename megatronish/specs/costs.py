"""Cost row of a layer: shapes of its linear layers, norms and attention cores, and the costs that follow from them.

A row lists what a layer computes with; parameters, FLOPs, bytes saved for the backward and bytes of deferred weight
gradients are sums over that list, so that no cost is written down twice. Rows of sublayers are added up to the row of a
layer. tp splits some of a layer and leaves the rest whole on every rank: a `Count` keeps the two apart.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple

from megatronish.config.sections.block import NormParameters
from megatronish.specs.block_pattern import BlockPattern

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Count:
    """Elements or bytes, apart for those that tensor parallelism splits and those that every rank holds whole.

    `experts` are those of routed experts: parameters, which ep and etp split, or rows of tokens on their way through
    experts, which tp splits as far as its ranks hold different experts (tp / etp). `by_expert` are those of them that
    ep splits alone, and every rank of etp holds whole: factors of adapters, and scales.
    """

    split: int = 0
    whole: int = 0
    experts: int = 0
    by_expert: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.split + other.split,
            self.whole + other.whole,
            self.experts + other.experts,
            self.by_expert + other.by_expert,
        )

    def __mul__(self, factor: int) -> "Count":
        return Count(self.split * factor, self.whole * factor, self.experts * factor, self.by_expert * factor)

    @property
    def total(self) -> int:
        """All elements together: what all ranks hold, each element counted once."""
        return self.split + self.whole + self.experts + self.by_expert

    @property
    def without_experts(self) -> "Count":
        """Split and whole elements."""
        return Count(self.split, self.whole)

    def per_rank(self, tp: int, *, sequence_parallel: bool = False, experts: int = 1, etp: int = 1) -> int:
        """Held by one of tp ranks, and of `experts` ranks that share experts, `etp` of them each expert.

        Under sequence parallelism activations are cut where else they are whole.
        """
        dense = self.split // tp + self.whole // (tp if sequence_parallel else 1)
        return dense + self.of_experts(experts, etp)

    def of_experts(self, ranks: int, etp: int) -> int:
        """Of experts, held by one of the ranks that share them, `etp` of which share each expert."""
        return (self.experts + self.by_expert * etp) // ranks


@dataclass(frozen=True)
class LinearShape:
    """Linear layer [in] -> [out], cut over tp by columns (its outputs), by rows (its inputs) or not at all.

    A layer that holds `copies` of it, of which a token passes `used`, is a layer of experts. `name` is that inside of
    its layer, and `sections` are the names and sizes of the parts of its outputs; those may have adapters.
    """

    in_features: int
    out_features: int
    cut: Literal["column", "row", "none"]
    bias: bool = False
    copies: int = 1
    used: int = 1
    name: str = ""
    sections: tuple[tuple[str, int], ...] = ()
    bias_name: str = "bias"
    splits_tokens: bool = False
    """Ranks of tp see different tokens, with sequence parallelism or without."""
    share: Fraction | int = 1
    """Part of the tokens of a row that pass it: those of the encoder, or of the decoder."""

    @property
    def matrix(self) -> int:
        """Elements of its weight, all copies."""
        return self.copies * self.in_features * self.out_features

    @property
    def matrices(self) -> Count:
        """Elements of its weight, by how tp cuts them, or ep and etp."""
        if self.copies > 1:
            return Count(experts=self.matrix)
        return Count(whole=self.matrix) if self.cut == "none" else Count(split=self.matrix)

    @property
    def parameters(self) -> Count:
        """Weight and bias. The bias of a row-parallel layer is added after the reduction, so every rank holds it.

        Those of experts are cut as their weights, by expert and by feature.
        """
        bias = self.copies * self.out_features if self.bias else 0
        if self.copies > 1:
            return self.matrices + Count(experts=bias)
        return self.matrices + (Count(split=bias) if self.cut == "column" else Count(whole=bias))

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes."""
        return self.parameters.total // self.copies * self.used

    @property
    def flops(self) -> int:
        """FLOPs of one token forward, two for each multiply-add; a bias is not counted."""
        return int(2 * self.used * self.in_features * self.out_features * self.share)

    @property
    def inputs(self) -> Count:
        """Elements a token that come in, which its weight gradient needs."""
        return self._elements(self.in_features, is_split=self.cut == "row")

    @property
    def outputs(self) -> Count:
        """Elements a token that go out, whose gradient its weight gradient needs."""
        return self._elements(self.out_features, is_split=self.cut == "column")

    def _elements(self, features: int, *, is_split: bool) -> Count:
        size = int(self.used * features * self.share)
        if is_split:
            return Count(split=size)
        return Count(experts=size) if self.copies > 1 else Count(whole=size)


@dataclass(frozen=True)
class NormShape:
    """Norm over vectors of `size`, of which a token has `vectors`; tp splits the vectors of a norm of heads.

    With `cuts_weight` it splits one vector and its weight, as of a norm over all heads at once.
    """

    kind: Literal["LayerNorm", "RMSNorm"]
    size: int
    vectors: int = 1
    is_split: bool = False
    one_plus: bool = False
    cuts_weight: bool = False
    name: str = ""
    share: Fraction | int = 1
    """Part of the tokens of a row that are normalised."""
    learned: NormParameters = "all"
    """What it learns."""
    each_weight: bool = False
    """Every vector has a weight of its own, cut with the vectors, and none has a bias."""
    shares_input: bool = False
    """Another norm of the row keeps the same input."""

    @property
    def has_weight(self) -> bool:
        """Whether there is a weight."""
        return self.learned != "none"

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias."""
        return self.kind == "LayerNorm" and self.learned == "all" and not self.cuts_weight and not self.each_weight

    @property
    def parameters(self) -> Count:
        """Weight, and LayerNorm's bias; whole on every rank, unless it is cut."""
        if self.cuts_weight or self.each_weight:
            return Count(split=self.size * self.vectors)
        return Count(whole=self.size * (self.has_weight + self.has_bias))

    def saved_bytes(self, *, element_bytes: int, device: DeviceType) -> Count:
        """Bytes a token that wait for its backward: the input.

        On a CPU torch's RMSNorm is a chain of operations, which keeps two copies in fp32: the input and, if there is a
        weight, what it multiplies. A weight stored as w - 1 is normalised in fp32 there, and the input is kept in fp32.
        """
        width = element_bytes
        if device == "cpu" and not self.cuts_weight:
            width = 4 if self.kind == "RMSNorm" or self.one_plus else element_bytes
            if self.kind == "RMSNorm" and (self.has_weight or self.each_weight):
                width += 4
        if self.each_weight:
            width += element_bytes  # what is multiplied by the weights
        if self.shares_input and (element_bytes == 4 or width == element_bytes):
            width -= element_bytes
        size = int(self.size * self.vectors * width * self.share)
        return Count(split=size) if self.is_split else Count(whole=size)


@dataclass(frozen=True)
class AttentionCore:
    """Scores, softmax and their product with the values: `num_heads` heads, split over tp.

    A token sees all before it, those in a window, or the blocks of a pattern. One that is not causal sees the whole
    square, however it is counted. Of a row that is cut into encoder and decoder, `queries` is the part that asks, and
    `keys_part` the one that is seen.
    """

    num_heads: int
    query_size: int
    value_size: int
    window: int | None = None
    pattern: BlockPattern | None = None
    causal: bool = True
    queries: Fraction | int = 1
    keys_part: Fraction | int = 1
    num_kv_heads: int | None = None
    """Heads of keys and values; None: as many as of queries."""

    @property
    def queries_size(self) -> int:
        """Features of the queries of all heads."""
        return self.num_heads * self.query_size

    def keys_values_size(self, tp: int) -> int:
        """Features of keys and values of all heads, both as wide as queries: as a kernel or a ring takes them.

        With fewer heads than ranks of tp every rank has one.
        """
        return 2 * max(self.num_kv_heads or self.num_heads, tp) * self.query_size

    def sharers(self, tp: int) -> int:
        """Ranks of tp that share a key/value head."""
        return max(1, tp // (self.num_kv_heads or self.num_heads))

    def scores(self, seq_length: int) -> int:
        """Scores of the average token of a row, those that a mask hides with them."""
        return int(self.num_heads * seq_length * self.queries * self.keys_part)

    def keys(self, seq_length: int, mask: Literal["causal", "full"]) -> float:
        """Keys that the average token of a sequence sees."""
        if self.pattern is not None:
            return self.pattern.keys(seq_length, mask)
        there = float(seq_length * self.keys_part)
        visible = min(self.window or there, there)
        seen = visible if mask == "full" or not self.causal else visible - visible**2 / (2 * there)
        return float(seen * self.queries)


@dataclass(frozen=True)
class LayerCost:
    """Cost row of a layer or of a sublayer.

    `kept` are elements a token that wait for the backward besides the inputs of linear layers and norms; dropout keeps
    nothing. `vectors` are parameters in addition to those of linear layers and norms. Of a sum of rows, `pieces` are
    these rows, in the order of the model.
    """

    linears: tuple[LinearShape, ...] = ()
    norms: tuple[NormShape, ...] = ()
    cores: tuple[AttentionCore, ...] = ()
    kept: Count = field(default_factory=Count)
    vectors: Count = field(default_factory=Count)
    vectors_name: str = field(default="vectors", compare=False)
    vectors_see_parts: bool = field(default=False, compare=False)
    """Ranks of tp multiply features of their own with whole vectors, so that their gradients are parts of the sum."""
    pieces: tuple["LayerCost", ...] = field(default=(), compare=False, repr=False)

    def __add__(self, other: "LayerCost") -> "LayerCost":
        return LayerCost(
            self.linears + other.linears,
            self.norms + other.norms,
            self.cores + other.cores,
            self.kept + other.kept,
            self.vectors + other.vectors,
            pieces=(*(self.pieces or (self,)), *(other.pieces or (other,))),
        )

    @property
    def parameters(self) -> Count:
        """Parameters by how tp cuts them."""
        norms = sum_counts(norm.parameters for norm in self.norms)
        return sum_counts(linear.parameters for linear in self.linears) + norms + self.vectors

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes: of experts the chosen ones alone."""
        norms = sum(norm.parameters.total for norm in self.norms)
        return sum(linear.active_parameters for linear in self.linears) + norms + self.vectors.total

    @property
    def matrices(self) -> Count:
        """Weights of linear layers by how tp cuts them."""
        return sum_counts(linear.matrices for linear in self.linears)

    @property
    def linear_flops(self) -> int:
        """FLOPs of one token forward in linear layers."""
        return sum(linear.flops for linear in self.linears)

    def score_flops(self, seq_length: int, mask: Literal["causal", "full"]) -> float:
        """FLOPs of the average token forward: queries times keys."""
        return sum(2 * core.num_heads * core.query_size * core.keys(seq_length, mask) for core in self.cores)

    def value_flops(self, seq_length: int, mask: Literal["causal", "full"]) -> float:
        """FLOPs of the average token forward: probabilities times values."""
        return sum(2 * core.num_heads * core.value_size * core.keys(seq_length, mask) for core in self.cores)

    def saved_bytes(
        self, *, seq_length: int, element_bytes: int, score_bytes: int = 0, device: DeviceType = "cuda"
    ) -> Count:
        """Bytes a token that wait for the backward; `score_bytes` for each query with each key, in a window or not."""
        elements = sum_counts(linear.inputs for linear in self.linears) + self.kept
        norms = sum_counts(norm.saved_bytes(element_bytes=element_bytes, device=device) for norm in self.norms)
        scores = Count(split=sum(core.scores(seq_length) for core in self.cores) * score_bytes)
        return elements * element_bytes + norms + scores

    @property
    def deferred_inputs(self) -> Count:
        """Elements a token that deferred weight gradients keep of inputs; cut under sequence parallelism."""
        return sum_counts(linear.inputs for linear in self.linears)

    @property
    def deferred_gradients(self) -> Count:
        """Elements a token that deferred weight gradients keep of output gradients, gathered over the sequence."""
        return sum_counts(linear.outputs for linear in self.linears)


class WeightGradientBytes(NamedTuple):
    """Bytes of an element of a weight's gradient before it is in its sum: 0 where its product adds it there."""

    dense: int = 0
    grouped: int = 0
    """Of the weights of experts."""

    def largest(self, linears: Iterable[LinearShape], *, tp: int, grid: int) -> int:
        """Bytes of the largest gradient of these layers on a rank."""
        sizes = ((self.grouped if each.copies > 1 else self.dense, each.matrices) for each in linears)
        return max((width * matrix.per_rank(tp, experts=grid) for width, matrix in sizes), default=0)


ADDED_AT_ONCE = WeightGradientBytes()


class ActivationBytes(NamedTuple):
    """Bytes of activations of a micro-batch on a rank, from which specs compute what their backward needs."""

    feature: float
    """One feature of all tokens, of features that tp cuts."""
    hidden: float
    """Hidden states, whole."""
    residual: float
    """Hidden states between layers, which sequence parallelism cuts."""
    gathers: bool
    """Whether there is sequence parallelism."""
    gradient: WeightGradientBytes
    element: int
    """An element of an activation."""
    hidden_size: int
    tp: int
    ep: int
    etp: int
    """Ranks that cut the features of an expert: each has the rows of all of them."""
    rows: float = 1.0
    """Rows of experts that a rank has room for, over those of an even load."""

    @property
    def grid(self) -> int:
        """Ranks that cut the experts of a layer."""
        return self.ep * self.etp


def sum_counts(counts: Iterable[Count]) -> Count:
    """Sum of counts, split and whole apart."""
    return sum(counts, start=Count())
