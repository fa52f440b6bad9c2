"""Tests of the rules on BERT: what it does not go with, and what the script sets."""

import pytest

from megatronish.commands.configuration import read_config
from megatronish.commands.pretrain_bert import with_bert
from megatronish.core.errors import UserError

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 1 "
    "--train-iters 2"
)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--num-experts 4", "model_type=bert does not go with num_experts=4, .*leave --num-experts out"),
        ("--window-size 4", "does not go with window_size=4, which counts on tokens that see none after them"),
        (
            "--attention-pattern sliding",
            "does not go with attention_pattern=sliding, which counts on tokens that see none after them",
        ),
        ("--position-embedding-type alibi", "does not go with position_embedding_type=alibi"),
        ("--objective dpo", "objective=dpo trains model_type=gpt, and this one is bert; use --objective masked_lm"),
        ("--sample-prompt Once", "asks for text, and BERT writes none; leave --sample-prompt out"),
    ],
)
def test_what_bert_does_not_go_with_is_said(flags: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_config(with_bert(f"{SIZES} --mock-data {flags}".split()))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--mask-prob 0.3", r"mask_prob=0.3 is read for BERT alone; add --model-type bert, or leave --mask-prob out"),
        ("--bert-no-binary-head", "bert_no_binary_head=True is read for BERT alone"),
        ("--objective masked_lm", "objective=masked_lm trains model_type=bert, and this one is gpt"),
    ],
)
def test_what_bert_alone_reads_is_said(flags: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_config(f"{SIZES} --mock-data {flags}".split())


def test_data_without_sentences_need_a_model_without_a_binary_head() -> None:
    given = f"{SIZES} --data-path never-read --tokenizer-type bytes --dataset-type pretrain"
    with pytest.raises(UserError, match=r"has no pairs of sentences, .*or --bert-no-binary-head"):
        read_config(with_bert(given.split()))


def test_the_script_makes_the_model_a_bert_that_learns_masked_tokens() -> None:
    config = read_config(with_bert(f"{SIZES} --mock-data".split())).config
    assert (config.model.model_type, config.training.objective) == ("bert", "masked_lm")
    assert str(config.run_dir) == "runs/pretrain_bert" and config.model.has_binary_head
    assert "--dataset-type" not in with_bert(["--dataset-type", "pretrain"])[:2]
