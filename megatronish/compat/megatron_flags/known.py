"""Record of a flag of Megatron-LM that is not a field here, and short ways to write many of them."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Status = Literal["means", "idle", "instead", "refused"]
"""means: fields of other names; idle: changes no number; instead: done otherwise, with a note; refused: an error."""

ANY = None  # a number of values that is not checked
GIVEN = "{}"  # in a setting's value: the value that the flag was given

Pairs = tuple[tuple[str, str], ...]
"""(field, value) pairs."""


class Known(NamedTuple):
    """Flag of Megatron-LM that is not a field."""

    status: Status
    text: str  # why it is idle, or what to do instead
    num_values: int | None = 0
    harmless: tuple[str, ...] = ()  # values that ask for what is done anyway
    settings: Pairs = ()  # fields that it means
    by_value: Mapping[str, Pairs] = {}  # fields that it means, by the value given
    yields: bool = False  # to a field that is set by its own flag
    replaces: str = ""  # value of its fields that `settings` replace, of a flag that is done otherwise
    family: str = ""  # name of the `Family` that it belongs to
    why_harmless: str = "it asks for what is done anyway"


def means(field: str, value: str) -> Known:
    """Switch that sets a field."""
    return Known("means", f"--{field.replace('_', '-')} {value}", settings=((field, value),))


def renamed(field: str) -> Known:
    """Flag whose value is the value of a field of another name."""
    return Known("means", f"--{field.replace('_', '-')}", 1, settings=((field, GIVEN),))


def by_value(text: str, values: Mapping[str, Pairs], *, harmless: tuple[str, ...] = ()) -> Known:
    """Flag that sets fields according to its value; any value that is not listed is refused with `text`."""
    return Known("means", text, 1, harmless, by_value=values)


def idle(text: str, num_values: int | None = 0) -> Known:
    """Flag that changes no number of a run here."""
    return Known("idle", text, num_values)


def instead(text: str, num_values: int | None = 0, harmless: tuple[str, ...] = ()) -> Known:
    """Flag in whose place something else is done, more exactly than asked; the run says so in a line of its own."""
    return Known("instead", text, num_values, harmless)


def refused(text: str, num_values: int | None = 0, harmless: tuple[str, ...] = ()) -> Known:
    """Flag that would change what is computed, and is not there."""
    return Known("refused", text, num_values, harmless)


def all_idle(text: str, *, switches: str = "", valued: str = "", lists: str = "") -> dict[str, Known]:
    """Flags with one reason to be idle: names of those without a value, with one, and with any number of values."""
    return {
        **dict.fromkeys(switches.split(), idle(text)),
        **dict.fromkeys(valued.split(), idle(text, 1)),
        **dict.fromkeys(lists.split(), idle(text, ANY)),
    }


def negation(known: Known) -> Known | None:
    """What --no-FLAG says, for a switch; None where it says nothing."""
    if known.num_values != 0:
        return None
    if known.status == "means":
        flipped = {"true": "false", "false": "true"}
        if not all(value in flipped for _, value in known.settings):
            return idle("it is off unless it is asked for")
        settings = tuple((field, flipped[value]) for field, value in known.settings)
        return known._replace(settings=settings, text=" ".join(f"--{f.replace('_', '-')} {v}" for f, v in settings))
    return known if known.status == "idle" else idle("it is off in any case")
