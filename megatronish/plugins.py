"""Registration of what plug-ins add: names that flags and configs then take like any other.

A plug-in is a module that calls these functions when it is imported, which `--plugin` does on every rank before the
rest of the config is read. docs/PLUGINS.md has an example of each. A name that is there already is refused. `options`
are options of the name itself, with their defaults: flags like --optimizer-args beta=0.95 set them, and what is
registered gets them as keyword arguments.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

from torch import nn

from megatronish.config.sections.data import DataConfig
from megatronish.core.errors import UserError
from megatronish.core.names import (
    BLOCK_NAMES,
    DATASET_NAMES,
    HOOK_NAMES,
    OBJECTIVE_NAMES,
    OPTIMIZER_NAMES,
    Choice,
    DatasetChoice,
    ObjectiveChoice,
    OptimizerChoice,
    Options,
)
from megatronish.data.datasets import DATASETS
from megatronish.data.sample import Dataset
from megatronish.formats.hf.families import FAMILIES
from megatronish.formats.hf.family import FamilyTensors, ModelFamily
from megatronish.model.block import BLOCKS
from megatronish.objectives.pairs import AnyObjective
from megatronish.objectives.table import OBJECTIVES
from megatronish.optim.masters import Update
from megatronish.optim.optimizer import OPTIMIZERS
from megatronish.parallel.schedules.plan import Action, Placement, looped
from megatronish.parallel.schedules.table import SCHEDULES, PipelineSchedule
from megatronish.specs.layers import LAYERS, LayerSpec
from megatronish.tokenizer.build import TOKENIZERS
from megatronish.tokenizer.names import TOKENIZER_NAMES
from megatronish.tokenizer.tokenizer import Tokenizer
from megatronish.train.trainer import HOOKS, Hook

__all__ = [
    "register_block",
    "register_dataset",
    "register_hook",
    "register_model_family",
    "register_objective",
    "register_optimizer",
    "register_schedule",
    "register_tokenizer",
]

NO_OPTIONS: Options = {}
Value = TypeVar("Value")


def register_block(
    name: str,
    make: Callable[..., nn.Module],
    *,
    layers: Callable[..., Sequence[LayerSpec]],
    options: Options = NO_OPTIONS,
) -> None:
    """A kind of layers, for --block: `make(config, layer=, tp=, core=)` builds layer number `layer` (`MakeBlock`).

    `layers(config)` gives the spec of every layer, whose `cost` FLOPs, memory and the split over stages are made of.
    """
    _add(BLOCK_NAMES, name, Choice(options), flag="--block")
    LAYERS[name], BLOCKS[name] = layers, make


def register_optimizer(
    name: str,
    make: Callable[..., Update],
    *,
    moments: int,
    matrix_moments: int | None = None,
    reads: Sequence[str] = (),
    has_momentum: bool = False,
    options: Options = NO_OPTIONS,
) -> None:
    """An optimizer, for --optimizer: `make(masters, config)` is an update rule of the fp32 masters of a rank.

    It keeps `moments` numbers for each element in addition to the master, `matrix_moments` for matrices of layers.
    `reads` are the beginnings of the names of flags that it reads ("adam_"). With `has_momentum` its `step` also takes
    a `momentum`, which --cycle-min-momentum changes from step to step.
    """
    choice = OptimizerChoice(options, moments, matrix_moments, tuple(reads), has_momentum)
    _add(OPTIMIZER_NAMES, name, choice, flag="--optimizer")
    OPTIMIZERS[name] = make  # type: ignore[assignment]  # any maker of an Update, which a class is too


def register_schedule(
    name: str,
    generate: Callable[..., list[Action]],
    *,
    placement: Callable[..., Placement] = looped,
    num_chunks: int | None = 1,
    has_weight_gradients: bool = False,
) -> None:
    """A pipeline schedule, for --pipeline-schedule: `generate` gives the actions of one stage (`PipelineSchedule`)."""
    schedule = PipelineSchedule(name, generate, placement, num_chunks, has_weight_gradients)
    _add(SCHEDULES, name, schedule, flag="--pipeline-schedule")


def register_objective(
    name: str,
    make: Callable[..., AnyObjective],
    *,
    options: Options = NO_OPTIONS,
    learns_from: Literal["text", "pairs", "labelled"] = "text",
    has_reference: bool = False,
) -> None:
    """An objective, for --objective: `make()` is one, which makes named sums of token losses, of logits or of pairs."""
    _add(OBJECTIVE_NAMES, name, ObjectiveChoice(options, learns_from, has_reference=has_reference), flag="--objective")
    OBJECTIVES[name] = make


def register_dataset(
    name: str, open_dataset: Callable[..., Dataset], *, needs_path: bool = True, options: Options = NO_OPTIONS
) -> None:
    """A kind of data sets, for --dataset-type: `open_dataset(source, settings)` opens one path of --data-path.

    A kind that does not need a path is opened once for each of training, validation and test where none is given.
    """
    _add(DATASET_NAMES, name, DatasetChoice(options, needs_path), flag="--dataset-type", taken=DATASETS)
    DATASETS[name] = open_dataset


def register_hook(name: str, make: Callable[..., Hook], *, options: Options = NO_OPTIONS) -> None:
    """A hook, for --hook: `make(job)` is called on every rank, with the `TrainingJob`.

    Hooks of plug-ins are called in the order of --hook, after those that stop, log and evaluate, and before saving.
    """
    _add(HOOK_NAMES, name, Choice(options), flag="--hook")
    HOOKS[name] = make


def register_tokenizer(name: str, make: Callable[[DataConfig], Tokenizer]) -> None:
    """A tokenizer, for --tokenizer-type: `make(data)` builds it from the [data] section (--tokenizer-model, ...)."""
    _add(TOKENIZER_NAMES, name, Choice(), flag="--tokenizer-type")
    TOKENIZERS[name] = make


def register_model_family(model_type: str, family: ModelFamily, tensors: FamilyTensors) -> None:
    """A family of Hugging Face models, known by the `model_type` of its config.json: its keys, and its tensors."""
    _add(FAMILIES, model_type, family, flag="model_type")
    FAMILIES[model_type] = family._replace(tensors=tensors)


def _add(
    table: dict[str, Value], name: str, value: Value, *, flag: str, taken: Mapping[str, object] | None = None
) -> None:
    """Add a name to a table; UserError for one that is there already, or that no flag could take."""
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise UserError(f"{flag} {name!r} is no name; use letters, digits and any of _ . + -")
    if name in table or name in (taken or ()):
        raise UserError(f"{flag} {name} is registered already; choose another name")
    table[name] = value
