"""How is attention shared over cp by heads? (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509)

Before attention each rank hands every other one the heads that are its own, and gets its own heads of the rest of the
sequence; the result goes back the same way. In between a rank holds whole sequences of n / cp heads, in their order.
"""

import torch
from torch import Tensor

from megatronish import comm
from megatronish.attention.core import ProbabilityDropout, attend_alone
from megatronish.attention.mask import AttentionMask
from megatronish.attention.zigzag import from_zigzag, to_zigzag
from megatronish.config.training import AttentionBackend
from megatronish.mesh import Axis


def all_to_all_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cp: Axis,
    mask: AttentionMask,
    backend: AttentionBackend,
    first_head: int,
    dropout: ProbabilityDropout | None,
) -> Tensor:
    """[S/cp, B, n, H], [S/cp, B, k, H], [S/cp, B, k, H] -> [S/cp, B, n H] of the places that zigzag.py says."""
    heads = q.shape[2]
    assert heads % cp.size == 0, f"{heads} heads do not divide by cp={cp.size}"
    repeats = num_repeats(heads, k.shape[2], cp.size)
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    # One exchange for all three: [S/cp, B, cp, n/cp + 2 k/cp, H], then what goes to one rank together.
    parts = [x.unflatten(2, (cp.size, -1)) for x in (q, k, v)]
    mine = torch.cat(parts, dim=3).movedim(2, 0).flatten(0, 1)
    whole = from_zigzag(comm.all_to_all(mine, cp), cp.size)
    q, k, v = whole.split([part.shape[3] for part in parts], dim=2)
    first_head += cp.rank * q.shape[2]
    out = attend_alone(q, k, v, mask=mask, backend=backend, first_head=first_head, dropout=dropout)
    back = comm.all_to_all(to_zigzag(out, cp.size), cp)
    return back.unflatten(0, (cp.size, -1)).movedim(0, 2).flatten(2)


def num_repeats(heads: int, kv_heads: int, cp_size: int) -> int:
    """How often each key/value head is repeated, at the least, for the ranks of cp to hold equally many.

    A divisor of heads / kv_heads, so that a query head still meets its own.
    """
    group = heads // kv_heads
    return next(times for times in range(1, group + 1) if group % times == 0 and kv_heads * times % cp_size == 0)
