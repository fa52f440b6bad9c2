"""ALiBi: attention with linear biases (Press et al. 2022, arXiv:2108.12409).

The score of a query with a key falls by slope x distance. Each head has a slope of its own, and there are no other
positions. The slopes of a power of two of heads are a geometric series; other numbers of heads take the series of the
power of two below, and then every other slope of the series of the power of two above, as the authors' code does.
"""

from functools import cache

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Slopes of all heads of a layer."""
    below = 1 << (num_heads.bit_length() - 1)
    return (_series(below) + _series(2 * below)[::2])[:num_heads]


def _series(num_heads: int) -> tuple[float, ...]:
    """2^(-8/n), 2^(-16/n), ..., 2^-8, for a power of two."""
    return tuple(2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1))


def distance_bias(slopes: tuple[float, ...], queries: Tensor, keys: Tensor) -> Tensor:
    """Positions int64 [q], [k] -> what is added to their scores, fp32 [1, n, q, k]."""
    distance = (queries[:, None] - keys).float()
    return slopes_on(slopes, queries.device)[:, None, None] * -distance.unsqueeze(0).unsqueeze(0)


@cache
def slopes_on(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """Slopes on a device, fp32 [n], copied once; the host does not wait for the copy."""
    return torch.tensor(slopes, dtype=torch.float32).to(device, non_blocking=device.type != "cpu")
