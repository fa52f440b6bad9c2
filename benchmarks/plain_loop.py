"""Plain PyTorch training loop of a GPT-2, the baseline of `against_plain_loop.py`.

Nothing of megatronish is imported. Eager, fp32, dropout 0: `nn.Linear`, `nn.LayerNorm`, exact GELU, SDPA, tied
embedding, `F.cross_entropy`, fused AdamW (no decay on norms and biases), `clip_grad_norm_`, gradients set to None.

    OMP_NUM_THREADS=2 python benchmarks/plain_loop.py --steps 25
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Sizes:
    """The model and batch of the comparison."""

    num_layers: int = 6
    hidden_size: int = 256
    num_heads: int = 8
    seq_length: int = 256
    vocab_size: int = 8192
    micro_batch_size: int = 8


class Block(nn.Module):
    """Transformer block: [B, S, D] -> [B, S, D]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.num_heads = sizes.hidden_size, sizes.num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq_length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq_length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq_length, width))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class PlainGPT(nn.Module):
    """GPT-2 with a tied head: tokens [B, S] -> logits [B, S, V]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.positions = nn.Embedding(sizes.seq_length, sizes.hidden_size)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.LayerNorm(sizes.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class PlainLoop:
    """The model, its optimizer and one step of training."""

    def __init__(self, sizes: Sizes, *, learning_rate: float = 3e-4, weight_decay: float = 0.01) -> None:
        self.model = PlainGPT(sizes)
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate, fused=True)

    def step(self, tokens: Tensor, labels: Tensor) -> tuple[float, float]:
        """[B, S], [B, S] -> the mean loss and the norm of the gradient; one update."""
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), norm.item()


def random_batch(sizes: Sizes, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, S] of a step."""
    generator = torch.Generator().manual_seed(step)
    shape = (sizes.micro_batch_size, sizes.seq_length + 1)
    samples = torch.randint(sizes.vocab_size, shape, generator=generator)
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def main() -> None:
    """Train on random tokens; print the time of every step, and the median without the warm-up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25, help=f"of which the first {WARM_UP_STEPS} are warm-up")
    arguments = parser.parse_args()
    sizes, seconds = Sizes(), []
    loop = PlainLoop(sizes)
    for step in range(arguments.steps):
        batch = random_batch(sizes, step)
        start = time.perf_counter()
        loss, norm = loop.step(*batch)
        seconds.append(time.perf_counter() - start)
        print(f"step {step + 1:3} | loss {loss:.4f} | grad norm {norm:.3f} | seconds {seconds[-1]:.4f}", flush=True)
    median = statistics.median(seconds[WARM_UP_STEPS:])
    print(f"median {median:.4f} s a step, {sizes.micro_batch_size * sizes.seq_length / median:.0f} tokens/s")


if __name__ == "__main__":
    main()
