"""Values of Megatron-LM's arguments, which come out of a pickle and may be anything: checked, and quoted in errors."""

from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from megatronish.config.fields import FIELDS
from megatronish.config.layer_pattern import LONGEST
from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError

LARGEST = 2**40  # elements of a tensor, more than any model has


def quote(value: Any) -> str:
    """Value of an argument as text for an error: a pickle may hold anything, of any length."""
    items = value if isinstance(value, list | tuple) and len(value) <= 4 else [value]
    if not all(item is None or isinstance(item, bool | int | float | str) for item in items):
        return "no number or word"
    if any(isinstance(item, int) and abs(item) >= 2**63 for item in items):
        return "beyond 64 bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def value_of(args: Mapping[str, Any], name: str) -> Any:
    """Value of an argument in the type of our field; UserError for another type or a number out of range."""
    value: Any = args.get(name)
    hint = get_type_hints(ModelConfig)[name]
    kinds = get_args(hint) or (hint,)
    if float in kinds and type(value) is int and abs(value) < 2**63:
        return float(value)
    if value is None or (type(value) not in kinds and value not in kinds):
        raise UserError(f"its argument {name} is {quote(value)}, which is not possible")
    if int in kinds and not 0 < value < 2**63:
        raise UserError(f"its argument {name} is {quote(value)}, and must be at least 1, in 64 bits")
    for bound in FIELDS[name].ranges:
        if isinstance(value, int) and bound.is_maximum and not bound.holds(value):
            raise UserError(f"its argument {name} is {value}, and {bound.rule}")
    return value


def is_on(args: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    return bool(args.get(name, default))


def pattern_of(args: Mapping[str, Any], name: str) -> str | None:
    """Pattern of layers: a number or a list there, a text here."""
    value = args.get(name)
    if not value:  # 0 is none, too
        return None
    numbers = value if isinstance(value, list | tuple) else [value]
    if len(numbers) > LONGEST or any(type(number) not in (int, bool) for number in numbers):
        raise UserError(f"its argument {name} is {quote(value)}; a number or a list of 0 and 1 is known here")
    return str([int(number) for number in numbers]) if isinstance(value, list | tuple) else str(value)
