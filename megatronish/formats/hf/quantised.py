"""Quantised weights, read as bf16, one tensor at a time; what is written is not quantised.

In fp8, as DeepSeek publishes them, and Qwen and others, a weight [out, in] is float8_e4m3fn, and `<name>_scale_inv`,
fp32 [ceil(out / rows), ceil(in / columns)], has a factor for each block of it: the weight is the product of both.

In 4 bits, as gpt-oss is published (MXFP4 of the OCP's Microscaling Formats 1.0), a stack of matrices [E, in, out] is
two tensors of bytes: `<name>_blocks` [E, out, in / 32, 16], of which a byte has two numbers (e2m1), the first one in
its low bits, and `<name>_scales` [E, out, in / 32], whose s is the factor 2^(s - 127) of a block of 32. Every product
is a bf16.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatronish.core.errors import UserError
from megatronish.formats.hf.family import CORRECT, ConfigJson

if TYPE_CHECKING:
    from torch import Tensor

    from megatronish.formats.weights import LazyTensor

QUANTISED = "quantization_config"
MXFP4 = "gpt_oss"  # the family that is published so
SCALE = "_scale_inv"


class Blocks(NamedTuple):
    """Size of the blocks of a weight that have one factor."""

    rows: int
    columns: int


Dequantise = Callable[[Path, "Mapping[str, LazyTensor]"], "dict[str, LazyTensor]"]


def quantisation(config: ConfigJson) -> Dequantise | None:
    """How the weights of a folder become bf16, None for weights that are; UserError for another quantisation."""
    settings = config.values.get(QUANTISED)
    if settings is None:
        return None
    if isinstance(settings, dict) and settings.get("quant_method") == "mxfp4" and config.values["model_type"] == MXFP4:
        return from_mxfp4
    is_fp8 = isinstance(settings, dict) and settings.get("quant_method") == "fp8"
    if not is_fp8 or settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        config.refuse(
            QUANTISED, "says that the weights are quantized other than in fp8", remedy="take the unquantized model"
        )
    size = settings.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(each) is int and each > 0 for each in size):
        config.refuse(QUANTISED, "must have a weight_block_size of two whole numbers of at least 1", remedy=CORRECT)
    return partial(dequantised, blocks=Blocks(*size))


def dequantised(load: Path, tensors: "Mapping[str, LazyTensor]", blocks: Blocks) -> "dict[str, LazyTensor]":
    """Lazy tensors in which weights with factors are bf16, without the factors; UserError for factors that do not fit.

    What is read of a weight is the weight itself, its product in bf16, and a row of blocks in fp32.
    """
    import torch  # late: config.json is read without it

    from megatronish.formats.weights import LazyTensor

    result = dict(tensors)
    for name, weight in tensors.items():
        if weight.dtype != torch.float8_e4m3fn:
            continue
        scales = result.pop(f"{name}{SCALE}", None)
        size = [-(-length // block) for length, block in zip(weight.shape, blocks, strict=False)]
        if scales is None or len(weight.shape) != 2 or list(scales.shape) != size:
            given = "is not there" if scales is None else f"is {list(scales.shape)}"
            raise UserError(
                f"{load}: {name} {list(weight.shape)} is in fp8, and {name}{SCALE} {given}, which must have a factor "
                f"for each block of {blocks.rows} x {blocks.columns}; fetch the model again, whole"
            )
        result[name] = LazyTensor(weight.shape, torch.bfloat16, partial(_product, weight, scales, blocks))
    return result


def _product(weight: "LazyTensor", scales: "LazyTensor", blocks: Blocks) -> "Tensor":
    """[out, in] in bf16."""
    import torch  # late, as above

    values, factors = weight.read(), scales.read().float().repeat_interleave(blocks.columns, dim=1)
    whole = torch.empty(weight.shape, dtype=torch.bfloat16)
    for number, factor in enumerate(factors[:, : weight.shape[1]]):
        rows = slice(number * blocks.rows, (number + 1) * blocks.rows)
        whole[rows] = values[rows].float() * factor
    return whole


# In 4 bits

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
