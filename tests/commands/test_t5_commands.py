"""A T5 by its commands: trained, moved to another layout, exported, trained further, asked; and what refuses it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chat_tokenizers import write_lines
from conversions import to_hf
from jobs import steps_of, tiny, train_on_ranks, write_tokens

from megatronish.commands.model_loading import refuse_encoder
from megatronish.commands.pretrain_t5 import with_t5
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.core.errors import UserError
from megatronish.inference.generate import Sampling, generate
from megatronish.inference.load import find_trained, load_model
from megatronish.report.plot import read_lines

SIDES = (
    "--num-layers 4 --seq-length 36 --encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 24 "
    "--decoder-seq-length 12 --relu --vocab-extra-ids 8"
)


def t5(run_dir: Path, flags: str, *, data: str) -> list[str]:
    return with_t5(tiny(run_dir, f"{SIDES} {flags}", data=data))


@pytest.fixture(scope="module")
def data(tmp_path_factory: Any) -> str:
    prefix = write_tokens(tmp_path_factory.mktemp("data") / "tokens", vocab_size=90)
    return f"--data-path {prefix} --tokenizer-type null"


def test_a_run_goes_on_in_another_layout_and_from_its_export(tmp_path: Path, data: str) -> None:
    one, two, further = (tmp_path / name for name in ("one", "two", "further"))
    train_on_ranks(t5(one, "", data=data))
    train_on_ranks(t5(two, "--train-iters 6 --exit-interval 3", data=data))
    train_on_ranks(t5(two, "--train-iters 6 --tp 2 --pp 2 --dp 1 --sequence-parallel", data=data), world_size=4)
    for step, seen in steps_of(one).items():
        assert steps_of(two)[step] == pytest.approx(seen, rel=1e-4), step

    to_hf(one, tmp_path / "hf")
    before, after = (load_model(folder).model.state_dict() for folder in (one, tmp_path / "hf"))
    assert before.keys() == after.keys() and all(
        torch.equal(after[name][: len(tensor)], tensor)
        for name, tensor in before.items()  # which is padded less
    )
    flags = f"--load-hf {tmp_path / 'hf'} --vocab-size 101 --train-iters 2"
    argv = with_t5(
        f"{flags} --encoder-seq-length 24 --decoder-seq-length 12 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 "
        f"--eval-iters 0 --device cpu --vocab-extra-ids 8 --run-dir {further} {data}".split()
    )
    train_on_ranks(argv)
    assert steps_of(further)[1].loss < steps_of(one)[1].loss, "it starts from what was trained"


def test_what_continues_a_text_refuses_a_t5(tmp_path: Path, data: str) -> None:
    train_on_ranks(t5(tmp_path, "--train-iters 1", data=data))
    found = find_trained(tmp_path)
    with pytest.raises(UserError, match=r"model_type=t5, which answers a text .*; use megatronish generate"):
        refuse_encoder(found)
    longer = found.config(ParallelConfig(), TrainingConfig(seq_length=512, micro_batch_size=1))  # of many hidden spans
    assert longer.model.encoder_seq_length == 512
    trained = load_model(tmp_path).model
    written = generate(
        trained, [[5, 6, 100]], num_tokens=3, seq_length=8, sampling=Sampling(temperature=0.0), decoder_start=100
    )
    assert len([token for _, token in written if token is not None]) == 3


# pairs of texts

LETTERS = "abcd"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: Any) -> Path:
    """Files of pairs, a letter and its neighbour, to train and to validate on."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = [{"input": letter, "target": chr(ord(letter) + 1)} for letter in LETTERS]
    for name in ("train", "valid"):
        write_lines(folder / f"{name}.jsonl", lines)
    return folder


def of_pairs(pairs: Path, flags: str) -> str:
    files = f"--train-data-path {pairs / 'train.jsonl'} --valid-data-path {pairs / 'valid.jsonl'}"
    return f"{files} --dataset-type chat --tokenizer-type bytes --vocab-size 272 {flags}"


ADAPTER = "--adapter-type lora --lora-rank 8 --lora-dropout 0.1 --adapter-targets all-linear"


def test_a_model_of_hugging_face_learns_pairs_and_answers(tmp_path: Path, pairs: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    text = write_tokens(tmp_path / "tokens", vocab_size=257)
    bytes_of = f"--data-path {text} --tokenizer-type bytes --vocab-size 272"
    train_on_ranks(
        t5(base, "--train-iters 2 --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.2", data=bytes_of)
    )
    to_hf(base, tmp_path / "hf")
    flags = (
        f"--load-hf {tmp_path / 'hf'} --encoder-seq-length 8 --decoder-seq-length 4 --micro-batch-size 2 "
        f"--global-batch-size 4 --num-epochs 40 --lr 3e-2 --lr-decay-style constant --eval-iters 1 "
        f"--eval-interval 20 --device cpu --hidden-dropout 0 --attention-dropout 0 --vocab-extra-ids 8 --run-dir {run}"
    )
    shown = train_on_ranks(with_t5([*of_pairs(pairs, "--dp 2").split(), *flags.split()]), world_size=2)
    steps, evaluations = steps_of(run), read_lines(run / "evaluations.jsonl")
    assert len(steps) == 40 and steps[40].loss < 0.5 < steps[1].loss
    assert evaluations[-1]["loss"] < 0.5 and "format input_target" in shown
    trained = load_model(run).model
    asked = [[ord(letter), 256] for letter in LETTERS]
    told: list[list[int]] = [[] for _ in asked]
    greedy = Sampling(temperature=0.0)
    for row, token in generate(
        trained, asked, num_tokens=4, seq_length=8, sampling=greedy, stops={256}, decoder_start=256
    ):
        told[row] += [] if token is None else [token]
    assert told == [[ord(letter) + 1] for letter in LETTERS]

    # Adam would turn rounding noise of gradients that are nearly zero into whole steps.
    flags = flags.replace("--lr 3e-2", "--optimizer sgd --lr 0.5")
    adapted = flags.replace(str(run), str(tmp_path / "lora")).replace("--num-epochs 40", "--num-epochs 4")
    losses = []
    for layout in ("--dp 2", "--tp 2 --dp 1 --sequence-parallel", "--pp 2 --dp 1"):
        one = adapted.replace(str(tmp_path / "lora"), str(tmp_path / layout.replace(" ", "")))
        argv = with_t5([*of_pairs(pairs, "").split(), *f"{one} {layout} {ADAPTER}".split()])
        train_on_ranks(argv, world_size=2)
        losses.append([step.loss for step in steps_of(tmp_path / layout.replace(" ", "")).values()])
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_pairs_of_completions_are_no_data_of_a_t5(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4)
    flags = f"--train-data-path {path} --dataset-type chat --tokenizer-type bytes --vocab-size 272"
    with pytest.raises(AssertionError, match=r"objective=causal_lm learns from texts or chats; use other data"):
        train_on_ranks(t5(tmp_path / "run", "", data=flags))
