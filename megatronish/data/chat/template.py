"""Chat template: messages to text, by the model's own Jinja template or a built-in one, and who wrote what in it.

Control tokens that a message spells stay text: before rendering, their names in the data are replaced by characters of
the same number in plane 15 of Unicode (`shield`), so every name of a control token in the rendered text is the
template's own. Rendered texts stay shielded until they are tokenized; replacing back moves no place.

Jinja runs in a sandbox, as model authors expect it, which can neither read nor change anything else. A template comes
with a model and is code of strangers. It sees the messages and nothing else, and cannot change them. What it can do is
fill the memory, or not end: so a template of strangers is compiled and written in a child process, which ends with its
bounds (contained.py). What it writes is tokenized by this process, which takes far longer: so a text has a bound that
follows from what the template is given, and from its own length. The date of today is the one that the run names: with
the true one, tokens would change overnight.
"""

import datetime
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatronish.core.contained import ChildBounds, Contained, ContainedError
from megatronish.core.errors import UserError, shown
from megatronish.core.foreign import size_of
from megatronish.data.chat.conversation import Message, WrittenArguments

# Built-in chat templates, for models without one of their own: the files of the folder templates/.
#
# A format that ends a turn with a control token of its own needs a tokenizer that has it. Those that end a turn with
# `eos_token` fit every tokenizer: alpaca, llama2, mistral, plain, vicuna and zephyr.
FOLDER = Path(__file__).parent / "templates"
BUILT_IN = (
    *("chatml", "llama3", "llama2", "mistral", "gemma", "phi3", "zephyr", "alpaca", "vicuna", "plain"),
    *("qwen25", "qwen3"),
)
"""Names for --chat-template."""
WITH_TOOLS = ("chatml", "qwen25", "qwen3")
"""Templates that have a place for tools and their calls; the others are put behind templates/prelude.jinja."""


