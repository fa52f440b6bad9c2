"""A T5 by its commands: trained, moved to another layout, exported, trained further, asked; and what refuses it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conversions import to_hf
from jobs import steps_of, tiny, train_on_ranks, write_tokens

from megatronish.commands.model_loading import refuse_encoder
from megatronish.commands.pretrain_t5 import with_t5
from megatronish.core.errors import UserError
from megatronish.inference.generate import Sampling, generate
from megatronish.inference.load import find_trained, load_model

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
    trained = load_model(tmp_path).model
    written = generate(
        trained, [[5, 6, 100]], num_tokens=3, seq_length=8, sampling=Sampling(temperature=0.0), decoder_start=100
    )
    assert len([token for _, token in written if token is not None]) == 3
