"""Tests of the arguments of commands: each wrong flag is a sentence, all of them together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from megatronish.config.arguments import read_arguments
from megatronish.core.errors import UserError


@dataclass(frozen=True)
class Painting:
    """Arguments of a command that paints."""

    walls: tuple[str, ...]
    tint: Annotated[str, tyro.conf.arg(name="colour")]
    layers: Annotated[int, tyro.conf.arg(aliases=["-n", "--coats"])] = 2
    gloss: float = 0.5
    brush: Literal["flat", "round"] = "flat"
    dry: bool = False


@dataclass(frozen=True)
class Framing:
    """Arguments of a command that takes a file without a flag."""

    picture: tyro.conf.Positional[Path]
    width: int | None = None


def told(kind: type[object], argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        read_arguments(kind, argv.split(" "), program="paint")
    *problems, last = str(caught.value).splitlines()
    return [*problems, last.removesuffix(" (paint --help lists the flags)")]


def test_good_arguments_are_read() -> None:
    argv = "--walls a b --colour red --coats 3 --gloss=1 --brush round --dry"
    assert read_arguments(Painting, argv.split(), program="paint") == Painting(("a", "b"), "red", 3, 1.0, "round", True)
    assert read_arguments(Framing, ["x.png", "--width", "3"], program="frame") == Framing(Path("x.png"), 3)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--gloss abc", "--gloss abc must be a number such as 0.1"),
        ("--gloss=", "--gloss '' must be a number such as 0.1"),
        ("--gloss", "--gloss must be a number such as 0.1"),
        ("--coats two", "--coats two must be a whole number such as 4"),
        ("--brush thin", "--brush thin must be one of flat or round"),
        ("--dry yes", "--dry yes: --dry takes no value; leave yes out"),
        ("--glos 1", "--glos is not a flag; did you mean --gloss?"),
        ("--frobnicate", "--frobnicate is not a flag"),
    ],
)
def test_a_wrong_flag_is_one_sentence(argv: str, sentence: str) -> None:
    assert told(Painting, f"--walls a --colour red {argv}") == [sentence]


def test_all_wrong_flags_are_told_together_with_those_that_are_missing() -> None:
    assert told(Painting, "stray --layers x --brush thin") == [
        "stray belongs to no flag; flags start with --",
        "--layers x must be a whole number such as 4",
        "--brush thin must be one of flat or round",
        "--walls and --colour are not given",
    ]
    assert told(Painting, "--walls a --dry --no-dry") == ["--colour is not given"]
    assert told(Framing, "--width x") == ["--width x must be a whole number such as 4", "PICTURE is not given"]
    assert told(Framing, "--width x a.png") == ["--width x must be a whole number such as 4"]


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_arguments(Painting, ["--help"], program="paint", description="Paints.")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "usage: paint" in out
    assert "Paints." in out
