"""Setup of chat data: the tokenizer's control tokens, the chosen template, and the options, from a run's config."""

import datetime
import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megatronish.config.sections.data import ChatConfig, DataConfig, template_variables
from megatronish.core import foreign
from megatronish.core.errors import UserError
from megatronish.core.foreign import shown
from megatronish.data.chat.encoder import ChatEncoder, SideEncoder
from megatronish.data.chat.template import BUILT_IN, ChatTemplate, built_in_template
from megatronish.tokenizer.control_tokens import ControlEncoder
from megatronish.tokenizer.settings import read_object, read_settings, stops_of_generation
from megatronish.tokenizer.tokenizer import Tokenizer

# Chat templates in the files of a tokenizer: chat_template.jinja, tokenizer_config.json and what they name.


TOOL_USE = "tool_use"
"""Name of the template that transformers takes for conversations with tools."""


class ModelTemplates(NamedTuple):
    """Templates of a model by name, "default" where it has one, and the names of its special tokens."""

    sources: dict[str, str]
    tokens: dict[str, str]


def read_model_templates(folder: Path) -> ModelTemplates:
    """What the files of a tokenizer's folder say; UserError for a file that cannot be read."""
    config = read_object(folder / "tokenizer_config.json")
    given: Any = read_object(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    sources: dict[str, str] = {}
    if isinstance(given, str):
        sources["default"] = given
    elif isinstance(given, list):
        for each in given:
            name, source = (each.get(key) if isinstance(each, dict) else None for key in ("name", "template"))
            if not isinstance(name, str) or not isinstance(source, str):
                raise UserError(
                    f"{folder / 'tokenizer_config.json'}: chat_template lists {shown(each)}, where each template is an "
                    "object with a name and its text; correct the file"
                )
            sources[name] = source
    for path in [*sorted((folder / "additional_chat_templates").glob("*.jinja")), folder / "chat_template.jinja"]:
        if path.is_file():
            sources["default" if path.parent == folder else path.stem] = read_template(path)
    return ModelTemplates(sources, dict(read_settings(folder).tokens))


def read_template(path: Path) -> str:
    """Text of a file; UserError if it cannot be read."""
    try:
        return foreign.read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"chat template {path} cannot be read ({error}); correct the path or the file") from error


class SideLimits(NamedTuple):
    """Rows of a model with an encoder: the token that ends each, and the most tokens of each, with its end."""

    end: int
    encoder: int
    decoder: int


