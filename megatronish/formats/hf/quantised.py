"""Quantised weights, by what config.json says; and those in fp8, read as bf16, one tensor at a time.

In fp8, as DeepSeek publishes them, and Qwen and others, a weight [out, in] is float8_e4m3fn, and `<name>_scale_inv`,
fp32 [ceil(out / rows), ceil(in / columns)], has a factor for each block of it: the weight is the product of both. What
is written is not quantised.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatronish.core.errors import UserError
from megatronish.formats.hf.family import CORRECT, ConfigJson
from megatronish.formats.hf.mxfp4 import from_mxfp4

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
