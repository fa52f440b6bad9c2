"""Perplexity of a model on a text: the sum of its losses over windows that predict each token once."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from megatronish.data.collate import Collator
from megatronish.data.windows import Windows
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
    """Perplexity over all windows, the same on every rank; all call this.

    Windows are dealt to the ranks of dp in turn. Where they do not come out even, some get windows of no prediction; a
    rank that is alone with all layers needs none.
    """
    dp = engine.mesh.dp
    size, most = micro_batch_size * dp.size, MICRO_BATCHES_A_STAGE * engine.mesh.pp.size
    nats, count = 0.0, 0
    for first in range(0, len(windows), size * most):
        num_windows = min(size * most, len(windows) - first)
        mine = range(first + dp.rank * micro_batch_size, first + num_windows + dp.rank * micro_batch_size, size)
        end = len(windows) if dp.size == engine.mesh.pp.size == 1 else first + size * most
        parts = [range(i, min(i + micro_batch_size, end)) for i in mine]
        batches = [collate([windows.sample(number) for number in part], part) for part in parts]
        losses, predictions = engine.evaluate(batches)
        nats, count = nats + losses, count + predictions
        on_progress(num_windows)
    assert count == windows.num_predictions, f"{count} of {windows.num_predictions} predictions were counted"
    return Perplexity(count, nats, num_bytes)
