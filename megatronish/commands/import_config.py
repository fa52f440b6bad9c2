"""Configs of other frameworks as TOML: the commands from-axolotl, from-deepspeed and from-accelerate.

megatronish from-axolotl config.yml --dp 8 --output mine.toml
megatronish pretrain --config mine.toml --dry-run
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatronish.compat.importers.accelerate import from_accelerate
from megatronish.compat.importers.axolotl import from_axolotl
from megatronish.compat.importers.deepspeed import from_deepspeed
from megatronish.compat.importers.imported import Imported
from megatronish.compat.importers.values import read_object
from megatronish.config.arguments import read_arguments
from megatronish.config.marks import at_least, at_most
from megatronish.core.files import AtomicFile, refuse_input_as_output, unwritten

Framework = Literal["deepspeed", "axolotl", "accelerate"]


@dataclass(frozen=True)
class ImportArguments:
    """Write a config of another framework as TOML, with a list of what has no counterpart."""

    config: tyro.conf.Positional[Path]
    """Its file: config.yml of Axolotl, ds_config.json of DeepSpeed, default_config.yaml of Accelerate."""
    output: Path | None = None
    """TOML file to write. Derived: standard output."""
    dp: Annotated[int | None, at_least(1), at_most(100_000)] = None
    """Data-parallel size: the global batch is the micro-batch times the accumulation steps times this. Derived: 1."""


def run_importer(framework: Framework, argv: Sequence[str], *, program: str) -> int:
    """Run the importer of a framework; the exit status. What trains otherwise than there is said on stderr, too."""
    arguments = read_arguments(ImportArguments, argv, program=program)
    settings = imported(framework, arguments.config, dp=arguments.dp)
    text = settings.to_toml(arguments.config)
    refuse_input_as_output("--output", arguments.output, [arguments.config])
    for line in settings.warnings():
        print(line, file=sys.stderr)
    if arguments.output is None:
        print(text, end="")
    else:
        _write(arguments.output, text)
    return 0


def _write(output: Path, text: str) -> None:
    try:
        if output.exists() and not output.is_file():  # a pipe, /dev/stdout
            output.write_text(text, encoding="utf-8")
            return
        with AtomicFile(output) as whole:
            whole.file.write(text.encode())
    except OSError as error:
        raise unwritten(f"--output {output}", output, error) from error


def import_config(framework: Framework, path: Path, *, dp: int | None = None) -> str:
    """Text of a TOML file for --config; UserError if the file cannot be read."""
    return imported(framework, path, dp=dp).to_toml(path)


def imported(framework: Framework, path: Path, *, dp: int | None = None) -> Imported:
    """Settings of a file of another framework; UserError if it cannot be read."""
    values = read_object(path, is_yaml=path.suffix != ".json" and framework != "deepspeed")
    if framework == "deepspeed":
        settings = from_deepspeed(values, dp=dp)
    else:
        read = from_axolotl if framework == "axolotl" else from_accelerate
        settings = read(values, folder=path.parent, dp=dp)
    settings.refuse_out_of_range()
    return settings


main_axolotl, main_deepspeed, main_accelerate = (
    partial(run_importer, framework) for framework in ("axolotl", "deepspeed", "accelerate")
)
