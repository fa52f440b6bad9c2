"""Pretraining of a BERT: a pretraining run of masked tokens on pairs of sentences."""

from collections.abc import Sequence

from megatronish.commands import pretrain
from megatronish.config.settings import read_command_line
from megatronish.config.shipped import fields_given

RUN_DIR = "runs/pretrain_bert"
"""Folder of a run that neither names one nor has a config file."""
SETTINGS = {"model_type": "bert", "dataset_type": "sentences"}
"""What a BERT is and reads, where neither flags nor the file say otherwise."""


def main(argv: Sequence[str], *, program: str = "megatronish pretrain-bert") -> int:
    """Run the command; the exit status."""
    return pretrain.main(with_bert(argv), program=program)


def with_bert(argv: Sequence[str]) -> list[str]:
    """The command line with what makes the model a BERT, in front of it."""
    line = read_command_line(argv)
    given = fields_given(line)
    flags = [word for name, value in SETTINGS.items() if name not in given for word in (_flag(name), value)]
    if line.config_file is None and "run_dir" not in given:
        flags += [_flag("run_dir"), RUN_DIR]
    return [*flags, *argv]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
