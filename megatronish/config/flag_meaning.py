"""Meaning of a flag, or of a key read like a flag: settings of fields, notes, and problems."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from megatronish.compat.megatron_flags.families import FAMILIES, GIVEN, Known, Pairs, Status
from megatronish.compat.megatron_flags.table import known_flag
from megatronish.compat.megatron_flags.values import (
    NOTED_VALUES,
    REFUSED_LISTS,
    REFUSED_VALUES,
    SEVERAL_SETTINGS,
    VALUES,
)
from megatronish.config.data_lists import DATA_LISTS, Lists
from megatronish.config.fields import ALIASES, FIELDS, VERBATIM
from megatronish.config.suggest import nearest_name, unknown


class Setting(NamedTuple):
    """Field that the user set. `spelled` is the setting as written: "--tp 2" or "[parallel] tp = 2"."""

    field: str
    values: tuple[str, ...]
    spelled: str
    typed: bool


class Recognised(NamedTuple):
    """Flag of Megatron-LM that is no field, as written."""

    known: Known
    values: tuple[str, ...]
    spelled: str

    @property
    def is_harmless(self) -> bool:
        """Whether the flag asks for what is done anyway."""
        return bool(self.values) and set(self.values) <= set(self.known.harmless)

    @property
    def status(self) -> Status:
        """What becomes of the flag with these values."""
        return "idle" if self.is_harmless else self.known.status

    @property
    def text(self) -> str:
        """Reason, and remedy, of what becomes of the flag."""
        return self.known.why_harmless if self.is_harmless else self.known.text


class Settings(NamedTuple):
    """Settings of one source, with notes and problems. `yielding` are settings for fields that are not set otherwise.

    `recognised` are flags that are no fields; `report` turns them into notes and problems.
    """

    settings: list[Setting]
    notes: list[str]
    problems: list[str]
    invalid: set[str]  # fields with a problem, which need no further complaint
    yielding: list[Setting]
    recognised: list[Recognised]

    @classmethod
    def empty(cls) -> "Settings":
        """Settings of a source that says nothing."""
        return cls([], [], [], set(), [], [])


def understand(
    found: Settings, *, name: str, values: tuple[str, ...], spelled: str, typed: bool, is_mock: bool = False
) -> None:
    """Add what a flag (or a key, read like a flag) leads to. `is_mock`: made-up tokens stand in for files."""
    # 1. Spelling: an alias, or the field's own name with dashes. Quotation marks are left over where a script quotes
    # twice; fields of free text keep theirs.
    field = ALIASES.get(name, name.replace("-", "_"))
    negated = field.removeprefix("no_")
    if typed and field not in VERBATIM:
        values = tuple(map(_without_quotes, values))
    # 2. In this order, from our own to Megatron-LM's: lists of data sets, fields, switches turned off, flags that are
    # no fields. Only what is in no table is unknown.
    if name in DATA_LISTS and is_mock:
        found.notes.append(f"{spelled} is idle by --mock-data: made-up tokens stand in for files")
    elif name in DATA_LISTS:
        _read_list(found, DATA_LISTS[name].read, values=values, spelled=spelled, typed=typed)
    elif field in FIELDS:
        _set_field(found, field, values=values, spelled=spelled, typed=typed)
    elif field != negated and negated in FIELDS and FIELDS[negated].type is bool and not values:
        found.settings.append(Setting(negated, ("false",), spelled, typed))
    elif (known := known_flag(name)) is not None:
        _use(found, Recognised(known, values, spelled), typed=typed)
    else:
        found.problems.append(unknown(name, spelled=spelled, typed=typed))
        _suppose(found, name, values=values, spelled=spelled, typed=typed)


def _suppose(found: Settings, name: str, *, values: tuple[str, ...], spelled: str, typed: bool) -> None:
    """Take a misspelled flag for the one that was meant, where nothing else sets it: it has its complaint already.

    Else complaints that follow from its absence would hide what is to be corrected.
    """
    # The complaint about the spelling stands already: this only keeps further complaints away, so it yields to any
    # setting that is really there.
    nearest = nearest_name(name)
    if nearest is None or nearest in ("config", "help"):
        return
    meant = Settings.empty()
    understand(meant, name=nearest, values=values, spelled=spelled, typed=typed)
    found.yielding.extend([*meant.settings, *meant.yielding])


def report(found: Settings) -> Settings:
    """Add notes and problems about all recognised flags, those with one reason together; settings that they replace."""
    # 1. What is done otherwise may set fields. Only now, when all flags are known, as it replaces one value of a field
    # and no other.
    for flag in found.recognised:
        if flag.status == "instead" and flag.known.settings:
            _replace(found, flag)
    # 2. A feature that is refused has options of its own in most scripts. They join the reason of the feature, so that
    # one line says it once; if it is not switched on, each has a reason of its own.
    switched_on = {
        flag.known.family
        for flag in found.recognised
        if flag.known.family and flag.status in ("refused", "instead") and not flag.is_harmless
    }
    texts = {family.title: (family.status, family.text) for family in FAMILIES}
    groups: dict[tuple[str, str], list[str]] = {}
    for flag in found.recognised:
        known = flag.known
        key = texts[known.family] if known.family in switched_on else (flag.status, flag.text)
        groups.setdefault(key, []).append(flag.spelled)
    # 3. Idle flags are many in a script of Megatron-LM: with one reason it is said, with several only their names.
    idle = {text: spelled for (status, text), spelled in groups.items() if status == "idle"}
    if len(idle) == 1:
        ((text, spelled),) = idle.items()
        found.notes.append(f"{_are(spelled)} idle: {text}")
    elif idle:
        names = [name for spelled in idle.values() for name in spelled]
        found.notes.append(
            f"{len(names)} settings are idle, as no number of the run depends on them here: {', '.join(names)} "
            f"(docs/FLAGS.md has the reasons)"
        )
    # 4. What trains otherwise is a note that stands out; what is refused ends the start.
    for (status, text), spelled in groups.items():
        if status == "instead":
            found.notes.append(f"NOT AS ASKED: {', '.join(spelled)}: {text}")
        elif status == "refused":
            found.problems.append(f"{_are(spelled)} refused: {text}")
    return found


def _replace(found: Settings, flag: Recognised) -> None:
    """Put the settings of a flag that is done otherwise in the place of the value that they replace, or of none."""
    for field, value in flag.known.settings:
        # Only the value that the flag replaces is removed: a field that was set to another one keeps it.
        found.settings[:] = [
            setting for setting in found.settings if (setting.field, setting.values) != (field, (flag.known.replaces,))
        ]
        if all(setting.field != field for setting in found.settings):
            found.settings.append(Setting(field, (value,), flag.spelled, flag.spelled.startswith("--")))


def _are(spelled: list[str]) -> str:
    return f"{', '.join(spelled)} {'is' if len(spelled) == 1 else 'are'}"


def _without_quotes(value: str) -> str:
    """Value without one pair of quotation marks around it, as a script that quotes twice leaves them."""
    inside = re.fullmatch(r"(['\"])(.*)\1", value, re.DOTALL)
    return inside[2] if inside else value


def _set_field(found: Settings, field: str, *, values: tuple[str, ...], spelled: str, typed: bool) -> None:
    # 1. Values in our form: a switch without a value is on, and the pair of a window becomes a number.
    if FIELDS[field].type is bool:
        values = tuple(value.lower() for value in values) or ("true",)
    if field == "window_size":
        window = _window(found, values, spelled=spelled)
        if window is None:
            found.invalid.add(field)
            return
        values = window
    if FIELDS[field].is_list_of_names:  # in quotation marks, or with commas
        values = tuple(word for value in values for word in value.replace(",", " ").split())
    # 2. Values that are Megatron-LM's alone. A refused one is no setting, and the field is invalid: no rule may
    # complain about its default.
    refusals = [REFUSED_VALUES[field, value] for value in values if (field, value) in REFUSED_VALUES]
    if len(values) > 1 and field in REFUSED_LISTS:
        refusals.append(REFUSED_LISTS[field])
    if refusals:
        found.problems.append(f"{spelled} is refused: {'; '.join(refusals)}")
        found.invalid.add(field)
        return
    # 3. Ours: one value there may be several fields here, or the same under another name.
    several = SEVERAL_SETTINGS.get((field, " ".join(values)), ())
    if several:
        found.settings.extend(Setting(name, (value,), spelled, typed) for name, value in several)
        return
    ours = tuple(VALUES.get(field, {}).get(value, value) for value in values)
    found.notes.extend(
        f"{spelled} is computed as {' '.join(ours)}: {NOTED_VALUES[field, value]}"
        for value in values
        if (field, value) in NOTED_VALUES
    )
    found.settings.append(Setting(field, ours, spelled, typed))


def _window(found: Settings, values: tuple[str, ...], *, spelled: str) -> tuple[str, ...] | None:
    """Megatron-LM's (tokens before, tokens after) as the number of visible tokens; None with a complaint."""
    pair = re.fullmatch(r"\(?\s*(-?\d+)\s*[, ]\s*(-?\d+)\s*\)?", " ".join(values))
    if pair is None:
        return values
    # -1 is no limit, there. A causal mask has no tokens after, so `after` is 0, or -1 where both sides have no limit.
    before, after = int(pair[1]), int(pair[2])
    if after not in (0, -1) or before < -1 or (after == -1 and before != -1):
        count = "all" if after == -1 else after
        found.problems.append(
            f"{spelled} lets a token see {count} tokens after itself, and a GPT sees none; use --window-size {before},0"
        )
        return None
    # Megatron-LM does not count the token itself, our window does.
    return ("None",) if before == -1 else (str(before + 1),)


