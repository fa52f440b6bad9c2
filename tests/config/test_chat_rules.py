"""Tests of the rules on chat data: flags that only chats read, and the date."""

from pathlib import Path

import pytest
from jobs import tiny

from megatronish.config.read import ConfigError, read_config

CHATS = "--data-path chats.jsonl --dataset-type chat --tokenizer-type bytes --vocab-size 257"


def told(flags: str, *, data: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(tiny(Path("never-written"), flags, data=data))
    return "\n".join(caught.value.problems)


def test_chats_are_read_with_their_flags() -> None:
    flags = "--train-on last --chat-template plain --chat-format openai --chat-date 2025-01-02 --no-pack-samples"
    chat = read_config(tiny(Path("never-written"), flags, data=CHATS)).config.chat
    assert (chat.train_on, chat.chat_template, chat.chat_date, chat.pack_samples) == (
        "last",
        "plain",
        "2025-01-02",
        False,
    )


@pytest.mark.parametrize("flag", ["--train-on last", "--chat-template chatml", "--no-pack-samples"])
def test_flags_of_chats_without_chats_are_an_error(flag: str) -> None:
    sentence = "is read for chats alone; add --dataset-type chat, or leave it out"
    assert sentence in told(flag, data="--mock-data")


@pytest.mark.parametrize("date", ["today", "2025-13-01", "01/02/2025"])
def test_a_date_that_is_none_is_told(date: str) -> None:
    assert f"chat_date={date} is no date; write it as 2024-07-26" in told(f"--chat-date {date}", data=CHATS)
