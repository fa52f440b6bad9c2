"""Section [chat] of a config: how chats become samples, for --dataset-type chat."""

from dataclasses import dataclass
from typing import Literal

ChatFormat = Literal["auto", "openai", "sharegpt", "alpaca", "prompt_completion", "text", "pairs", "labelled"]
TrainOn = Literal["assistant", "last", "all"]


@dataclass(frozen=True)
class ChatConfig:
    """Chats: their format, the template that writes them as text, the tokens that are trained, and packing."""

    chat_format: ChatFormat = "auto"
    """Format of the files; `auto` takes that of the first good line of each file. `labelled` reads pairs, too: as a
    wanted and an unwanted completion."""
    chat_template: str | None = None
    """A template of the package (chatml, llama3, ...), a .jinja file, or a named one of the model. Derived: its own."""
    chat_date: str = "2024-07-26"
    """Date (YYYY-MM-DD) for templates that write the date of today, so that tokens do not change overnight."""
    train_on: TrainOn = "assistant"
    """Tokens of the loss: of all answers, of the last one, or all. A message with "train": false never counts."""
    pack_samples: bool = True
    """Several chats in a row of --seq-length tokens, which do not see each other; else one a row."""
