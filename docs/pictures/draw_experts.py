"""How tokens are sent through experts, drawn from random choices: python docs/pictures/draw_experts.py"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

RANKS, TOKENS, EXPERTS, CHOSEN = 4, 4, 8, 2
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
SIDE, GAP, LANE = 0.8, 1.0, 11.5
COLUMNS = {
    "tokens of a rank,\nrouted": 0.0,
    "a row for each choice,\nsorted by expert": 4.0,
    "all-to-all: rows on the\nrank of their expert": 10.0,
    "experts: one grouped\nproduct a matrix": 14.0,
    "all-to-all back": 20.0,
    "sum of a token's rows,\nweighted": 24.0,
}

Place = tuple[int, int]
"""(home rank, number of the choice)."""


def place_of(lane: int, number: int, count: int) -> float:
    """Height of square `number` of `count` in the lane of a rank."""
    return -lane * LANE - (number - (count - 1) / 2) * GAP


def square(axes: Axes, x: float, y: float, home: int, text: str) -> None:
    """A token or a row, in the colour of its home rank."""
    axes.add_patch(Rectangle((x - SIDE / 2, y - SIDE / 2), SIDE, SIDE, color=COLOURS[home]))
    axes.text(x, y, text, ha="center", va="center", color="white", fontsize=7)


def draw_column(axes: Axes, x: float, rows: list[list[Place]], choices: np.ndarray) -> dict[Place, float]:
    """Squares of the rows of each rank; the height of each row."""
    heights = {}
    for rank, held in enumerate(rows):
        for number, (home, choice) in enumerate(held):
            heights[home, choice] = place_of(rank, number, len(held))
            square(axes, x, heights[home, choice], home, str(choices[home].flat[choice]))
    return heights


def connect(axes: Axes, first: dict[Place, float], second: dict[Place, float], x: tuple[float, float]) -> None:
    """A line for each row, from one column to the next."""
    steps = np.linspace(0, 1, 40)
    curve = steps * steps * (3 - 2 * steps)
    for row, height in second.items():
        along = x[0] + SIDE / 2 + steps * (x[1] - x[0] - SIDE)
        axes.plot(along, first[row] + curve * (height - first[row]), color=COLOURS[row[0]], linewidth=0.8, alpha=0.8)


def draw_experts(axes: Axes, x: float, rows: list[list[Place]], choices: np.ndarray) -> None:
    """A frame around the rows of each expert, with its number."""
    for rank, held in enumerate(rows):
        numbers = [int(choices[home].flat[choice]) for home, choice in held]
        for expert in range(rank * EXPERTS // RANKS, (rank + 1) * EXPERTS // RANKS):
            places = [number for number, other in enumerate(numbers) if other == expert]
            if not places:
                continue
            top, bottom = (place_of(rank, place, len(held)) for place in (places[0], places[-1]))
            axes.add_patch(
                Rectangle((x - 1.4, bottom - 0.47), 2.8, top - bottom + 0.94, facecolor="0.93", edgecolor="0.6")
            )
            axes.text(x, (top + bottom) / 2, f"expert {expert}", ha="center", va="center", fontsize=8)


def draw() -> Figure:
    """Tokens of four ranks, of which each chooses two of eight experts, over ep 4."""
    random = np.random.default_rng(8)
    choices = np.array([[random.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS)] for _ in range(RANKS)])
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    axes = figure.subplots()
    home, sent, received, worked, back, summed = COLUMNS.values()

    # Rows on their own rank, sorted by expert; then on the rank of the expert, sorted once more.
    own = [[(rank, c) for c in np.argsort(choices[rank], axis=None, kind="stable").tolist()] for rank in range(RANKS)]
    arrived: list[list[Place]] = [[] for _ in range(RANKS)]
    for row in sorted((row for held in own for row in held), key=lambda row: choices[row[0]].flat[row[1]]):
        arrived[choices[row[0]].flat[row[1]] * RANKS // EXPERTS].append(row)

    tokens = {(rank, c): place_of(rank, c // CHOSEN, TOKENS) for rank in range(RANKS) for c in range(TOKENS * CHOSEN)}
    before = draw_column(axes, sent, own, choices)
    there = draw_column(axes, received, arrived, choices)
    draw_experts(axes, worked, arrived, choices)
    after = draw_column(axes, back, own, choices)
    for x in (home, summed):
        for (rank, c), height in tokens.items():
            square(axes, x, height, rank, f"{c // CHOSEN}")
    for first, second, x in (
        (tokens, before, (home, sent)),
        (before, there, (sent, received)),
        (there, there, (received, worked - 1)),
        (there, after, (worked + 1, back)),
        (after, tokens, (back, summed)),
    ):
        connect(axes, first, second, x)
    for title, x in COLUMNS.items():
        axes.text(x, LANE / 2 + 0.6, title, ha="center", va="bottom", fontsize=8)
    for rank in range(RANKS):
        axes.text(-2.2, -rank * LANE, f"rank {rank}", ha="center", va="center", color=COLOURS[rank], fontsize=10)
        if rank:
            axes.axhline(-(rank - 0.5) * LANE, color="0.85", linewidth=0.8, linestyle=":")
    axes.set(xlim=(-3.5, 25.5), ylim=(-(RANKS - 0.5) * LANE, LANE / 2 + 3.5))
    axes.axis("off")
    return figure


if __name__ == "__main__":
    draw().savefig(Path(__file__).parent / "experts.png", dpi=110)
