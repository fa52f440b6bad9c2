"""Case of the comparison: sizes, layout and numbers, the same for every contestant. torch and nothing else is needed.

A contestant is a module of this folder with a function

    build(job: Job, state: State) -> Contestant

which makes the model of the case from the given initial weights, on this rank, with the settings that a user of that
framework would choose. `worker.py` calls it in the contestant's own environment.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

Layout = Literal["one", "dp2", "tp2", "pp2"]
Numbers = Literal["fp32", "bf16", "dropout"]
State = Mapping[str, Tensor]
"""The initial weights by megatronish's names, in the order of the model; queries, keys, values are [q | k | v]."""

LEARNING_RATE, WEIGHT_DECAY, MAX_NORM, DROPOUT = 3e-4, 0.01, 1.0, 0.1
NUM_PIPELINE_MICRO_BATCHES = 8


class UnavailableError(Exception):
    """A contestant that cannot run here; the message says why, in one sentence."""


class Contestant(Protocol):
    """A model and its optimizer in one framework, on one rank."""

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied one counted once."""
        ...

    def step(self, tokens: Tensor, labels: Tensor) -> float | None:
        """One update from the global batch [G, S], of which the contestant takes this rank's part.

        Returns the mean loss of that part before the update; None on a pipeline stage that does not have it.
        """
        ...


@dataclass(frozen=True)
class Sizes:
    """Sizes of a GPT-2 with a tied head, and of its micro-batch."""

    num_layers: int
    hidden_size: int
    num_heads: int
    seq_length: int
    vocab_size: int
    micro_batch_size: int


SIZES = {
    "tiny": Sizes(2, 32, 2, 16, 128, 4),
    "small": Sizes(6, 256, 8, 256, 8192, 8),
    "gpt2-124m": Sizes(12, 768, 12, 256, 50304, 4),  # 50257 tokens, padded to a multiple of 128
}


@dataclass(frozen=True)
class Case:
    """One comparison: every contestant trains this model on the same global batches."""

    layout: Layout
    size: str
    numbers: Numbers

    @property
    def sizes(self) -> Sizes:
        """The model's sizes."""
        return SIZES[self.size]

    @property
    def dropout(self) -> float:
        """Rate of every dropout."""
        return DROPOUT if self.numbers == "dropout" else 0.0

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the matrix products."""
        return torch.bfloat16 if self.numbers == "bf16" else torch.float32

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step on one data rank."""
        return NUM_PIPELINE_MICRO_BATCHES if self.layout == "pp2" else 1

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch; a quarter in a pipeline, so that a step of eight is no longer than two others."""
        size = self.sizes.micro_batch_size
        return max(1, size // 4) if self.layout == "pp2" else size

    @property
    def global_batch_size(self) -> int:
        """Samples of a step over all ranks."""
        return self.micro_batch_size * self.num_micro_batches * (2 if self.layout == "dp2" else 1)

    @property
    def num_tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.global_batch_size * self.sizes.seq_length

    @property
    def linear_flops(self) -> int:
        """FLOPs of the linear layers for one token, forward and backward."""
        sizes = self.sizes
        return 6 * (12 * sizes.num_layers * sizes.hidden_size**2 + sizes.vocab_size * sizes.hidden_size)

    @property
    def flops(self) -> int:
        """FLOPs of a step: linear layers, and the half of attention's scores that the causal mask leaves."""
        sizes = self.sizes
        attention = 6 * sizes.num_layers * sizes.seq_length * sizes.hidden_size
        return self.num_tokens * (self.linear_flops + attention)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels [G, S] of a step."""
        sizes, generator = self.sizes, torch.Generator().manual_seed(step)
        shape = (self.global_batch_size, sizes.seq_length + 1)
        samples = torch.randint(sizes.vocab_size, shape, generator=generator)
        return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


@dataclass(frozen=True)
class Job:
    """What one process of a contestant is to do: `variant` is an option of the contestant."""

    case: Case
    module: str
    variant: str = ""
    rank: int = 0
    world_size: int = 1

    def micro_batches(self, tokens: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of a global batch; without data ranks, all."""
        if self.world_size > 1 and self.case.layout == "dp2":
            tokens, labels = (each.chunk(self.world_size)[self.rank] for each in (tokens, labels))
        size = self.case.micro_batch_size
        return list(zip(tokens.split(size), labels.split(size), strict=True))


def init_process_group() -> None:
    """torch's default process group over gloo, where worker.py says that the ranks meet."""
    if not torch.distributed.is_initialized() and "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters of the optimizer: matrices decay, norms and biases do not."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    matrices = [each for each in parameters if each.dim() > 1]
    vectors = [each for each in parameters if each.dim() <= 1]
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]


def fused_adamw(model: nn.Module) -> torch.optim.AdamW:
    """torch's fused AdamW with the settings of every contestant."""
    return torch.optim.AdamW(parameter_groups(model), lr=LEARNING_RATE, fused=True)


def count(model: nn.Module) -> int:
    """Parameters of a model that one process holds whole."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_over_ranks(mine: Mapping[str, int]) -> int:
    """Parameters of a model that several ranks hold, from each rank's sizes of its whole tensors by their global names.

    What several ranks name counts once: a tied embedding on two stages, tensors that are cut or copied.
    """
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, dict(mine))
    sizes: dict[str, int] = {}
    for each in everyone:
        for name, size in each.items():
            assert sizes.setdefault(name, size) == size, f"{name} has {size} and {sizes[name]} elements"
    return sum(sizes.values())
