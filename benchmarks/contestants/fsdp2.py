"""The plain loop under FSDP2: `fully_shard` of each block and of the rest; bf16 by its mixed precision."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.contestants.case import Job, State, count, init_process_group
from benchmarks.contestants.plain import PlainLoop
from benchmarks.contestants.plain_gpt import PlainGPT


def build(job: Job, state: State) -> PlainLoop:
    """The loop on one of two data ranks."""
    init_process_group()
    model = PlainGPT(job.case).load(state)
    num_parameters = count(model)
    mesh = init_device_mesh("cpu", (job.world_size,))
    policy = MixedPrecisionPolicy()
    if job.case.numbers == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    loop = PlainLoop(job, model, model, autocast=False)
    loop.num_parameters = num_parameters
    return loop
