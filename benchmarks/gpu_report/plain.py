"""Plain PyTorch decoder, the baseline of the GPU report: GPT-2's or Llama's blocks, nothing of megatronish.

Two ways to train it, as a user would: fp32 parameters under autocast, compiled; or sharded by torch's `fully_shard`
(FSDP2) with bf16 parameters and fp32 masters, compiled too. The parameters stand in megatronish's order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 3e-4, 0.1, 1.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with a tied head, and of its micro-batch. `kv_heads` make it a Llama, else it is a GPT-2."""

    num_layers: int
    hidden_size: int
    num_heads: int
    seq_length: int
    micro_batch_size: int
    vocab_size: int
    ffn_size: int
    kv_heads: int | None = None

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.hidden_size // self.num_heads


class PlainAttention(nn.Module):
    """Self-attention with SDPA: [B, S, D] -> [B, S, D]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, bias = shape, shape.kv_heads is None
        self.sections = [shape.hidden_size, *[(shape.kv_heads or shape.num_heads) * shape.head_size] * 2]
        self.qkv = nn.Linear(shape.hidden_size, sum(self.sections), bias=bias)
        self.out = nn.Linear(shape.hidden_size, shape.hidden_size, bias=bias)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        parts = self.qkv(x).split(self.sections, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_size)).transpose(1, 2) for part in parts)
        if rotation is not None:
            q, k = rotated(q, rotation), rotated(k, rotation)
        grouped = self.shape.kv_heads is not None
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class PlainBlock(nn.Module):
    """Block with norms before: [B, S, D] -> [B, S, D]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.is_llama, width, ffn = shape.kv_heads is not None, shape.hidden_size, shape.ffn_size
        self.norm1, self.attention = norm_of(shape), PlainAttention(shape)
        self.norm2 = norm_of(shape)
        self.fc1 = nn.Linear(width, 2 * ffn if self.is_llama else ffn, bias=not self.is_llama)
        self.fc2 = nn.Linear(ffn, width, bias=not self.is_llama)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        hidden = self.fc1(self.norm2(x))
        if self.is_llama:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = self.gated(gate, up)
        else:
            hidden = F.gelu(hidden, approximate="tanh")
        out: Tensor = x + self.fc2(hidden)
        return out

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU of two halves."""
        return F.silu(gate) * up


class PlainHead(nn.Module):
    """Last norm, logits and loss: [B, S, D], the tied weight, labels [B, S] -> the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = norm_of(shape)

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(self.norm(x), weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class PlainDecoder(nn.Module):
    """Decoder with a tied head: tokens and labels [B, S] -> the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(shape.seq_length, shape.hidden_size) if shape.kv_heads is None else None
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.num_layers))
        self.head = PlainHead(shape)

    @torch.no_grad()
    def take(self, weights: Sequence[Tensor]) -> None:
        """Copy weights, in the order of these parameters."""
        parameters = list(self.parameters())
        assert [each.shape for each in parameters] == [each.shape for each in weights], "the models differ"
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)

    def compile_parts(self, backend: str) -> None:
        """Compile blocks, which are alike and share their graphs, and the head: minutes faster than the whole."""
        for part in (*self.blocks, self.head):
            part.compile(backend=backend)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, rotation = self.tokens(tokens), None
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if self.positions is not None:
            x = x + self.positions(places)
        else:
            rotation = turns(places, self.shape.head_size)
        for block in self.blocks:
            x = block(x, rotation)
        loss: Tensor = self.head(x, self.tokens.weight, labels)
        return loss


def norm_of(shape: Shape) -> nn.Module:
    """The norm of the architecture."""
    return nn.LayerNorm(shape.hidden_size) if shape.kv_heads is None else nn.RMSNorm(shape.hidden_size, eps=1e-5)


def turns(places: Tensor, head_size: int) -> Tensor:
    """Positions [S] -> cosines and sines [2, S, H] of RoPE, base 500000."""
    frequencies = 500000.0 ** (-torch.arange(0, head_size, 2, device=places.device) / head_size)
    angles = (places[:, None] * frequencies).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """[B, n, S, H] -> [B, n, S, H]: RoPE on halves."""
    cos, sin = rotation.to(x.dtype)
    front, back = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-back, front), dim=-1) * sin


Batch = tuple[Tensor, Tensor]
Step = Callable[[Sequence[Batch]], float]
"""Micro-batches of tokens and labels [B, S] -> the mean loss before the update."""


def autocast_step(model: PlainDecoder, *, backend: str | None) -> Step:
    """A step of fp32 parameters under bf16 autocast, compiled if there is a backend."""
    if backend is not None:
        model.compile_parts(backend)
    optimizer = adamw(model)
    device_type = model.tokens.weight.device.type

    def step(batches: Sequence[Batch]) -> float:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for batch in batches:
            with torch.autocast(device_type, torch.bfloat16):
                loss = model(*batch) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        return updated(model, optimizer, losses)

    return step


def fsdp_step(model: PlainDecoder, *, backend: str) -> Step:
    """A step under `fully_shard` over the ranks of the default group, bf16 parameters and fp32 reduction.

    With compiled blocks it is what torchtitan does. Gradients are summed after the last micro-batch.
    """
    device_type = model.tokens.weight.device.type
    mesh = dist.device_mesh.init_device_mesh(device_type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model.compile_parts(backend)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    sharded = fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = adamw(model)

    def step(batches: Sequence[Batch]) -> float:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, batch in enumerate(batches, 1):
            sharded.set_requires_gradient_sync(number == len(batches))
            loss = model(*batch) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        return updated(model, optimizer, losses)

    return step


def updated(model: PlainDecoder, optimizer: torch.optim.Optimizer, losses: Sequence[Tensor]) -> float:
    """Clip, update, and wait for the mean loss."""
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return float(torch.stack(list(losses)).sum())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """torch's fused AdamW; norms and biases do not decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
