"""Dequantisation of rows in NF4 as they are stored, in one launch: codes, absmax and its double quantisation.

The bits are those of the reference: each product is rounded before it is added (no fused multiply-add).
"""

import triton
import triton.language as tl
from torch import Tensor

from megatronish.ops.nf4 import BLOCK, BLOCKS_PER_SCALE, table_on

BLOCKS = 32  # of a program: 2,048 elements


@triton.jit
def _unpack(
    into,
    stored,
    level,
    values,
    dynamic,
    num_blocks,
    width,
    row_blocks,
    first_row,
    first_block,
    last,
    DOUBLE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    PER_SCALE: tl.constexpr,
    CODES: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    source = stored + block * BLOCK_BYTES
    if DOUBLE:
        # The scale of a block follows from its number in the whole section, of which these rows are a part.
        number = (first_row + block // width) * row_blocks + first_block + block % width
        code = tl.load(source + CODES, mask=is_block, other=0).to(tl.int32)
        scale = tl.load(level + number // PER_SCALE, mask=is_block, other=0.0)
        absmax = tl.load(dynamic + code) * scale + tl.load(level + last)
    else:
        bits = tl.load(source + CODES, mask=is_block, other=0).to(tl.int32)
        for byte in tl.static_range(1, 4):
            bits |= tl.load(source + CODES + byte, mask=is_block, other=0).to(tl.int32) << (8 * byte)
        absmax = bits.to(tl.float32, bitcast=True)
    pair = tl.arange(0, CODES)[None, :]
    codes = tl.load(source[:, None] + pair, mask=is_block[:, None], other=0).to(tl.int32)
    high, low = tl.load(values + (codes >> 4)), tl.load(values + (codes & 15))
    both = tl.reshape(tl.join(high * absmax[:, None], low * absmax[:, None]), (BLOCKS, 2 * CODES))
    place = block[:, None] * (2 * CODES) + tl.arange(0, 2 * CODES)[None, :]
    tl.store(into + place, both.to(into.dtype.element_ty), mask=is_block[:, None])


def unpack(
    into: Tensor, stored: Tensor, level: Tensor | None, first_row: int, row_blocks: int, first_block: int
) -> None:
    """Rows of one section, uint8 [n, bytes] -> [n, in], written in the dtype of `into`; see ops/nf4.py."""
    if not (into.is_contiguous() and stored.is_contiguous()):
        return NotImplemented
    width = into.shape[1] // BLOCK
    num_blocks = into.shape[0] * width
    if num_blocks:
        _unpack[(triton.cdiv(num_blocks, BLOCKS),)](
            *(into, stored, stored if level is None else level),
            *(table_on("nf4", into.device), table_on("dynamic", into.device)),
            *(num_blocks, width, row_blocks, first_row, first_block, 0 if level is None else level.numel() - 1),
            DOUBLE=level is not None,
            BLOCK_BYTES=stored.shape[1] // width,
            PER_SCALE=BLOCKS_PER_SCALE,
            CODES=BLOCK // 2,
            BLOCKS=BLOCKS,
            enable_fp_fusion=False,
        )
    return None