def _read_list(
    found: Settings,
    read: Callable[[str], Lists],
    *,
    values: tuple[str, ...],
    spelled: str,
    typed: bool,
) -> None:
    """Add the settings of data sets that a file, or a text, lists."""
    if not values:
        found.problems.append(f"{spelled} must have a value; it has none")
        return
    try:
        lists = read(" ".join(values))
    except ValueError as error:
        found.problems.append(f"{spelled}: {error}")
        return
    found.settings.extend(Setting(field, words, spelled, typed) for field, words in lists)


def _use(found: Settings, flag: Recognised, *, typed: bool) -> None:
    known, values = flag.known, flag.values
    expects, number = known.num_values, len(values)
    # A refused flag is refused with any number of values; for every other a wrong number is an error, also where it is
    # idle.
    if known.status != "refused" and expects is not None and number != expects:
        found.problems.append(f"{flag.spelled} must have {expects or 'no'} value; it has {number}")
    elif known.status != "means" or flag.is_harmless:
        found.recognised.append(flag)
    elif known.by_value and values[0] not in known.by_value:
        found.problems.append(f"{flag.spelled} is refused: {known.text}")
    else:
        pairs = known.by_value[values[0]] if known.by_value else known.settings
        into = found.yielding if known.yields else found.settings
        if known.note:
            found.notes.append(f"{flag.spelled} is {known.text}: {known.note}")
        # A kind that is named counts before one that follows from a number: of those that yield the first one counts.
        place = 0 if known.yields and known.by_value else len(into)
        into[place:place] = _settings(pairs, flag, typed=typed)


def _settings(pairs: Pairs, flag: Recognised, *, typed: bool) -> Iterable[Setting]:
    for field, value in pairs:
        given = flag.values[0] if value == GIVEN else value
        values = tuple(given.split()) if FIELDS[field].is_list_of_names else (given,)
        yield Setting(field, values, flag.spelled, typed)
