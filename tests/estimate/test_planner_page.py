"""Tests of docs/PLANNER.md: what it says that the planner prints is what it prints.

`python tests/estimate/test_planner_page.py` writes the page again.
"""

import contextlib
import io
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from searches import search_of, searched
from sweeps import further

from megatronish.commands.plan import main
from megatronish.estimate.planner.search import Search, SearchResult

PAGE = Path(__file__).parents[2] / "docs" / "PLANNER.md"
PRINTED = re.compile(r"```sh\n(megatronish plan [^\n]*)\n```\n\n```text\n(.*?)```", re.DOTALL)


def printed(found: re.Match[str]) -> str:
    """A block of the page with what its command prints now."""
    _, _, *words = shlex.split(found[1])
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(words, program="megatronish plan") == 0
    return f"```sh\n{found[1]}\n```\n\n```text\n{output.getvalue()}```"


def found_before(name: str, folder: Path) -> Callable[[Search], SearchResult]:
    """In the place of a search that takes a minute: what the same search has found for another test."""

    def run(search: Search) -> SearchResult:
        assert search == search_of(name)
        return searched(name, folder).result

    return run


BLOCKS = list(PRINTED.finditer(PAGE.read_text(encoding="utf-8")))
LONG = ("gpt3-175b", "qwen3-30b-a3b")
"""Whose searches and lists take long; a list of the others is of the same form."""


def test_the_page_shows_four_commands() -> None:
    assert len(BLOCKS) == 4


def is_long(block: re.Match[str]) -> bool:
    return "--explain" not in block[1] and any(f"--config {name} " in block[1] for name in LONG)


@pytest.mark.long
@pytest.mark.parametrize(
    "block",
    [further(block) if is_long(block) else block for block in BLOCKS],
    ids=lambda block: block[1].removeprefix("megatronish plan --config "),
)
def test_the_page_has_what_the_planner_prints(
    block: re.Match[str], session_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = shlex.split(block[1])[3]
    monkeypatch.setattr(Search, "run", found_before(name, session_folder))
    assert block[0] == printed(block), f"{block[1]} prints other text; python {Path(__file__).name} writes it"


if __name__ == "__main__":
    PAGE.write_text(PRINTED.sub(printed, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
