"""Weights that the model computes with as codes: qwZ of ZeRO++ (Wang et al. 2023, arXiv:2306.10209, section 3.1).

Every matrix W is used as Q(W): each row of the tensor is cut into blocks, and a block is one scale in fp32 and a code
in int8 for each element (block_codes.py). Data ranks send these codes: with blocks of 128 elements about a quarter of
the bytes of fp32, half of those of bf16. The optimizer steps W by the gradient at Q(W), as if rounding were not there.
Vectors (norms, biases) are used and sent as they are.

Blocks are those of the tensor, and never of a buffer: so Q(W) has the same bits in every layout, on one process too,
where nothing is sent. That needs whole blocks in each row on every rank. A run whose rows have others is refused before
it starts (`refuse_cut_blocks` of estimate/costs/parameters.py), and a layer of a plug-in when it is built.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.parallel import comm
from megatronish.parallel.block_codes import decode, encoded
from megatronish.parallel.bucketing import WEIGHT_CODES
from megatronish.parallel.mesh import Axis
from megatronish.parallel.sharding import Sharding


class PendingWeights:
    """Gather of codes in progress; `wait` writes what they stand for into the buffer that the model computes with."""

    def __init__(self, pending: comm.Pending, block: int, into: Tensor) -> None:
        self._pending, self._block, self._into = pending, block, into

    def wait(self) -> Tensor:
        """[size * s]: Q(W) of all ranks, in the dtype of the model."""
        decode(self._pending.wait(), WEIGHT_CODES, self._into.view(-1, self._block))
        return self._into


def start_coded_gather(values: Tensor, axis: Axis, block: int, *, into: Tensor) -> PendingWeights:
    """Start the gather of fp32 [s] of every rank, whole blocks, as codes; on one rank they are rounded all the same."""
    return PendingWeights(comm.start_all_gather(encoded(values.view(-1, block), WEIGHT_CODES), axis), block, into)


def refuse_odd_rows(parameters: Mapping[str, Tensor], shardings: Mapping[str, Sharding], block: int) -> None:
    """UserError if a matrix that learns has rows, on this rank, that are not of whole blocks."""
    for name, parameter in parameters.items():
        width = parameter.shape[-1]
        if parameter.requires_grad and shardings[name].is_rounded and width % block:
            raise UserError(
                f"zero_quantized_weights_block={block} must divide every row of a matrix, and {name} has rows of "
                f"{width} on a rank; use --zero-quantized-weights-block with a number that divides them, or leave "
                "--zero-quantized-weights out"
            )


@torch.no_grad()
def round_weights(values: Tensor, block: int, *, into: Tensor) -> None:
    """fp32 [s], whole blocks -> Q(values) [s], written there in its dtype."""
    decode(encoded(values.view(-1, block), WEIGHT_CODES), WEIGHT_CODES, into.view(-1, block))
