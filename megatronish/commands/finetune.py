"""Fine-tuning of a GPT: a pretraining run that starts from a trained model, whole or with adapters."""

from collections.abc import Sequence

from megatronish.commands import pretrain
from megatronish.config.settings import read_command_line


def main(argv: Sequence[str], *, program: str = "megatronish finetune") -> int:
    """Run the command; the exit status."""
    return pretrain.main(with_start(argv), program=program)


def with_start(argv: Sequence[str]) -> list[str]:
    """The command line with what a start means here: weights of a trained model, its settings, and step 0."""
    given = {setting.field for setting in read_command_line(argv).flags.settings}
    flags = ["--finetune", *(["--use-checkpoint-args"] if "load" in given else [])]
    return [*flags, *argv]
