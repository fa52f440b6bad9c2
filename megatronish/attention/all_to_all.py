"""All-to-all attention: context parallelism by heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

Before attention an all-to-all turns a part of the sequence with all heads into the whole sequence with n / cp heads.
After attention a second all-to-all turns the result back.
"""

from collections.abc import Callable, Sequence

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
    score_mod: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """[S/cp, B, n, H], [S/cp, B, k, H], [S/cp, B, k, H] -> [S/cp, B, n H] of the places that zigzag.py says."""
    heads = q.shape[2]
    assert heads % cp.size == 0, f"{heads} heads do not divide by cp={cp.size}"
    q, k, v = to_heads((q, *for_each_rank(k, v, heads=heads, cp=cp)), cp)
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
        score_mod=score_mod,
    )
    return to_places(out, cp)


def to_heads(parts: Sequence[Tensor], cp: Axis) -> tuple[Tensor, ...]:
    """[S/cp, B, n, H] each -> [S, B, n/cp, H] each: by one all-to-all, from parts of the sequence to parts of heads."""
    if cp.size == 1:
        return tuple(parts)
    # Heads are grouped by the rank they go to, [S/cp, B, cp, (sum of n)/cp, H], and the groups put one after the other.
    grouped = [x.unflatten(2, (cp.size, -1)) for x in parts]
    mine = torch.cat(grouped, dim=3).movedim(2, 0).flatten(0, 1)
    # What arrives is the sequence by ranks; `from_zigzag` puts it in order.
    whole = from_zigzag(comm.all_to_all(mine, cp), cp.size)
    return whole.split([each.shape[3] for each in grouped], dim=2)


def to_places(x: Tensor, cp: Axis) -> Tensor:
    """[S, B, n/cp H] -> [S/cp, B, n H]: the way back, heads in their order."""
    if cp.size == 1:
        return x
    back = comm.all_to_all(to_zigzag(x, cp.size), cp)
    return back.unflatten(0, (cp.size, -1)).movedim(0, 2).flatten(2)


def for_each_rank(k: Tensor, v: Tensor, *, heads: int, cp: Axis) -> tuple[Tensor, Tensor]:
    """[S/cp, B, k, H] each, of so many query heads -> the same, each head so often that ranks of cp share them out."""
    repeats = num_repeats(heads, k.shape[2], cp.size)
    return (k, v) if repeats == 1 else (k.repeat_interleave(repeats, dim=2), v.repeat_interleave(repeats, dim=2))


def num_repeats(heads: int, kv_heads: int, cp_size: int) -> int:
    """Smallest number of copies of each key/value head with which every rank of cp holds equally many.

    It divides heads / kv_heads, so that a query head still meets its own key/value head.
    """
    group = heads // kv_heads
    return next(times for times in range(1, group + 1) if group % times == 0 and kv_heads * times % cp_size == 0)
