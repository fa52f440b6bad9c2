"""Loading of a trained model for generation and evaluation: a checkpoint of any layout, or a Hugging Face folder.

It is loaded into any layout, with adapters by their names, of which one at a time is applied.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from megatronish.checkpoint.load import load_tensors
from megatronish.checkpoint.save import model_tensors, state_tensors
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.config.config import Config
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.layout import ExpertLayout
from megatronish.engine.build import build_engine, nothing, with_adapters
from megatronish.engine.engine import Engine
from megatronish.formats.adapters import SavedAdapter, under_names_of_checkpoints
from megatronish.formats.load_sharded import load_weights
from megatronish.formats.read_adapter import refuse_other_model
from megatronish.formats.weights import Description
from megatronish.inference.saved_model import SavedModel, find_trained
from megatronish.layers.linear import select_adapter
from megatronish.model.adapters import DEFAULT, is_adapter
from megatronish.model.gpt import GPT
from megatronish.parallel.all_or_none import all_or_none
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.pipeline.stage import build_stage
from megatronish.parallel.pipeline.stages import Stages
from megatronish.parallel.sharding import Shard
from megatronish.train.checkpoint_state import base_tensors_of, tensors_of


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
    found = find_trained(load, step=step, adapters={} if adapter is None else {"adapter": adapter})
    if mesh is None:
        mesh = Mesh.start(experts=None if found.description.model.num_experts is None else ExpertLayout())
    return load_found(found, mesh, dtype=dtype)


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
        all_or_none(mesh.checkpoint_axis, lambda: load_weights(found.tensors(), tensors, source=found.checkpoint))
    else:
        load_tensors(found.checkpoint, tensors | states, mesh=mesh)
    trained = LoadedModel(model.requires_grad_(False).eval(), description, found.step, tuple(adapters))
    trained.select(next(iter(adapters), None))
    return trained


def load_engine(found: SavedModel, config: Config, mesh: Mesh) -> Engine:
    """Engine for evaluation in any layout, without gradients and optimizer states. A collective call.

    It has one adapter at most.
    """
    engine = build_engine(config, mesh, vocab_size=found.description.vocab_size, trainable=nothing)
    tensors = base_tensors_of(engine)
    if found.is_hf:
        wanted = {name: each for name, each in tensors.items() if name.removeprefix("model.") in engine.stage.shardings}
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
