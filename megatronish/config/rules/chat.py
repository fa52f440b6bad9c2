"""Rules on chat data."""

import datetime

from megatronish.config.config import Config
from megatronish.config.fields import FIELDS, fields_of
from megatronish.config.rules.rule import ConfigRule
from megatronish.config.sections.chat import ChatConfig

_FIELDS = tuple(fields_of(ChatConfig, "chat"))


def _date(config: Config) -> str | None:
    try:
        datetime.date.fromisoformat(config.chat.chat_date)
    except ValueError:
        return f"chat_date={config.chat.chat_date} is no date; write it as 2024-07-26"
    return None


def _unread(config: Config) -> str | None:
    given = [name for name in _FIELDS if getattr(config.chat, name) != FIELDS[name].default]
    if not given or config.data.dataset_type == "chat":
        return None
    name = given[0]
    return f"{name}={getattr(config.chat, name)} is read for chats alone; add --dataset-type chat, or leave it out"


RULES = (
    ConfigRule(("chat_date",), _date),
    ConfigRule((*_FIELDS, "dataset_type"), _unread),
)
