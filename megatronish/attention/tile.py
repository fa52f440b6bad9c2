"""Attention of one tile, a run of queries against a run of keys: forward and backward, as ring attention needs them.

`forward` returns the tile's own output, as if there were no other keys, and the log-sum-exp of its scores, by which
tiles are merged. `backward` is given the output and the log-sum-exp over *all* keys, and returns the tile's terms of
the gradients. SDPA offers only both together, so the operations that it is made of are called by name (operations.py),
each where `TABLE` has it: from the fastest operation to the one that takes everything.

torch's SDPA chooses among the same operations, but returns no log-sum-exp. What is fastest was read, not measured: by
PyTorch 2.5's release notes cuDNN is up to 75 % faster than FlashAttention 2 on an H100, and FlashAttention 3 up to
twice as fast by its paper (arXiv:2407.08608). Nothing here has run on a GPU.

Shapes: q, out [B, n, q, H]; k, v [B, kv, k, H]; lse [B, n, q], at least fp32; n / kv query heads share a kv head.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatronish.attention.operations import (
    CUDNN,
    EFFICIENT,
    EXPLICIT,
    FLASH,
    FLASH_ON_CPU,
    Operation,
    TileGradients,
    TileMask,
)

HALF = (torch.float16, torch.bfloat16)
OLDEST_CUDNN = 90_100  # 9.1, with the backward that torch asks for; torch 2.11 brings 9.10


class TileProblem(NamedTuple):
    """What the choice depends on. `cudnn` is the version, 0 without; `flash` the implementation that torch calls."""

    device: str
    dtype: torch.dtype
    head_size: int
    mask: Literal["by order", "dense", "dropout"] = "by order"
    capability: tuple[int, int] = (0, 0)
    cudnn: int = 0
    flash: str = "FA2"

    def fits(self, first: tuple[int, int], end: tuple[int, int], largest_head: int) -> bool:
        """Whether it is in half precision, without a dense mask, on a GPU from one capability to before another."""
        is_plain = self.device == "cuda" and self.dtype in HALF and self.mask == "by order"
        return is_plain and first <= self.capability < end and self.head_size <= largest_head


class TileRow(NamedTuple):
    """A row of the table: an operation, and where it runs and is the first choice."""

    name: str
    operation: Operation
    when: str
    why: str
    takes: Callable[[TileProblem], bool]


TABLE = (
    TileRow(
        "explicit",
        EXPLICIT,
        "dropout",
        "operators of torch draw masks of their own, which would depend on the layout",
        lambda problem: problem.mask == "dropout",
    ),
    TileRow(
        "flash, of a CPU",
        FLASH_ON_CPU,
        "a CPU",
        "it takes all masks and types",
        lambda problem: problem.device == "cpu",
    ),
    TileRow(
        "FlashAttention 3",
        FLASH,
        "9.0 (Hopper), 16 bits, heads of up to 256, no dense mask, activated in torch",
        "written for Hopper's asynchronous products",
        lambda problem: problem.flash == "FA3" and problem.fits((9, 0), (9, 1), 256),
    ),
    TileRow(
        "cuDNN",
        CUDNN,
        "9.0 to 10.x (Hopper, Blackwell), 16 bits, heads of up to 128, no dense mask, cuDNN 9.1",
        "its kernels are for these devices, those of FlashAttention 2 for Ampere",
        lambda problem: problem.cudnn >= OLDEST_CUDNN and problem.fits((9, 0), (11, 0), 128),
    ),
    TileRow(
        "FlashAttention 2",
        FLASH,
        "8.0 and later, 16 bits, heads of up to 256, no dense mask",
        "no scores in memory",
        lambda problem: problem.fits((8, 0), (1000, 0), 256),
    ),
    TileRow(
        "memory-efficient",
        EFFICIENT,
        "all else: fp32, dense masks, older devices",
        "it takes them; slower",
        lambda problem: True,  # noqa: ARG005 - whatever it is
    ),
)


def row_for(problem: TileProblem) -> TileRow:
    """The first row that takes the tile."""
    return next(row for row in TABLE if row.takes(problem))


def operation_for(q: Tensor, tile_mask: TileMask) -> Operation:
    """Operation for a tile of these queries."""
    problem = TileProblem(q.device.type, q.dtype, q.shape[-1])
    if tile_mask.dense is not None or tile_mask.dropped is not None:
        problem = problem._replace(mask="dense" if tile_mask.dropped is None else "dropout")
    if q.device.type == "cuda":
        problem = problem._replace(
            capability=torch.cuda.get_device_capability(q.device), cudnn=_cudnn_version(), flash=_flash_in_use()
        )
    return row_for(problem).operation


def _cudnn_version() -> int:
    """Version of cuDNN, 0 where there is none or its attention is switched off."""
    return (torch.backends.cudnn.version() or 0) if torch.backends.cuda.cudnn_sdp_enabled() else 0


def _flash_in_use() -> str:
    """What torch computes its operator of flash attention by: FA2, unless another one was activated."""
    in_use = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (in_use() if in_use is not None else None) or "FA2"


def forward(q: Tensor, k: Tensor, v: Tensor, *, tile_mask: TileMask) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the tile. A row that sees nothing has a finite output and a log-sum-exp of -inf."""
    if tile_mask.dense is None:
        return operation_for(q, tile_mask).forward(q, k, v, tile_mask)
    seen = tile_mask.dense.any(-1)
    # Operations differ in what they return for a row that sees no key (on CPU a log-sum-exp of 0). Such rows are shown
    # all keys, and their log-sum-exp is set to -inf afterwards: the merge then gives them no weight.
    tile_mask = tile_mask._replace(dense=tile_mask.dense | ~seen.unsqueeze(-1))
    out, lse = operation_for(q, tile_mask).forward(q, k, v, tile_mask)
    return out, lse.masked_fill(~seen, -torch.inf)


def backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, *, tile_mask: TileMask
) -> TileGradients:
    """The tile's terms of the gradients. `out` and `lse` are those over all keys of the sequence.

    `lse` is finite, for every token sees itself. So a row that sees nothing here has gradients of exactly zero.
    """
    return operation_for(q, tile_mask).backward(dout, q, k, v, out, lse.contiguous(), tile_mask)


def merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge a tile's output [B, n, q, H] and log-sum-exp [B, n, q] into those of the tiles before, in place.

    The merged output is the mean of both, weighted by their sums of exponentials: exp(new) / (exp(lse) + exp(new)) is
    sigmoid(new - lse).
    """
    # Sums of exponentials would overflow; the weight by a sigmoid of a difference cannot. Against lse = -inf it is 1.
    out.lerp_(new_out.to(out.dtype), torch.sigmoid(new_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))
