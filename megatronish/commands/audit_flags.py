"""Flags of `megatronish audit`."""

from dataclasses import dataclass
from pathlib import Path

from megatronish.commands.plugin_flag import PluginNames
from megatronish.config.sections.chat import ChatConfig, ChatFormat, TrainOn


@dataclass(frozen=True)
class AuditArguments:
    """Print the numbers of chat data and three samples with the trained tokens marked."""

    data_path: tuple[str, ...]
    """FILE ..., or WEIGHT FILE WEIGHT FILE ...: chats as JSON lines."""
    tokenizer_model: str | None = None
    """The tokenizer's file or folder, which may hold the model's chat template."""
    tokenizer_type: str | None = None
    """Kind of the tokenizer. Derived from its files."""
    chat_template: str | None = None
    """A template of the package (chatml, llama3, ...), a .jinja file, or a named one of the model. Derived: its own."""
    chat_format: ChatFormat = "auto"
    """Format of the files; `auto` takes that of the first good line of each file."""
    chat_date: str = ChatConfig.chat_date
    """Date (YYYY-MM-DD) for templates that write the date of today."""
    train_on: TrainOn = "assistant"
    """Tokens of the loss: of all answers, of the last one, or all."""
    pack_samples: bool = True
    """Several chats in a row."""
    seq_length: int = 2048
    """Tokens of a row."""
    seed: int = 1234
    """Seed of the order."""
    data_cache_path: str | None = None
    """Where the tokens are kept, for training too. Derived: a folder `cache` next to each file."""
    html: Path | None = None
    """FILE of the same as a page."""
    plugin: PluginNames = ()
    """A plug-in (my.module or FILE.py) to import, which runs its code; several are allowed. See docs/PLUGINS.md."""
