"""Tests of the drawn pictures: each file is what its script draws, byte for byte, and its words fit into its frame."""

import importlib
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from paths import ROOT

PICTURES = ROOT / "docs" / "pictures"
sys.path.append(str(PICTURES))
DRAWINGS = {
    name: draw
    for script in ("draw_layouts", "draw_house")
    for name, draw in importlib.import_module(script).DRAWINGS.items()
}
WIDEST_LETTER = 0.56
"""Mean width of a letter of the widest usual font, as a part of its size."""


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_picture_is_what_its_script_draws(name: str) -> None:
    assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == DRAWINGS[name]().text


def test_every_svg_has_a_script_and_a_page_that_shows_it() -> None:
    assert {path.stem for path in PICTURES.glob("*.svg")} == DRAWINGS.keys()
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert not [name for name in DRAWINGS if f"pictures/{name}.svg)" not in text]


@pytest.mark.parametrize("name", DRAWINGS)
def test_words_of_a_picture_are_inside_of_it(name: str) -> None:
    drawing = DRAWINGS[name]()
    outside = []
    for words in ElementTree.fromstring(drawing.text).iter("{http://www.w3.org/2000/svg}text"):
        if words.get("transform"):
            continue
        length = len(words.text or "") * float(words.attrib["font-size"]) * WIDEST_LETTER
        left = float(words.attrib["x"]) - length * {"start": 0, "middle": 0.5, "end": 1}[words.attrib["text-anchor"]]
        if left < 0 or left + length > drawing.width or not 0 < float(words.attrib["y"]) < drawing.height:
            outside.append(words.text)
    assert not outside


def test_the_house_has_every_folder() -> None:
    drawn = {folder for folders in importlib.import_module("draw_house").GROUPS.values() for folder in folders}
    package = ROOT / "megatronish"
    assert drawn == {path.name for path in package.iterdir() if (path / "__init__.py").exists()}


def test_a_picture_needs_no_network_and_has_both_colours() -> None:
    for path in sorted(Path(PICTURES).glob("*.svg")):
        text = path.read_text(encoding="utf-8")
        assert "prefers-color-scheme: dark" in text
        assert text.count("http") == 1  # the namespace
