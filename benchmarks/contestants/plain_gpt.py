"""GPT-2 as plain PyTorch modules: the model of the plain loop, DDP, FSDP2, DTensor, pipelining and DeepSpeed.

Nothing of megatronish is imported. `nn.Linear`, `nn.LayerNorm`, exact GELU, SDPA, a tied head, `F.cross_entropy`.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contestants.case import Case, State


class PlainBlock(nn.Module):
    """Transformer block: [B, S, D] -> [B, S, D]. Under tensor parallelism `num_heads` are those of this rank."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq_length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq_length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, seq_length, -1)))
        return x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))

    def drop(self, x: Tensor) -> Tensor:
        """Dropout; nothing at all where the rate is 0."""
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class PlainGPT(nn.Module):
    """Consecutive layers of a GPT-2 with a tied head, by default all: tokens [B, S] -> logits [B, S, V].

    A part without the first layer takes [B, S, D], one without the last returns it. Both ends hold the tied embedding.
    """

    def __init__(self, case: Case, layers: Sequence[int] | None = None) -> None:
        super().__init__()
        sizes = case.sizes
        width, self.dropout = sizes.hidden_size, case.dropout
        layers = range(sizes.num_layers) if layers is None else layers
        self.is_first, self.is_last = 0 in layers, sizes.num_layers - 1 in layers
        if self.is_first or self.is_last:
            self.tokens = nn.Embedding(sizes.vocab_size, width)
        if self.is_first:
            self.positions = nn.Embedding(sizes.seq_length, width)
        self.layers = nn.ModuleDict({str(n): PlainBlock(width, sizes.num_heads, case.dropout) for n in layers})
        if self.is_last:
            self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
            x = F.dropout(x, self.dropout, self.training) if self.dropout else x
        for block in self.layers.values():
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight) if self.is_last else x

    @torch.no_grad()
    def load(self, state: State) -> "PlainGPT":
        """The model with the given weights."""
        for name, parameter in self.named_parameters():
            parameter.copy_(state[our_name(name)])
        return self


_OUR_NAMES = {
    "tokens.": "embedding.tokens.",
    "positions.": "embedding.positions.",
    "norm.": "final_norm.",
    "norm1.": "attention_norm.",
    "qkv.": "attention.qkv.",
    "out.": "attention.out.",
    "norm2.": "mlp_norm.",
    "fc1.": "mlp.fc1.",
    "fc2.": "mlp.fc2.",
}


def our_name(name: str) -> str:
    """Name in the state of a parameter of PlainGPT."""
    *layer, module, leaf = name.split(".")
    return ".".join([*layer, _OUR_NAMES[f"{module}."] + leaf])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of logits [B, S, V], computed in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def mean(losses: Iterable[Tensor]) -> float:
    """Mean over micro-batches, on the host."""
    return torch.stack([loss.detach() for loss in losses]).mean().item()
