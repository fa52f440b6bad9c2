"""Audit behind `megatronish audit`: the data set as training would open it, and its audit."""

import sys
from typing import Any

from megatronish.commands.audit_flags import AuditArguments
from megatronish.config.hub import data_files, local_tokenizer
from megatronish.config.model_source import implied_tokenizer
from megatronish.config.plugins import import_plugins
from megatronish.config.sections.chat import ChatConfig
from megatronish.config.sections.data import DataConfig
from megatronish.core.errors import UserError
from megatronish.data.chat.audit import Audit
from megatronish.data.chat.dataset import ChatDataset
from megatronish.data.chat.setup import ChatSetup
from megatronish.data.datasets import build_datasets
from megatronish.tokenizer.names import tokenizer_type
from megatronish.tokenizer.tokenizer import build_tokenizer


def run(arguments: AuditArguments) -> int:
    """Print the audit; the exit status."""
    import_plugins(arguments.plugin)
    if arguments.seq_length < 1:
        raise UserError(f"--seq-length {arguments.seq_length} must be at least 1; for example 2048")
    data = data_settings(arguments)
    tokenizer = build_tokenizer(data)
    chat = ChatConfig(
        chat_format=arguments.chat_format,
        chat_template=arguments.chat_template,
        chat_date=arguments.chat_date,
        train_on=arguments.train_on,
        pack_samples=arguments.pack_samples,
    )
    setup = ChatSetup.of(chat, data, tokenizer)
    try:
        found = build_datasets(
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
    assert isinstance(found, ChatDataset)
    audit = Audit.of(found, setup)
    print(audit.text(colour=sys.stdout.isatty()))
    if arguments.html is not None:
        try:
            arguments.html.write_text(audit.html(), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html {arguments.html} cannot be written: {error.strerror}; choose another") from error
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
