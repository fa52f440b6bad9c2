"""4-bit NormalFloat (NF4) with double quantisation, of Dettmers et al. 2023 (arXiv:2305.14314, section 3).

A matrix is cut into blocks of 64 neighbouring elements. Each element, divided by the largest magnitude of its block
(absmax), is rounded to one of sixteen values, the quantiles of a normal distribution; two 4-bit codes share a byte, the
first in the high half. Double quantisation stores absmax, less the mean of all of them, in 8 bits, with one fp32 scale
for 256 blocks:

    absmax of block i = DYNAMIC[code_i] * scale[i // 256] + offset

Codes and scales have the bits of bitsandbytes', with two exceptions. The mean is summed in fp64, so that it depends on
neither device nor number of threads. The 8-bit codes are the nearest values, as bitsandbytes finds on GPUs; on CPUs
it rounds to 16 bits before, and one code in 600 is the neighbour.
"""

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatronish.ops.library import Operator, OperatorFamily, define, has_kernels
from megatronish.specs.chunk_sizes import chunk_sizes

BLOCK = 64
BLOCKS_PER_SCALE = 256

NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
"""The sixteen values."""


def _dynamic_values() -> Tensor:
    """The 256 values of an 8-bit number with a sign, a dynamic exponent and a fraction (arXiv:1511.04561), in order.

    Decade d of seven, from 1e-6 to 1, has 2^d fractions, midpoints of equal parts of [0.1, 1].
    """
    magnitudes = []
    for decade in range(7):
        ends = torch.linspace(0.1, 1.0, 2**decade + 1)
        magnitudes.append(10 ** (decade - 6) * ((ends[:-1] + ends[1:]) / 2))
    positive = torch.cat(magnitudes)
    return torch.cat((positive, -positive, torch.tensor([0.0, 1.0]))).sort().values


DYNAMIC = _dynamic_values()
"""Values of the 8-bit codes of absmax."""

_TABLES = {
    "nf4": NF4,
    "pairs": torch.stack((NF4.repeat_interleave(16), NF4.repeat(16)), dim=1),  # [256, 2]: the two values of a byte
    "dynamic": DYNAMIC.unsqueeze(1),  # [256, 1]
}


class QuantisedScales(NamedTuple):
    """Absmax of n blocks in 8 bits: `codes` uint8 [n], `scales` fp32 [ceil(n / 256)], `offset` fp32 []."""

    codes: Tensor
    scales: Tensor
    offset: Tensor


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[n, in], in a multiple of 64 -> codes uint8 [n, in / 64, 32] and absmax fp32 [n, in / 64]."""
    num_rows, width = weight.shape
    codes = torch.empty(num_rows, width // BLOCK, BLOCK // 2, dtype=torch.uint8, device=weight.device)
    absmax = torch.empty(num_rows, width // BLOCK, device=weight.device)
    rows = max(1, chunk_sizes(weight.device.type).quantised // width)
    for first in range(0, num_rows, rows):
        blocks = weight[first : first + rows].float().unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1)
        absmax[first : first + rows] = largest
        code = _nearest(blocks * (1.0 / largest.clamp_min(1e-38)).unsqueeze(-1), NF4)
        codes[first : first + rows] = code[..., 0::2] << 4 | code[..., 1::2]
    return codes, absmax


def dequantise(codes: Tensor, absmax: Tensor, into: Tensor) -> None:
    """uint8 [n, in / 64, 32] and fp32 [n, in / 64] -> [n, in], written in its own dtype."""
    values = F.embedding(codes.int(), table_on("pairs", codes.device)).flatten(-2)  # [n, in / 64, 64]
    into.unflatten(-1, (-1, BLOCK)).copy_(values * absmax.unsqueeze(-1))


def quantise_scales(absmax: Tensor) -> QuantisedScales:
    """Absmax fp32 [n] of all blocks of one matrix, in its order -> 8 bits each."""
    offset = absmax.double().mean().float()
    padded = F.pad(absmax - offset, (0, -absmax.numel() % BLOCKS_PER_SCALE)).view(-1, BLOCKS_PER_SCALE)
    scales = padded.abs().amax(-1)
    codes = _nearest(padded * (1.0 / scales.clamp_min(1e-38)).unsqueeze(-1), DYNAMIC).flatten()[: absmax.numel()]
    return QuantisedScales(codes, scales, offset)


def dequantise_scales(codes: Tensor, scales: Tensor, offset: Tensor) -> Tensor:
    """uint8 [...], fp32 [...] (the scale of each block) and fp32 [] -> absmax fp32 [...]."""
    return F.embedding(codes.int(), table_on("dynamic", codes.device)).squeeze(-1) * scales + offset


@cache
def table_on(name: Literal["nf4", "pairs", "dynamic"], device: torch.device) -> Tensor:
    """A table on a device, copied once: a copy from the CPU's memory cannot be part of a CUDA graph."""
    return _TABLES[name].to(device, non_blocking=device.type != "cpu")


def _nearest(x: Tensor, table: Tensor) -> Tensor:
    """Numbers of the nearest values of a table, uint8; halfway between two, the lower one."""
    midpoints = ((table[1:] + table[:-1]) / 2).to(x.device)
    return torch.bucketize(x, midpoints, out_int32=True).to(torch.uint8)


def _unpack_reference(
    into: Tensor, stored: Tensor, level: Tensor | None, first_row: int, row_blocks: int, first_block: int
) -> None:
    num_rows, width = into.shape[0], into.shape[1] // BLOCK
    blocks = stored.unflatten(-1, (width, -1))
    codes = blocks[..., BLOCK // 2 :]
    if level is None:
        absmax = codes.contiguous().view(torch.float32).squeeze(-1)
    else:
        # Which scale a block has follows from its number in the global section.
        rows = torch.arange(first_row, first_row + num_rows, device=codes.device) * row_blocks
        places = torch.arange(width, device=codes.device) + first_block
        numbers = (rows.unsqueeze(1) + places) // BLOCKS_PER_SCALE
        absmax = dequantise_scales(codes.squeeze(-1), level[numbers], level[-1])
    dequantise(blocks[..., : BLOCK // 2], absmax, into)


def unpack(
    into: Tensor, stored: Tensor, level: Tensor | None, *, first_row: int, row_blocks: int, first_block: int
) -> None:
    """Rows of one section as they are stored, uint8 [n, bytes] -> [n, in], in the dtype of `into`.

    Each block of 64 is 32 bytes of codes and its absmax: an 8-bit code, or fp32 where `level` is None. `level` has the
    section's scales and at last the mean. The section has `row_blocks` blocks a row; these rows begin at `first_row`,
    and their columns at `first_block`.
    """
    fused = into.is_cuda and HAS_KERNELS
    compute = torch.ops.megatronish.nf4_unpack_ if fused else _unpack_reference
    compute(into, stored, level, first_row, row_blocks, first_block)


def _nothing(*_: Any) -> None:
    """Fake of an operator that works in place."""


FAMILY = OperatorFamily(
    "nf4",
    (
        Operator(
            "nf4_unpack_(Tensor(a!) into, Tensor stored, Tensor? level, int first_row, int row_blocks, int first_block)"
            " -> ()",
            reference=_unpack_reference,
            fake=_nothing,
            triton="nf4.unpack",
        ),
    ),
    in_cuda=False,
)
define(FAMILY)
HAS_KERNELS = has_kernels(FAMILY)
