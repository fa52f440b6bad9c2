"""Specs of the two ends of a model: what it has before its layers and after them, as data that needs no torch.

Every model has a table of words before its layers and an output layer after them, which may be the same table. Small
tables (positions, token types) and norms are added to the former, and dense layers come before the latter. As with
layers, the modules of an end and its costs say the same, and a test compares the two.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatronish.config.sections.model import ModelConfig
from megatronish.specs.costs import Count, LayerCost, LinearShape, NormShape


class SmallTable(NamedTuple):
    """Table of an embedding that every rank has whole, of `rows` times D."""

    name: str
    rows: int


class SharedTable(NamedTuple):
    """Table that every pipeline stage has, and that tp cuts into columns."""

    name: str
    rows: int
    columns: int


@dataclass(frozen=True)
class ModelEnds:
    """What a model has besides its layers, the table of words and the weight of the output layer.

    `has_bias`: the output layer has a bias of the vocabulary. `head` is of every token; `of_sequence` what comes after
    the layers for one token of a sequence alone. `shared` are tables that every stage has.
    """

    tables: tuple[SmallTable, ...] = ()
    norm: NormShape | None = None
    head: LayerCost = field(default_factory=LayerCost)
    has_bias: bool = False
    of_sequence: LayerCost = field(default_factory=LayerCost)
    shared: tuple[SharedTable, ...] = ()

    @property
    def of_stage(self) -> Count:
        """Parameters that every stage has."""
        return Count(split=sum(table.rows * table.columns for table in self.shared))

    def of_embedding(self, model: ModelConfig) -> Count:
        """Parameters before the layers, without the table of words."""
        tables = Count(whole=sum(table.rows for table in self.tables) * model.hidden_size)
        return tables if self.norm is None else tables + self.norm.parameters

    def of_head(self, vocab_size: int) -> Count:
        """Parameters after the layers, without the weight of the output layer."""
        bias = Count(split=vocab_size if self.has_bias else 0)
        return self.head.parameters + self.of_sequence.parameters + bias


def _norm(model: ModelConfig, name: str) -> NormShape:
    return NormShape(
        model.normalization,
        model.hidden_size,
        one_plus=model.apply_layernorm_1p,
        name=name,
        learned=model.norm_parameters,
    )


def _positions(model: ModelConfig, seq_length: int) -> tuple[SmallTable, ...]:
    if model.position_embedding_type != "learned_absolute":
        return ()
    return (SmallTable("positions", model.position_offset + (model.max_position_embeddings or seq_length)),)


def gpt_ends(model: ModelConfig, seq_length: int) -> ModelEnds:
    """A GPT: positions if they are learned, a norm of words if it is asked for, and the final norm."""
    return ModelEnds(
        _positions(model, seq_length),
        norm=_norm(model, "norm") if model.embed_layernorm else None,
        head=LayerCost(norms=(_norm(model, "final_norm"),)),
        has_bias=model.add_output_bias,
    )


def bert_ends(model: ModelConfig, seq_length: int) -> ModelEnds:
    """A BERT: positions and token types under a norm; norm(gelu(W x + b)); a pooler and a classifier of two classes."""
    hidden = model.hidden_size
    sentence = LayerCost(
        linears=(
            LinearShape(hidden, hidden, "none", bias=True, name="sentence.pooler"),
            LinearShape(hidden, 2, "none", bias=True, name="sentence.classifier"),
        )
    )
    return ModelEnds(
        (*_positions(model, seq_length), SmallTable("types", model.num_token_types)),
        norm=_norm(model, "norm"),
        head=LayerCost(
            linears=(LinearShape(hidden, hidden, "none", bias=True, name="transform.dense"),),
            norms=(_norm(model, "transform.norm"),),
            kept=Count(whole=hidden),
        ),
        has_bias=True,
        of_sequence=sentence if model.has_binary_head else LayerCost(),
    )


def t5_ends(model: ModelConfig, seq_length: int) -> ModelEnds:
    """A T5: the tables of score biases, which every stage has, and the final norm of the decoder."""
    sides = [f"{side}_bias.weight" for side in ("encoder", "decoder")]
    return replace(
        gpt_ends(model, seq_length),
        shared=tuple(
            SharedTable(name, model.relative_attention_num_buckets, model.num_attention_heads) for name in sides
        ),
    )


ENDS: dict[str, Callable[[ModelConfig, int], ModelEnds]] = {"gpt": gpt_ends, "bert": bert_ends, "t5": t5_ends}
"""Ends of a model with sequences of a length, by --model-type; `MODELS` of model/table.py has what is built."""


def ends_of(model: ModelConfig, *, seq_length: int) -> ModelEnds:
    """The ends of a model; `seq_length` is that of training, of which learned positions may have as many rows."""
    return ENDS[model.model_type](model, seq_length)
