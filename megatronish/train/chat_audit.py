"""Audit of a run's chat data: printed before the first step, and kept in the run folder as text and as a page."""

import sys
from collections.abc import Callable
from pathlib import Path

from megatronish.data.chat.audit import Audit
from megatronish.data.chat.dataset import ChatDataset
from megatronish.data.chat.setup import ChatSetup
from megatronish.train.setup import TrainingJob


def report_chats(job: TrainingJob, say: Callable[[str], object]) -> None:
    """Print and keep the audit, on the main rank of a run that trains on chats; else nothing."""
    config, data = job.config, job.datasets.train
    if not job.mesh.is_main or not isinstance(data, ChatDataset):
        return
    audit = Audit.of(data, ChatSetup.of(config.chat, config.data, job.tokenizer))
    for file in data.files:
        if data.learned_by != "text" and not file.counts.template:
            say(without_template(file.path))
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "audit.txt").write_text(audit.text() + "\n", encoding="utf-8")
    (config.run_dir / "audit.html").write_text(audit.html(), encoding="utf-8")
    say(audit.text(colour=sys.stdout.isatty(), whole=False))


def without_template(path: Path) -> str:
    """Note about a file of completions whose prompts are texts."""
    return (
        f"note: prompts and completions of {path} are texts, so no chat template is around them; for a model that "
        'chats, write them as messages: "prompt": [{"role": "user", "content": ...}], and so on'
    )
