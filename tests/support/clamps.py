"""Watch over the clamps of gated MLPs: how near a value comes to a limit, where its gradient jumps."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from megatronish.model import mlp
from megatronish.specs.layers import MLPSpec


@contextmanager
def watched_clamps() -> Iterator[list[float]]:
    """Smallest distance of a value from its limit in each forward of a clamped MLP meanwhile."""
    distances: list[float] = []
    gated = mlp.gated

    def watched(x: Tensor, *, spec: MLPSpec) -> Tensor:
        if spec.clamp is not None and x.numel():
            gate, up = x.detach().chunk(2, dim=-1)
            distances.extend(float((values - spec.clamp).abs().min()) for values in (gate, up.abs()))
        return gated(x, spec=spec)

    mlp.gated = watched  # type: ignore[assignment]
    try:
        yield distances
    finally:
        mlp.gated = gated
