"""Which layers does a model position hold?"""

from megatronish.errors import UserError


def layers_of_stage(*, num_layers: int, num_stages: int, stage: int) -> range:
    """The layers of one of num_stages equal parts; UserError where they cannot be equal."""
    if num_layers % num_stages:
        fitting = ", ".join(str(size) for size in range(1, num_layers + 1) if num_layers % size == 0)
        raise UserError(
            f"num_layers={num_layers} must be divisible by pipeline_model_parallel_size={num_stages}; "
            f"use one of {fitting}"
        )
    if not 0 <= stage < num_stages:
        raise UserError(f"stage={stage} is outside a pipeline of {num_stages} stages; use 0 to {num_stages - 1}")
    size = num_layers // num_stages
    return range(stage * size, (stage + 1) * size)
