"""Results of a judged comparison: grades of each model, or wins of pairs, as numbers and as tables in Markdown.

A pair is judged in both orders. One answer wins if both verdicts prefer it, and anything else is a tie (Zheng et al.
2023, arXiv:2306.05685, section 3.4). Intervals take a question as one observation: its turns depend on each other.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatronish.inference.judge_rounds import Judgement

Z95 = 1.959964  # of a normal distribution, 95 % on both sides
MISSING = "-"


@dataclass(frozen=True)
class Grades:
    """Grades of a model, from 1 to 10: means over turns. `half_width` is that of a 95 % interval of the average."""

    model: str
    average: float | None
    half_width: float | None
    turns: tuple[float | None, ...]
    categories: dict[str, float | None]
    num_graded: int
    num_unreadable: int


@dataclass(frozen=True)
class DuelTally:
    """Wins, ties and losses of `first` over `second` in judged turns."""

    wins: int
    ties: int
    losses: int

    @property
    def win_rate(self) -> float | None:
        """Share of wins, where a tie is half a win; None without any."""
        total = self.wins + self.ties + self.losses
        return (self.wins + self.ties / 2) / total if total else None


@dataclass(frozen=True)
class Duel:
    """Two models compared. `interval` is that of the win rate, 95 %, by Wilson, over questions."""

    first: str
    second: str
    tally: DuelTally
    interval: tuple[float, float] | None
    categories: dict[str, DuelTally]
    num_unreadable: int


@dataclass(frozen=True)
class PositionBias:
    """Pairs whose two verdicts differ: of all, and those in which the first or the second place won both times."""

    num_pairs: int
    changed: int
    first_place: int
    second_place: int

    @property
    def share(self) -> float | None:
        """Share of pairs whose verdict changes with the order."""
        return self.changed / self.num_pairs if self.num_pairs else None


def mean(numbers: Iterable[float]) -> float | None:
    """The mean; None without numbers."""
    values = list(numbers)
    return statistics.fmean(values) if values else None


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval of a share, 95 %: within 0 and 1, and not empty where all have won."""
    middle = share + Z95**2 / (2 * count)
    half = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    scale = 1 + Z95**2 / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def grades_of(model: str, judgements: Sequence[Judgement]) -> Grades:
    """The grades of a model among all judgements."""
    own = [each for each in judgements if each.names == (model,)]
    graded = [(each, each.verdict) for each in own if isinstance(each.verdict, int | float)]
    num_turns = max((each.turn + 1 for each in judgements), default=0)
    by_question: dict[int | str, list[float]] = {}
    for judgement, grade in graded:
        by_question.setdefault(judgement.question.identity, []).append(grade)
    means = [statistics.fmean(grades) for grades in by_question.values()]
    return Grades(
        model,
        average=mean(grade for _, grade in graded),
        half_width=Z95 * statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        turns=tuple(mean(grade for each, grade in graded if each.turn == turn) for turn in range(num_turns)),
        categories={
            category: mean(grade for each, grade in graded if each.question.category == category)
            for category in categories_of(judgements)
        },
        num_graded=len(graded),
        num_unreadable=len(own) - len(graded),
    )


def categories_of(judgements: Iterable[Judgement]) -> list[str]:
    """Categories of the questions, in their order."""
    return list(dict.fromkeys(each.question.category for each in judgements))


@dataclass(frozen=True)
class Pair:
    """The two verdicts about a turn; each is that for the first place (A), for the second (B) or a tie (C)."""

    category: str
    identity: int | str
    verdict: str
    swapped: str

    @property
    def outcome(self) -> str:
        """`wins`, `ties` or `losses` of the model that is first in `verdict`."""
        return {("A", "B"): "wins", ("B", "A"): "losses"}.get((self.verdict, self.swapped), "ties")

    @property
    def is_changed(self) -> bool:
        """Whether the order has changed which model, if any, is preferred."""
        return {"A": "B", "B": "A"}.get(self.swapped, "C") != self.verdict


