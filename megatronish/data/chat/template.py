"""Chat template: messages to text, by the model's own Jinja template or a built-in one, and who wrote what in it.

Control tokens that a message spells stay text: before rendering, their names in the data are replaced by characters of
the same number in plane 15 of Unicode (`shield`), so every name of a control token in the rendered text is the
template's own. Rendered texts stay shielded until they are tokenized; replacing back moves no place.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatronish.core.contained import ContainedError
from megatronish.core.errors import UserError, shown
from megatronish.data.chat.conversation import Message
from megatronish.data.chat.sandbox import GENERATION_MARKS, ContainedWriter, TemplateWriter

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


class Rendering(NamedTuple):
    """Messages to be written, up to where the model answers or not."""

    messages: Sequence[Message]
    generation_prompt: bool = False


class ChatTemplate:
    """Template of a tokenizer's control tokens. `variables` are names like bos_token that it may use."""

    def __init__(
        self, source: str, *, name: str, controls: Sequence[str], variables: Mapping[str, str], date: str
    ) -> None:
        self.name = name
        self.has_generation_blocks = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        """Whether the template itself says what the model writes."""
        self.reads_date = "strftime_now" in source
        """Whether what it writes may depend on the date."""
        try:
            self._write = (TemplateWriter if is_built_in(source) else ContainedWriter)(source, date)
        except ContainedError as error:
            raise self._unbounded(error) from error
        except ValueError as error:
            raise UserError(
                f"the chat template {name} is no Jinja template: {shown(str(error))}; correct it, or name another with "
                "--chat-template"
            ) from error
        self._variables = dict(variables)
        longest_first = sorted(controls, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        characters = sorted({character for name in controls for character in name})
        self._shield = {ord(each): chr(SHIELD + number) for number, each in enumerate(characters)}
        self._unshield = {SHIELD + number: each for number, each in enumerate(characters)}

    def shield(self, value: Any) -> Any:
        """A copy of messages or tools in which no text spells a control token. ValueError for a reserved character."""
        if isinstance(value, str):
            if (found := RESERVED.search(value)) is not None:
                raise ValueError(
                    f"a text has the private character U+{ord(found[0]):X}, which marks places here; remove it"
                )
            return self._controls.sub(lambda match: match[0].translate(self._shield), value)
        if isinstance(value, list | tuple):
            return [self.shield(each) for each in value]
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
        return without_generation_marks(self.render_marked(messages, tools, generation_prompt=generation_prompt))

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Any] = (), *, generation_prompt: bool = False
    ) -> str:
        """The same with GENERATION_MARKS around what {% generation %} blocks write."""
        (found,) = self.render_all([Rendering(messages, generation_prompt)], tools)
        if isinstance(found, ValueError):
            raise found
        return found

    def render_all(self, renderings: Sequence[Rendering], tools: Sequence[Any]) -> list[str | ValueError]:
        """Each text with its GENERATION_MARKS, or why there is none. UserError where the template has no bounds."""
        values = [
            {
                **self._variables,
                "messages": list(each.messages),
                "tools": list(tools) or None,
                "documents": None,
                "add_generation_prompt": each.generation_prompt,
            }
            for each in renderings
        ]
        try:
            found = self._write(values)
        except ContainedError as error:
            raise self._unbounded(error) from error
        return [
            ValueError(f"the chat template {self.name} {shown(why)}") if text is None else text for text, why in found
        ]

    def _unbounded(self, error: ContainedError) -> UserError:
        return UserError(
            f"the chat template {self.name} {error}; correct it, or name another with --chat-template: a template has "
            "a part of the memory and of the time that any real one stays far below"
        )


def without_generation_marks(text: str) -> str:
    """The text as the model sees it."""
    for mark in GENERATION_MARKS:
        text = text.replace(mark, "")
    return text
