"""Covering arrays: few cases in which every compatible pair of feature values occurs (pairwise testing)."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
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


def cheapened(
    cases: Sequence[Choices],
    dealt: Sequence[Chosen],
    *,
    cost: Callable[[int, Chosen], float],
    features: Sequence[str],
    wanted: Set[Pair],
) -> list[Chosen]:
    """The cases with cheaper values of `features`, which still cover all of `wanted` that they covered.

    `cost` is that of a case by its number. The dearest cases are changed first, and each as much as the others allow.
    """
    filled = [dict(chosen) for chosen in dealt]
    covered = Counter(pair for chosen in filled for pair in covered_pairs([chosen]) & wanted)
    has_changed = True
    while has_changed:
        has_changed = False
        for number in sorted(range(len(filled)), key=lambda number: -cost(number, filled[number])):
            for feature in features:
                chosen = filled[number]
                values = sorted(cases[number][feature], key=lambda value: cost(number, chosen | {feature: value}))
                for value in values[: values.index(chosen[feature])]:
                    if cost(number, chosen | {feature: value}) == cost(number, chosen):
                        break
                    lost = {pair for pair in _pairs_with(chosen, feature) & wanted if covered[pair] == 1}
                    if lost <= _pairs_with(chosen | {feature: value}, feature):
                        covered.subtract(_pairs_with(chosen, feature) & wanted)
                        chosen[feature] = value
                        covered.update(_pairs_with(chosen, feature) & wanted)
                        has_changed = True
                        break
    return filled


def _pairs_with(chosen: Chosen, feature: str) -> set[Pair]:
    """The pairs of a case in which this feature is one."""
    return {frozenset({(feature, chosen[feature]), item}) for item in chosen.items() if item[0] != feature}


def one_of_each(cases: Sequence[Chosen], costs: Sequence[float]) -> set[int]:
    """Numbers of cheap cases, in which every value of every feature occurs."""
    missing = {item for chosen in cases for item in chosen.items()}
    found: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(cases[number].items() & missing) / costs[number])
        missing -= cases[best].items()
        found.add(best)
    return found
