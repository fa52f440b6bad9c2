"""Perplexity of a model on a text: the sum of its losses over windows that predict each token once."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from megatronish.data.collate import Collator
from megatronish.data.loader import BatchShare
from megatronish.data.windows import Windows
from megatronish.objectives.objective import LOSS
from megatronish.train.engine import Engine

MICRO_BATCHES_A_STAGE = 8  # between two sums over all ranks: few enough to hold, enough to fill a pipeline


class Perplexity(NamedTuple):
    """Sum of the losses in `nats`, and how many predictions it is over. `num_bytes` of the text, where known."""

    num_predictions: int
    nats: float
    num_bytes: int | None

    @property
    def loss(self) -> float:
        """Mean loss, in nats a token."""
        return self.nats / self.num_predictions

    @property
    def perplexity(self) -> float:
        """e to the power of the mean loss; infinite where that is too large for a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits of all predictions, ends of documents among them, over the bytes of the text."""
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

    Windows are dealt to the data-parallel ranks in turn, as samples of a step are. Where they do not divide evenly, the
    last ranks get windows of which nothing counts: a pipeline or a collective needs equal micro-batches. One rank alone
    with all layers gets a shorter last micro-batch instead.
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