def built_in_template(name: str) -> str:
    """Source of the template of this name."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return source if name in WITH_TOOLS else (FOLDER / "prelude.jinja").read_text(encoding="utf-8") + source


def is_built_in(source: str) -> bool:
    """Whether this is the text of a template that is known here, so that it needs no bounds."""
    return any(source == built_in_template(name) for name in BUILT_IN)


SHIELD = 0xF0000
MARKS = 0xF1000
LARGEST_MARK = 0xFE000
RESERVED = re.compile("[\U000f0000-\U0010ffff]")


NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class Rendering(NamedTuple):
    """Messages to be written, up to where the model answers or not, with variables of their own."""

    messages: Sequence[Message]
    generation_prompt: bool = False
    variables: Mapping[str, Any] = NO_VARIABLES


class ChatTemplate:
    """Template of a tokenizer's control tokens. `variables` are names like bos_token that it may use.

    `stops` are those of the control tokens that end what the model writes.
    """

    def __init__(
        self,
        source: str,
        *,
        name: str,
        controls: Sequence[str],
        variables: Mapping[str, Any],
        date: str,
        stops: Collection[str] = (),
    ) -> None:
        self.name, self.stops = name, frozenset(stops)
        self.has_generation_blocks = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        """Whether the template itself says what the model writes."""
        self.reads_date = "strftime_now" in source
        """Whether what it writes may depend on the date."""
        try:
            self._write = (TemplateWriter if is_built_in(source) else ContainedWriter)(source, date)
        except ContainedError as error:
            raise self._unbounded(str(error)) from error
        except ValueError as error:
            raise UserError(
                f"the chat template {name} is no Jinja template: {shown(str(error))}; correct it, or name another with "
                "--chat-template"
            ) from error
        self._variables = dict(variables)
        self.ends = self.stops | {name for name in (variables.get("eos_token"),) if isinstance(name, str)}
        """Control tokens at which the model stops, that of the end of a text among them."""
        self._spell: Spell | None = None
        self._own_size = None if is_built_in(source) else MOST_OWN + TIMES_SOURCE * (len(source) + size_of(variables))
        longest_first = sorted(controls, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        characters = sorted({character for name in controls for character in name})
        self._shield = {ord(each): chr(SHIELD + number) for number, each in enumerate(characters)}
        self._unshield = {SHIELD + number: each for number, each in enumerate(characters)}

    def shield(self, value: Any) -> Any:
        """A copy of messages or tools in which no text spells a control token. ValueError for a reserved character."""
        if isinstance(value, str):
            if (reserved := RESERVED.search(value)) is not None:
                raise ValueError(
                    f"a text has the private character U+{ord(reserved[0]):X}, which marks places here; remove it"
                )
            return self._controls.sub(lambda match: match[0].translate(self._shield), value)
        if isinstance(value, list | tuple):
            return [self.shield(each) for each in value]
        if isinstance(value, WrittenArguments):
            return WrittenArguments(self.shield(dict(value)), self.shield(value.text))
        if isinstance(value, dict):
            return {self.shield(name): self.shield(each) for name, each in value.items()}
        return value

    def unshield(self, text: str) -> str:
        """The text as the data have it."""
        return text.translate(self._unshield)

    def control_places(self, text: str) -> list[tuple[int, int]]:
        """Places of the control tokens that the template wrote, in a shielded text."""
        return [match.span() for match in self._controls.finditer(text)]

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, generation_prompt: bool = False) -> str:
        """Text of shielded messages; ValueError, a sentence, if the template cannot write them."""
        return self.render_one(Rendering(messages, generation_prompt), tools)

    def render_one(self, rendering: Rendering, tools: Sequence[Any]) -> str:
        """The same for a rendering with variables of its own."""
        (rendered,) = self.render_all([rendering], tools)
        if isinstance(rendered, ValueError):
            raise rendered
        return without_generation_marks(rendered)

    def render_all(self, renderings: Sequence[Rendering], tools: Sequence[Any]) -> list[str | ValueError]:
        """Each text with its GENERATION_MARKS, or why there is none. UserError where the template has no bounds.

        Arguments of calls are objects for most templates, and JSON texts for those that put them behind a text
        (DeepSeek). Those that take both (Qwen 3, Kimi K2) write a JSON text of the data as it is. Which, the first
        conversation with calls shows.
        """
        if not any(_calls(each) for each in renderings):
            return self._rendered(renderings, tools)
        if self._spell is not None:
            return self._rendered(_with_arguments(renderings, self._spell), tools)
        as_objects = self._rendered(_with_arguments(renderings, _object), tools)
        given = [
            arguments for each in renderings for call in _calls(each) if (arguments := call["function"]["arguments"])
        ]
        spelled = [str(arguments) for arguments in given]
        if num_bad := _num_bad(as_objects, spelled):
            texts = self._rendered(_with_arguments(renderings, _text), tools)
            if _num_bad(texts, spelled) < num_bad:  # it is not bad for another reason
                self._spell = _text
                return texts
        able = [
            each
            for each, text in zip(renderings, as_objects, strict=True)
            if _calls(each) and not isinstance(text, ValueError)
        ]
        if not able or not any(isinstance(arguments, WrittenArguments) for arguments in given):
            return as_objects  # which do not show it
        probed = self._rendered(_with_arguments(able, _probe), tools)
        if not all(_has_probes(text, each) for text, each in zip(probed, able, strict=True)):
            self._spell = _object
            return as_objects
        self._spell = _written
        return self._rendered(_with_arguments(renderings, _written), tools)

    def _rendered(self, renderings: Sequence[Rendering], tools: Sequence[Any]) -> list[str | ValueError]:
        values = [
            {
                **self._variables,
                **each.variables,
                "messages": list(each.messages),
                "tools": list(tools) or None,
                "documents": None,
                "add_generation_prompt": each.generation_prompt,
            }
            for each in renderings
        ]
        try:
            outcomes = self._write(values)
        except ContainedError as error:
            raise self._unbounded(str(error)) from error
        for each, (text, _) in zip(renderings, outcomes, strict=True):
            self._refuse_long(text or "", each.messages, tools)
        return [
            ValueError(f"the chat template {self.name} {shown(why)}") if text is None else text
            for text, why in outcomes
        ]

    def _refuse_long(self, text: str, messages: Sequence[Message], tools: Sequence[Any]) -> None:
        """UserError for a text out of all proportion to what the template was given."""
        if self._own_size is None or len(text) <= self._own_size:
            return
        size = size_of([*messages, *tools])
        if len(text) > self._own_size + TIMES_GIVEN * size:
            raise self._unbounded(f"writes {len(text):,} characters for messages and tools of {size:,}")

    def _unbounded(self, why: str) -> UserError:
        return UserError(
            f"the chat template {self.name} {why}; correct it, or name another with --chat-template: a template has "
            "a part of the memory and of the time that any real one stays far below"
        )


PROBE = '{"probed": 1}'
"""Arguments that a template that takes a text writes as they are."""

Spell = Callable[[Mapping[str, Any]], Any]
"""Arguments of a call to what a template takes."""


def _object(arguments: Mapping[str, Any]) -> Any:
    return dict(arguments)


def _written(arguments: Mapping[str, Any]) -> Any:
    """The text of the data, where they have one."""
    return arguments.text if isinstance(arguments, WrittenArguments) else dict(arguments)


def _text(arguments: Mapping[str, Any]) -> Any:
    return arguments.text if isinstance(arguments, WrittenArguments) else _tojson(arguments)


def _probe(_: Mapping[str, Any]) -> Any:
    return PROBE


def _has_probes(text: str | ValueError, rendering: Rendering) -> bool:
    """Whether the text has one for each call."""
    return not isinstance(text, ValueError) and text.count(PROBE) == len(_calls(rendering))


def _calls(rendering: Rendering) -> list[Any]:
    return [call for message in rendering.messages for call in message.get("tool_calls", ())]


def _with_arguments(renderings: Sequence[Rendering], spell: Spell) -> list[Rendering]:
    """The same with arguments of calls as a template takes them."""
    return [each._replace(messages=[_spelled(message, spell) for message in each.messages]) for each in renderings]


def _spelled(message: Message, spell: Spell) -> Message:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": spell(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _num_bad(texts: Sequence[str | ValueError], spelled: Sequence[str]) -> int:
    """Texts that a template cannot write, or in which arguments of calls are as Python spells objects."""
    return sum(isinstance(text, ValueError) or any(each in text for each in spelled) for text in texts)


def without_generation_marks(text: str) -> str:
    """The text as the model sees it."""
    for mark in GENERATION_MARKS:
        text = text.replace(mark, "")
    return text


LARGEST_PRODUCT = 1_000_000  # characters of a text, elements of a list, or bits of a power
BOUNDS = ChildBounds()
"""Of a template of strangers. One that is real writes a conversation in a thousandth of a second."""
MOST_OWN, TIMES_SOURCE, TIMES_GIVEN = 2**15, 4, 64
"""Characters that a text may have of no one's, times those of the template itself (a system prompt may stand in it, or
in a variable), times those of messages and tools: JSON that is indented is some ten times as long."""
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
        self._child = Contained("megatronish.data.chat.template:answering", source, date, bounds=BOUNDS)
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
