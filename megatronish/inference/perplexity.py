"""Perplexity of a model on a text: the sum of token losses over windows that predict each token once."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from megatronish.data.loader import BatchShare, Collator
from megatronish.data.text import Windows
from megatronish.engine.engine import Engine
from megatronish.objectives.objective import LOSS

MICRO_BATCHES_A_STAGE = 8  # in one pipeline run: few enough to fit into memory, enough for a small pipeline bubble


class Perplexity(NamedTuple):
    """Sum of the token losses in nats, and the number of predictions. `num_bytes` is the text's size, where known."""

    num_predictions: int
    nats: float
    num_bytes: int | None

    @property
    def loss(self) -> float:
        """Mean loss in nats per token."""
        return self.nats / self.num_predictions

    @property
    def perplexity(self) -> float:
        """exp(mean loss), infinite where that is too large for a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits of all predictions, end-of-document tokens included, divided by the bytes of the text."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None


def measure(
    engine: Engine,
    windows: Windows,
    *,
    collate: Collator,
    micro_batch_size: int,
    num_bytes: int | None = None,
    on_progress: Callable[[int], Any] = lambda _num_windows: None,
) -> Perplexity:
    """Perplexity over all windows, the same on every rank; a collective call.

    Windows go to the data-parallel ranks as the samples of a training step do. Where they do not divide evenly, the
    last micro-batches are filled with windows without predictions: ranks that communicate get equal micro-batches. With
    dp 1 and pp 1 the last micro-batch is shorter instead. `on_progress` gets the number of windows of each run.
    """
    dp = engine.mesh.dp
    share = BatchShare(dp.rank, dp.size, micro_batch_size)
    size, most = micro_batch_size * dp.size, MICRO_BATCHES_A_STAGE * engine.mesh.pp.size
    nats, count = 0.0, 0
    for first in range(0, len(windows), size * most):
        num_windows = min(size * most, len(windows) - first)
        parts = share.sample_ids(consumed_samples=first, global_batch_size=-(-num_windows // size) * size)
        if dp.size == engine.mesh.pp.size == 1:
            parts = [range(part.start, min(part.stop, len(windows))) for part in parts]
        batches = [collate([windows.sample(number) for number in part], part) for part in parts]
        totals = engine.evaluate(batches)
        nats, count = nats + totals.sums[LOSS], count + totals.weight
        on_progress(num_windows)
    assert count == windows.num_predictions, f"{count} of {windows.num_predictions} predictions were counted"
    return Perplexity(count, nats, num_bytes)
