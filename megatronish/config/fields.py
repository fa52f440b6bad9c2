"""Table of all fields of a config: section, type, default, marks and aliases, read from the sections' classes."""

import dataclasses
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from megatronish.config.config import Config
from megatronish.config.marks import NamedIn, Range

SAMPLE_VALUES = {int: "a whole number such as 4", float: "a number such as 0.1", str: "a text", Path: "a path"}


class Field(NamedTuple):
    """Field of a section. `type` is the bare type of its `annotation`, without Annotated and None."""

    name: str
    section: str
    annotation: Any
    type: Any
    default: Any
    marks: tuple[Any, ...]

    @property
    def flag(self) -> str:
        """Flag of the command line, --num-layers."""
        return "--" + self.name.replace("_", "-")

    @property
    def aliases(self) -> tuple[str, ...]:
        """Shorter flags of the command line, such as --tp."""
        return tuple(alias for mark in self.marks for alias in getattr(mark, "aliases", None) or ())

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Bounds on a number, minimum first."""
        return tuple(mark for mark in self.marks if isinstance(mark, Range))

    def broken_range(self, value: float) -> Range | None:
        """The bound that a number breaks, of two the last; None if it is in its range."""
        return next((bound for bound in reversed(self.ranges) if not bound.holds(value)), None)

    @property
    def choices(self) -> tuple[Any, ...]:
        """Values of a field, or of a list, that has only a few; empty for a field that takes any value of its type."""
        tables = [mark.table for mark in self.marks if isinstance(mark, NamedIn)]
        kind = get_args(self.type)[0] if get_origin(self.type) is tuple else self.type
        return get_args(kind) if get_origin(kind) is Literal else tuple(*tables)

    @property
    def is_list_of_names(self) -> bool:
        """Whether it takes several of its choices."""
        return get_origin(self.type) is tuple and bool(self.choices)

    @property
    def is_extensible(self) -> bool:
        """Whether the choices are the names of a table, to which plug-ins add."""
        return any(isinstance(mark, NamedIn) for mark in self.marks)

    def allows(self, value: Any) -> bool:
        """Whether a value of the field's type, or each of a list, is one of its choices, or the field takes any."""
        if value is None or not (self.choices or self.is_extensible):
            return True
        return all(part in self.choices for part in (value if isinstance(value, tuple) else (value,)))

    @property
    def wants(self) -> str:
        """Allowed values in words, as in "num_layers must be a whole number such as 4"."""
        if self.choices:
            return ("a list of " if self.is_list_of_names else "one of ") + one_of(self.choices)
        if self.is_extensible:
            return "a name that a plug-in registers (--plugin)"
        if get_origin(self.type) is tuple:
            parts = get_args(self.type)
            if parts[-1] is Ellipsis:
                return {int: "a list of whole numbers", float: "a list of numbers"}.get(parts[0], "a list of texts")
            return f"{len(parts)} whole numbers"
        return SAMPLE_VALUES.get(self.type, "true or false")

    def takes(self, value: Any) -> bool:
        """Whether a value that was read from a file is of the field's type; None is of every type."""
        types: dict[Any, Any] = {int: int, float: (int, float), str: str, Path: str, bool: bool}
        if self.type == tuple[float, ...]:
            return value is None or (isinstance(value, tuple) and all(type(part) in (int, float) for part in value))
        wanted = tuple if get_origin(self.type) is tuple else types.get(self.type, object)
        is_truth = isinstance(value, bool) and self.type in (int, float)
        return value is None or (isinstance(value, wanted) and not is_truth)


def one_of(values: Any) -> str:
    """[1, 2, 3] -> "1, 2 or 3"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def _bare(annotation: Any) -> Any:
    """Type without `| None`."""
    if get_origin(annotation) in (UnionType, Union):
        return next(part for part in get_args(annotation) if part is not NoneType)
    return annotation


def fields_of(kind: type[Any], section: str = "") -> dict[str, Field]:
    """The fields of a dataclass, by name; `section` is what a config calls it."""
    plain, annotated = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    return {
        field.name: Field(
            field.name,
            section,
            annotated[field.name],
            _bare(plain[field.name]),
            field.default,
            getattr(annotated[field.name], "__metadata__", ()),
        )
        for field in dataclasses.fields(kind)
    }


FIELDS = {
    name: field for section, kind in get_type_hints(Config).items() for name, field in fields_of(kind, section).items()
}
SECTIONS = tuple(get_type_hints(Config))
ALIASES = {alias.removeprefix("--"): field.name for field in FIELDS.values() for alias in field.aliases}


def read_fields(config: Config) -> dict[str, Any]:
    """{field name: value} of all sections."""
    return {name: getattr(getattr(config, field.section), name) for name, field in FIELDS.items()}


VERBATIM = ("sample_prompt",)
"""Fields whose text is what it is: quotation marks belong to it, and it is no URL."""
