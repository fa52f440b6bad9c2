"""How well does a model predict a text? The sum of the losses over windows that predict each token once."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from megatronish.config.data import DataConfig
from megatronish.data.loader import micro_batch
from megatronish.data.windows import Windows
from megatronish.model.batch import MicroBatch
from megatronish.train.engine import Engine

MICRO_BATCHES_A_STAGE = 8  # between two sums over all ranks: few enough to hold, enough to fill a pipeline


class Perplexity(NamedTuple):
    """`nats` are the sum of the losses of so many predictions; `num_bytes` those of the text, where they are known."""

    num_predictions: int
    nats: float
    num_bytes: int | None

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.num_predictions

    @property
    def perplexity(self) -> float:
        """e to the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Of all predictions, ends of documents among them, over the bytes of the text."""
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None


def measure(
    engine: Engine,
    windows: Windows,
    *,
    micro_batch_size: int,
    num_bytes: int | None = None,
    data: DataConfig | None = None,
    eod: int | None = None,
    on_progress: Callable[[int], Any] = lambda _num_windows: None,
) -> Perplexity:
    """The same on every rank; all call this. `data` says whether documents see each other, and `eod` where they end.

    Windows are dealt to the ranks of dp in turn. Where they do not come out even, some get windows of no prediction; a
    rank that is alone with all layers needs none.
    """
    dp, data = engine.mesh.dp, data or DataConfig()
    size, most = micro_batch_size * dp.size, MICRO_BATCHES_A_STAGE * engine.mesh.pp.size
    nats, count = 0.0, 0
    for first in range(0, len(windows), size * most):
        num_windows = min(size * most, len(windows) - first)
        mine = range(first + dp.rank * micro_batch_size, first + num_windows + dp.rank * micro_batch_size, size)
        end = len(windows) if dp.size == engine.mesh.pp.size == 1 else first + size * most
        parts = [range(i, min(i + micro_batch_size, end)) for i in mine]
        batches = [_micro_batch(windows, part, data=data, eod=eod) for part in parts]
        losses, predictions = engine.evaluate(batches)
        nats, count = nats + losses, count + predictions
        on_progress(num_windows)
    assert count == windows.num_predictions, f"{count} of {windows.num_predictions} predictions were counted"
    return Perplexity(count, nats, num_bytes)


def _micro_batch(windows: Windows, numbers: range, *, data: DataConfig, eod: int | None) -> MicroBatch:
    batch = micro_batch(
        windows,
        numbers,
        eod=-1 if eod is None else eod,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
    )
    return replace(batch, loss_mask=windows.counted(numbers))
