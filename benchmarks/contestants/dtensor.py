"""The plain loop under torch's tensor parallelism: DTensor plans for each block; vocabulary and loss are cut, too.

Norms and position embeddings stay plain tensors, which torch does not mix with DTensors: so they are in parameter
groups of their own, and the gradient is clipped here.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from benchmarks.contestants.case import (
    LEARNING_RATE,
    MAX_NORM,
    Job,
    State,
    count,
    init_process_group,
    parameter_groups,
)
from benchmarks.contestants.plain import PlainLoop
from benchmarks.contestants.plain_gpt import PlainGPT, mean

PLAN = {
    "qkv": ColwiseParallel(),
    "out": RowwiseParallel(),
    "fc1": ColwiseParallel(),
    "fc2": RowwiseParallel(),
}


class PlainGPTWithHead(PlainGPT):
    """The model with its tied head as a module, for which there is a plan."""

    head: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        for block in self.layers.values():
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class TensorParallelLoop(PlainLoop):
    """The loop with the loss computed over the cut vocabulary."""

    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        """One update; the backward of a cut loss belongs into its context."""
        self.optimizer.zero_grad(set_to_none=True)
        with loss_parallel():
            with self.autocast:
                logits = self.forward(tokens)
            loss: Any = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            loss.backward()
        self._clip()
        self.optimizer.step()
        return mean([loss.full_tensor() if hasattr(loss, "full_tensor") else loss])

    @torch.no_grad()
    def _clip(self) -> None:
        cut: list[Tensor] = []
        whole: list[Tensor] = []
        for parameter in self.model.parameters():
            gradient = parameter.grad
            is_cut = isinstance(gradient, DTensor) and any(place.is_shard() for place in gradient.placements)
            assert gradient is not None
            (cut if is_cut else whole).append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        square = torch.stack(torch._foreach_norm(cut)).square().sum()
        dist.all_reduce(square)
        square += torch.stack(torch._foreach_norm(whole)).square().sum()
        factor = MAX_NORM / (math.sqrt(square.item()) + 1e-6)
        if factor < 1:
            torch._foreach_mul_([*cut, *whole], factor)


def parameter_groups_of_a_kind(model: nn.Module) -> list[dict[str, Any]]:
    """The groups of the optimizer, each with DTensors alone or without any."""
    found = []
    for group in parameter_groups(model):
        for is_cut in (True, False):
            chosen = [each for each in group["params"] if isinstance(each, DTensor) == is_cut]
            found += [group | {"params": chosen}] if chosen else []
    return found


def by_rank(qkv: Tensor, num_ranks: int) -> Tensor:
    """[q | k | v] with the rows of each rank next to each other, [q0 | k0 | v0 | q1 ...]: a plan cuts once."""
    return qkv.unflatten(0, (3, num_ranks, -1)).transpose(0, 1).flatten(0, 2)


def build(job: Job, state: State) -> PlainLoop:
    """The loop on one of two tensor-parallel ranks."""
    init_process_group()
    mesh = init_device_mesh("cpu", (job.world_size,))
    cut = {name: by_rank(each, job.world_size) if ".qkv." in name else each for name, each in state.items()}
    model: Any = PlainGPTWithHead(job.case).load(cut)
    num_parameters = count(model)
    model.head = nn.Linear(job.case.sizes.hidden_size, job.case.sizes.vocab_size, bias=False)
    for block in model.layers.values():
        parallelize_module(block, mesh, PLAN)
        block.num_heads = job.case.sizes.num_heads // job.world_size
    ends = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    model.head.weight = model.tokens.weight
    loop = TensorParallelLoop(job, model, model)
    loop.num_parameters = num_parameters
    loop.optimizer = torch.optim.AdamW(parameter_groups_of_a_kind(model), lr=LEARNING_RATE, fused=True)
    return loop
