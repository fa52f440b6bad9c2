"""What was trained, and how does a rank get its share of it? From a checkpoint of any layout, into any other."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from megatronish.checkpoint.folder import find_checkpoint, read_state
from megatronish.checkpoint.load import load_tensors
from megatronish.checkpoint.save import model_tensors
from megatronish.config.check import problems
from megatronish.config.config import Config
from megatronish.config.data import DataConfig
from megatronish.config.optimizer import OptimizerConfig
from megatronish.config.parallel import ParallelConfig
from megatronish.config.tokenizer_names import TokenizerType
from megatronish.config.training import TrainingConfig
from megatronish.errors import UserError
from megatronish.formats.native import description_of
from megatronish.formats.weights import Description
from megatronish.mesh import Mesh, TensorParallel
from megatronish.model.gpt import GPT, ModelChunk
from megatronish.pipeline.stages import Stages
from megatronish.schedule.plan import StageChunk
from megatronish.sharding import Shard, collect_shardings
from megatronish.tokenizer import build_tokenizer
from megatronish.train.engine import Engine
from megatronish.train.hooks.save import tensors_of

FOREIGN = ("config.json", "latest_checkpointed_iteration.txt", "model.safetensors.index.json")


class SavedModel(NamedTuple):
    """A checkpoint, and which model it holds."""

    checkpoint: Path
    step: int
    description: Description

    def config(self, parallel: ParallelConfig, training: TrainingConfig) -> Config:
        """This model in a layout of one's own; UserError if it cannot be spread or fed like that."""
        model, rows = self.description.model, self.description.num_positions
        if model.position_embedding_type == "learned_absolute":
            if training.seq_length > rows:
                raise UserError(
                    f"seq_length={training.seq_length} exceeds the {rows} positions that the model has learned; "
                    f"use --seq-length {rows} or less"
                )
            model = replace(model, max_position_embeddings=rows)
        config = Config(
            model=model,
            parallel=parallel,
            training=replace(training, train_iters=1),
            optimizer=OptimizerConfig(lr=1.0),  # these two are only to be sound
            data=DataConfig(mock_data=True),
        )
        if wrong := problems(config):
            raise UserError("\n".join(wrong))
        return config

    def with_tokenizer(self, path: Path) -> "SavedModel":
        """The same, whose text becomes tokens, and documents end, by a file or folder of one's own."""
        kind: TokenizerType = "huggingface" if path.is_dir() or path.suffix == ".json" else "sentencepiece"
        data = replace(
            self.description.data,
            mock_data=False,
            tokenizer_type=kind,
            tokenizer_model=str(path),
            vocab_file=None,
            merge_file=None,
            vocab_size=self.description.vocab_size,
        )
        return self._replace(description=replace(self.description, data=data, eod=build_tokenizer(data).eod))


class LoadedModel(NamedTuple):
    """This rank's share of a model, and what there is to know of it."""

    model: GPT
    description: Description
    step: int


def find_trained(load: Path, *, step: int | None = None, tokenizer: Path | None = None) -> SavedModel:
    """From a run folder, its checkpoints folder or one step's folder; UserError if it holds no checkpoint.

    `tokenizer` is a file or folder to use instead of the checkpoint's own.
    """
    checkpoint = find_checkpoint(load, step=step) if load.is_dir() else None
    if checkpoint is None and any((load / name).is_file() for name in FOREIGN):
        raise UserError(f"{load} holds a model in another format; convert it with tools/convert_checkpoint.py")
    if checkpoint is None:
        raise UserError(f"{load} holds no checkpoint; name a run folder, its checkpoints folder or one step's folder")
    found = SavedModel(checkpoint, read_state(checkpoint)["step"], description_of(checkpoint))
    return found if tokenizer is None else found.with_tokenizer(tokenizer)


def load_model(
    load: Path, *, step: int | None = None, mesh: Mesh | None = None, dtype: torch.dtype = torch.float32
) -> LoadedModel:
    """What a rank of tp and pp holds, by default the whole; all ranks call this."""
    found, mesh = find_trained(load, step=step), mesh or Mesh.start()
    assert mesh.data.size == 1, "ranks of dp and cp would hold copies"
    description = found.description
    parallel = ParallelConfig(
        tensor_model_parallel_size=mesh.tp.size, pipeline_model_parallel_size=mesh.pp.size, data_parallel_size=1
    )
    stages = Stages.of(
        parallel, description.model, vocab_size=description.vocab_size, seq_length=description.seq_length
    )
    place = StageChunk(mesh.pp.rank, 0)
    with mesh.device:
        model = GPT(
            description.model,
            vocab_size=description.vocab_size,
            num_positions=description.num_positions,
            tp=TensorParallel(mesh.tp),
            chunks=[ModelChunk(stages.layers_at(place), stages.is_first(place), stages.is_last(place))],
        ).to(dtype)
    shardings = collect_shardings(model)
    shards = {
        name: Shard(parameter.detach(), tuple(shardings[name].pieces(mesh.tp)))
        for name, parameter in model.named_parameters()
    }
    load_tensors(found.checkpoint, model_tensors(shards, shardings, mesh, mesh.copied), mesh=mesh)
    return LoadedModel(model.requires_grad_(False).eval(), description, found.step)


def load_engine(found: SavedModel, config: Config, mesh: Mesh) -> Engine:
    """What evaluates this rank's share of the model, and cannot train it; all ranks call this."""
    engine = Engine.build(
        mesh,
        model=config.model,
        parallel=config.parallel,
        training=config.training,
        optimizer=config.optimizer,
        vocab_size=found.description.vocab_size,
        learns=False,
    )
    load_tensors(found.checkpoint, tensors_of(engine, with_optimizer=False), mesh=mesh)
    engine.data_parallel.publish(frozen=True)
    engine.model.eval()
    return engine
