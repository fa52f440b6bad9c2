"""Candidates as configs: the fields that a layout sets, and the check of the config by the project's own rules."""

from megatronish.config.check import problems, refuse_unrunnable_plans
from megatronish.config.config import Config
from megatronish.config.fields import with_fields
from megatronish.core.errors import UserError
from megatronish.estimate.planner.candidate import Candidate, MeshSizes

UNSET = {
    "data_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "use_distributed_optimizer": False,
    "num_distributed_optimizer_instances": 1,
    "recompute_granularity": None,
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "distribute_saved_activations": False,
    "offload_saved_activations": False,
}
"""Fields of a layout that no candidate varies: what the file says of them belongs to its own layout."""


def config_of(base: Config, candidate: Candidate) -> Config:
    """The config of a run in this layout; batch, model and everything else stay."""
    mesh = candidate.mesh
    is_interleaved = candidate.schedule == "interleaved"
    return with_fields(
        base,
        **{
            **UNSET,
            "tensor_model_parallel_size": mesh.tp,
            "pipeline_model_parallel_size": mesh.pp,
            "data_parallel_size": mesh.dp,
            "context_parallel_size": mesh.cp,
            "expert_model_parallel_size": mesh.ep,
            "expert_tensor_parallel_size": mesh.etp if base.model.num_experts is not None else None,
            "sequence_parallel": candidate.sequence_parallel,
            "pipeline_schedule": candidate.schedule,
            "num_virtual_stages_per_pipeline_rank": candidate.chunks if is_interleaved else None,
            "zero_stage": candidate.zero,
            "recompute_granularity": None if candidate.recompute == "none" else candidate.recompute,
            "micro_batch_size": candidate.micro_batch,
            "global_batch_size": base.global_batch_size,
        },
    )


def without_layout(base: Config) -> Config:
    """The config on one device, under the least ZeRO that its other settings allow; its batch stays as it is."""
    alone = [config_of(base, Candidate(MeshSizes(), zero=zero)) for zero in (0, 1, 3)]
    return min(alone, key=lambda config: len(problems(config)))


def complaints(config: Config) -> list[str]:
    """What the project's rules and its simulator of schedules say against a config."""
    found = problems(config)
    if not found:
        try:
            refuse_unrunnable_plans(config)
        except UserError as error:
            found.append(str(error))
    return found
