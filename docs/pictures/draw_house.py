"""Folders of megatronish/ in their groups, drawn from the source: python docs/pictures/draw_house.py"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

PICTURES = Path(__file__).parent
PACKAGE = PICTURES.parents[1] / "megatronish"
GROUPS = {
    "what one calls": ("commands", "inference", "dry_run", "verify"),
    "a run": ("train", "report", "checkpoint", "formats"),
    "one step": ("engine", "optim", "data"),
    "before a run": ("estimate",),
    "who computes it": ("parallel/schedules", "parallel/*.py", "parallel/pipeline", "parallel/data_parallel"),
    "what is computed": ("objectives", "model", "layers", "attention", "ops", "specs"),
    "settings": ("config", "compat"),
    "ground": ("core", "tokenizer", "launch", "watch"),
}
"""Roughly from the top to the ground; `ROWS` of tests/test_layering.py has the exact order of imports."""
NAMES = {"parallel/*.py": "parallel: mesh, comm, sharding"}
WIDTH, HEIGHT, GAP, LABEL = 100.0, 6.0, 1.2, 15.0
FEWEST = 7.5  # width of a box whose folder is small


def lines_of(folder: str) -> int:
    """Lines of the source in a folder."""
    pattern = folder if "*" in folder else f"{folder}/**/*.py"
    return sum(len(path.read_text().splitlines()) for path in PACKAGE.glob(pattern))


def widths_of(lines: list[int]) -> list[float]:
    """Widths of the boxes of a band: by their lines, but a name has room in each."""
    room = WIDTH - GAP * (len(lines) - 1) - FEWEST * len(lines)
    return [FEWEST + room * each / sum(lines) for each in lines]


def draw(path: Path) -> None:
    """Write the picture."""
    figure, axes = pyplot.subplots(figsize=(11, 5.6))
    colours = pyplot.get_cmap("Set2").colors  # type: ignore[attr-defined]
    for number, (group, folders) in enumerate(GROUPS.items()):
        bottom = (len(GROUPS) - 1 - number) * (HEIGHT + GAP)
        axes.text(-GAP, bottom + HEIGHT / 2, group, ha="right", va="center", fontsize=11)
        lines, left = [lines_of(folder) for folder in folders], 0.0
        for folder, count, width in zip(folders, lines, widths_of(lines), strict=True):
            style = {"boxstyle": "round,pad=0,rounding_size=0.8", "edgecolor": "none", "facecolor": colours[number]}
            axes.add_patch(FancyBboxPatch((left, bottom), width, HEIGHT, **style))
            axes.text(
                left + width / 2,
                bottom + 0.62 * HEIGHT,
                NAMES.get(folder, folder),
                ha="center",
                va="center",
                fontsize=10,
            )
            size = f"{count / 1000:.1f}k"
            axes.text(left + width / 2, bottom + 0.26 * HEIGHT, size, ha="center", va="center", fontsize=8, color="0.3")
            left += width + GAP
    axes.set_xlim(-LABEL, WIDTH)
    axes.set_ylim(-GAP, len(GROUPS) * (HEIGHT + GAP))
    axes.axis("off")
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    draw(PICTURES / "house.png")
