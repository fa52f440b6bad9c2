"""Config of another framework as settings of this one, with a reason for each key that is not carried over.

Keys, values and names of files are of others. They reach the TOML through its one writer, which escapes them and reads
the text again (config/dump.py); section [plugins], which names code that runs, is never written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatronish.config.config import Config
from megatronish.config.conflicts import CONFLICTS
from megatronish.config.dump import write_toml
from megatronish.config.fields import FIELDS, SECTIONS
from megatronish.config.rules.model import SIGHT_RULES
from megatronish.config.rules.optimizer import LENGTH_RULES, RATE_RULES
from megatronish.core.errors import UserError, without_passwords
from megatronish.core.foreign import is_finite, shown

NEVER = "plugins"
"""Section that no importer may set: what it names is run."""


class Imported:
    """Settings by field, keys that are not carried over, and what will train otherwise than there, with reasons.

    `key_of` has the whole path of the key, or keys, in the file that a setting is from.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.key_of: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.otherwise: dict[str, str] = {}

    def set(self, field: str, value: Any, *, key: str | None = None) -> None:
        """Set a field, from a key of the file. A whole number that the other format writes as 5e8 becomes one."""
        assert FIELDS[field].section != NEVER, f"an importer sets {field}, which runs code"
        parts = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(part, int | float) and not isinstance(part, bool) and not is_finite(part) for part in parts):
            raise UserError(f"{shown(key or field)}={shown(value)} must be finite; correct the file")
        if any(isinstance(part, str) and without_passwords(part) != part for part in parts):
            self.warn(key or field, f"it has a password, which no file of a run holds; give it as {FIELDS[field].flag}")
            return
        self.key_of.pop(field, None)
        if key is not None:
            self.key_of[field] = key
        wants_int = FIELDS[field].type is int
        self.settings[field] = int(value) if wants_int and isinstance(value, float) and value.is_integer() else value

    def refuse_out_of_range(self) -> None:
        """UserError for a value that no run takes, with the name of its key."""
        for name, value in self.settings.items():
            field, key = FIELDS[name], shown(self.key_of.get(name, name))
            if not field.allows(value):
                raise UserError(f"{key}={shown(value)} must be {field.wants}; correct the file")
            if isinstance(value, int | float) and (bound := field.broken_range(value)) is not None:
                raise UserError(f"{key}={shown(value)} {bound.rule}; correct the file")

    def complaints(self) -> list[str]:
        """What a run will complain about: settings of the file that contradict each other."""
        asked = {name: value for name, value in self.settings.items() if value != FIELDS[name].default}
        config, contradictions = Config().with_fields(**self.settings), []
        for one, other, rule, _ in CONFLICTS:
            pair = [next((name for name in names if name in asked), None) for names in (one, other)]
            if pair[0] is not None and pair[1] is not None:
                contradictions.append(f"{pair[0]} contradicts {pair[1]}: {rule}")
        rules = (*LENGTH_RULES, *RATE_RULES, *SIGHT_RULES)
        return contradictions + list(filter(None, (rule.complaint(config) for rule in rules)))

    def set_default(self, field: str, value: Any) -> None:
        """Set a field that nothing has set: what the absence of its key means there, and not here."""
        if field not in self.settings:
            self.set(field, value)

    def set_grad_scaler(self) -> None:
        """fp16 with the loss scale of torch's GradScaler, which Accelerate and the Trainer of transformers use."""
        for field, value in {
            "fp16": True,
            "initial_loss_scale": 65536.0,
            "loss_scale_window": 2000,
            "hysteresis": 1,
        }.items():
            self.set(field, value)

    def leave_out(self, key: str, reason: str) -> None:
        """List a key as not carried over."""
        self.left_out[key] = reason

    def warn(self, key: str, reason: str) -> None:
        """List a key by which the run trains otherwise than there; it is also said when the file is imported."""
        self.otherwise[key] = reason

    def to_toml(self, source: Path) -> str:
        """Text of a TOML file for --config, with the keys that are not carried over as comments at its end."""
        tables: dict[str, dict[str, Any]] = {}
        for section in SECTIONS:
            own = {name: value for name, value in self.settings.items() if FIELDS[name].section == section}
            if own and section != NEVER:
                tables[section] = own
        name = without_passwords(source.name)
        before = [f"From {name}. Check it with: megatronish pretrain --config THIS_FILE --dry-run"]
        before += ["", *said] if (said := self.warnings()) else []
        after = [f"Not carried over from {name}:"] if self.left_out else []
        after += [f"  {_line(key, reason)}" for key, reason in self.left_out.items()]
        return write_toml(tables, before=before, after=after)

    def warnings(self) -> list[str]:
        """A line for each key by which the run trains otherwise than there, and for what no run takes as it is."""
        otherwise = [f"NOT AS THERE: {_line(key, reason)}" for key, reason in self.otherwise.items()]
        return otherwise + [f"TO CORRECT: {complaint}" for complaint in self.complaints()]


def _line(key: str, reason: str) -> str:
    return f"{shown(without_passwords(key), most=100)}: {shown(without_passwords(reason), most=250)}"


class Rule(NamedTuple):
    """Fate of a key: its value is the value of `field`, or it is left out for a reason.

    Without what the key asks for, another model is trained where `changes`.
    """

    field: str | None
    reason: str = ""
    changes: bool = False


def field(name: str) -> Rule:
    """Key whose value is a field's value."""
    return Rule(name)


def dropped(reason: str) -> Rule:
    """Key that is not carried over."""
    return Rule(None, reason)


def missed(reason: str) -> Rule:
    """Key that is not carried over, without which another model is trained."""
    return Rule(None, reason, changes=True)


AUTO = "auto is filled in by the program that starts the run; give the value here"
UNKNOWN = "it is not known here"
SPEED = dropped("it changes speed and memory alone")
NOT_THERE = missed("it is not there")
NO_SUCH_RECORD = dropped("it is not there, and changes no number")


def apply(found: Imported, values: Mapping[str, Any], rules: Mapping[str, Rule], *, within: str = "") -> None:
    """Apply one rule a key; keys without a rule are listed, too. Empty values say nothing."""
    for key, value in values.items():
        rule, name = rules.get(key, Rule(None, UNKNOWN)), f"{within}{key}"
        if value is None or value in ("", [], {}):
            continue
        if rule.field is None:
            asked = value.get("enabled") if isinstance(value, dict) else value
            is_off = asked is False
            if asked == "auto" and rule.changes:
                found.leave_out(name, AUTO)
            elif rule.changes and not is_off and value != 0:
                found.warn(name, rule.reason)
            elif not rule.changes and (not is_off or rule.reason == UNKNOWN):
                found.leave_out(name, rule.reason)
        elif value == "auto":
            found.leave_out(name, f"{AUTO}, as {FIELDS[rule.field].flag}")
        elif not _fits(value, FIELDS[rule.field].type):
            raise UserError(f"{shown(name)}={shown(value)} must be {FIELDS[rule.field].wants}; correct the file")
        else:
            found.set(rule.field, value, key=name)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value is of a field's type; a number may be written as 5e8 where a whole one is wanted."""
    if wanted in (bool, str):
        return isinstance(value, wanted)
    if wanted in (int, float):
        return is_finite(value) and (wanted is float or float(value).is_integer())
    return not isinstance(value, dict | list | bool)
