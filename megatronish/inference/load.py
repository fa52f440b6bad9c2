"""Trained models, found on disk and loaded for generation and evaluation: a checkpoint of any layout, or a HF folder.

It is loaded into any layout, with adapters by their names, of which one at a time is applied.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from megatronish.checkpoint.folder import find_checkpoint, read_state
from megatronish.checkpoint.load import load_tensors
from megatronish.checkpoint.save import model_tensors, state_tensors
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.config.check import problems
from megatronish.config.config import Config
from megatronish.config.hub import local_model, local_tokenizer
from megatronish.config.rules.model import too_few_positions
from megatronish.config.sections.data import DataConfig
from megatronish.config.sections.finetuning import AdapterConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.run import CheckpointConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.errors import UserError
from megatronish.core.layout import ExpertLayout
from megatronish.engine.build import build_engine, nothing, with_adapters
from megatronish.engine.engine import Engine
from megatronish.formats import native
from megatronish.formats.adapters import SavedAdapter, under_names_of_checkpoints
from megatronish.formats.hf import tensors as hf
from megatronish.formats.hf.family import CONFIG
from megatronish.formats.load_sharded import load_weights, open_hf
from megatronish.formats.megatron.names import LATEST
from megatronish.formats.native import description_of
from megatronish.formats.read_adapter import read_adapter, refuse_other_model
from megatronish.formats.safetensors import INDEX
from megatronish.formats.weights import Description, LazyTensor
from megatronish.layers.linear import select_adapter
from megatronish.model.adapters import DEFAULT, is_adapter
from megatronish.model.gpt import GPT
from megatronish.parallel.all_or_none import all_or_none
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.pipeline.stage import build_stage
from megatronish.parallel.sharding import Shard
from megatronish.parallel.stages import Stages
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.names import TEKKEN, TIKTOKEN, TokenizerType, tokenizer_in, tokenizer_of_files
from megatronish.train.checkpoint_state import base_tensors_of, tensors_of

FOREIGN = (LATEST, INDEX)
NO_ADAPTERS: Mapping[str, Path] = MappingProxyType({})


class SavedModel(NamedTuple):
    """A model on disk and its description; `adapters` are folders with adapters of it, by name.

    `checkpoint` is one step's folder, or with `is_hf` a Hugging Face folder.
    """

    checkpoint: Path
    step: int
    description: Description
    adapters: Mapping[str, Path] = NO_ADAPTERS
    is_hf: bool = False

    def read_adapters(self) -> dict[str, SavedAdapter]:
        """The adapters by name, not read yet."""
        return {name: read_adapter(folder, self.description) for name, folder in self.adapters.items()}

    def tensors(self) -> dict[str, LazyTensor]:
        """Weights of the base, not read yet, under our names."""
        return open_hf(self.checkpoint).tensors if self.is_hf else native.tensors_in(self.checkpoint)

    def config(self, parallel: ParallelConfig, training: TrainingConfig) -> Config:
        """Config of this model in a new layout and sequence length; UserError if one does not fit the model.

        Its adapter is the first one.
        """
        model, rows = self.description.model, self.description.num_positions
        if model.num_experts is None and parallel.expert_model_parallel_size > 1:
            ep = parallel.expert_model_parallel_size
            raise UserError(f"--expert-model-parallel-size {ep} is for a model with experts, which this is not; use 1")
        if model.position_embedding_type == "learned_absolute":
            if complaint := too_few_positions(rows, seq_length=training.seq_length):
                raise UserError(complaint)
            model = replace(model, max_position_embeddings=rows)
        if model.has_encoder:  # which bounds no length
            length = training.seq_length
            model = replace(model, encoder_seq_length=length, decoder_seq_length=length)
            training = replace(training, seq_length=2 * length)
        config = Config(
            model=model,
            parallel=parallel,
            training=replace(training, train_iters=1),
            optimizer=OptimizerConfig(lr=1.0),  # no training: the optimizer and the data only have to be valid
            data=DataConfig(mock_data=True, vocab_extra_ids=training.seq_length * model.has_encoder),
            checkpoint=CheckpointConfig(load=str(self.checkpoint)),
        )
        adapters = [saved.config for saved in self.read_adapters().values()] or [AdapterConfig()]
        configs = [replace(config, adapter=adapter) for adapter in adapters]
        if wrong := next((complaints for each in configs if (complaints := problems(each))), None):
            raise UserError("\n".join(wrong))
        return configs[0]

    def with_tokenizer(self, path: Path) -> "SavedModel":
        """The same checkpoint with another tokenizer, from a file or folder; its end of document becomes `eod`."""
        kind: TokenizerType = "sentencepiece"
        if path.is_dir() or path.name == "tokenizer.json":
            kind = "huggingface"
        elif path.suffix == ".tiktoken" or self.description.data.tokenizer_type == "tiktoken":
            kind = "tiktoken"  # its other form is a .json, too
        elif path.suffix == ".json":
            kind = "huggingface"
        fields: dict[str, Any] = {"tokenizer_type": kind, "tokenizer_model": str(path)}
        if path.is_dir():
            fields |= tokenizer_in(path, like_gpt2=True)
        elif path.name in (TIKTOKEN, TEKKEN):
            fields |= tokenizer_of_files([path.name], folder=path.parent, like_gpt2=False)
        size = self.description.vocab_size
        data = replace(
            self.description.data, mock_data=False, vocab_file=None, merge_file=None, vocab_size=size, **fields
        )
        return self._replace(description=replace(self.description, data=data, eod=build_tokenizer(data).eod))


def find_trained(
    load: Path,
    *,
    step: int | None = None,
    tokenizer: Path | None = None,
    adapters: Mapping[str, Path] = NO_ADAPTERS,
) -> SavedModel:
    """The checkpoint in a run folder, a checkpoints folder or one step's folder, or a Hugging Face folder or org/name.

    It is without its layers of multi-token prediction, which training alone runs. UserError if there is none, and for a
    model that writes no text. `step` None takes the newest. `tokenizer` is a file or folder to use instead of the
    model's own. `adapters` are folders of PEFT, or of runs with adapters, by name.
    """
    load = local_model(load, flag="--load")
    checkpoint = find_checkpoint(load, step=step) if load.is_dir() else None
    if checkpoint is not None:
        state = read_state(checkpoint)
        native.refuse_adapters_alone(state, checkpoint)
        saved_model = SavedModel(checkpoint, state["step"], description_of(checkpoint), adapters)
    elif (load / CONFIG).is_file():
        saved_model = SavedModel(load, 0, hf.describe(load), adapters, is_hf=True)
    elif any((load / name).is_file() for name in FOREIGN):
        raise UserError(f"{load} holds a model in another format; convert it with megatronish convert")
    else:
        raise UserError(f"{load} holds no checkpoint; name a run folder, its checkpoints folder or one step's folder")
    _refuse_encoder(saved_model)
    description = saved_model.description
    model = replace(description.model, mtp_num_layers=None)
    saved_model = saved_model._replace(description=replace(description, model=model))
    return saved_model if tokenizer is None else saved_model.with_tokenizer(local_tokenizer(tokenizer))


def _refuse_encoder(found: SavedModel) -> None:
    kind = found.description.model.model_type
    if not found.description.model.is_causal:
        raise UserError(
            f"{found.checkpoint} is model_type={kind}, which sees both sides of a token and so writes no text; name a "
            "GPT, or measure the loss of this one with --eval-iters of pretrain_bert.py"
        )


class LoadedModel(NamedTuple):
    """This rank's stage and tp shard of a model, its description, and the training step of its checkpoint.

    `adapters` are the names of its adapters, in the order of their numbers in the model.
    """

    model: GPT
    description: Description
    step: int
    adapters: tuple[str, ...] = ()

    def select(self, adapter: str | None) -> None:
        """From now on the adapter of this name is applied; None: the base alone."""
        select_adapter(self.model, None if adapter is None else str(self.adapters.index(adapter)))


def load_model(
    load: Path,
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
    dtype: torch.dtype = torch.float32,
    adapter: Path | None = None,
) -> LoadedModel:
    """Model for generation: this rank's share over tp and pp, without `mesh` the whole model. A collective call."""
    saved_model = find_trained(load, step=step, adapters={} if adapter is None else {"adapter": adapter})
    if mesh is None:
        mesh = Mesh.start(experts=None if saved_model.description.model.num_experts is None else ExpertLayout())
    return load_found(saved_model, mesh, dtype=dtype)


