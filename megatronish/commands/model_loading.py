"""Opening of a trained model for the commands that generate: its files, its new layout, its tokenizer and adapters."""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatronish.commands.inference_flags import ModelArguments, SamplingArguments
from megatronish.config.config import Config
from megatronish.config.plugins import PluginsConfig, import_plugins
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.errors import UserError
from megatronish.inference.generate import Sampling
from megatronish.inference.load import SavedModel, find_trained, load_found
from megatronish.inference.session import Session
from megatronish.launch.place import Place
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.control_tokens import SpanTokens
from megatronish.tokenizer.tokenizer import Tokenizer
from megatronish.train.start import start_mesh

NONE = "none"
"""Name of no adapter, the base alone, on command lines."""
A_WEEK = 7 * 24 * 60.0  # minutes


@dataclass(frozen=True)
class OpenedModel:
    """Checked input of every rank: the model on disk, its config in the new layout, and the tokenizer."""

    found: SavedModel
    config: Config
    tokenizer: Tokenizer

    @property
    def seq_length(self) -> int:
        """Tokens that the model sees at a time."""
        return self.config.training.seq_length

    @property
    def special(self) -> SpanTokens | None:
        """What starts and ends the rows of a model with an encoder."""
        if not self.found.description.model.has_encoder:
            return None
        return self.tokenizer.span_tokens(self.found.description.data.vocab_extra_ids)

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end a text."""
        ends = () if self.special is None else (self.special.end,)
        return frozenset({self.tokenizer.eod, *self.found.description.stops, *ends})

    def adapter(self, name: str | None) -> str | None:
        """Adapter of this name, None for the base; without a name the first. UserError if there is no such adapter."""
        names = list(self.found.adapters)
        if name is None:
            return names[0] if names else None
        if name == NONE or name in names:
            return None if name == NONE else name
        given = f"there are {', '.join(names)} and {NONE}" if names else "name its folder with --adapter NAME=FOLDER"
        raise UserError(f"adapter {name} is not loaded; {given}")

    def load(self, place: Place, *, batch_size: int = 8) -> Session:
        """The model on this rank. A collective call."""
        mesh = start_mesh(self.config, place)
        dtype = torch.bfloat16 if self.config.training.bf16 else torch.float32
        trained = load_found(self.found, mesh, dtype=dtype)
        return Session(trained, mesh, self.seq_length, batch_size, self.tokenizer.decode)


def open_model(arguments: ModelArguments, *, waits: bool = False) -> OpenedModel:
    """The model of these arguments; user errors are raised here, before any rank starts.

    With `waits`, ranks wait for the next order of the main one for up to a week.
    """
    if arguments.seq_length is not None and arguments.seq_length < 1:
        raise UserError(f"--seq-length {arguments.seq_length} must be at least 1; or leave it out")
    import_plugins(arguments.plugin)
    saved_model = find_trained(
        arguments.load,
        step=arguments.ckpt_step,
        tokenizer=arguments.tokenizer_model,
        adapters=adapters_of(arguments.adapter),
    )
    if waits:
        refuse_encoder(saved_model)
    parallel = ParallelConfig(
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size,
        data_parallel_size=1,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
        expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
        device=arguments.device,
    )
    training = TrainingConfig(
        seq_length=saved_model.description.seq_length if arguments.seq_length is None else arguments.seq_length,
        micro_batch_size=1,
        bf16=arguments.bf16,
    )
    config = saved_model.config(replace(parallel, distributed_timeout_minutes=A_WEEK) if waits else parallel, training)
    config = replace(config, plugins=PluginsConfig(arguments.plugin))
    return OpenedModel(saved_model, config, tokenizer_of(saved_model))


def refuse_encoder(found: SavedModel) -> None:
    """UserError for a model that answers a text, and does not continue it."""
    model = found.description.model
    if model.has_encoder:
        raise UserError(
            f"{found.checkpoint} is model_type={model.model_type}, which answers a text and does not continue it, as "
            "this command asks for; use megatronish generate, or name a GPT"
        )


def tokenizer_of(found: SavedModel) -> Tokenizer:
    """The model's tokenizer; UserError if it has none."""
    if found.is_hf and found.description.data.tokenizer_model is None and found.description.data.vocab_file is None:
        raise UserError(
            f"{found.checkpoint} has no tokenizer.json and no tokenizer.model; copy the model's there, or name another "
            "with --tokenizer-model"
        )
    return build_tokenizer(found.description.data)


def adapters_of(words: Iterable[str]) -> dict[str, Path]:
    """Folders of --adapter by name; UserError for a name that is given twice or means no adapter."""
    folders: dict[str, Path] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals or "/" in name:
            folder = word
            name = Path(os.path.realpath(word)).name
        if not re.fullmatch(r"[^\s,/]+", name) or name == NONE:
            raise UserError(f"--adapter {word} has the name {name!r}; give it one without spaces that is not {NONE}")
        if name in folders:
            raise UserError(f"--adapter {word} has the name {name} again; give each one its own: --adapter NAME=FOLDER")
        folders[name] = Path(folder)
    return folders


def sampling_of(arguments: SamplingArguments) -> Sampling:
    """The choice of tokens that flags describe; UserError for numbers out of range."""
    if not 0 <= arguments.temperature < math.inf:
        raise UserError(f"--temperature {arguments.temperature} must be a number from 0 on; for example 0.8")
    if not 0 < arguments.top_p <= 1:
        raise UserError(f"--top-p {arguments.top_p} must be above 0 and at most 1; for example 0.95")
    if arguments.top_k < 0:
        raise UserError(f"--top-k {arguments.top_k} must not be negative; use 0 or more")
    return Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
