"""Tests of resharding: a checkpoint of any layout loads into any other bit by bit, and a rank reads only its part."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engines import in_few_micro_batches, world_size_of
from jobs import VOCABULARY, steps_of, tiny, train_on_ranks
from ranks import run_ranks
from saved_runs import alone, assert_holds, assert_same_bits, engine_of_run, read_whole
from sweeps import some_of

from megatronish.checkpoint.folder import read_state
from megatronish.checkpoint.load import load_tensors
from megatronish.checkpoint.save import save_checkpoint
from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.config.read import read_config
from megatronish.core.layout import Layout
from megatronish.data.mock import MockSamples
from megatronish.launch.place import Place
from megatronish.model.block import MakeBlock, TransformerBlock
from megatronish.parallel.mesh import Mesh, leave
from megatronish.parallel.sharding import Piece
from megatronish.train.checkpoint_state import tensors_of
from megatronish.train.hooks.evaluate import mean_metrics
from megatronish.train.resume import resume

GPT2 = "--num-layers 3"
LLAMA = (
    "--num-layers 4 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 6 --untie-embeddings-and-output-weights"
)

GPT_OSS = (
    "--num-layers 2 --position-embedding-type rope --normalization RMSNorm --quick-geglu --glu-linear-offset 1 "
    "--activation-func-clamp-value 0.5 --softmax-type learnable --window-size 5 --window-attn-skip-freq 2 "
    "--embed-layernorm --decoupled-lr 2e-2"
)
SHARED = (
    "--num-layers 2 --position-embedding-type rope --normalization RMSNorm --swiglu --add-qkv-bias --qk-layernorm "
    "--qk-layernorm-by-head --group-query-attention --num-query-groups 2 --kv-channels 6"
)


def load_and_save(
    place: Place, argv: list[str], source: Path, target: Path, make_block: MakeBlock = TransformerBlock
) -> float:
    """One rank that takes over a checkpoint and leaves it again, unchanged, in its own layout; the loss there."""
    job, engine = engine_of_run(place, argv, make_block)
    progress = resume(engine, checkpoint=source, weights_only=False, with_optimizer=True, check=lambda _: None)
    tensors = tensors_of(engine, with_optimizer=True)
    for name, tensor in tensors.items():
        held = sum(int(piece.view(tensor.local).count_nonzero()) for piece in tensor.pieces)
        assert held == int(tensor.local.count_nonzero()), f"the padding of {name} is not zero"
    state = read_state(source) | {"optimizer_steps": engine.optimizer.num_steps}
    save_checkpoint(target, step=progress.step, tensors=tensors, state=state, mesh=engine.mesh)
    batches = job.evaluation_of(MockSamples(name="any seed's", seq_length=16, seed=0, vocab_size=VOCABULARY, eod=0))
    loss = mean_metrics(engine, batches, 1)[0]["loss"]
    leave()
    return loss


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        (
            f"{GPT2} --global-batch-size 8",
            [
                "--tp 3 --zero-stage 3",
                "--pp 3 --bf16",
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
            f"{SHARED} --optimizer muon --global-batch-size 8",
            ["--tp 4 --sequence-parallel", "--tp 2 --dp 2 --zero-stage 3", "--tp 6 --zero-stage 1", "--tp 4 --dp 2"],
        ),
        pytest.param(
            f"{GPT_OSS} --global-batch-size 8",
            ["--tp 2 --pp 2 --dp 2 --zero-stage 3", "--tp 3 --cp 2 --zero-stage 1", "--dp 4 --zero-stage 3"],
            marks=pytest.mark.sweep,
        ),
        pytest.param(
            f"{GPT2} --optimizer muon --global-batch-size 12",
            ["--tp 2 --dp 2 --zero-stage 2", "--dp 3 --zero-stage 3", "--pp 3 --tp 2"],
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["gpt2", "llama", "shared heads", "gpt-oss", "muon"],
)
def test_a_checkpoint_of_any_layout_loads_in_any_other_bit_by_bit(
    tmp_path: Path, model: str, layouts: list[str]
) -> None:
    train_on_ranks(tiny(tmp_path / "run", in_few_micro_batches(f"{model} --train-iters 2")))
    source = tmp_path / "run" / "checkpoints" / "step_00000002"
    written = read_whole(source)
    assert all(tensor.isfinite().all() and tensor.any() for tensor in written.values())
    losses = {}
    # From each layout to the next, and back to one process.
    for number, layout in enumerate([*layouts, ""]):
        argv = tiny(tmp_path / "run", in_few_micro_batches(f"{model} {layout} --seed {number}"))
        target = tmp_path / str(number)
        losses[layout], *_ = run_ranks(read_config(argv).config.layout.world_size, load_and_save, argv, source, target)
        source = target / "step_00000002"
        assert_holds(source, written)
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


CHANGES = ["--tp 3", "--pp 4 --tp 2", "--dp 4 --zero-stage 3", "--zero-stage 1"]
CHANGES.append("--dp 2 --tp 2 --pp 2 --sequence-parallel --zero-stage 2")


@pytest.mark.parametrize("layouts", some_of([CHANGES, CHANGES[::2]], [CHANGES[::2]]), ids=len)
def test_a_run_that_changes_its_layout_at_every_step_loses_nothing(tmp_path: Path, layouts: list[str]) -> None:
    flags = f"--num-layers 4 --global-batch-size 8 --train-iters {len(layouts)}"
    train_on_ranks(tiny(tmp_path / "serial", flags))
    for step, layout in enumerate(layouts):
        argv = tiny(tmp_path / "moved", in_few_micro_batches(f"{flags} {layout} --exit-interval 1"))
        output = train_on_ranks(argv, world_size=world_size_of(f"{flags} {layout}"))
        assert ("changed since: parallel." in output) == (step > 0), output
    moved, serial = steps_of(tmp_path / "moved"), steps_of(tmp_path / "serial")
    assert sorted(moved) == sorted(serial) == [*range(1, len(layouts) + 1)]
    for step, seen in serial.items():
        assert moved[step] == pytest.approx(seen, rel=1e-5), f"step {step}"


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        pytest.param("--bf16", 1, marks=pytest.mark.sweep),
        ("--bf16 --tp 2", 2),
        pytest.param("--optimizer sgd", 1, marks=pytest.mark.sweep),
        (f"{GPT_OSS} --decoupled-min-lr 1e-3 --lr-decay-style cosine", 1),
    ],
)
def test_a_resumed_run_repeats_every_bit(tmp_path: Path, flags: str, world_size: int) -> None:
    for parts, name in ((1, "whole"), (2, "parts")):
        for _ in range(parts):
            exits = "--exit-interval 2" if name == "parts" else ""
            train_on_ranks(tiny(tmp_path / name, f"{flags} --train-iters 4 {exits}"), world_size=world_size)
    assert steps_of(tmp_path / "parts") == steps_of(tmp_path / "whole")
    one, other = (tmp_path / name / "checkpoints" / "step_00000004" for name in ("parts", "whole"))
    assert_same_bits(one, other)
    if "bf16" in flags:  # what is saved are the masters, which bf16 cannot hold
        weights = read_whole(one)["model.layers.0.mlp.fc1.weight"]
        assert not torch.equal(weights, weights.bfloat16().float())


# What a rank reads, and holds


def bytes_read() -> int:
    """By this process from files, so far."""
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


class Reading(NamedTuple):
    """What loading a checkpoint took on one rank, in bytes."""

    read: int  # from files of tensors
    own: int  # what this rank keeps
    pieces: int
    stored: int  # in all files of tensors


def read_in_the_same_layout(place: Place, argv: list[str], folder: Path) -> Reading:
    """Save what this layout holds, and load it again."""
    _, engine = engine_of_run(place, argv)
    tensors = tensors_of(engine, with_optimizer=True)
    checkpoint = save_checkpoint(folder, step=1, tensors=tensors, state={}, mesh=engine.mesh)
    load_tensors(checkpoint, tensors, mesh=engine.mesh)  # whatever is imported on the way
    before = bytes_read()
    load_tensors(checkpoint, tensors, mesh=engine.mesh)
    described = sum((checkpoint / name).stat().st_size for name in (".metadata", "checksums.json"))
    pieces = [torch.Size(piece.sizes).numel() for tensor in tensors.values() for piece in tensor.pieces]
    stored = sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))
    read = bytes_read() - before - described
    leave()
    return Reading(read, 4 * sum(pieces), len(pieces), stored)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux, which counts what a process reads")
@pytest.mark.parametrize(
    ("layout", "shared_by"),
    [
        pytest.param("--dp 2", 1, marks=pytest.mark.sweep),
        pytest.param("--tp 2", 2, marks=pytest.mark.sweep),
        ("--pp 2", 2),  # but for the small embedding, which is on both stages
        pytest.param("--dp 2 --zero-stage 1", 2, marks=pytest.mark.sweep),
        pytest.param("--dp 2 --zero-stage 2", 2, marks=pytest.mark.sweep),
        ("--dp 2 --zero-stage 3", 2),
        ("--dp 2 --tp 2 --zero-stage 1", 4),
    ],
)
def test_in_the_same_layout_a_rank_reads_its_own_bytes_alone(tmp_path: Path, layout: str, shared_by: int) -> None:
    argv = tiny(tmp_path / "run", f"--hidden-size 96 --ffn-hidden-size 384 {layout}")
    world_size = read_config(argv).config.layout.world_size
    for rank in run_ranks(world_size, read_in_the_same_layout, argv, tmp_path / "saved"):
        assert rank.own <= rank.read <= rank.own + 2000 * rank.pieces, rank  # a header each, in torch's format
        assert rank.stored == pytest.approx(shared_by * rank.read, rel=0.2), rank


def peak_while_loading(place: Place, folder: Path, cut: int) -> int:
    """By how many bytes this rank grows above its own share, a part of every tensor."""
    mesh = Mesh.start(Layout(dp=place.world_size), rank=place.rank, init_method=place.rendezvous)
    tensors = {}
    for name in (f"model.{number}" for number in range(24)):
        size = [512, 1024]
        size[cut] //= place.world_size
        offset = tuple(size[cut] * place.rank if dim == cut else 0 for dim in range(2))
        piece = Piece(offset, (0, 0), tuple(size))
        tensors[name] = GlobalTensor((512, 1024), (piece,), torch.zeros(size), writes=False)
    load_tensors(folder, tensors, mesh=mesh)  # once before, for what is imported at first use
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak()
    load_tensors(folder, tensors, mesh=mesh)
    grown = peak() - before
    assert all(tensor.local.eq(1.0).all() for tensor in tensors.values())
    leave()
    return grown


def peak() -> int:
    """The most memory this process has held."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux, which tells the peak of memory")
@pytest.mark.parametrize("cut", [0, 1])
def test_in_another_layout_no_rank_holds_more_than_a_tensor_beside_its_own(tmp_path: Path, cut: int) -> None:
    tensor_bytes = 4 * 512 * 1024
    tensors = {f"model.{number}": alone(torch.ones(512, 1024)) for number in range(24)}
    checkpoint = save_checkpoint(tmp_path, step=1, tensors=tensors, state={}, mesh=Mesh.start())
    for grown in run_ranks(4, peak_while_loading, checkpoint, cut):
        assert grown < 4 * tensor_bytes  # of 24: the bytes of one and the tensor in them, and what Python needs
