"""Checkpoints of any layout load into any other bit by bit, and a rank reads what it needs of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import VOCABULARY, steps_of, tiny, train_on_ranks
from ranks import run_ranks
from saved_runs import assert_same_bits, build_engine, read_whole

from megatronish.checkpoint.folder import read_state
from megatronish.checkpoint.save import save_checkpoint
from megatronish.config.read import read_config
from megatronish.data.mock import MockSamples
from megatronish.launch.place import Place
from megatronish.mesh.groups import leave
from megatronish.model.block import TransformerBlock
from megatronish.model.gpt import MakeBlock
from megatronish.train.evaluate import mean_loss
from megatronish.train.keep import resume, tensors_of

GPT2 = "--num-layers 4"
LLAMA = (
    "--num-layers 4 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 6 --untie-embeddings-and-output-weights"
)


def load_and_save(
    place: Place, argv: list[str], source: Path, target: Path, make_block: MakeBlock = TransformerBlock
) -> float:
    """One rank that takes over a checkpoint and leaves it again, unchanged, in its own layout; the loss there."""
    job, engine = build_engine(place, argv, make_block)
    progress = resume(engine, checkpoint=source, weights_only=False, with_optimizer=True, check=lambda _: None)
    tensors = tensors_of(engine, with_optimizer=True)
    for name, tensor in tensors.items():
        held = sum(int(piece.view(tensor.local).count_nonzero()) for piece in tensor.pieces)
        assert held == int(tensor.local.count_nonzero()), f"the padding of {name} is not zero"
    state = read_state(source) | {"optimizer_steps": engine.optimizer.num_steps}
    save_checkpoint(target, step=progress.step, tensors=tensors, state=state, mesh=engine.mesh)
    batches = job.evaluation_of(MockSamples(name="any seed's", seq_length=16, seed=0, vocab_size=VOCABULARY, eod=0))
    loss, _ = mean_loss(engine, batches, 1)
    leave()
    return loss


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (
            f"{GPT2} --global-batch-size 8",
            [
                "--tp 3 --zero-stage 3",
                "--pp 4 --tp 2 --bf16",
                "--dp 4 --zero-stage 3",
                "--dp 4 --dp-replicate 2 --zero-stage 2 --bf16",
                "--tp 2 --dp 2 --sequence-parallel --zero-stage 3 --bf16 --optimizer-cpu-offload",
                "--cp 4 --zero-stage 1",
            ],
        ),
        (
            f"{LLAMA} --optimizer sgd --global-batch-size 12",
            [
                "--tp 2 --pp 2 --dp 2 --zero-stage 3 --param-cpu-offload",
                "--dp 3 --zero-stage 1 --optimizer-cpu-offload",
                "--tp 6",
                "--dp 4 --pp 2 --dp-replicate 2 --zero-stage 3",
                "--pp 2",
            ],
        ),
        (
            f"{GPT2} --optimizer muon --global-batch-size 12",
            ["--tp 2 --dp 2 --zero-stage 2", "--dp 3 --zero-stage 3", "--pp 2 --tp 2"],
        ),
    ],
    ids=["gpt2", "llama", "muon"],
)
def test_a_checkpoint_of_any_layout_loads_in_any_other_bit_by_bit(
    tmp_path: Path, model: str, layouts: list[str]
) -> None:
    train_on_ranks(tiny(tmp_path / "run", f"{model} --train-iters 2"))
    first = source = tmp_path / "run" / "checkpoints" / "step_00000002"
    assert all(tensor.isfinite().all() and tensor.any() for tensor in read_whole(first).values())
    losses = {}
    # From each layout to the next, and back to one process.
    for number, layout in enumerate([*layouts, ""]):
        argv = tiny(tmp_path / "run", f"{model} {layout} --seed {number}")
        target = tmp_path / str(number)
        losses[layout], *_ = run_ranks(read_config(argv).config.layout.world_size, load_and_save, argv, source, target)
        source = target / "step_00000002"
        assert_same_bits(first, source)
        assert read_state(source)["optimizer_steps"] == 2
    # What was loaded is what the model computes with.
    for layout, loss in losses.items():
        assert loss == pytest.approx(losses[""], rel=2**-9 if "--bf16" in layout else 1e-5), layout


class PartlyFrozen(TransformerBlock):
    """A layer of which only the MLP learns."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.attention.requires_grad_(False)


def test_what_is_frozen_is_saved_and_loaded_without_states(tmp_path: Path) -> None:
    train_on_ranks(tiny(tmp_path / "run", "--train-iters 2"))
    first = source = tmp_path / "run" / "checkpoints" / "step_00000002"
    losses = []
    for number, layout in enumerate(("--dp 2 --zero-stage 2", "--dp 3 --zero-stage 3", "--tp 2", "")):
        argv = tiny(tmp_path / "run", f"--global-batch-size 12 {layout} --seed {number}")
        target = tmp_path / str(number)
        world_size = read_config(argv).config.layout.world_size
        losses += run_ranks(world_size, load_and_save, argv, source, target, PartlyFrozen)
        source = target / "step_00000002"
    assert losses == pytest.approx([losses[-1]] * len(losses), rel=1e-5)
    before, after = read_whole(first), read_whole(source)
    assert before.keys() - after.keys() == {n for n in before if n.startswith("optimizer.") and ".attention." in n}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_a_run_that_changes_its_layout_at_every_step_loses_nothing(tmp_path: Path) -> None:
    flags = "--num-layers 4 --global-batch-size 8 --train-iters 5"
    train_on_ranks(tiny(tmp_path / "serial", flags))
    layouts = {
        "--tp 3": 3,
        "--pp 4 --tp 2": 8,
        "--dp 8 --zero-stage 3": 8,
        "--zero-stage 1": 1,
        "--dp 2 --tp 2 --pp 2 --sequence-parallel --zero-stage 2": 8,
    }
    for step, (layout, world_size) in enumerate(layouts.items()):
        argv = tiny(tmp_path / "moved", f"{flags} {layout} --exit-interval 1")
        output = train_on_ranks(argv, world_size=world_size)
        assert ("changed since: parallel." in output) == (step > 0), output
    moved, serial = steps_of(tmp_path / "moved"), steps_of(tmp_path / "serial")
    assert sorted(moved) == sorted(serial) == [1, 2, 3, 4, 5]
    for step, seen in serial.items():
        assert moved[step] == pytest.approx(seen, rel=1e-5), f"step {step}"


@pytest.mark.parametrize(("flags", "world_size"), [("--bf16", 1), ("--bf16 --tp 2", 2), ("--optimizer sgd", 1)])
def test_a_resumed_run_repeats_every_bit(tmp_path: Path, flags: str, world_size: int) -> None:
    for parts, name in ((1, "whole"), (2, "parts")):
        for _ in range(parts):
            exits = "--exit-interval 3" if name == "parts" else ""
            train_on_ranks(tiny(tmp_path / name, f"{flags} {exits}"), world_size=world_size)
    assert steps_of(tmp_path / "parts") == steps_of(tmp_path / "whole")
    one, other = (tmp_path / name / "checkpoints" / "step_00000006" for name in ("parts", "whole"))
    assert_same_bits(one, other)
    if "bf16" in flags:  # what is saved are the masters, which bf16 cannot hold
        weights = read_whole(one)["model.layers.0.mlp.fc1.weight"]
        assert not torch.equal(weights, weights.bfloat16().float())
