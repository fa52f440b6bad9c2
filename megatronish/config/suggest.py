"""Complaints about unknown flags and keys, with the known name that was meant where it is close."""

import difflib
from collections.abc import Iterable

from megatronish.config.fields import ALIASES, FIELDS
from megatronish.config.megatron_flags.table import KNOWN

CLOSE = 0.8  # of difflib's ratio; at 0.6, its default, num-experts is close to num-layers


def unknown(name: str, *, spelled: str, typed: bool) -> str:
    """Complaint about a flag, or a key, that is unknown."""
    positive = FIELDS.get(name.removeprefix("no-").replace("-", "_"))
    if typed and positive is not None and name.startswith("no-"):
        return f"{spelled.split()[0]} is not a flag: {positive.flag} is {positive.wants}, and has no off; leave it out"
    nearest = nearest_name(name)
    if typed:
        remedy = f"did you mean --{nearest}?" if nearest else "see --help"
        return f"{spelled.split()[0]} is not a flag; {remedy}"
    remedy = f"did you mean {nearest.replace('-', '_')}?" if nearest else "docs/FLAGS.md lists all"
    return f"{spelled.split(' = ')[0]} is not a key; {remedy}"


def nearest_name(name: str) -> str | None:
    """Known name that `name` is a misspelling of; None if none is close, or its words are others."""
    names = [*ALIASES, *(field.replace("_", "-") for field in FIELDS), *KNOWN, "config", "help"]
    close = difflib.get_close_matches(name, names, n=3, cutoff=CLOSE)
    return next((other for other in close if _same_family(name, other)), None)


def _same_family(name: str, other: str) -> bool:
    """Whether each word of the shorter name is a word of the other, or nearly one."""
    short, long = sorted((name.split("-"), other.split("-")), key=len)
    return all(difflib.get_close_matches(word, long, n=1, cutoff=0.6) for word in short)


def one_of_sections(section: str, sections: Iterable[str]) -> str:
    """Complaint about a section of a TOML file that does not exist."""
    nearest = difflib.get_close_matches(section, list(sections), n=1)
    remedy = f"did you mean [{nearest[0]}]?" if nearest else f"there are {', '.join(sections)}"
    return f"[{section}] is not a section; {remedy}"
