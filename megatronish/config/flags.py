"""Printer of docs/FLAGS.md: all fields, and all flags of Megatron-LM that are not fields.

`python -m megatronish.config.flags` prints the page, `python -m megatronish.config.flags --manual-gc ...` says of each
flag what becomes of it.
"""

import sys
from collections.abc import Sequence
from typing import get_type_hints

from megatronish.compat.megatron_flags.differences import DIFFERENCES, TRIED
from megatronish.compat.megatron_flags.families import FAMILIES, FAMILY_FLAGS, Family, Known
from megatronish.compat.megatron_flags.table import KNOWN, known_flag
from megatronish.config.config import Config
from megatronish.config.data_lists import DATA_LISTS
from megatronish.config.fields import ALIASES, FIELDS, Field
from megatronish.config.help import meanings
from megatronish.config.marks import REQUIRED
from megatronish.config.suggest import unknown

_TITLES = {
    "means": "## Other names",
    "idle": "## Accepted and idle",
    "instead": "## Done otherwise, which the run says",
    "refused": "## Refused",
}

_INTRODUCTION = """# Flags

Printed by `python -m megatronish.config.flags > docs/FLAGS.md`; a test checks that it is current.
`python -m megatronish.config.flags --manual-gc` prints what becomes of one flag.

A config is a TOML file (`--config FILE.toml`) with the sections below, and flags that override it. A flag
`--num-layers 12` is `num_layers = 12` in its section; `--num_layers` and `--num-layers=12` work too. Switches have both
forms, `--swiglu` and `--no-swiglu`. Names and meanings are Megatron-LM's where it has the flag. Of a flag that is given
several times the last counts, and a note says so: to change a launch script, add flags at its end.

Every flag of Megatron-LM is known. It works, here or under another name; or it is idle, because no number of a run
depends on it here (one line of the run lists these); or something else is done, more exactly than asked (fp8 is not
there yet: a line of the run begins with NOT AS ASKED); or it is refused, with the reason and a remedy. A flag that only
changes speed, memory, communication or logging never ends a run.
"""

_TRIED = """## Launch scripts tried

Uses of flags in real launch scripts and in Megatron-LM's own test configs, by what becomes of them. The tests carry the
names and values of these flags, and count them again.
"""

_FAMILIES = """## Families

Flags with one reason. Where a family has switches (in bold), its other flags are idle without a switch.
"""

_SHORT = {"means": "works", "idle": "idle", "instead": "done otherwise", "refused": "refused"}


def flags_markdown() -> str:
    """Text of the page docs/FLAGS.md."""
    parts = [_INTRODUCTION, _tried()]
    for section, section_type in get_type_hints(Config).items():
        texts = meanings(section_type)
        rows = [_field_row(field, texts[field.name]) for field in FIELDS.values() if field.section == section]
        parts.append(_table(f"## [{section}]", "flag | default | meaning", rows))
    differing = [f"`{FIELDS[name].flag}` | {text}" for name, text in DIFFERENCES.items()]
    parts.append(_table("## Where a flag differs from Megatron-LM", "flag | difference", differing))
    lists = [f"`--{name}` | {each.text}" for name, each in DATA_LISTS.items()]
    for status, title in _TITLES.items():
        head = "flag of Megatron-LM | " + ("is" if status == "means" else "because")
        rows = _reasons(status) + (lists if status == "means" else [])
        parts.append(_table(title, head, rows))
    rows = [f"{_members(family)} | {_SHORT[family.status]} | {family.text}" for family in FAMILIES]
    parts.append(_table(_FAMILIES, "flags | are | because", rows))
    return "\n".join(parts)


def statuses(flags: Sequence[tuple[str, Sequence[str]]]) -> list[str | None]:
    """What becomes of flags, (name, values) pairs of one command line.

    Each works, is idle, done otherwise or refused; None for an unknown flag. The flags of a family
    share the fate of its switch, where that is given.
    """
    known_flags = [known_flag(name) for name, _ in flags]
    own = [_status(name, values) for name, values in flags]
    switched = {
        known.family
        for known, status in zip(known_flags, own, strict=True)
        if known is not None and known.family and status in (_SHORT["refused"], _SHORT["instead"])
    }
    fates = {family.title: _SHORT[family.status] for family in FAMILIES if family.title in switched}
    return [
        fates.get(known.family, status) if known is not None and status != "works" else status
        for known, status in zip(known_flags, own, strict=True)
    ]


