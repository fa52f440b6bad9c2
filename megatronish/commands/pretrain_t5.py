"""Pretraining of a T5: a pretraining run of an encoder and a decoder on texts with hidden spans."""

from collections.abc import Sequence

from megatronish.commands import pretrain

RUN_DIR = "runs/pretrain_t5"
"""Folder of a run that neither names one nor has a config file."""
SETTINGS: dict[str, str | None] = {
    "model_type": "t5",
    "position_embedding_type": "relative",
    "normalization": "RMSNorm",
    "disable_bias_linear": None,
    "vocab_extra_ids": "100",
}
"""What a T5 is and reads, where neither flags nor the file say otherwise."""


def main(argv: Sequence[str], *, program: str = "megatronish pretrain-t5") -> int:
    """Run the command; the exit status."""
    return pretrain.main(with_t5(argv), program=program)


def with_t5(argv: Sequence[str]) -> list[str]:
    """The command line with what makes the model a T5, in front of it."""
    return pretrain.with_settings(argv, SETTINGS, run_dir=RUN_DIR)
