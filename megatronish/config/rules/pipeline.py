"""Rules on cutting layers into stages and chunks, and on the micro-batches of a step."""

from megatronish.config.config import Config
from megatronish.config.fields import one_of
from megatronish.config.rules.rule import MESH, ConfigRule
from megatronish.parallel.schedules.split import stages_problem
from megatronish.parallel.schedules.table import SCHEDULES

LARGEST_NUM_MICROBATCHES = 100_000
_STAGES = (
    "num_layers",
    "pipeline_model_parallel_size",
    "pipeline_schedule",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def _interleaving(config: Config) -> str | None:
    parallel = config.parallel
    name, pp = parallel.schedule, parallel.pipeline_model_parallel_size
    num_chunks = SCHEDULES[name].num_chunks
    ends = sum(parallel.ends_in_split)
    layers, chunk = config.model.num_layers, parallel.num_layers_per_virtual_pipeline_stage
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    asked = chunk is not None or virtual is not None
    if num_chunks is None and chunk is None and virtual in (None, 1):
        return (
            f"pipeline_schedule={name} needs several chunks a stage; add --num-virtual-stages-per-pipeline-rank 2, "
            "or --num-layers-per-virtual-pipeline-stage"
        )
    given = (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers)
    if chunk is not None and given != (None, None):
        return (
            f"num_layers_per_virtual_pipeline_stage={chunk} makes all chunks equal, which stages with layers of their "
            "own are not; use --num-virtual-stages-per-pipeline-rank instead"
        )
    if num_chunks == 1 and parallel.num_virtual_chunks(layers) > 1:
        return (
            f"pipeline_schedule={name} has one chunk a stage, but virtual stages are asked for; "
            f"use --pipeline-schedule {_for_any_number_of_chunks()}, or leave the virtual stages out"
        )
    if num_chunks is not None and num_chunks > 1 and asked:
        return f"pipeline_schedule={name} has {num_chunks} chunks a stage in any case; leave the virtual stages out"
    if chunk is not None and (layers + ends) % (pp * chunk):
        counted = f" + {ends} for the embedding and the head" if ends else ""
        return (
            f"num_layers={layers}{counted} must be divisible by pipeline_model_parallel_size={pp} x "
            f"num_layers_per_virtual_pipeline_stage={chunk}; use --num-virtual-stages-per-pipeline-rank, "
            "which cuts any number of layers"
        )
    return None


def _for_any_number_of_chunks() -> str:
    return one_of(name for name, schedule in SCHEDULES.items() if schedule.num_chunks is None)


def _layers_over_stages(config: Config) -> str | None:
    parallel, layers = config.parallel, config.model.num_layers
    if _interleaving(config):
        return None
    return stages_problem(
        num_layers=layers + sum(parallel.ends_in_split),
        num_stages=parallel.pipeline_model_parallel_size,
        num_chunks=parallel.num_chunks(layers),
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
    )


def _num_microbatches(config: Config) -> str | None:
    """Complaint about a number of micro-batches that no run needs: each is an action in the plan."""
    micro, dp = config.training.micro_batch_size, config.layout.dp
    number = config.global_batch_size // (micro * dp)
    if number <= LARGEST_NUM_MICROBATCHES:
        return None
    return (
        f"global_batch_size={config.global_batch_size} / (micro_batch_size={micro} x data_parallel_size={dp}) is "
        f"{number} micro-batches, and must be at most {LARGEST_NUM_MICROBATCHES}; use a smaller batch, or a larger "
        "--micro-batch-size"
    )


STAGE_RULES = (
    ConfigRule(_STAGES, _interleaving),
    ConfigRule(_STAGES, _layers_over_stages),
)

MICROBATCH_RULES = (ConfigRule((*MESH, "global_batch_size", "micro_batch_size"), _num_microbatches),)