def pairs_of(first: str, second: str, judgements: Iterable[Judgement]) -> tuple[list[Pair], int]:
    """The pairs with two verdicts, and the number of those of which one could not be read."""
    by_turn: dict[tuple[int | str, int], dict[tuple[str, ...], Judgement]] = {}
    for each in judgements:
        if set(each.names) == {first, second}:
            by_turn.setdefault((each.question.identity, each.turn), {})[each.names] = each
    pairs, unreadable = [], 0
    for both in by_turn.values():
        if len(both) < 2:  # one of them was refused
            continue
        one, other = both[first, second], both[second, first]
        if isinstance(one.verdict, str) and isinstance(other.verdict, str):
            pairs.append(Pair(one.question.category, one.question.identity, one.verdict, other.verdict))
        else:
            unreadable += 1
    return pairs, unreadable


def tally_of(pairs: Iterable[Pair]) -> DuelTally:
    """Wins, ties and losses of the first model of the pairs."""
    outcomes = [pair.outcome for pair in pairs]
    return DuelTally(outcomes.count("wins"), outcomes.count("ties"), outcomes.count("losses"))


def duel_of(first: str, second: str, judgements: Sequence[Judgement]) -> Duel:
    """The comparison of two models among all judgements."""
    pairs, unreadable = pairs_of(first, second, judgements)
    tally = tally_of(pairs)
    num_questions = len({pair.identity for pair in pairs})
    return Duel(
        first,
        second,
        tally,
        interval=None if tally.win_rate is None else wilson(tally.win_rate, num_questions),
        categories={
            category: tally_of(pair for pair in pairs if pair.category == category)
            for category in categories_of(judgements)
        },
        num_unreadable=unreadable,
    )


def bias_of(duels: Iterable[tuple[str, str]], judgements: Sequence[Judgement]) -> PositionBias:
    """The position bias over all duels, each given by the names of its two models."""
    pairs = [pair for first, second in duels for pair in pairs_of(first, second, judgements)[0]]
    verdicts = [(pair.verdict, pair.swapped) for pair in pairs]
    changed = sum(pair.is_changed for pair in pairs)
    return PositionBias(len(pairs), changed, verdicts.count(("A", "A")), verdicts.count(("B", "B")))


def single_tables(grades: Sequence[Grades]) -> list[str]:
    """Tables of grades: over all, and by category."""
    ordered = sorted(grades, key=lambda each: -1.0 if each.average is None else each.average, reverse=True)
    num_turns = max((len(each.turns) for each in grades), default=0)
    head = ["model", *(f"turn {turn + 1}" for turn in range(num_turns)), "average", "95 %"]
    rows = [[each.model, *map(_grade, each.turns), _grade(each.average), _half(each.half_width)] for each in ordered]
    categories = [*(grades[0].categories if grades else ())]
    by_category = [[each.model, *(_grade(each.categories[name]) for name in categories)] for each in ordered]
    return [markdown(head, rows), markdown(["model", *categories], by_category)]


def pairwise_tables(duels: Sequence[Duel]) -> list[str]:
    """Tables of wins: over all, and win rates by category."""
    head = ["model", "against", "wins", "ties", "losses", "win rate", "95 %"]
    rows = [
        [each.first, each.second, *map(str, (each.tally.wins, each.tally.ties, each.tally.losses)),
         _percent(each.tally.win_rate), _range(each.interval)]
        for each in duels
    ]  # fmt: skip
    categories = [*(duels[0].categories if duels else ())]
    by_category = [
        [each.first, each.second, *(_percent(each.categories[name].win_rate) for name in categories)] for each in duels
    ]
    return [markdown(head, rows), markdown(["model", "against", *categories], by_category)]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, its columns as wide as their widest cell."""
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    lines.insert(1, " | ".join("-" * max(width, 3) for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def numbers_of(results: Sequence[Grades] | Sequence[Duel]) -> list[dict[str, Any]]:
    """The results as JSON has them, with the win rates of duels."""
    records = []
    for each in results:
        numbers = asdict(each)
        if isinstance(each, Duel):
            numbers["win_rate"] = each.tally.win_rate
            for category, tally in each.categories.items():
                numbers["categories"][category]["win_rate"] = tally.win_rate
        records.append(numbers)
    return records


def _grade(number: float | None) -> str:
    return MISSING if number is None else f"{number:.2f}"


def _half(width: float | None) -> str:
    return MISSING if width is None else f"± {width:.2f}"


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{share:.1%}"


def _range(interval: tuple[float, float] | None) -> str:
    return MISSING if interval is None else f"{interval[0]:.1%} to {interval[1]:.1%}"
