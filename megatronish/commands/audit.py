"""Command `megatronish audit`: what would be trained on in files of chats, without training."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatronish.commands.exit_status import exit_status
from megatronish.config.arguments import PluginNames, read_arguments
from megatronish.config.hub import data_files, local_tokenizer
from megatronish.config.model_source import implied_tokenizer
from megatronish.config.plugins import import_plugins
from megatronish.config.sections.data import ChatConfig, ChatFormat, DataConfig, TrainOn
from megatronish.core.errors import UserError
from megatronish.core.files import refuse_input_as_output, unwritten
from megatronish.tokenizer.names import tokenizer_type


def main(argv: Sequence[str], *, program: str = "megatronish audit") -> int:
    """Run the command; the exit status."""

    def work() -> int:
        return run(read_arguments(AuditArguments, argv, program=program))

    return exit_status(work, prefix="error: ")


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
    chat_template_kwargs: str | None = None
    """Variables of the template, as JSON: '{"enable_thinking": false}' for Qwen 3."""
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


def run(arguments: AuditArguments) -> int:
    """Print the audit; the exit status."""
    # Late: these import torch, and --help need not wait for that.
    from megatronish.data.chat.audit import Audit
    from megatronish.data.chat.dataset import ChatDataset
    from megatronish.data.chat.setup import ChatSetup
    from megatronish.data.datasets import build_datasets
    from megatronish.tokenizer.build import build_tokenizer

    import_plugins(arguments.plugin)
    if arguments.seq_length < 1:
        raise UserError(f"--seq-length {arguments.seq_length} must be at least 1; for example 2048")
    read = (arguments.tokenizer_model, arguments.chat_template, *arguments.data_path, *arguments.plugin)
    refuse_input_as_output("--html", arguments.html, read)
    data = data_settings(arguments)
    tokenizer = build_tokenizer(data)
    chat = ChatConfig(
        chat_format=arguments.chat_format,
        chat_template=arguments.chat_template,
        chat_template_kwargs=arguments.chat_template_kwargs,
        chat_date=arguments.chat_date,
        train_on=arguments.train_on,
        pack_samples=arguments.pack_samples,
    )
    setup = ChatSetup.of(chat, data, tokenizer)
    try:
        dataset = build_datasets(
            data,
            seq_length=arguments.seq_length,
            seed=arguments.seed,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            chats=setup,
        ).train
    except UserError:
        raise
    except ValueError as error:  # weights of --data-path, which a run checks with its config
        raise UserError(f"--data-path {error}") from error
    assert isinstance(dataset, ChatDataset)
    audit = Audit.of(dataset, setup)
    print(audit.text(colour=sys.stdout.isatty()))
    if arguments.html is not None:
        try:
            arguments.html.write_text(audit.html(), encoding="utf-8")
        except OSError as error:
            raise unwritten(f"--html {arguments.html}", arguments.html, error) from error
    return 0


def data_settings(arguments: AuditArguments) -> DataConfig:
    """Section [data] of these arguments."""
    given: dict[str, Any] = {}
    if arguments.tokenizer_model is not None:
        given["tokenizer_model"] = str(local_tokenizer(arguments.tokenizer_model))
    if arguments.tokenizer_type is not None:
        given["tokenizer_type"] = tokenizer_type(arguments.tokenizer_type)
    words = arguments.data_path
    paths = (path for word in words for path in data_files(word, "data_path", is_alone=len(words) == 1))
    return DataConfig(
        train_data_path=tuple(paths),
        dataset_type="chat",
        data_cache_path=arguments.data_cache_path,
        **given | implied_tokenizer(given),
    )
