"""Folders of megatronish/ in their groups: python docs/pictures/draw_house.py"""

import sys
from pathlib import Path

PICTURES = Path(__file__).parent
sys.path.append(str(PICTURES))

from svg import HUES, Drawing  # noqa: E402

GROUPS = {
    "what one calls": {
        "commands": "programs",
        "inference": "generate, serve",
        "dry_run": "without a GPU",
        "verify": "compare",
    },
    "a run": {"train": "loop, hooks", "report": "lines, pages"},
    "one step": {"engine": "one update", "optim": "AdamW, Muon", "data": "samples"},
    "files": {"checkpoint": "in any layout", "formats": "Hugging Face, Megatron-LM"},
    "before a run": {"estimate": "time and memory of a layout, the planner"},
    "on many ranks": {"parallel": "mesh, collectives, sharding, schedules, pipeline, ZeRO"},
    "what is computed": {
        **{"objectives": "losses", "model": "blocks", "layers": "linear", "attention": "ring", "ops": "kernels"},
        "specs": "as data",
    },
    "settings": {"config": "ours, as flags and TOML", "compat": "other frameworks'"},
    "the ground": {"core": "names, errors", "tokenizer": "text", "launch": "start ranks", "watch": "see hangs"},
}
"""Roughly from the top to the ground; `ROWS` of tests/test_layering.py has the exact order of imports."""
WIDTH, LEFT, BAND, GAP = 760.0, 140.0, 40.0, 6.0


def house() -> Drawing:
    """A band for each group, a box for each folder."""
    drawing = Drawing(WIDTH, 16 + len(GROUPS) * (BAND + GAP) + 8, "the folders of megatronish in their groups")
    for number, (group, folders) in enumerate(GROUPS.items()):
        top = 14 + number * (BAND + GAP)
        drawing.words(LEFT - 12, top + 24, group, size=13, anchor="end")
        width = (WIDTH - LEFT - 16 - GAP * (len(folders) - 1)) / len(folders)
        for place, (folder, what) in enumerate(folders.items()):
            left = round(LEFT + place * (width + GAP), 2)
            middle = round(left + width / 2, 2)
            drawing.box(left, top, round(width, 2), BAND, f"h{number % HUES}")
            drawing.words(middle, top + 17, folder, size=13, anchor="middle")
            drawing.words(middle, top + 32, what, size=10, anchor="middle")
    return drawing


DRAWINGS = {"house": house}

if __name__ == "__main__":
    (PICTURES / "house.svg").write_text(house().text, encoding="utf-8")
