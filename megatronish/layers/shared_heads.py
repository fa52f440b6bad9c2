"""Key/value heads that neighbouring ranks of tp share: with fewer heads than ranks, each rank projects a part of one.

The projection of keys and values is cut over tp by features, however few heads there are. So no parameter has copies,
and gradients, norms, optimizer states and checkpoints are those of any layer that is cut. The ranks whose query heads
share a key/value head send each other their parts of it. In the backward each rank gets the gradients of its part from
all of them, and adds them up.
"""

import torch
from torch import Tensor, nn

from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis
from megatronish.specs.attention import ranks_of_a_head


class KeyValueHeads(nn.Module):
    """A rank's heads of keys and values, whole, from what it has projected, of K heads of size H.

    [S, B, K H / tp] each -> [S, B, K / tp, H] each, or with K < tp [S, B, 1, H]: the head that its queries share.
    """

    def __init__(self, heads: int, size: int, *, tp: Axis) -> None:
        super().__init__()
        self.size, self.tp, self.sharers = size, tp, ranks_of_a_head(heads, tp.size)

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """[S, B, K H / tp] each -> [S, B, k, H] each."""
        if self.sharers == 1:
            return k.unflatten(-1, (-1, self.size)), v.unflatten(-1, (-1, self.size))
        parts = torch.stack((k, v), dim=2)  # [S, B, 2, H / sharers]
        gathered = comm.gather_from_neighbours(parts.unsqueeze(0), self.tp, self.sharers)
        keys, values = gathered.movedim(0, 3).flatten(3).split(1, dim=2)
        return keys, values
