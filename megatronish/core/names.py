"""Names that flags take from tables which plug-ins extend, with all that is known of a name before torch is imported.

A config is read, checked and costed without torch, and what a name stands for is often made of torch: so there are two
tables of each kind. The one here has the names, their options and their costs; the one next to the code (`OPTIMIZERS`
of optim/optimizer.py, `BLOCKS` of model/block.py, ...) has what is built. `megatronish/plugins.py` adds to both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatronish.core.errors import UserError

OptionValue = bool | int | float | str
Options = Mapping[str, OptionValue]
"""Options that belong to a name of a table, with their defaults, whose types are those of the options."""


@dataclass(frozen=True)
class Choice:
    """A name of a table, with the options of its own that flags such as --block-args set."""

    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class OptimizerChoice(Choice):
    """An optimizer, with the fp32 numbers that it keeps for each element of a parameter, in addition to the master.

    `matrix_moments` are those of the matrices of layers, where they differ. `reads` are the beginnings of the names of
    the config's fields that belong to it. `has_momentum`: its `step` takes a momentum, which may change.
    `divided_by_width` are the roles of parameters whose learning rate muP divides by the width; without any it has no
    muP.
    """

    moments: int = 0
    matrix_moments: int | None = None
    reads: tuple[str, ...] = ()
    has_momentum: bool = False
    divided_by_width: tuple[str, ...] = ()

    def num_moments(self, *, count: int, in_matrices: int) -> int:
        """Numbers kept for `count` elements, of which `in_matrices` are in matrices of layers."""
        of_matrices = self.moments if self.matrix_moments is None else self.matrix_moments
        return self.moments * (count - in_matrices) + of_matrices * in_matrices


@dataclass(frozen=True)
class ObjectiveChoice(Choice):
    """An objective, with what it learns from, and the fields of a config that it reads.

    `learns_from` text is any data with a loss of each token; pairs are chosen and rejected completions; labelled are
    completions that are said to be wanted or not. `has_reference`: it compares with another model. `model_types` are
    the kinds of models that it trains.
    """

    learns_from: Literal["text", "pairs", "labelled"] = "text"
    reads: tuple[str, ...] = ()
    has_reference: bool = False
    model_types: tuple[str, ...] = ("gpt",)


@dataclass(frozen=True)
class DatasetChoice(Choice):
    """A kind of data sets. One that does not need a path makes its samples without files, or from an option.

    `has_sentences`: its samples are pairs of sentences.
    """

    needs_path: bool = True
    has_sentences: bool = False


BLOCK_NAMES: dict[str, Choice] = {"transformer": Choice()}
"""Layers of --block."""

OPTIMIZER_NAMES: dict[str, OptimizerChoice] = {
    "adam": OptimizerChoice(moments=2, reads=("adam_",), has_momentum=True, divided_by_width=("matrix", "router")),
    "sgd": OptimizerChoice(moments=1, reads=("sgd_",), has_momentum=True),
    "muon": OptimizerChoice(  # a step of its matrices has a size of its own, for any width
        moments=2,
        matrix_moments=1,
        reads=("muon_", "adam_"),
        has_momentum=True,
        divided_by_width=("router",),
    ),
}
"""Optimizers of --optimizer."""

OBJECTIVE_NAMES: dict[str, ObjectiveChoice] = {
    "causal_lm": ObjectiveChoice(model_types=("gpt", "t5")),
    "masked_lm": ObjectiveChoice(reads=("bert_no_binary_head",), model_types=("bert",)),
    "dpo": ObjectiveChoice(learns_from="pairs", reads=("beta", "dpo_loss_type", "label_smoothing"), has_reference=True),
    "ipo": ObjectiveChoice(learns_from="pairs", reads=("beta",), has_reference=True),
    "simpo": ObjectiveChoice(learns_from="pairs", reads=("beta", "label_smoothing", "simpo_gamma", "cpo_alpha")),
    "cpo": ObjectiveChoice(learns_from="pairs", reads=("beta", "label_smoothing", "cpo_alpha")),
    "orpo": ObjectiveChoice(learns_from="pairs", reads=("beta",)),
    "kto": ObjectiveChoice(
        learns_from="labelled", reads=("beta", "desirable_weight", "undesirable_weight"), has_reference=True
    ),
}
"""Objectives of --objective."""

DATASET_NAMES: dict[str, DatasetChoice] = {
    "pretrain": DatasetChoice(),
    "chat": DatasetChoice(),
    "sentences": DatasetChoice(has_sentences=True),
}
"""Kinds of data sets of --dataset-type."""

HOOK_NAMES: dict[str, Choice] = {}
"""Hooks of --hook: those of plug-ins alone, as other flags ask for the hooks of the package."""


def in_braces(names: Sequence[str] | Mapping[str, object]) -> str:
    """Names as --help shows them, {adam,sgd}."""
    return f"{{{','.join(names)}}}"


def options_of(table: Mapping[str, Choice], name: str, words: Sequence[str]) -> dict[str, OptionValue]:
    """Options of one name: its defaults, and what words like "beta=0.9" set. UserError for what it does not have."""
    return options_of_each(table, [name], words)[name]


def options_of_each(
    table: Mapping[str, Choice], names: Sequence[str], words: Sequence[str]
) -> dict[str, dict[str, OptionValue]]:
    """{name: its options}. A word sets the option of each name that has it; UserError if none of the names has it."""
    options_by_name = {name: dict(table[name].options) for name in names}
    for word in words:
        option, equals, text = word.partition("=")
        having = [options for options in options_by_name.values() if option in options]
        if not equals or not having:
            known = sorted({option for options in options_by_name.values() for option in options})
            remedy = f"there are {', '.join(known)}, written option=value" if known else "leave it out"
            raise UserError(f"{word} is no option of {', '.join(names) or 'any name'}; {remedy}")
        for options in having:
            options[option] = _read(word, text, like=options[option])
    return options_by_name


def _read(word: str, text: str, *, like: OptionValue) -> OptionValue:
    """The value of an option, of the type of its default."""
    try:
        if isinstance(like, bool):
            return {"true": True, "false": False}[text.lower()]
        value = type(like)(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(text)
        return value
    except (ValueError, KeyError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[type(like)]
        raise UserError(f"{word} must be {wanted}, such as {str(like).lower()}") from None
