"""Which data set, and which of its samples, is sample k of a blend?

Greedy as in Megatron-LM: each sample comes from the data set that is furthest behind its share, so after k samples each
has given its share of k to within one. Shares are rounded to parts of PERIOD, after which all are exactly even and
the order repeats: a place far into a run is found at once, and the order does not depend on the run's length.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatronish.data.sample import Dataset, Sample

PERIOD = 100_000


class Blend:
    """Samples of several data sets in proportion to positive weights; each goes through its own epochs."""

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float], *, name: str) -> None:
        self.name = name
        self._datasets = list(datasets)
        self._shares = _shares(np.asarray(weights, np.float64))
        self._choices = _greedy(self._shares)
        self._ranks = np.empty(PERIOD, np.int64)
        for dataset in range(len(self._datasets)):
            self._ranks[self._choices == dataset] = np.arange(self._shares[dataset])
        sizes = [dataset.num_samples for dataset in self._datasets]
        self.num_samples = None if None in sizes else sum(size for size in sizes if size is not None)
        facts = [(dataset.identity, int(share)) for dataset, share in zip(datasets, self._shares, strict=True)]
        self.identity = hashlib.sha256(repr(facts).encode()).hexdigest()

    def place(self, index: int) -> tuple[int, int]:
        """(data set, number of its sample) of sample `index`."""
        period, place = divmod(index, PERIOD)
        dataset = int(self._choices[place])
        return dataset, period * int(self._shares[dataset]) + int(self._ranks[place])

    def sample(self, index: int) -> Sample:
        """Sample `index` of the blend."""
        dataset, number = self.place(index)
        return self._datasets[dataset].sample(number)


def _shares(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Samples of each data set in a period: at least one, the largest remainders rounded up."""
    exact = weights / weights.sum() * PERIOD
    shares = np.maximum(exact.astype(np.int64), 1)
    missing = PERIOD - int(shares.sum())
    if missing > 0:
        shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
    else:
        shares[np.argmax(shares)] += missing
    return shares


def _greedy(shares: NDArray[np.int64]) -> NDArray[np.int16]:
    """[PERIOD]: at step k the argmax of share * (k + 1) - PERIOD * count, the first of equals; in whole numbers."""
    choices = np.empty(PERIOD, np.int16)
    behind = np.zeros(len(shares), np.int64)
    for step in range(PERIOD):
        behind += shares
        choice = behind.argmax()
        behind[choice] -= PERIOD
        choices[step] = choice
    return choices
