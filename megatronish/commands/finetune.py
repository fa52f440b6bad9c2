"""Fine-tuning of a GPT: a pretraining run that starts from a trained model, whole or with adapters."""

from collections.abc import Sequence

from megatronish.commands import pretrain
from megatronish.config.settings import read_command_line
from megatronish.config.shipped import fields_given
from megatronish.core.errors import UserError

RUN_DIR = "runs/finetune_gpt"
"""Folder of a run that neither names one nor has a config file: not that of pretraining, which may be the base."""


def main(argv: Sequence[str], *, program: str = "megatronish finetune") -> int:
    """Run the command; the exit status."""
    return pretrain.main(with_start(argv), program=program, check=refuse_without_model)


def with_start(argv: Sequence[str]) -> list[str]:
    """The command line with what a start means here: weights of a trained model, its settings, and step 0."""
    line = read_command_line(argv)
    given = {setting.field for setting in line.flags.settings}
    flags = ["--finetune", *(["--use-checkpoint-args"] if "load" in given else [])]
    if line.config_file is None and "run_dir" not in given:
        flags += ["--run-dir", RUN_DIR]
    return [*flags, *argv]


def refuse_without_model(argv: Sequence[str]) -> None:
    """UserError where neither flags nor the file name a model to start from, or describe one: it is the first to ask.

    Reading them says what else is wrong.
    """
    line = read_command_line(argv)
    given = fields_given(line)
    if not line.wants_help and not given & {"load", "load_hf", "hidden_size", "mock_data"}:
        raise UserError(
            "finetune has no model to start from; name one with --load RUN (a run folder), or with --load-hf FOLDER "
            "(of Hugging Face, or org/name of its hub)"
        )
