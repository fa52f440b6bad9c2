"""Tests that a training of megatron-core continues here: its next losses, from its Adam's states, in any layout.

tests/golden/megatron_training has what tests/peers/test_megatron_training_there.py saved after two iterations, and the
losses of the next two. Every sample of the data is the same.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import state_of, steps_of, tiny, train_on_ranks
from paths import GOLDEN
from saved_runs import read_whole

from megatronish.checkpoint.foreign import write_listing
from megatronish.core.errors import UserError
from megatronish.data.indexed import IndexedWriter
from megatronish.formats.convert import convert
from megatronish.formats.megatron.torch_dist.files import DistributedFiles
from megatronish.formats.megatron.torch_dist.moments import common_of_training
from megatronish.formats.prove import compare_tensors
from megatronish.formats.weights import Training

TRAININGS = GOLDEN / "megatron_training"
SAMPLE = [3, 17, 8, 22, 5, 11, 29, 0]
FLAGS = (
    "--seq-length 8 --vocab-size 30 --global-batch-size 2 --train-iters 4 --lr-decay-style constant --lr 0.01 "
    "--adam-beta2 0.999 --weight-decay 0.1 --clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0 --save-interval 4 "
    "--use-checkpoint-args"
)
OF_THE_MODEL = ("--num-layers", "--hidden-size", "--num-attention-heads", "--ffn-hidden-size")


def continued(folder: Path, layout: str = "", *, world_size: int = 1) -> str:
    """What a run printed that continues from the converted checkpoint in `folder`."""
    with IndexedWriter(folder / "tokens", dtype=np.dtype("uint16")) as writer:
        writer.add_document(SAMPLE * 50)
    data = f"--data-path {folder / 'tokens'} --split 1,0,0"
    argv = tiny(folder / "run", f"{FLAGS} --load {folder / 'ours'} {layout}", data=data)
    for flag in OF_THE_MODEL:  # that --use-checkpoint-args takes from the checkpoint
        place = argv.index(flag)
        del argv[place : place + 2]
    return train_on_ranks(argv, world_size=world_size)


@pytest.mark.parametrize(
    ("name", "layout"), [("llama_3", ""), ("llama_3", "--tp 2"), ("llama_3", "--pp 2"), ("mixtral", "--ep 2")]
)
def test_a_training_continues_with_its_moments_in_any_layout(tmp_path: Path, name: str, layout: str) -> None:
    report = convert(TRAININGS / name, tmp_path / "ours", source="megatron", target="megatronish")
    assert "kept for the run that continues: exp_avg, exp_avg_sq after 2 steps, 4 samples" in str(report)
    printed = continued(tmp_path, layout, world_size=2 if layout else 1)
    assert f"continuing from {tmp_path / 'ours' / 'step_00000002'}" in printed
    losses = [seen.loss for _, seen in sorted(steps_of(tmp_path / "run").items())]
    assert losses == pytest.approx(json.loads((TRAININGS / name / "losses.json").read_text()), rel=1e-5)
    state = state_of(tmp_path / "run", 4)
    assert (state["consumed_samples"], state["optimizer_steps"]) == (8, 4)
    assert not state.get("began_elsewhere")


@pytest.mark.parametrize(("name", "layout"), [("llama_3", "--tp 2"), ("mixtral", "--ep 2 --zero-stage 1")])
def test_a_training_of_ours_goes_there_and_comes_back_bit_for_bit(tmp_path: Path, name: str, layout: str) -> None:
    convert(TRAININGS / name, tmp_path / "ours", source="megatron", target="megatronish")
    continued(tmp_path, layout, world_size=2)
    kinds = {"source": "megatronish", "target": "megatron-dist"}
    writing = {"expert_parallel_size": 2} if "--ep" in layout else {}  # two optimizers there
    report = convert(tmp_path / "run", tmp_path / "there", **kinds, writing=writing)
    assert "kept for the run that continues: exp_avg, exp_avg_sq after 4 steps, 8 samples" in str(report)
    assert (tmp_path / "there" / "latest_checkpointed_iteration.txt").read_text() == "4"
    convert(tmp_path / "there", tmp_path / "back", source="megatron-dist", target="megatronish")
    before, after = (
        read_whole(folder / "step_00000004") for folder in (tmp_path / "run" / "checkpoints", tmp_path / "back")
    )
    assert sum("exp_avg_sq" in key for key in after) > 10
    for key, tensor in after.items():
        assert torch.equal(before[key], tensor), key
    state = json.loads((tmp_path / "back" / "step_00000004" / "state.json").read_text())
    assert (state["consumed_samples"], state["optimizer_steps"]) == (8, 4)


@pytest.mark.parametrize(("has_biases", "groups_of_experts"), [(False, [1.0]), (True, [1.0, 0.0])])
def test_an_optimizer_of_experts_has_its_own_groups_there(has_biases: bool, groups_of_experts: list[float]) -> None:
    training = Training({}, {}, frozenset(), 3, 4, 8, {"weight_decay": 0.1})
    common = common_of_training(training, has_expert_ranks=True, has_expert_biases=has_biases)
    dense, experts = (common["optimizer"][number]["param_groups"] for number in (0, 1))
    assert [group["wd_mult"] for group in dense] == [1.0, 0.0]
    assert [group["wd_mult"] for group in experts] == groups_of_experts
    assert {group["is_expert_parallel"] for group in dense} == {False}
    assert {group["is_expert_parallel"] for group in experts} == {True}
    assert {group["step"] for group in dense + experts} == {3.0}


def test_states_that_are_kept_are_proved(tmp_path: Path) -> None:
    how: dict[str, Any] = {"source": "megatron", "target": "megatronish"}
    convert(TRAININGS / "llama_3", tmp_path / "ours", **how)
    said = compare_tensors(TRAININGS / "llama_3", tmp_path / "ours", **how, reading={}, dtype=None)
    assert "the 15 tensors and 30 states of Adam read from" in said
    how = {"source": "megatronish", "target": "megatron-dist"}
    convert(tmp_path / "ours", tmp_path / "there", **how)
    iteration, key = tmp_path / "there" / "iter_0000002", "decoder.final_layernorm.weight"
    tensors = DistributedFiles(iteration).tensors
    tensors[f"optimizer.state.exp_avg.{key}"] = tensors[f"optimizer.state.exp_avg_sq.{key}"]  # another one's bytes
    write_listing(iteration, tensors, {})
    with pytest.raises(UserError, match=r"is not proved: its optimizer.exp_avg.final_norm.weight is not that of"):
        compare_tensors(tmp_path / "ours", tmp_path / "there", **how, reading={}, dtype=None)


def test_a_loss_scale_goes_there_and_comes_back(tmp_path: Path) -> None:
    """One that has shrunk from 2**32: without it the run that continues would leave out its first steps again."""
    flags = "--fp16 --hysteresis 1 --train-iters 24 --save-interval 22 --hidden-dropout 0 --attention-dropout 0"
    train_on_ranks(tiny(tmp_path / "run", f"{flags} --lr-decay-style constant"))
    steps = {"step": 22}
    how = {"source": "megatronish", "target": "megatron-dist", "reading": steps}
    assert "exp_avg_sq, a loss scale of" in str(convert(tmp_path / "run", tmp_path / "there", **how))
    convert(tmp_path / "there", tmp_path / "back", source="megatron-dist", target="megatronish")
    before = state_of(tmp_path / "run", 22)["loss_scale"]
    after = json.loads((tmp_path / "back" / "step_00000022" / "state.json").read_text())["loss_scale"]
    assert before == after and before["scale"] < 2**30
    train_on_ranks(tiny(tmp_path / "again", f"{flags} --lr-decay-style constant --load {tmp_path / 'back'}"))
    whole, again = steps_of(tmp_path / "run"), steps_of(tmp_path / "again")
    assert again == {step: whole[step] for step in (23, 24)}
    assert all(seen.grad_norm is not None for seen in again.values())


def test_moments_of_another_optimizer_stay(tmp_path: Path) -> None:
    convert(TRAININGS / "llama_3", tmp_path / "ours", source="megatron", target="megatronish")
    continued(tmp_path, "--optimizer muon --finetune")
    report = convert(tmp_path / "run", tmp_path / "there", source="megatronish", target="megatron-dist")
    assert "weights alone were taken" in str(report)
    assert (tmp_path / "there" / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_finetuning_starts_from_its_weights_alone(tmp_path: Path) -> None:
    convert(TRAININGS / "llama_3", tmp_path / "ours", source="megatron", target="megatronish")
    printed = continued(tmp_path, "--finetune")
    assert f"took the weights of {tmp_path / 'ours' / 'step_00000002'}" in printed
    assert sorted(steps_of(tmp_path / "run")) == [1, 2, 3, 4]


@pytest.mark.parametrize(("target", "dtype"), [("hf", None), ("megatron-dist", None), ("megatronish", torch.bfloat16)])
def test_weights_alone_are_taken_where_there_is_no_place_for_more(
    tmp_path: Path, target: str, dtype: torch.dtype | None
) -> None:
    report = convert(TRAININGS / "llama_3", tmp_path / "theirs", source="megatron", target=target, dtype=dtype)
    assert "weights alone were taken" in str(report)
    assert "optimizer.state.exp_avg" in str(report) and "the state of Megatron-LM's optimizer" in str(report)
