"""Tests of the rules on multi-token prediction: what does not go together is refused in a sentence."""

import pytest

from megatronish.commands.configuration import read_config
from megatronish.core.errors import UserError
from megatronish.report.first_lines import _prediction

SIZES = (
    "--mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --vocab-size 64"
)
ROPE = "--position-embedding-type rope"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--mtp-num-layers 1",
            "mtp_num_layers=1 looks words up where the model ends, and position_embedding_type=learned_absolute adds "
            "to them where it begins; add --position-embedding-type rope, or leave --mtp-num-layers out",
        ),
        (
            f"--mtp-num-layers 1 {ROPE} --embed-layernorm",
            "mtp_num_layers=1 is for the layers and words of a plain GPT, and not for embed_layernorm=True; leave one",
        ),
        (
            f"--mtp-num-layers 2 {ROPE} --model-type bert --objective masked_lm --dataset-type sentences",
            "mtp_num_layers=2 is for the layers and words of a plain GPT, and not for model_type=bert; leave one out",
        ),
        (
            f"--mtp-num-layers 1 {ROPE} --objective simpo",
            "mtp_num_layers=1 adds to a loss of each next token, which objective=simpo is not; use --mtp-num-layers 0",
        ),
        (f"--mtp-num-layers 16 {ROPE}", "mtp_num_layers=16 must be less than seq_length=16, or nothing is there to"),
        (f"--mtp-num-layers -1 {ROPE}", "mtp_num_layers=-1 must not be negative; change --mtp-num-layers"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        read_config(f"{SIZES} {flags}".split())
    assert sentence in str(refused.value)


def test_the_first_lines_of_a_run_tell_of_it() -> None:
    config = read_config(f"{SIZES} {ROPE} --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3".split()).config
    assert _prediction(config) == [
        "multi-token prediction: 2 layers after the last, in training alone, on the stage that ends the model; the "
        "mean of their losses weighs 0.3"
    ]
    assert _prediction(read_config(f"{SIZES} {ROPE} --mtp-num-layers 0".split()).config) == []
