"""Sandbox of chat templates: Jinja as model authors expect it, which can neither read nor change anything else.

A template comes with a model and is code of strangers. It sees the messages and nothing else, and cannot change them.
What it can do is fill the memory, or not end: so a template of strangers is compiled and written in a child process,
which ends with its bounds (contained.py). The date of today is the one that the run names: with the true one, tokens
would change overnight.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatronish.core.contained import ChildBounds, Contained

LARGEST_PRODUCT = 1_000_000  # characters of a text, elements of a list, or bits of a power
BOUNDS = ChildBounds()
"""Of a template of strangers. One that is real writes a conversation in a thousandth of a second."""
GENERATION_MARKS = ("\U000ff000", "\U000ff001")
"""Characters around what a {% generation %} block writes."""


class GenerationBlocks(Extension):
    """{% generation %} ... {% endgeneration %}, around what the model writes."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Block whose text is marked at both ends."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        begin, end = GENERATION_MARKS
        return f"{begin}{caller()}{end}"


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Sandboxed environment in which no product or power is larger than LARGEST_PRODUCT."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Value of an operation whose size is bounded."""
        size = (
            _size(left, right) if operator == "*" else abs(right) * abs(left).bit_length() if _ints(left, right) else 0
        )
        if size > LARGEST_PRODUCT:
            raise jinja2.exceptions.SecurityError(f"a value of size {size:,} is not allowed")
        return super().call_binop(context, operator, left, right)


def _ints(*values: Any) -> bool:
    return all(isinstance(value, int) for value in values)


def _size(left: Any, right: Any) -> int:
    """Length of the product of a sequence and a number; 0 for a product of numbers."""
    for sequence, number in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(number, int):
            return len(sequence) * number
    return 0


Written = tuple[str | None, str]
"""A text, or None and what follows "the chat template NAME" instead."""


class TemplateWriter:
    """Compiled template: called with values for each text, it gives the texts. ValueError for what is no template."""

    def __init__(self, source: str, date: str) -> None:
        try:
            self._template = _environment(date).from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise ValueError(f"{error} in line {error.lineno}") from error
        except MemoryError:
            raise
        except Exception as error:  # constants are computed here
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def __call__(self, values: Sequence[Mapping[str, Any]]) -> list[Written]:
        return [self._written(each) for each in values]

    def _written(self, values: Mapping[str, Any]) -> Written:
        try:
            return self._template.render(values), ""
        except jinja2.exceptions.TemplateError as error:
            return None, f"refuses it: {error}"
        except MemoryError:
            raise
        except Exception as error:
            return None, f"cannot write it: {type(error).__name__}: {error}"


class ContainedWriter:
    """The same for a template of strangers, in a child process. ContainedError for what exceeds its bounds."""

    def __init__(self, source: str, date: str) -> None:
        self._child = Contained("megatronish.data.chat.sandbox:answering", source, date, bounds=BOUNDS)
        self._child.start()

    def __call__(self, values: Sequence[Mapping[str, Any]]) -> list[Written]:
        # Equal objects are pickled once, so beginnings of one conversation take the room of one.
        return [(text, why) for text, why in json.loads(self._child.ask(list(values)))]


def answering(source: str, date: str) -> Callable[[Sequence[Mapping[str, Any]]], str]:
    """What the child does."""
    writer = TemplateWriter(source, date)
    return lambda values: json.dumps(writer(values))


def _environment(date: str) -> ImmutableSandboxedEnvironment:
    """Environment with what templates of Hugging Face's models may use; `date` is today's, YYYY-MM-DD."""
    environment = TemplateSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols], autoescape=False
    )
    today = datetime.datetime.fromisoformat(date)
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": today.strftime}
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without escapes of HTML, which Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> str:
    raise jinja2.exceptions.TemplateError(message)
