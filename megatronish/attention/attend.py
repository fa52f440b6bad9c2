"""Attention under context parallelism: the choice between ring ("p2p") and all-to-all ("a2a") attention.

"p2p": keys and values go around the ranks of cp (ring.py). "a2a": for the time of attention each rank holds the
whole sequence of some heads (all_to_all.py). Ring attention sends more bytes but overlaps them with computation, and
can cut the sequence over more ranks than there are heads. All-to-all attention sends less and waits for it. On one rank
both are plain attention.

Where a rank computes whole sequences there is a choice of backends (flash.py). Ring attention merges blocks of keys by
their log-sum-exp, which the softmax of a whole row does not return, and has operations of its own (tile.py).
"""

from functools import partial
from typing import Literal

from torch import Tensor

from megatronish.attention.all_to_all import all_to_all_attention
from megatronish.attention.flash import attend_alone
from megatronish.attention.mask import AttentionMask
from megatronish.attention.ring import ring_attention
from megatronish.config.sections.training import AttentionBackend
from megatronish.ops.dropout import ProbabilityDropout
from megatronish.parallel.mesh import Axis
from megatronish.parallel.ranges import ATTENTION, marked


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cp: Axis,
    method: Literal["p2p", "a2a"],
    mask: AttentionMask,
    backend: AttentionBackend = "auto",
    first_head: int = 0,
    dropout: ProbabilityDropout | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[S/cp, B, n, H], [S/cp, B, k, H], [S/cp, B, k, H] -> [S/cp, B, n H] of the places that zigzag.py says.

    n / k query heads share a key/value head. `first_head` is the number of this tp rank's first head among all heads.
    The mask's slopes and `sinks` [n] are those of this tp rank's heads.
    """
    with marked(ATTENTION):
        if cp.size > 1 and method == "p2p":
            assert backend in ("auto", "flash"), "a rank of a ring sees no whole row of probabilities"
            return ring_attention(q, k, v, cp=cp, mask=mask, first_head=first_head, dropout=dropout, sinks=sinks)
        over_cp = attend_alone if cp.size == 1 else partial(all_to_all_attention, cp=cp)
        return over_cp(q, k, v, mask=mask, backend=backend, first_head=first_head, dropout=dropout, sinks=sinks)
