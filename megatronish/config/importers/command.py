"""Command line of the importers: a config of another framework in, TOML out."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatronish.config.arguments import read_arguments
from megatronish.config.importers.axolotl import from_axolotl
from megatronish.config.importers.deepspeed import from_deepspeed
from megatronish.config.importers.imported import read_json, read_yaml
from megatronish.config.marks import at_least
from megatronish.errors import UserError

Framework = Literal["deepspeed", "axolotl"]


@dataclass(frozen=True)
class ImportArguments:
    """Write a config of another framework as TOML, with a list of what has no counterpart."""

    config: tyro.conf.Positional[Path]
    """Its file: ds_config.json of DeepSpeed, config.yml of Axolotl."""
    output: Path | None = None
    """TOML file to write. Derived: standard output."""
    dp: Annotated[int | None, at_least(1)] = None
    """Data-parallel size: the global batch is the micro-batch times the accumulation steps times this."""


def run_importer(framework: Framework, argv: Sequence[str]) -> int:
    """Run the importer of a framework; the exit status."""
    try:
        arguments = read_arguments(ImportArguments, argv, program=f"from_{framework}.py")
        text = import_config(framework, arguments.config, dp=arguments.dp)
        if arguments.output is None:
            print(text, end="")
        else:
            _write(arguments.output, text)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}; choose another") from error


def import_config(framework: Framework, path: Path, *, dp: int | None = None) -> str:
    """Text of a TOML file for --config; UserError if the file cannot be read."""
    text = _toml_of(framework, path, dp=dp)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{path} has half a surrogate pair, which is no text ({error.reason}); correct it") from error
    return text


def _toml_of(framework: Framework, path: Path, *, dp: int | None) -> str:
    values = read_json(path) if path.suffix == ".json" or framework == "deepspeed" else read_yaml(path)
    if framework == "deepspeed":
        return from_deepspeed(values, dp=dp).to_toml(path)
    return from_axolotl(values, folder=path.parent, dp=dp).to_toml(path)