def load_found(found: SavedModel, mesh: Mesh, *, dtype: torch.dtype) -> LoadedModel:
    """The model that was found, with its adapters, of which the first is applied. A collective call.

    Every rank of dp holds a copy.
    """
    assert mesh.cp.size == 1, "generation has no cp: its ranks would hold copies"
    description = found.description
    parallel = ParallelConfig(
        tensor_model_parallel_size=mesh.tp.size, pipeline_model_parallel_size=mesh.pp.size, data_parallel_size=1
    )
    stages = Stages.of(
        parallel, description.model, vocab_size=description.vocab_size, seq_length=description.seq_length
    )
    built = build_stage(
        description.model,
        stages,
        mesh,
        vocab_size=description.vocab_size,
        num_positions=description.num_positions,
        device=torch.device("meta"),  # nothing is there in fp32 first
    )
    adapters = found.read_adapters()
    for number, saved in enumerate(adapters.values()):
        built = with_adapters(built, saved.config, device=torch.device("meta"), name=str(number))
    model, shardings = built.model.to(dtype).to_empty(device=mesh.device), built.shardings
    shards = {
        name: Shard(parameter.detach(), tuple(shardings[name].pieces(mesh.domains[shardings[name].domain].model)))
        for name, parameter in model.named_parameters()
    }
    for shard in shards.values():
        shard.master.zero_()  # what no file fills is padding
    tensors = model_tensors(shards, shardings, mesh.domains)
    of_adapters = {name: tensors.pop(name) for name in [*tensors] if is_adapter(name)}
    _refuse_other_base(found, adapters, mesh)
    for number, saved in enumerate(adapters.values()):
        part = f".adapters.{number}."
        _fill(saved, {name: each for name, each in of_adapters.items() if part in name}, mesh, name=str(number))
    states = state_tensors(model.state(), mesh.domains["dense"])
    if found.is_hf:
        wanted = tensors | _of_hf(states)
        all_or_none(mesh.checkpoint_axis, lambda: load_weights(found.tensors(), wanted, source=found.checkpoint))
    else:
        load_tensors(found.checkpoint, tensors | states, mesh=mesh)
    trained = LoadedModel(model.requires_grad_(False).eval(), description, found.step, tuple(adapters))
    trained.select(next(iter(adapters), None))
    return trained


