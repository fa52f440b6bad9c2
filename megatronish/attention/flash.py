"""Attention of a whole sequence without its probabilities in memory: SDPA or FlexAttention, and which of them when.

On a CPU, SDPA's kernel takes masks and query heads that share a key/value head. On CUDA, SDPA's flash attention takes
no mask and no fp32, and its memory-efficient kernels take no shared heads: for what neither takes, torch silently
computes all S x S scores. So masks go to FlexAttention, a kernel that torch compiles for the mask and that skips the
blocks that no query sees. Where it cannot be compiled, SDPA gets a dense mask, and each query head a key/value head of
its own.

All of this was read from torch's sources (2.13); it has not run on a GPU yet.
"""

import os
import shutil
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from megatronish.attention.alibi import slopes_on
from megatronish.attention.mask import AttentionMask

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256  # of flash attention, and of FlexAttention with the sizes of blocks that it has for them
SMALLEST_FLEX_HEAD = 16  # Triton's matrix product takes no less
OLDEST_GPU = (8, 0)  # of flash attention, and of bf16 in Triton

_C_COMPILERS = (os.environ.get("CC"), "cc", "gcc", "clang")
HAS_COMPILER = find_spec("triton") is not None and any(name and shutil.which(name) for name in _C_COMPILERS)
"""Whether torch can compile kernels for CUDA here: Triton, and the C compiler that Triton calls."""

Attend = Callable[..., Any]  # torch's FlexAttention, whose result is a tensor unless it is asked for more
Kernel = Literal["sdpa", "sdpa, heads repeated", "flex"]


class AttentionProblem(NamedTuple):
    """What the choice of a kernel depends on."""

    device: str  # its type
    dtype: torch.dtype
    head_size: int
    is_grouped: bool  # query heads share key/value heads
    is_masked: bool  # not plain causal
    capability: tuple[int, int] = (0, 0)  # of a CUDA device
    may_compile: bool = False  # FlexAttention is wanted, there is a compiler, and queries are the whole sequence


def kernel_for(problem: AttentionProblem) -> Kernel:
    """The fastest kernel that holds no S x S scores."""
    if problem.device == "cpu":
        return "sdpa"
    fits_flex = SMALLEST_FLEX_HEAD <= problem.head_size <= LARGEST_HEAD and problem.dtype in (*HALF, torch.float32)
    if problem.is_masked and problem.may_compile and fits_flex and problem.capability >= OLDEST_GPU:
        return "flex"
    if problem.is_grouped and (problem.is_masked or not has_flash(problem)):
        return "sdpa, heads repeated"
    return "sdpa"


def has_flash(problem: AttentionProblem) -> bool:
    """Whether SDPA's flash attention computes a plain causal problem on CUDA, forward and backward."""
    # Its backward of 193 to 224 channels needs more shared memory than GPUs 8.6 to 8.9 and 12.x have.
    is_small = (8, 6) <= problem.capability <= (8, 9) or problem.capability >= (12, 0)
    fits = problem.head_size <= LARGEST_HEAD and not (is_small and 192 < problem.head_size <= 224)
    return problem.dtype in HALF and problem.capability >= OLDEST_GPU and fits


def flash_attention(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, may_compile: bool) -> Tensor:
    """[B, n, q, H], [B, kv, S, H], [B, kv, S, H] -> [B, n, q, H]; queries are the end of the sequence, or all of it."""
    kernel = kernel_for(_problem(q, k, mask, may_compile=may_compile))
    if kernel == "flex":
        if torch.compiler.is_compiling():  # it is compiled with the graph that it is a part of
            return masked_by_blocks(q, k, v, mask=mask)
        return masked_by_blocks(q, k, v, mask=mask, attention=_compiled_flex())
    if kernel == "sdpa, heads repeated":
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    dense = mask.whole_bias(q.dtype) if mask.slopes else mask.whole
    # Sizes may be symbols in a graph, and then a comparison is one too; a branch makes it the bool that SDPA needs.
    is_causal = True if dense is None and q.shape[2] > 1 else False  # noqa: SIM210 - a single query sees all keys
    is_grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210
    return F.scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=is_causal, enable_gqa=is_grouped)


def masked_by_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, attention: Attend = flex_attention
) -> Tensor:
    """Attention under the block mask, [B, n, S, H] -> [B, n, S, H]; `attention` is FlexAttention, compiled or not."""
    bias = _distance_bias(slopes_on(mask.slopes, q.device)) if mask.slopes else None
    out: Tensor = attention(q, k, v, score_mod=bias, block_mask=mask.blocks, enable_gqa=q.shape[1] != k.shape[1])
    return out


def _problem(q: Tensor, k: Tensor, mask: AttentionMask, *, may_compile: bool) -> AttentionProblem:
    capability = (0, 0)
    if q.is_cuda:
        device = torch.cuda.get_device_properties(q.device)
        capability = device.major, device.minor
    return AttentionProblem(
        q.device.type,
        q.dtype,
        q.shape[-1],
        is_grouped=q.shape[1] != k.shape[1],
        is_masked=mask.needs_dense,
        capability=capability,
        may_compile=may_compile and mask.first_query == 0 and HAS_COMPILER,
    )


@cache
def _compiled_flex() -> Attend:
    """FlexAttention, compiled at the first call with each kind of mask and each shape.

    As a full graph: beyond torch's limit of kinds of one function there is an error, and no silent S x S scores.
    """
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _distance_bias(slopes: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """ALiBi as FlexAttention asks for it: the score of one place, from slopes [n]."""

    def biased(score: Tensor, _sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key)

    return biased
