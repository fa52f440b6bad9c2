"""Watch over the clamps of gated MLPs: how near a value comes to a limit, where its gradient jumps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from megatronish.layers.dispatch import TokenRoute
from megatronish.layers.experts import Experts
from megatronish.model import mlp
from megatronish.specs.layers import MLPSpec


@contextmanager
def watched_clamps() -> Iterator[list[float]]:
    """Smallest distance of a value from its limit in each forward of a clamped MLP meanwhile.

    Rows of dropped choices, which lie behind those of all experts, do not count: they are what the memory had.
    """
    distances: list[float] = []
    num_rows: list[int] = []
    gated, forward = mlp.gated, Experts.forward

    def watched(x: Tensor, *, spec: MLPSpec) -> Tensor:
        if spec.clamp is not None and len(values := x.detach()[: num_rows[-1] if num_rows else None]):
            gate, up = values.chunk(2, dim=-1)
            distances.extend(float((half - spec.clamp).abs().min()) for half in (gate, up.abs()))
        return gated(x, spec=spec)

    def of_experts(self: Experts, x: Tensor, weights: Tensor | None, route: TokenRoute, **options: Any) -> Tensor:
        num_rows.append(int(route.groups.ends[-1]))
        try:
            return forward(self, x, weights, route, **options)
        finally:
            num_rows.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp, "gated", watched)
        patch.setattr(Experts, "forward", of_experts)
        yield distances
