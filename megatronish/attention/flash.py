"""Self-attention of one rank's heads over a whole sequence, and the operation that computes it: SDPA or another.

With probabilities in memory it is explicit.py. Without, SDPA or FlexAttention. SDPA knows no sinks; with them its flash
operations run (sinks.py). It draws masks of its own from the global generator; so dropout has an attention of its own,
block by block (dropout_attention.py).

On a CPU, SDPA's kernel takes masks and query heads that share a key/value head. On CUDA, SDPA's flash attention takes
no mask and no fp32, and its memory-efficient kernels take no shared heads: for what neither takes, torch silently
computes all S x S scores. So masks go to FlexAttention, a kernel that torch compiles for the mask and that skips the
blocks that no query sees. Where it cannot be compiled, SDPA gets a dense mask, and each query head a key/value head of
its own.

A kernel is compiled for one length, and each takes many seconds: sequences are padded to one of a few (`bucket_of`). In
generation nearly every forward has another length and another batch, so there SDPA gets the dense mask; and of its
backends all except cuDNN's, which plans for the very shape, tens of milliseconds that each token would wait.

All of this was read from torch's sources (2.13); it has not run on a GPU yet.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from megatronish.attention.block_sparse import block_attention
from megatronish.attention.dropout_attention import dropped_attention
from megatronish.attention.explicit import explicit_attention
from megatronish.attention.mask import BLOCK, AttentionMask, slopes_on
from megatronish.attention.sinks import sink_attention
from megatronish.config.sections.training import EXPLICIT, AttentionBackend
from megatronish.ops.compiled import compile_function
from megatronish.ops.dropout import ProbabilityDropout
from megatronish.ops.triton_host import why_triton_cannot_compile
from megatronish.ops.windowed import can_run_windowed, windowed_attention

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256  # of flash attention, and of FlexAttention with the sizes of blocks that it has for them
SMALLEST_FLEX_HEAD = 16  # Triton's matrix product takes no less
OLDEST_GPU = (8, 0)  # of flash attention, and of bf16 in Triton

HAS_COMPILER = why_triton_cannot_compile() is None
"""Whether torch can compile kernels for CUDA here: Triton, and what Triton needs."""

MOST_KERNELS = 128
"""Kernels that are compiled of FlexAttention: lengths (36 buckets up to 131,072) times kinds of masks, with and without
a backward. torch's own limit is 8."""
WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Attend = Callable[..., Any]  # torch's FlexAttention, whose result is a tensor unless it is asked for more
Kernel = Literal["sdpa", "sdpa, heads repeated", "flex"]


def attend_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask,
    backend: AttentionBackend = "auto",
    first_head: int = 0,
    dropout: ProbabilityDropout | None = None,
    sinks: Tensor | None = None,
    score_mod: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[q, B, n, H], [S, B, kv, H], [S, B, kv, H] -> [q, B, n H]: queries are the whole sequence, or the end of it.

    n / kv query heads share a key/value head; `sinks` [n] are logits besides those of the keys. `auto` is SDPA
    (flash attention where the device has it) or FlexAttention, `flash` SDPA; with dropout both are attention block by
    block. With a `score_mod`, of each score alone, probabilities are explicit in any case.
    """
    explicit = backend in EXPLICIT or score_mod is not None
    has_blocks = mask.pattern is not None if dropout is not None else mask.runs_by_blocks(q.device)
    if has_blocks and not explicit and dropout is None and sinks is None and mask.is_window and can_run_windowed(q):
        assert mask.window_size is not None
        return windowed_attention(q, k, v, window=mask.window_size)
    if has_blocks and not explicit:
        return block_attention(q, k, v, mask=mask, first_head=first_head, dropout=dropout, sinks=sinks)
    if dropout is not None and not explicit:
        return dropped_attention(q, k, v, mask=mask, first_head=first_head, dropout=dropout, sinks=sinks)
    q, k, v = (rearrange(x, "s b n h -> b n s h") for x in (q, k, v))
    if explicit:
        drop: Callable[[Tensor], Tensor] | None = None
        if dropout is not None:
            positions = torch.arange(mask.seq_length, device=q.device)
            queries = positions[mask.first_query :]
            drop = partial(dropout.drop, first_head=first_head, queries=queries, keys=positions)
        fused = backend == "fused_softmax"
        out = explicit_attention(q, k, v, mask=mask, fused=fused, dropout=drop, sinks=sinks, score_mod=score_mod)
    elif sinks is not None:
        out = sink_attention(q, k, v, sinks, mask=mask)
    else:
        out = flash_attention(q, k, v, mask=mask, may_compile=backend == "auto")
    return rearrange(out, "b n s h -> s b (n h)")


class AttentionProblem(NamedTuple):
    """What the choice of a kernel depends on."""

    device: str  # its type
    dtype: torch.dtype
    head_size: int
    is_grouped: bool  # query heads share key/value heads
    is_masked: bool  # more than by order
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
        return _padded(q, k, v, mask=mask)
    if kernel == "sdpa, heads repeated":
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    dense = mask.whole_bias(q.dtype) if mask.slopes else mask.whole
    # Sizes may be symbols in a graph, and then a comparison is one too; a branch makes it the bool that SDPA needs.
    is_plain_causal = mask.causal and dense is None
    is_causal = True if is_plain_causal and q.shape[2] > 1 else False  # noqa: SIM210 - a single query sees all keys
    is_grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210
    with sdpa_kernel(WITHOUT_PLANS) if mask.in_generation else nullcontext():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=is_causal, enable_gqa=is_grouped)


def bucket_of(seq_length: int) -> int:
    """The length that a sequence is padded to for FlexAttention: four in each octave, all multiples of a block.

    Sequences of 2,048, 3,072 or 4,096 are their own; no other grows by more than a quarter.
    """
    step = max(BLOCK, (1 << (seq_length - 1).bit_length()) // 8)
    return -(-seq_length // step) * step


def _padded(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask) -> Tensor:
    """FlexAttention of a sequence padded at its end to the length of a bucket: no token of it sees what is added."""
    seq_length, length = q.shape[2], bucket_of(q.shape[2])
    if length != seq_length:
        q, k, v = (F.pad(x, (0, 0, 0, length - seq_length)) for x in (q, k, v))
    return masked_by_blocks(q, k, v, mask=mask.longer(length), attention=_compiled_flex())[:, :, :seq_length]


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
        may_compile=may_compile and not mask.in_generation and HAS_COMPILER,
    )


@cache
def _compiled_flex(backend: Any = "inductor") -> Attend:
    """FlexAttention, compiled at the first call with each kind of mask and each shape.

    As a full graph: beyond the limit of kernels of one function there is an error, and no silent S x S scores.
    """
    return compile_function(flex_attention, most_graphs=MOST_KERNELS, dynamic=False, fullgraph=True, backend=backend)


def _distance_bias(slopes: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """ALiBi as FlexAttention asks for it: the score of one place, from slopes [n]."""

    def biased(score: Tensor, _sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[head] * (query - key)

    return biased
