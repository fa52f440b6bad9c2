"""All-to-all attention: context parallelism by heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

Before attention an all-to-all turns a part of the sequence with all heads into the whole sequence with n / cp heads.
After attention a second all-to-all turns the result back.
"""

import torch
from torch import Tensor

from megatronish.attention.flash import attend_alone
from megatronish.attention.mask import AttentionMask
from megatronish.attention.zigzag import from_zigzag, to_zigzag
from megatronish.config.sections.training import AttentionBackend
from megatronish.ops.dropout import ProbabilityDropout
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis


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
    sinks: Tensor | None = None,
) -> Tensor:
    """[S/cp, B, n, H], [S/cp, B, k, H], [S/cp, B, k, H] -> [S/cp, B, n H] of the places that zigzag.py says."""
    heads = q.shape[2]
    assert heads % cp.size == 0, f"{heads} heads do not divide by cp={cp.size}"
    repeats = num_repeats(heads, k.shape[2], cp.size)
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    # 1. One all-to-all for queries, keys and values: heads are grouped by the rank they go to,
    #    [S/cp, B, cp, n/cp + 2 k/cp, H], and the groups put one after the other, [cp S/cp, B, n/cp + 2 k/cp, H].
    parts = [x.unflatten(2, (cp.size, -1)) for x in (q, k, v)]
    mine = torch.cat(parts, dim=3).movedim(2, 0).flatten(0, 1)
    # 2. What arrives is the sequence by ranks; `from_zigzag` puts it in order: [S, B, n/cp + 2 k/cp, H].
    whole = from_zigzag(comm.all_to_all(mine, cp), cp.size)
    q, k, v = whole.split([part.shape[3] for part in parts], dim=2)
    my_heads = range(cp.rank * q.shape[2], (cp.rank + 1) * q.shape[2])
    out = attend_alone(
        q,
        k,
        v,
        mask=mask.for_heads(my_heads),
        backend=backend,
        first_head=first_head + my_heads.start,
        dropout=dropout,
        sinks=None if sinks is None else sinks[my_heads.start : my_heads.stop],
    )
    # 3. The way back: [S, B, n/cp H] -> [S/cp, B, n H], heads in their order.
    back = comm.all_to_all(to_zigzag(out, cp.size), cp)
    return back.unflatten(0, (cp.size, -1)).movedim(0, 2).flatten(2)


def num_repeats(heads: int, kv_heads: int, cp_size: int) -> int:
    """Smallest number of copies of each key/value head with which every rank of cp holds equally many.

    It divides heads / kv_heads, so that a query head still meets its own key/value head.
    """
    group = heads // kv_heads
    return next(times for times in range(1, group + 1) if group % times == 0 and kv_heads * times % cp_size == 0)
