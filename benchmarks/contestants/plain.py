"""The plain loop: PlainGPT, autocast for bf16, fused AdamW, `clip_grad_norm_`.

Variants: compile (`torch.compile`), keep (freed memory stays with the process, which is our setting).

The baseline of every table, and the loop of DDP, FSDP2 and DTensor, which wrap the model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestants.case import MAX_NORM, Job, State, count, fused_adamw
from benchmarks.contestants.plain_gpt import PlainGPT, cross_entropy, mean
from megatronish.launch.libraries import keep_freed_memory


class PlainLoop:
    """A model with its optimizer, and one step of training; `forward` is the model as it is called."""

    def __init__(self, job: Job, model: nn.Module, forward: Any, *, autocast: bool = True) -> None:
        self.job, self.model, self.forward = job, model, forward
        self.num_parameters = count(model)
        self.optimizer = fused_adamw(model)
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=autocast and job.case.numbers == "bf16")

    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        """One update; gradients of micro-batches add up."""
        self.optimizer.zero_grad(set_to_none=True)
        micro_batches = self.job.micro_batches(tokens, labels)
        losses = []
        for inputs, targets in micro_batches:
            with self.autocast:
                loss = cross_entropy(self.forward(inputs), targets)
            (loss / len(micro_batches)).backward()
            losses.append(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        return mean(losses)


def build(job: Job, state: State) -> PlainLoop:
    """The loop on one process with all cores."""
    variants = job.variant.split()
    if "keep" in variants:
        keep_freed_memory()
    model = PlainGPT(job.case).load(state)
    return PlainLoop(job, model, torch.compile(model) if "compile" in variants else model)
