"""Tests of the rules on T5: what does not go together is refused in a sentence, and sizes of sides add up."""

import pytest

from megatronish.commands.configuration import read_config
from megatronish.commands.pretrain_t5 import with_t5
from megatronish.core.errors import UserError

SIZES = (
    "--mock-data --encoder-num-layers 2 --decoder-num-layers 3 --hidden-size 32 --num-attention-heads 4 "
    "--encoder-seq-length 24 --decoder-seq-length 12 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --vocab-size 200"
)


def read(flags: str, *, sizes: str = SIZES) -> object:
    return read_config(with_t5(f"{sizes} {flags}".split()))


def test_sizes_of_both_sides_add_up() -> None:
    config = read_config(with_t5(SIZES.split())).config
    assert (config.model.num_layers, config.training.seq_length) == (5, 36)
    assert config.model.position_embedding_type == "relative" and config.data.vocab_extra_ids == 100
    assert str(config.run_dir) == "runs/pretrain_t5"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num-layers 2", "num_layers=2 must be the sum of encoder_num_layers=2 and decoder_num_layers=3"),
        ("--seq-length 24", "seq_length=24 must be the sum of encoder_seq_length=24 and decoder_seq_length=12"),
        ("--position-embedding-type rope", "position_embedding_type=rope is not that of a T5"),
        ("--num-experts 2", "model_type=t5 does not go with num_experts=2"),
        ("--window-size 4", "model_type=t5 does not go with window_size=4"),
        ("--cp 2 --num-attention-heads 4", "cp_comm_type=p2p is not for model_type=t5"),
        ("--cp 2 --cp-comm-type a2a --decoder-seq-length 14", "decoder_seq_length=14 must be divisible by 4"),
        ("--compile", "compile was tried with a GPT alone"),
        ("--attention-backend flash", "attention_backend=flash knows no score bias"),
        ("--reset-attention-mask", "reset_attention_mask is about texts of a GPT"),
        ("--vocab-extra-ids 0", "vocab_extra_ids=0 leaves no sentinels"),
        (
            "--encoder-seq-length 96 --decoder-seq-length 48 --vocab-extra-ids 4",
            "has 5 hidden spans, and there are 4 sentinels; use --vocab-extra-ids 5",
        ),
        ("--objective masked_lm", "objective=masked_lm trains model_type=bert"),
        ("--relu --geglu", "an MLP has one activation"),
        ("--bert-no-binary-head", "bert_no_binary_head=True is read for BERT alone"),
    ],
)
def test_what_a_t5_is_not_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        read(flags)
    assert sentence in str(refused.value)


PAIRS = SIZES.replace("--mock-data", "--train-data-path a.jsonl --dataset-type chat --tokenizer-type bytes")
PAIRS = PAIRS.replace("--vocab-size 200", "")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--train-on all", "train_on=all is for rows of a GPT"),
        ("--mask-prob 0.3", "mask_prob=0.3 is about hidden spans, and pairs of texts have none"),
        ("--mean-span-length 5", "mean_span_length=5.0 is about hidden spans"),
        ("--dataset-type sentences", "dataset_type=sentences is for BERT"),
        ("--objective dpo", "objective=dpo trains model_type=gpt"),
    ],
)
def test_what_pairs_of_texts_do_not_go_with_is_refused(flags: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        read(flags, sizes=PAIRS)
    assert sentence in str(refused.value)


def test_pairs_of_texts_need_no_sentinels() -> None:
    config = read_config(with_t5(f"{PAIRS} --vocab-extra-ids 0 --train-on last".split())).config
    assert config.data.has_chats and config.data.vocab_extra_ids == 0


@pytest.mark.parametrize("flag", ["--decoder-num-layers 3", "--encoder-num-layers 2", "--encoder-seq-length 24"])
def test_a_side_that_is_missing_is_named(flag: str) -> None:
    name = flag.split()[0]
    with pytest.raises(UserError) as refused:
        read("", sizes=SIZES.replace(flag, ""))
    assert f"{name.removeprefix('--').replace('-', '_')} is not given; add {name}" in str(refused.value)


def test_layers_of_all_without_sides_are_refused() -> None:
    with pytest.raises(UserError, match="encoder_num_layers is not given; add --encoder-num-layers and --decoder"):
        read("--num-layers 4", sizes=SIZES.replace("--encoder-num-layers 2 --decoder-num-layers 3", ""))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--encoder-num-layers 2", "encoder_num_layers=2 is read for T5 alone"),
        ("--position-embedding-type relative", "position_embedding_type=relative is the score bias of a T5"),
        ("--vocab-extra-ids 10", "vocab_extra_ids=10 is read for T5 alone"),
    ],
)
def test_flags_of_a_t5_are_refused_in_a_gpt(flags: str, sentence: str) -> None:
    gpt = "--mock-data --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --micro-batch-size 1"
    with pytest.raises(UserError) as refused:
        read_config(f"{gpt} --train-iters 1 --lr 1e-3 {flags}".split())
    assert sentence in str(refused.value)
