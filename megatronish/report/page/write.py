"""Writer of a run's page: one HTML file with all that it needs inside, so that it opens anywhere, without a network.

Curves are drawn by uPlot (MIT license, in uplot/), which is part of the file.
"""

import html
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from megatronish.core.files import AtomicFile
from megatronish.report.page.contents import as_json, contents_of
from megatronish.report.page.curves import Curves

PAGE = "report.html"


@cache
def _part(name: str) -> str:
    return (files("megatronish.report.page") / name).read_text(encoding="utf-8")


Kept = Mapping[Path, Curves]
"""Curves of runs that are looked at more than once."""
NONE: Kept = MappingProxyType({})


def page_of(runs: Sequence[Path], curves: Kept = NONE, *, refreshed_every: int | None = None) -> str:
    """HTML of one run or several. Where a server answers for it, it asks for new contents every so many seconds."""
    names = ", ".join(run.resolve().name for run in runs)
    parts = {
        "title": html.escape(names),
        "styles": _part("uplot/uPlot.min.css") + _part("page.css"),
        "library": _part("uplot/uPlot.iife.min.js"),
        "script": _part("page.js"),
        "contents": contents_as_json(runs, curves),
    }
    text = _part("page.html")
    if refreshed_every is not None:
        text = text.replace('<html lang="en">', f'<html lang="en" data-every="{refreshed_every}">')
    # One pass over the template: what is filled in is not looked at for further places.
    before, *rest = text.split("{{ ")
    return before + "".join(parts[name] + after for name, _, after in (piece.partition(" }}") for piece in rest))


def encoded(text: str) -> bytes:
    """UTF-8; halves of characters, which JSON and names of folders can hold, are question marks."""
    return text.encode("utf-8", errors="replace")


def contents_as_json(runs: Sequence[Path], curves: Kept = NONE) -> str:
    """What the page shows of the runs."""
    return as_json({"runs": [contents_of(run, curves.get(run)) for run in runs]})


def write_page(runs: Sequence[Path], path: Path) -> Path:
    """Write the page whole or not at all; returns its path."""
    with AtomicFile(path) as file:
        file.file.write(encoded(page_of(runs)))
    return path