@dataclass(frozen=True)
class ChatSetup:
    """All that turns chats into tokens. `folder` holds the tokenizer's files, if it has any.

    `sides` are those of a model whose encoder reads what is asked and whose decoder writes the answer.
    """

    config: ChatConfig
    tokenizer: Tokenizer
    folder: Path | None = None
    sides: SideLimits | None = None

    @classmethod
    def of(
        cls, config: ChatConfig, data: DataConfig, tokenizer: Tokenizer, *, sides: SideLimits | None = None
    ) -> "ChatSetup":
        """The setup that a config asks for."""
        if data.tokenizer_model is None:
            return cls(config, tokenizer, sides=sides)
        path = Path(data.tokenizer_model)
        return cls(config, tokenizer, path if path.is_dir() else path.parent, sides)

    def __post_init__(self) -> None:
        try:
            datetime.date.fromisoformat(self.config.chat_date)
        except ValueError as error:
            raise UserError(
                f"--chat-date {self.config.chat_date} is no date ({error}); write it as 2024-07-26"
            ) from error
        template_variables(self.config)

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the tokenizer."""
        return self.tokenizer.vocab_size

    @cached_property
    def controls(self) -> ControlEncoder:
        """Encoder of texts with control tokens."""
        return self.tokenizer.control_encoder()

    @cached_property
    def files(self) -> ModelTemplates:
        """What the tokenizer's files say."""
        return ModelTemplates({}, {}) if self.folder is None else read_model_templates(self.folder)

    @property
    def bos(self) -> str:
        """Name of the token that begins a text; empty if there is none."""
        return self.files.tokens.get("bos_token") or self.controls.bos or ""

    @cached_property
    def variables(self) -> dict[str, Any]:
        """What templates may use besides messages and tools: names of special tokens, and what the config gives."""
        given = template_variables(self.config)
        return {"bos_token": self.bos, "eos_token": self.controls.eos, **self.files.tokens, **given}

    @cached_property
    def stops(self) -> list[str]:
        """Names of the control tokens at which the model stops by its generation_config.json, in order."""
        ids = set() if self.folder is None else stops_of_generation(self.folder)
        return sorted(name for name, number in self.controls.names.items() if number in ids)

    @cached_property
    def beginning(self) -> list[int]:
        """Tokens that the tokenizer itself puts before a text."""
        marked, plain = self.tokenizer.encode_marked("a"), self.tokenizer.encode("a")
        for start in range(len(marked) - len(plain) + 1):
            if marked[start : start + len(plain)] == plain:
                return marked[:start]
        return []

    @cached_property
    def identity(self) -> str:
        """Hash of all that determines the samples of given data."""
        config = self.config
        options = (config.chat_format, config.train_on, config.chat_date, sorted(self.variables.items()))
        if self.sides is not None:
            options = (*options, "two sides", self.sides.end)  # type: ignore[assignment]
        if len(self.stops) > 1:  # of which one may end a turn by beginning the next
            options = (*options, self.stops)  # type: ignore[assignment]
        if (tool_use := self._source_with_tools()) is not None:
            options = (*options, tool_use)  # type: ignore[assignment]
        _, source = self._named_source() or ("", "")
        return hashlib.sha256(repr((options, source, self.controls.identity)).encode()).hexdigest()

    def encoder(self, *, for_chats: bool) -> ChatEncoder:
        """Encoder of conversations, or of plain texts alone, which need no template."""
        if self.sides is not None:
            template = self.template() if self._named_source() is not None else None
            return SideEncoder(self.controls, template, train_on=self.config.train_on, end=self.sides.end)
        return ChatEncoder(
            self.controls,
            self.template() if for_chats else None,
            train_on=self.config.train_on,
            beginning=self.beginning,
            with_tools=self._template_with_tools() if for_chats else None,
        )

    def _source_with_tools(self) -> tuple[str, str] | None:
        """Name and text of the model's own template for conversations with tools, where it has another for others."""
        own = self.files.sources
        if self.config.chat_template is not None or "default" not in own or TOOL_USE not in own:
            return None
        return f"{TOOL_USE} of {self.folder}", own[TOOL_USE]

    def _template_with_tools(self) -> ChatTemplate | None:
        source = self._source_with_tools()
        return None if source is None else self._template(*source)

    def template_source(self) -> str:
        """Text of the chosen template, or the model's own; UserError if there is none."""
        return self._chosen()[1]

    def template(self) -> ChatTemplate:
        """The chosen template, or the model's own; UserError if there is none."""
        return self._template(*self._chosen())

    def _chosen(self) -> tuple[str, str]:
        named_source = self._named_source()
        if named_source is None:
            raise UserError(
                f"the tokenizer{f' in {self.folder}' if self.folder else ''} has no chat template; name one with "
                f"--chat-template: {', '.join(BUILT_IN)}, or a .jinja file"
            )
        return named_source

    def _template(self, name: str, source: str) -> ChatTemplate:
        return ChatTemplate(
            source,
            name=name,
            controls=list(self.controls.names),
            variables=self.variables,
            date=self.config.chat_date,
            stops=self.stops,
        )

    def _named_source(self) -> tuple[str, str] | None:
        """Name and text of the template; None if none is named and the model has none."""
        name, own = self.config.chat_template, self.files.sources
        if name is None:
            if own and "default" not in own:
                raise UserError(
                    f"the model in {self.folder} has several chat templates; name one with --chat-template: "
                    f"{', '.join(own)}"
                )
            return (f"of {self.folder}", own["default"]) if own else None
        if name in own:
            return f"{name} of {self.folder}", own[name]
        if name in BUILT_IN:
            return name, built_in_template(name)
        if "/" in name or name.endswith(".jinja"):
            return name, read_template(Path(name))
        raise UserError(
            f"--chat-template {name} is not known; name one of {', '.join([*own, *BUILT_IN])}, or a .jinja file"
        )
