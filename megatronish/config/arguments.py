"""Arguments of a command: its flags read into a dataclass, and a sentence for each flag that is wrong or missing."""

import contextlib
import dataclasses
import difflib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_origin

import tyro

from megatronish.config.fields import Field, fields_of
from megatronish.config.settings import HELP, flags_of
from megatronish.core.errors import UserError

PluginNames = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
"""Plug-ins to import, which runs their code: modules (my.module) or files (FILE.py). See docs/PLUGINS.md."""

Arguments = TypeVar("Arguments")


def read_arguments(
    kind: type[Arguments], argv: Sequence[str], *, program: str, description: str | None = None
) -> Arguments:
    """Arguments of class `kind`. Prints and exits 0 on --help; UserError with all problems of `argv` together."""
    wants_help = any(word in HELP for word in argv)
    try:
        if wants_help:
            return tyro.cli(kind, args=argv, prog=program, description=description)
        # An error is printed in spite of console_outputs.
        with contextlib.redirect_stderr(io.StringIO()) as said:
            arguments = tyro.cli(kind, args=argv, prog=program, console_outputs=False)
    except SystemExit as ending:
        if wants_help:
            raise
        problems = [*_problems(kind, argv)] or [said.getvalue() or f"the flags cannot be read ({ending})"]
    else:
        problems = [*_out_of_range(kind, arguments)]
        if not problems:
            return arguments
    raise UserError("\n".join([*problems[:-1], f"{problems[-1]} ({program} --help lists the flags)"])) from None


def _out_of_range(kind: type[Any], arguments: object) -> Iterator[str]:
    """What is wrong with numbers whose flags have a range."""
    for name, field in fields_of(kind).items():
        value = getattr(arguments, name)
        if value is not None and (bound := field.broken_range(value)) is not None:
            yield f"{field.flag} {value} {bound.rule}"


def _problems(kind: type[Any], argv: Sequence[str]) -> Iterator[str]:
    """What is wrong with each flag by itself, and which flags are missing."""
    fields = fields_of(kind)
    by_flag = {flag: field for field in fields.values() for flag in _flags(field)}
    positional = {name for name, each in fields.items() if _is_positional(each)}
    given = set[str]()
    for flag, values in flags_of(argv):
        field = by_flag.get(flag.replace("_", "-"))
        if field is not None:
            given.add(field.name)
        if positional and len(values) > 1 and field is not None and get_origin(field.type) is not tuple:
            given |= positional
            values = values[:1]
        if not flag and positional:  # words in front of all flags
            given |= positional
        elif not flag:
            yield f"{' '.join(values)} belongs to no flag; flags start with --"
        elif field is None:
            yield f"{flag} is not a flag{_meant(flag, by_flag)}"
        elif field.type is bool:  # by itself it always fits; a class of it alone would have it take a value
            if values:
                yield f"{flag} {' '.join(values)}: {flag} takes no value; leave {' '.join(values)} out"
        elif not _fits(field, flag, values):
            yield f"{flag} {' '.join(value or repr('') for value in values)}".rstrip() + f" must be {field.wants}"
    missing = [_flags(field)[0] for name, field in fields.items() if _is_required(field) and name not in given]
    if missing:
        yield f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given"


def _flags(field: Field) -> list[str]:
    """Flags of a field, the main one first; the name alone of one that is given without a flag."""
    if _is_positional(field):
        return [field.name.upper()]
    name = next((f"--{mark.name}" for mark in field.marks if getattr(mark, "name", None)), field.flag)
    return [name, *field.aliases, *([f"--no-{name[2:]}"] if field.type is bool else [])]


def _is_positional(field: Field) -> bool:
    return any("Positional" in repr(mark) for mark in field.marks)


def _is_required(field: Field) -> bool:
    return field.default is dataclasses.MISSING


def _meant(flag: str, known: Mapping[str, Field]) -> str:
    nearest = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _fits(field: Field, flag: str, values: Sequence[str]) -> bool:
    """Whether a flag of a class with no other field can be read."""
    alone = dataclasses.make_dataclass("Alone", [(field.name, field.annotation)])
    words = [f"{flag}={values[0]}", *values[1:]] if values else [flag]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            tyro.cli(alone, args=words, console_outputs=False)
    except SystemExit:
        return False
    return True
