"""The plain loop under torch.distributed.pipelining: `Schedule1F1B` over two stages cut by hand.

That package knows no tied embedding, so both stages hold one and its gradients are summed here, as a user must.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.contestants.case import MAX_NORM, Job, State, count_over_ranks, fused_adamw, init_process_group
from benchmarks.contestants.plain_gpt import PlainGPT, cross_entropy, mean, our_name


class PipelinedLoop:
    """One stage of the model, its optimizer, and one step of training."""

    def __init__(self, job: Job, state: State) -> None:
        case, half = job.case, job.case.sizes.num_layers // 2
        layers = range(half) if job.rank == 0 else range(half, case.sizes.num_layers)
        self.model = PlainGPT(case, layers).load(state)
        stage = PipelineStage(self.model, job.rank, job.world_size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, case.num_micro_batches, loss_fn=cross_entropy)
        self.optimizer = fused_adamw(self.model)
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=case.numbers == "bf16")
        self.num_parameters = count_over_ranks(
            {our_name(name): each.numel() for name, each in self.model.named_parameters()}
        )

    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        """One update."""
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        with self.autocast:
            if self.model.is_first:
                self.schedule.step(tokens)
            else:
                self.schedule.step(target=labels, losses=losses)
        tied = self.model.tokens.weight.grad
        assert tied is not None
        dist.all_reduce(tied)
        self._clip()
        self.optimizer.step()
        return mean(losses) if self.model.is_last else None

    @torch.no_grad()
    def _clip(self) -> None:
        # The embedding's gradient is the same on both stages and counts once.
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        counted = gradients if self.model.is_first else gradients[1:]
        square = torch.stack(torch._foreach_norm(counted)).square().sum()
        dist.all_reduce(square)
        factor = MAX_NORM / (math.sqrt(square.item()) + 1e-6)
        if factor < 1:
            torch._foreach_mul_(gradients, factor)


def build(job: Job, state: State) -> PipelinedLoop:
    """The loop on one of two stages."""
    init_process_group()
    return PipelinedLoop(job, state)