def _status(name: str, values: Sequence[str]) -> str | None:
    field = ALIASES.get(name, name.replace("-", "_"))
    if name in DATA_LISTS or field in FIELDS or (field.startswith("no_") and field.removeprefix("no_") in FIELDS):
        return "works"
    known = known_flag(name)
    if known is None:
        return None
    harmless = bool(values) and set(values) <= set(known.harmless)
    return _SHORT["idle" if harmless else known.status]


def describe(flag: str) -> str:
    """Line about one flag: what it is here, and why."""
    name = flag.lstrip("-").replace("_", "-")
    known = known_flag(name)
    if _status(name, ()) == "works" and known is None:
        field = ALIASES.get(name, name.replace("-", "_"))
        field = field if field in FIELDS else field.removeprefix("no_")
        section = f", in [{FIELDS[field].section}]" if field in FIELDS else ""
        return f"--{name} works{section}"
    if known is None:
        return unknown(name, spelled=f"--{name}", typed=True)
    fate = "means" if known.status == "means" else f"is {_SHORT[known.status]}:"
    return f"--{name} {fate} {_text(known)}"


def _text(known: Known) -> str:
    """Reason or meaning of a flag, with the values that have meanings of their own."""
    text = known.text
    if known.by_value:
        meanings = [
            f"{value}: {' '.join(f'--{name} {given}'.replace('_', '-') for name, given in pairs)}"
            for value, pairs in known.by_value.items()
        ]
        text = "; ".join([*meanings, f"else refused: {text}"])
    text = f"{text} (accepted with {', '.join(known.harmless)})" if any(known.harmless) else text
    return text.replace("|", "\\|")  # a bar ends a cell of the page's tables


def _tried() -> str:
    """Table of the launch scripts tried, with a sum of them."""
    head = "script | flags used | work | idle | done otherwise | refused | unknown"
    scripts = [each for each in TRIED if each.is_script]
    total = ("sum of these scripts", *(sum(column) for column in zip(*(each.counts for each in scripts), strict=True)))
    rows = [(each.name, *each.counts) for each in scripts]
    others = [(each.name, *each.counts) for each in TRIED if not each.is_script]
    return _table(_TRIED, head, [" | ".join(map(str, row)) for row in [*rows, total, *others]])


def _reasons(status: str) -> list[str]:
    """Rows of the flags outside of families with one status: those with one reason together."""
    groups: dict[str, list[str]] = {}
    for name, known in KNOWN.items():
        if known.status == status and name not in FAMILY_FLAGS:
            groups.setdefault(_text(known), []).append(f"`--{name}`")
    return [f"{' '.join(names)} | {text}" for text, names in groups.items()]


def _members(family: Family) -> str:
    """Flags of a family: its switches, then the others."""
    switches = [f"**`--{name}`**" for name in family.switches.split()]
    return " ".join([*switches, *(f"`--{name}`" for name in family.names.split())])


def _table(title: str, head: str, rows: list[str]) -> str:
    line = " | ".join("---" for _ in head.split(" | "))
    return "\n".join([title.rstrip("\n"), "", *(f"| {row} |" for row in [head, line, *rows]), ""])


def _field_row(field: Field, meaning: str) -> str:
    flag = " ".join(f"`{name}`" for name in (field.flag, *field.aliases))
    empty = field.default is None or field.default == () or REQUIRED in field.marks
    default = "" if empty else f"`{str(field.default).lower() if field.type is bool else field.default}`"
    values = f" ({field.wants.removeprefix('one of ')})" if field.choices else ""
    return f"{flag} | {default} | {' '.join(meaning.split())}{values}"


if __name__ == "__main__":
    print("\n".join(map(describe, sys.argv[1:])) + "\n" if sys.argv[1:] else flags_markdown(), end="")
