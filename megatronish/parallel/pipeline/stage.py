"""Construction of a pipeline stage: the modules of a rank, and the sharding of their parameters.

Training, evaluation, generation, conversion and counting all build their modules here.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.model.block import MakeBlock
from megatronish.model.gpt import GPT, Execution, ModelChunk
from megatronish.model.table import MODELS
from megatronish.parallel.mesh import Mesh, TensorParallel
from megatronish.parallel.schedules.plan import StageChunk
from megatronish.parallel.sharding import Sharding, collect_shardings
from megatronish.parallel.stages import Stages
from megatronish.parallel.symmetric import can_share
from megatronish.specs.layers import layer_specs


@dataclass(frozen=True)
class ModelStage:
    """The modules of this rank's pipeline stage, the sharding of their parameters, and the layers of all stages.

    `is_adapted`: the model has adapters, on this stage or on another one, and nothing else learns.
    """

    model: GPT
    shardings: dict[str, Sharding]
    stages: Stages
    is_adapted: bool = False


def build_stage(
    config: ModelConfig,
    stages: Stages,
    mesh: Mesh,
    *,
    vocab_size: int,
    num_positions: int,
    sequence_parallel: bool = False,
    by_pieces: Literal["p2p", "symm_mem"] | None = None,
    execution: Execution | None = None,
    make_block: MakeBlock | None = None,
    device: torch.device | None = None,
) -> ModelStage:
    """The stage of this rank, with uninitialised fp32 parameters, by default on the mesh's device.

    `make_block` None makes the blocks that the config names. `by_pieces` says how products of a cut sequence get
    their pieces.
    """
    shares_memory = by_pieces == "symm_mem" and can_share(mesh.tp, mesh.device)
    places = [StageChunk(mesh.pp.rank, chunk) for chunk in range(stages.num_chunks)]
    with device or mesh.device:
        model = MODELS[config.model_type](
            config,
            vocab_size=vocab_size,
            num_positions=num_positions,
            tp=TensorParallel(mesh.tp, sequence_parallel, mesh.experts, by_pieces is not None, shares_memory),
            chunks=[
                ModelChunk(stages.layers_at(place), stages.is_first(place), stages.is_last(place)) for place in places
            ],
            execution=execution,
            make_block=make_block,
        )
    if make_block is None and config.block != "transformer":  # the package's own is tested
        _refuse_wrong_specs(model, tp=mesh.tp.size, experts=mesh.experts.ep.size * mesh.experts.etp.size)
    return ModelStage(model, collect_shardings(model), stages)


def _refuse_wrong_specs(model: GPT, *, tp: int, experts: int) -> None:
    """UserError for a block of a plug-in whose spec counts other parameters than the block has."""
    for layer, spec in enumerate(layer_specs(model.config)):
        if str(layer) not in model.layers:
            continue
        has = sum(parameter.numel() for parameter in model.layers[str(layer)].parameters())
        counted = spec.cost(model.config).parameters.per_rank(tp, experts=experts)
        if has != counted:
            raise UserError(
                f"block={model.config.block} has {has:,} parameters in layer {layer} of a rank, and its spec counts "
                f"{counted:,}; correct the cost of the spec, which FLOPs and memory are computed from"
            )
