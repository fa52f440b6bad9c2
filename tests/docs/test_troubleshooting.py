"""Tests of docs/TROUBLESHOOTING.md: the messages it quotes are printed by the package."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from paths import ROOT

PAGE = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
VALUE = "\0"  # what stands for a placeholder of an f-string


def spelled(node: ast.Constant | ast.JoinedStr) -> str:
    """The text of a string, with `VALUE` in the place of each placeholder."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)


@cache
def package_strings() -> tuple[str, ...]:
    """Every string of the package."""
    found = []
    for path in sorted((ROOT / "megatronish").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                found.append(spelled(node))
    return tuple(found)


def is_printed(message: str) -> bool:
    """Whether one string of the package has the parts of `message` between `...`, in this order."""
    parts = [part for part in re.split(r"\.\.\.", message) if part.strip(" :;,=.")]
    pattern = ".*".join(re.escape(part.strip()) for part in parts)
    return any(re.search(pattern, text, re.DOTALL) for text in package_strings())


def symptoms() -> Iterator[str]:
    """The first cell of each row of the tables."""
    for line in PAGE.splitlines():
        if line.startswith("| ") and not line.startswith(("| symptom", "| ---")):
            yield re.split(r"(?<!\\)\|", line)[1]


QUOTED = sorted(
    {
        quoted
        for symptom in symptoms()
        for quoted in re.findall(r"`([^`]+)`", symptom)
        if (" " in quoted and not quoted.startswith("--")) or "..." in quoted
    }
)


def test_the_page_quotes_messages() -> None:
    assert len(QUOTED) > 40


@pytest.mark.long
@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_printed_by_the_package(message: str) -> None:
    assert is_printed(message), f"no string of the package has {message!r}; quote it as it is printed"


@pytest.mark.long
def test_a_message_that_nobody_prints_is_noticed() -> None:
    assert not is_printed("the run ... was eaten by a dragon")
