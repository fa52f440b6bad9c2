"""Files of a chat: the template that a run was trained with, and the tokens that end its answers, come with the model.

A run may have named a template that is not its base's own. Without it, and without the tokens that it ends answers
with, another program would ask the model in another form, and never stop.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatronish.checkpoint.folder import find_checkpoint, read_state
from megatronish.config.dump import section_of
from megatronish.config.portable import with_copies
from megatronish.config.sections.data import ChatConfig
from megatronish.data.chat.setup import ChatSetup
from megatronish.formats.weights import Description
from megatronish.tokenizer.build import build_tokenizer
from megatronish.tokenizer.settings import read_object, stops_of_generation

TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"


def trained_with(folders: Sequence[Path], *, step: int | None = None) -> ChatConfig:
    """Settings of the chats of the first of these runs that names a template, or variables of one."""
    for folder in folders:
        checkpoint = find_checkpoint(folder, step=step) if folder.is_dir() else None
        saved: dict[str, Any] = (
            {} if checkpoint is None else with_copies(read_state(checkpoint), checkpoint).get("chat", {})
        )
        config = section_of(ChatConfig, saved)
        if config.chat_template is not None or config.chat_template_kwargs is not None:
            return config
    return ChatConfig()


@contextmanager
def with_chat_files(description: Description, chat: ChatConfig) -> Iterator[Description]:
    """Context with the description of a model whose files have the template that `chat` names, if it names one."""
    if chat.chat_template is None or not description.tokenizer_files:
        yield description
        return
    setup = ChatSetup.of(chat, description.data, build_tokenizer(description.data))
    encoder = setup.encoder(for_chats=True)
    with tempfile.TemporaryDirectory() as folder:
        files = {TEMPLATE: Path(folder) / TEMPLATE}
        files[TEMPLATE].write_text(setup.template_source(), encoding="utf-8")
        if (config := _stopping_at(encoder.ends_of_answers(), description)) is not None:
            files[GENERATION] = Path(folder) / GENERATION
            files[GENERATION].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        yield replace(description, tokenizer_files={**description.tokenizer_files, **files})


def _stopping_at(ends: Sequence[int], description: Description) -> dict[str, Any] | None:
    """Content of a generation_config.json that stops at these tokens, too; None if that of the model does."""
    path = description.tokenizer_files.get(GENERATION)
    known = [*stops_of_generation(path.parent)] if path is not None else []
    known = sorted(known) or [token for token in (description.eod,) if token is not None]
    new = [token for token in ends if token not in known]
    if not new:
        return None
    return {**(read_object(path) if path is not None else {}), "eos_token_id": [*known, *new]}
