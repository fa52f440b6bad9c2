"""Weights in 4 bits as gpt-oss is published (MXFP4 of the OCP's Microscaling Formats 1.0): read as bf16, exactly.

A stack of matrices [E, in, out] is two tensors of bytes: `<name>_blocks` [E, out, in / 32, 16], of which a byte has two
numbers (e2m1), the first one in its low bits, and `<name>_scales` [E, out, in / 32], whose s is the factor 2^(s - 127)
of a block of 32. Every product is a bf16. What is written is not quantised.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatronish.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from megatronish.formats.weights import LazyTensor

BLOCKS, SCALES = "_blocks", "_scales"
BYTES, BLOCK = 16, 32  # of a block, and numbers in it
NO_NUMBER, BIAS = 255, 127  # of a scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the three low bits of a number; the fourth is the sign


def from_mxfp4(load: Path, tensors: "Mapping[str, LazyTensor]") -> "dict[str, LazyTensor]":
    """Lazy tensors in which stacks of blocks are bf16, without the scales; UserError for scales that do not fit.

    Of a stack a row can be read by itself, and the whole is made row by row.
    """
    import torch  # late: config.json is read without it

    from megatronish.formats.weights import LazyTensor

    result = dict(tensors)
    for key, blocks in tensors.items():
        if not key.endswith(BLOCKS) or blocks.dtype != torch.uint8:
            continue
        name = key.removesuffix(BLOCKS)
        scales = result.pop(f"{name}{SCALES}", None)
        del result[key]
        fits = scales is not None and scales.dtype == torch.uint8 and scales.shape == blocks.shape[:-1]
        if scales is None or not fits or len(blocks.shape) != 4 or blocks.shape[-1] != BYTES:
            given = "is not there" if scales is None else f"is {list(scales.shape)}"
            raise UserError(
                f"{load}: {key} {list(blocks.shape)} is in 4 bits, [experts, outputs, blocks, {BYTES}], and "
                f"{name}{SCALES} {given}, which must have a byte for each block; fetch the model again, whole"
            )
        number, outputs, count, _ = blocks.shape
        rows = partial(_rows, f"{load}: {name}{SCALES}", blocks, scales)
        whole = partial(rows, 0, number)
        result[name] = LazyTensor((number, count * BLOCK, outputs), torch.bfloat16, whole, rows)
    return result


def _rows(source: str, blocks: "LazyTensor", scales: "LazyTensor", start: int, stop: int) -> "Tensor":
    """Rows of a stack, [n, in, out] in bf16; UserError, with the source, for a scale that is no number."""
    import torch  # late, as above

    _, outputs, count, _ = blocks.shape
    made = torch.empty(stop - start, outputs, count * BLOCK, dtype=torch.bfloat16)
    for row, into in zip(range(start, stop), made, strict=True):
        factors = scales.rows(row, row + 1)[0]
        if (factors == NO_NUMBER).any():
            raise UserError(f"{source} has a scale of {NO_NUMBER}, which is no number; fetch the model again, whole")
        _values(blocks.rows(row, row + 1)[0], factors, into.view(outputs, count, BLOCK))
    return made.transpose(1, 2)


def _values(blocks: "Tensor", scales: "Tensor", into: "Tensor") -> None:
    """Fill [out, blocks, 32] from bytes [out, blocks, 16] and [out, blocks]."""
    import torch  # late, as above

    numbers = torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)])
    exponents = (scales.int() - BIAS).unsqueeze(-1)
    for place, codes in enumerate((blocks & 15, blocks >> 4)):
        into[..., place::2] = torch.ldexp(numbers[codes.int()], exponents)
