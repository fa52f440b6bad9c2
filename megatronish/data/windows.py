"""Windows over a text in which a model predicts each token exactly once, for measuring perplexity.

A span of n tokens has n - 1 predictions: every token but the first, from those before it. A window shows `seq_length`
tokens; the next one begins `stride` further, and what both could predict counts in the first, where it came first. So
except for those of the first window every prediction sees at least seq_length - stride tokens before its own. The last
window is filled up with made-up tokens that are not predicted; nothing is dropped.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronish.data.sample import Sample


class Windows:
    """Windows over spans of tokens; span d is `tokens[starts[d] : starts[d + 1]]`, and no window crosses spans."""

    def __init__(self, tokens: NDArray[Any], starts: NDArray[np.int64], *, seq_length: int, stride: int) -> None:
        assert 1 <= stride <= seq_length
        self.tokens, self.starts, self.seq_length, self.stride = tokens, starts, seq_length, stride
        predictions = np.maximum(np.diff(starts) - 1, 0)
        later = -(-np.maximum(predictions - seq_length, 0) // stride)
        self._before = np.concatenate(([0], np.cumsum((predictions > 0) + later)))
        self.num_predictions = int(predictions.sum())

    def __len__(self) -> int:
        return int(self._before[-1])

    def narrowed(self, *, multiple_of: int) -> "Windows":
        """The same predictions from windows no wider than the longest span, rounded up to a multiple."""
        longest = max(1, int(np.diff(self.starts).max()) - 1)
        width = min(self.seq_length, -(-longest // multiple_of) * multiple_of)
        return Windows(self.tokens, self.starts, seq_length=width, stride=min(self.stride, width))

    def sample(self, index: int) -> Sample:
        """A window, filled up with zeros that do not count in the loss; beyond the last window, zeros alone.

        The first window of a span counts all its labels, a later one the last `stride`: the window before counted the
        labels before them.
        """
        tokens, loss_mask = np.zeros(self.seq_length + 1, np.int64), np.zeros(self.seq_length + 1, np.bool_)
        if index < len(self):
            start, end, is_first = self._place(index)
            tokens[: end - start] = self.tokens[start:end]
            loss_mask[1 if is_first else self.seq_length - self.stride + 1 : end - start] = True
        return Sample(tokens, loss_mask)

    def _place(self, index: int) -> tuple[int, int, bool]:
        """First token of a window, the end of its labels, and whether it is the first window of its span."""
        span = int(np.searchsorted(self._before, index, side="right")) - 1
        number = index - int(self._before[span])
        start = int(self.starts[span]) + number * self.stride
        return start, min(start + self.seq_length + 1, int(self.starts[span + 1])), number == 0
