"""Block mask of FlexAttention: of a mask, the blocks of scores that are computed, and those that need no look inside.

torch's `create_block_mask` evaluates all S x S places. A causal mask with a window and documents follows from less: the
first and the last place of a block, and its least and its greatest document id. Nothing is read back to the host.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # queries, and keys: torch's default


def block_mask(
    seq_length: int, window_size: int | None, document_ids: Tensor | None, *, device: torch.device
) -> BlockMask:
    """Block mask of a whole sequence, for 1 sample or, with documents int64 [B, S], for B; the same for all heads.

    A block whose documents' ids only overlap is computed, and its mask evaluated. So it is exact for any ids, and skips
    most where ids rise along the sequence.
    """
    # First and last place of each block [S/BLOCK]; the last block may be ragged, which is never "whole".
    first = torch.arange(0, seq_length, BLOCK, device=device)
    last = (first + BLOCK - 1).clamp_max(seq_length - 1)
    is_complete = first + BLOCK <= seq_length
    # [queries, keys] in blocks: some query sees some key; every query sees every key.
    some, whole = last[:, None] >= first, first[:, None] >= last
    whole = whole & is_complete[:, None] & is_complete
    if window_size is not None:
        some = some & (first[:, None] - last < window_size)
        whole = whole & (last[:, None] - first < window_size)
    some, whole = some[None], whole[None]
    if document_ids is not None:
        places = torch.arange(len(first) * BLOCK, device=device).clamp_max(seq_length - 1)
        least, greatest = document_ids[:, places].unflatten(1, (-1, BLOCK)).aminmax(dim=-1)
        some = some & (least[:, :, None] <= greatest[:, None]) & (greatest[:, :, None] >= least[:, None])
        whole = whole & (least[:, :, None] == greatest[:, None]) & (greatest[:, :, None] == least[:, None])
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~whole),
        *_ordered(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=_visibility(window_size, document_ids),
        seq_lengths=(seq_length, seq_length),
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, q, k] -> of each row of blocks their number [B, 1, q] and their places first [B, 1, q, k], int32."""
    blocks = blocks.unsqueeze(1)
    return blocks.sum(-1).int(), blocks.int().argsort(dim=-1, descending=True, stable=True).int()


def _visibility(
    window_size: int | None, document_ids: Tensor | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a query sees a key, as FlexAttention asks: for one place of a sample and a head."""

    def visible(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window_size is not None:
            seen = seen & (query - key < window_size)
        if document_ids is not None:
            seen = seen & (document_ids[sample, query] == document_ids[sample, key])
        return seen

    return visible
