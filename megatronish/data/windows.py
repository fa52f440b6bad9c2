"""In which windows does a model see tokens so that it predicts each of them exactly once?

A span of n tokens has n - 1 predictions: every token but the first, from those before it. A window shows `seq_length`
tokens; the next one begins `stride` further, and what both could predict counts in the first, where it came first. So
but for those of the first window every prediction sees at least seq_length - stride tokens before its own. The last
window is filled up with made-up tokens that are not predicted; nothing is dropped.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Windows:
    """Windows over spans of tokens; span d is `tokens[starts[d] : starts[d + 1]]`, and none sees another."""

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
        """The same predictions from windows that are no wider than the longest span needs."""
        longest = max(1, int(np.diff(self.starts).max()) - 1)
        width = min(self.seq_length, -(-longest // multiple_of) * multiple_of)
        return Windows(self.tokens, self.starts, seq_length=width, stride=min(self.stride, width))

    def sample(self, index: int) -> NDArray[np.int64]:
        """int64 [S + 1]: the tokens of a window and the one after it, zeros at the end; of no window, zeros alone."""
        shown = np.zeros(self.seq_length + 1, np.int64)
        if index < len(self):
            start, end, _ = self._place(index)
            shown[: end - start] = self.tokens[start:end]
        return shown

    def counted(self, indices: range) -> torch.Tensor:
        """bool [B, S]: which predictions of these windows count."""
        counted = torch.zeros(len(indices), self.seq_length, dtype=torch.bool)
        for row, index in zip(counted, indices, strict=True):
            if index < len(self):
                start, end, is_first = self._place(index)
                row[0 if is_first else self.seq_length - self.stride : end - start - 1] = True
        return counted

    def _place(self, index: int) -> tuple[int, int, bool]:
        """The tokens that a window and its labels span, and whether it is the first one of its span."""
        span = int(np.searchsorted(self._before, index, side="right")) - 1
        number = index - int(self._before[span])
        start = int(self.starts[span]) + number * self.stride
        return start, min(start + self.seq_length + 1, int(self.starts[span + 1])), number == 0
