"""The plain loop under DistributedDataParallel, with gradients as views of its buckets."""

from torch.nn.parallel import DistributedDataParallel

from benchmarks.contestants.case import Job, State, init_process_group
from benchmarks.contestants.plain import PlainLoop
from benchmarks.contestants.plain_gpt import PlainGPT


def build(job: Job, state: State) -> PlainLoop:
    """The loop on one of two data ranks."""
    init_process_group()
    model = PlainGPT(job.case).load(state)
    return PlainLoop(job, model, DistributedDataParallel(model, gradient_as_bucket_view=True))
