"""Tests of docs/PLANNER.md: what it says that the planner prints is what it prints.

`python tests/estimate/test_planner_page.py` writes the page again.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path

from megatronish.commands.plan import main

PAGE = Path(__file__).parents[2] / "docs" / "PLANNER.md"
PRINTED = re.compile(r"```sh\n(megatronish plan [^\n]*)\n```\n\n```text\n(.*?)```", re.DOTALL)


def printed(found: re.Match[str]) -> str:
    """A block of the page with what its command prints now."""
    _, _, *words = shlex.split(found[1])
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(words, program="megatronish plan") == 0
    return f"```sh\n{found[1]}\n```\n\n```text\n{output.getvalue()}```"


def test_the_page_has_what_the_planner_prints() -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = list(PRINTED.finditer(page))
    assert len(blocks) == 4
    for block in blocks:
        assert block[0] == printed(block), f"{block[1]} prints other text; python {Path(__file__).name} writes it"


if __name__ == "__main__":
    PAGE.write_text(PRINTED.sub(printed, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
