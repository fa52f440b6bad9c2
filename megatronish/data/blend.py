"""Blend: samples of several data sets in proportion to weights, in an order that is a function of the weights alone.

Greedy as in Megatron-LM: sample k comes from the data set that is furthest behind its share of k + 1 samples (Megatron
takes the share of max(k, 1), so the orders can differ). With n data sets and after any number of samples, a data set is
ahead of its share by at most 1 - 1/n samples, and behind it by at most 1/2 + 1/3 + ... + 1/n: 0.5 for two data sets,
0.83 for three, 1.93 for ten, 4.19 for a hundred. The worst of 1,656 random blends of up to 255 data sets was 1.62.

Proof of the second bound: let b(k) bound the mean distance of the k data sets that are furthest behind. All n distances
sum to 0, so b(n) = 0. A sample adds the shares, 1 in all, and takes 1 off the data set that it is chosen from. If that
one is among the k furthest behind afterwards, their sum has not grown. If not, it had been as far behind as any of the
k, and the k + 1 together give b(k) = b(k + 1) + 1/(k + 1). So b(1) = 1/2 + ... + 1/n.

Shares are rounded to parts of PERIOD, after which all are exactly even and the order repeats: a place far into a run is
found at once, and the order does not depend on the run's length. The order is part of a run's identity, so the rule
stays as it is: a closer one (earliest deadline first stays within one) would end the runs that began with this one.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatronish.data.sample import Dataset, Sample

PERIOD = 100_000
"""Samples after which the order repeats; the smallest share is one of them."""


class Blend:
    """Dataset that takes from several in proportion to positive weights; each goes through its own epochs."""

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

    @property
    def members(self) -> list[Dataset]:
        """The data sets that it takes from."""
        return list(self._datasets)

    def place(self, index: int) -> tuple[int, int]:
        """Sample `index` as (data set, number of the sample in it)."""
        period, place = divmod(index, PERIOD)
        dataset = int(self._choices[place])
        return dataset, period * int(self._shares[dataset]) + int(self._ranks[place])

    def sample(self, index: int) -> Sample:
        """Sample `index` of the blend: the next one of the data set chosen for it."""
        dataset, number = self.place(index)
        return self._datasets[dataset].sample(number)


def _shares(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """int64 [n]: samples of each data set in a period, at least one; the largest remainders are rounded up."""
    exact = weights / weights.sum() * PERIOD
    shares = np.maximum(exact.astype(np.int64), 1)
    missing = PERIOD - int(shares.sum())
    if missing > 0:
        shares[np.argsort(shares - exact, kind="stable")[:missing]] += 1
    else:
        shares[np.argmax(shares)] += missing
    return shares


def _greedy(shares: NDArray[np.int64]) -> NDArray[np.int16]:
    """[PERIOD]: the choice at each place k, argmax of share * (k + 1) - PERIOD * count, the first of equals.

    In whole numbers: `behind` is what a data set is behind its share, times PERIOD.
    """
    choices = np.empty(PERIOD, np.int16)
    behind = np.zeros(len(shares), np.int64)
    for step in range(PERIOD):
        behind += shares
        choice = behind.argmax()
        behind[choice] -= PERIOD
        choices[step] = choice
    return choices
