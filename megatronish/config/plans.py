"""The check of a config's pipeline plan by the simulator, before any rank starts."""

from megatronish.config.batch_sizes import parse_batch_sizes
from megatronish.config.config import Config
from megatronish.parallel.schedules.simulate import refuse_schedule
from megatronish.parallel.schedules.table import SCHEDULES


def refuse_unrunnable_plans(config: Config) -> None:
    """UserError, with its picture, for a plan that would hang: of the full batch, or of a smaller one."""
    parallel, training = config.parallel, config.training
    ramp, steps = training.rampup_batch_size, training.step_batch_size_schedule
    sizes = {config.global_batch_size, *(ramp[:1] if ramp else ())}
    sizes |= {size for _, size in parse_batch_sizes(steps, seq_length=training.seq_length)} if steps else set()
    for batch_size in sizes:
        refuse_schedule(
            SCHEDULES[parallel.schedule],
            num_stages=parallel.pipeline_model_parallel_size,
            num_microbatches=batch_size // (training.micro_batch_size * config.layout.dp),
            num_chunks=parallel.num_chunks(config.model.num_layers),
        )