def _of_hf(tensors: Mapping[str, GlobalTensor]) -> dict[str, GlobalTensor]:
    """Those that Hugging Face's models have: not the choices of the step before, which a run counts again."""
    return {name: each for name, each in tensors.items() if not name.endswith(native.LOAD)}


def load_engine(found: SavedModel, config: Config, mesh: Mesh) -> Engine:
    """Engine for evaluation in any layout, without gradients and optimizer states. A collective call.

    It has one adapter at most.
    """
    engine = build_engine(config, mesh, vocab_size=found.description.vocab_size, trainable=nothing)
    tensors = base_tensors_of(engine)
    if found.is_hf:
        wanted = _of_hf(tensors)
        all_or_none(mesh.checkpoint_axis, lambda: load_weights(found.tensors(), wanted, source=found.checkpoint))
    else:
        load_tensors(found.checkpoint, tensors, mesh=mesh)
    adapters = found.read_adapters()
    assert len(adapters) <= 1, "an engine has one adapter"
    _refuse_other_base(found, adapters, mesh)
    for saved in adapters.values():
        _fill(saved, tensors_of(engine, with_optimizer=False), mesh, name=DEFAULT)
    engine.data_parallel.gather_parameters(frozen=True)
    engine.stage.model.eval()
    return engine


def _refuse_other_base(found: SavedModel, adapters: Mapping[str, SavedAdapter], mesh: Mesh) -> None:
    """UserError if one of the adapters was trained with another base. A collective call."""
    if adapters:
        refuse_other_model(adapters.values(), found.tensors(), source=found.checkpoint, over=mesh.checkpoint_axis)


def _fill(adapter: SavedAdapter, into: dict[str, GlobalTensor], mesh: Mesh, *, name: str) -> None:
    """Fill this rank's part of an adapter. A collective call."""
    tensors = under_names_of_checkpoints(adapter, name=name)
    all_or_none(mesh.checkpoint_axis, lambda: load_weights(tensors, into, source=adapter.folder))
