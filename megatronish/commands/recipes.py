"""Recipes for named models: a list of those that come with megatronish, and copies of them.

    megatronish recipes
    megatronish recipes --search qwen
    megatronish recipes --copy llama-3.1-8b/lora-1x24gb

A recipe is a config of a model of the hub, a task and a machine, with the memory that its fullest GPU needs. A command
takes one by its name, too: megatronish finetune --config llama-3.1-8b/lora-1x24gb.
"""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import read_arguments
from megatronish.config.shipped import shipped_recipes
from megatronish.core.errors import UserError
from megatronish.core.files import unwritten

FIRST = re.compile(r"# (?P<model>.+?), (?P<task>.+), (?P<machine>[^,]+ GPUs? of \d+ GB): (?P<hub>\S+)\n")
SECOND = re.compile(r"# (?P<layout>[^,]+), (?P<memory>[\d.]+) of (?P<size>\d+) GiB ")
COLUMNS = ("recipe", "model of the hub", "task", "machine", "layout", "GiB a GPU")


@dataclass(frozen=True)
class RecipesArguments:
    """List the recipes for named models, or copy one of them."""

    search: str = ""
    """List the recipes that have this text in their line."""
    copy: str | None = None
    """Copy this recipe, to be changed."""
    output: Path | None = None
    """File of the copy. By default the recipe's name in this folder: llama-3.1-8b-lora-1x24gb.toml."""


class Recipe(NamedTuple):
    """What the first lines of a recipe say."""

    name: str
    hub: str
    task: str
    machine: str
    layout: str
    memory: str


def main(argv: Sequence[str], *, program: str = "megatronish recipes") -> int:
    """Run the command; the exit status."""
    return exit_status(partial(_main, argv, program))


def _main(argv: Sequence[str], program: str) -> int:
    arguments = read_arguments(RecipesArguments, argv, program=program, description=__doc__)
    if arguments.copy is not None:
        print(copied(arguments.copy, arguments.output))
        return 0
    if arguments.output is not None:
        raise UserError(f"--output {arguments.output} is the file of a copy; name a recipe with --copy")
    lines = listed()
    chosen = [line for line in lines[1:] if arguments.search.lower() in line.lower()]
    if not chosen:
        raise UserError(f"--search {arguments.search} is in no recipe; leave it out to list all {len(lines) - 1}")
    print("\n".join([lines[0], *chosen]))
    return 0


def read_recipe(name: str, path: Path) -> Recipe:
    """The first lines of a recipe."""
    text = path.read_text(encoding="utf-8")
    first = FIRST.match(text)
    second = SECOND.search(text)
    assert first is not None and second is not None, f"{path} does not begin as a recipe"
    return Recipe(name, first["hub"], first["task"], first["machine"], second["layout"], second["memory"])


def recipes() -> list[Recipe]:
    """All recipes that come with megatronish."""
    return [read_recipe(name, path) for name, path in shipped_recipes().items()]


def listed() -> list[str]:
    """A line for each recipe, after that of the columns."""
    rows = [COLUMNS, *recipes()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def copied(name: str, output: Path | None) -> str:
    """Copy a recipe; what to do with the copy. UserError for an unknown one, or a file that exists."""
    path = shipped_recipes().get(name.removesuffix(".toml"))
    if path is None:
        raise UserError(f"--copy {name} is no recipe; megatronish recipes lists them")
    target = output or Path(f"{path.parent.name}-{path.name}")
    if target.exists():
        raise UserError(f"{target} exists and is not replaced; name another file with --output")
    try:
        shutil.copyfile(path, target)
    except OSError as error:
        raise unwritten(f"--output {target}", target, error) from error
    command = "pretrain" if path.name.startswith("pretrain") else "finetune"
    return f"{target}: change its data, then megatronish {command} --config {target}"
