"""Pretraining of a BERT: a pretraining run of masked tokens on pairs of sentences."""

from collections.abc import Sequence

from megatronish.commands import pretrain

RUN_DIR = "runs/pretrain_bert"
"""Folder of a run that neither names one nor has a config file."""
SETTINGS: dict[str, str | None] = {"model_type": "bert", "dataset_type": "sentences"}
"""What a BERT is and reads, where neither flags nor the file say otherwise."""


def main(argv: Sequence[str], *, program: str = "megatronish pretrain-bert") -> int:
    """Run the command; the exit status."""
    return pretrain.main(with_bert(argv), program=program)


def with_bert(argv: Sequence[str]) -> list[str]:
    """The command line with what makes the model a BERT, in front of it."""
    return pretrain.with_settings(argv, SETTINGS, run_dir=RUN_DIR)
