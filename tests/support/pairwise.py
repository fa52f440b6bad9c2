"""Covering arrays: few cases in which every compatible pair of feature values occurs (pairwise testing)."""

import random
from collections.abc import Mapping, Sequence, Set
from itertools import combinations
from typing import Any

Choices = Mapping[str, tuple[Any, ...]]
"""What each feature may be in one case; a fact of the case is a feature of one choice."""

Chosen = dict[str, Any]

Pair = frozenset[tuple[str, Any]]
"""Two features with a value each."""

NUM_CANDIDATES = 60  # random ways to fill a case, of which the one that covers most is taken


def possible_pairs(cases: Sequence[Choices]) -> set[Pair]:
    """All pairs of values that can occur together in some case."""
    return {
        frozenset({(a, x), (b, y)})
        for choices in cases
        for a, b in combinations(choices, 2)
        for x in choices[a]
        for y in choices[b]
    }


def covered_pairs(cases: Sequence[Chosen]) -> set[Pair]:
    """All pairs of values that occur together in some case."""
    return {frozenset(pair) for chosen in cases for pair in combinations(chosen.items(), 2)}


def pairwise(cases: Sequence[Choices], *, seed: int, wanted: Set[Pair] | None = None) -> list[Chosen]:
    """One way to fill each case; together they cover `wanted` (all `possible_pairs`), if the cases are enough."""
    random_ = random.Random(seed)
    missing = possible_pairs(cases) if wanted is None else set(wanted)
    filled: dict[int, Chosen] = {}
    for index in random_.sample(range(len(cases)), len(cases)):
        candidates = [
            {feature: random_.choice(values) for feature, values in cases[index].items()} for _ in range(NUM_CANDIDATES)
        ]
        filled[index] = max(candidates, key=lambda chosen: len(covered_pairs([chosen]) & missing))
        missing -= covered_pairs([filled[index]])
    return [filled[index] for index in range(len(cases))]


def one_of_each(cases: Sequence[Chosen], costs: Sequence[float]) -> set[int]:
    """Numbers of cheap cases, in which every value of every feature occurs."""
    missing = {item for chosen in cases for item in chosen.items()}
    found: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(cases[number].items() & missing) / costs[number])
        missing -= cases[best].items()
        found.add(best)
    return found
