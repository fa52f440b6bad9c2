"""Checkpoints: of any layout into any other bit by bit, and whole at whatever moment a run is killed."""

import errno
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import VOCABULARY, checkpoints_of, run_job, state_of, steps_of, tiny, train_on_ranks
from ranks import run_ranks
from torch import Tensor

from megatronish.checkpoint.folder import find_checkpoint, read_state, remove_leftovers
from megatronish.checkpoint.save import save_checkpoint
from megatronish.checkpoint.storage import Reader
from megatronish.checkpoint.tensors import GlobalTensor, read_tensors, stored_shapes
from megatronish.config.read import read_config
from megatronish.data.mock import MockSamples
from megatronish.errors import RunError
from megatronish.launch.place import Place
from megatronish.mesh.groups import Mesh, leave
from megatronish.model.block import TransformerBlock
from megatronish.model.gpt import MakeBlock
from megatronish.sharding import Piece
from megatronish.train.engine import Engine
from megatronish.train.evaluate import mean_loss
from megatronish.train.job import Job
from megatronish.train.keep import resume, tensors_of
from megatronish.train.run import start_mesh

GPT2 = "--num-layers 4"
LLAMA = (
    "--num-layers 4 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 6 --untie-embeddings-and-output-weights"
)


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    tensors = {name: torch.full(shape, torch.nan) for name, shape in stored_shapes(Reader(folder)).items()}
    read_tensors(folder, {name: alone(tensor) for name, tensor in tensors.items()})
    return tensors


def alone(tensor: Tensor) -> GlobalTensor:
    """A tensor that one process holds whole."""
    zeros = (0,) * tensor.dim()
    return GlobalTensor(tuple(tensor.shape), (Piece(zeros, zeros, tuple(tensor.shape)),), tensor, writes=True)


def assert_same_bits(one: Path, other: Path) -> None:
    before, after = read_whole(one), read_whole(other)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.int32), after[name].view(torch.int32)), name


# Any layout into any other


def load_and_save(
    place: Place, argv: list[str], source: Path, target: Path, make_block: MakeBlock = TransformerBlock
) -> float:
    """One rank that takes over a checkpoint and leaves it again, unchanged, in its own layout; the loss there."""
    config, _ = read_config(argv)
    mesh = start_mesh(config, place)
    job = Job.open(config, mesh)
    engine = Engine.build(
        mesh,
        model=config.model,
        parallel=config.parallel,
        training=config.training,
        optimizer=config.optimizer,
        vocab_size=VOCABULARY,
        make_block=make_block,
    )
    progress = resume(engine, checkpoint=source, weights_only=False, with_optimizer=True, check=lambda _: None)
    tensors = tensors_of(engine, with_optimizer=True)
    for name, tensor in tensors.items():
        held = sum(int(piece.view(tensor.local).count_nonzero()) for piece in tensor.pieces)
        assert held == int(tensor.local.count_nonzero()), f"the padding of {name} is not zero"
    state = read_state(source) | {"optimizer_steps": engine.optimizer.num_steps}
    save_checkpoint(target, step=progress.step, tensors=tensors, state=state, mesh=mesh)
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


# What is loaded, and from where


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one process that saved at steps 2, 4 and 6."""
    run_dir = tmp_path_factory.mktemp("six") / "run"
    train_on_ranks(tiny(run_dir, "--save-interval 2"))
    return run_dir


@pytest.fixture(scope="module")
def six_steps_of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on four ranks."""
    run_dir = tmp_path_factory.mktemp("four") / "run"
    train_on_ranks(tiny(run_dir, "--save-interval 2 --tp 2 --pp 2"), world_size=4)
    return run_dir


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/step_00000004"])
def test_load_takes_a_run_folder_its_checkpoints_or_one_step(tmp_path: Path, six_steps: Path, place: str) -> None:
    step = "" if place.endswith("4") else "--ckpt-step 4"
    train_on_ranks(tiny(tmp_path / "run", f"--load {six_steps / place} {step}"))
    before = steps_of(six_steps)
    assert steps_of(tmp_path / "run") == {5: before[5], 6: before[6]}


def test_ckpt_step_goes_back_and_what_comes_after_is_written_anew(tmp_path: Path, six_steps: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(six_steps, run_dir)
    output = train_on_ranks(tiny(run_dir, "--ckpt-step 2 --save-interval 2 --exit-interval 4"))
    assert "continuing from" in output and "step_00000002" in output
    assert checkpoints_of(run_dir) == ["latest", "step_00000002", "step_00000004", "step_00000006"]
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_00000004\n"
    # The newest is the one saved last, not the farthest.
    assert "step_00000004" in train_on_ranks(tiny(run_dir))
    assert steps_of(run_dir) == steps_of(six_steps)


def test_the_runs_own_checkpoints_come_before_those_it_was_begun_from(tmp_path: Path, six_steps: Path) -> None:
    """A launch script that is killed and started again goes on."""
    for finetune in ("--finetune", ""):
        run_dir = tmp_path / f"run{finetune}"
        for part in range(2):
            load = f"--load {six_steps} --ckpt-step 4 {finetune}"
            output = train_on_ranks(tiny(run_dir, f"{load} --train-iters 8 --exit-interval 2"))
            assert (str(six_steps) in output) == (part == 0), output
        assert state_of(run_dir, 4 if finetune else 8)["step"] == (4 if finetune else 8)


def test_finetuning_takes_weights_alone_of_whatever_run_of_the_model(tmp_path: Path, six_steps: Path) -> None:
    output = train_on_ranks(tiny(tmp_path / "run", f"--load {six_steps} --finetune --seed 5 --train-iters 1"))
    assert f"took the weights of {six_steps}" in output
    state = state_of(tmp_path / "run", 1)
    assert (state["step"], state["consumed_samples"], state["optimizer_steps"]) == (1, 4, 1)
    train_on_ranks(tiny(tmp_path / "new", "--seed 5 --train-iters 1"))
    assert steps_of(tmp_path / "run")[1].loss < steps_of(tmp_path / "new")[1].loss


def test_an_optimizer_can_be_left_out(tmp_path: Path, six_steps: Path) -> None:
    run_dir = tmp_path / "run"
    train_on_ranks(tiny(run_dir, "--no-save-optim --exit-interval 3"))
    saved = run_dir / "checkpoints" / "step_00000003"
    assert not any(name.startswith("optimizer.") for name in stored_shapes(Reader(saved)))
    refused = run_job(tiny(run_dir), tmp_path)
    assert refused.status == 2
    assert "--no-load-optim" in refused.errors and "Traceback" not in refused.errors
    train_on_ranks(tiny(run_dir, "--no-load-optim"))
    assert state_of(run_dir, 6)["optimizer_steps"] == 3
    assert steps_of(run_dir)[4] == steps_of(six_steps)[4]  # the weights are the same,
    assert steps_of(run_dir)[6] != steps_of(six_steps)[6]  # momentum is not


# Kills


class Point:
    """Counts what a save does to the disk, and kills this process at event number `at`."""

    def __init__(self, at: int, kill: Callable[[], None]) -> None:
        self.left, self.kill = at, kill

    def install(self) -> None:
        sys.addaudithook(self.audit)
        fsync = os.fsync

        def counted(descriptor: int) -> None:
            self.pass_by()
            fsync(descriptor)

        os.fsync = counted  # type: ignore[assignment]

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            self.pass_by()

    def pass_by(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.kill()


def save_value(folder: Path, value: float) -> None:
    """A checkpoint of step 4 whose tensor holds `value`."""
    tensors = {"model.weight": alone(torch.full((64,), value))}
    save_checkpoint(folder, step=4, tensors=tensors, state={"value": value}, mesh=Mesh.start())


def saved_value(folder: Path) -> float | None:
    """What the newest checkpoint holds, tensor and state agreeing; None if there is none."""
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        return None
    (value,) = set(read_whole(checkpoint)["model.weight"].tolist())
    assert read_state(checkpoint)["value"] == value
    return value


def save_killed_at_every_point(place: Place, folder: Path, before: float | None) -> list[float | None]:
    """What is there after a kill at each point of a save over `before`."""
    found = []
    for point in itertools.count(1):
        run = folder / str(point)
        if before is not None:
            save_value(run, before)
        child = os.fork()
        if child == 0:
            Point(point, lambda: os.kill(os.getpid(), signal.SIGKILL)).install()
            save_value(run, 2.0)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        remove_leftovers(run)
        found.append(saved_value(run))
        assert not any(path.name.startswith(".") for path in run.glob("*"))
        save_value(run, 3.0)  # goes on as if nothing had been
        assert saved_value(run) == 3.0
        assert sorted(path.name for path in run.iterdir()) == ["latest", "step_00000004"]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return found
    raise AssertionError


@pytest.mark.parametrize("before", [None, 1.0], ids=["the-first", "another-of-the-same-step"])
def test_a_save_killed_at_any_point_leaves_the_checkpoint_before_or_the_new_one(
    tmp_path: Path, before: float | None
) -> None:
    (found,) = run_ranks(1, save_killed_at_every_point, tmp_path, before)
    assert len(found) > 15
    arrived = found.index(2.0)
    assert found == [before] * arrived + [2.0] * (len(found) - arrived)


def save_on_a_full_disk(place: Place, folder: Path, fails_at: int) -> tuple[str, float | None, list[str]]:
    """What the save says whose write number `fails_at` finds no room, what is loaded then, and what is left."""
    save_value(folder, 1.0)
    count, sync = itertools.count(1), os.fsync

    def no_room(descriptor: int) -> None:
        if next(count) == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    os.fsync = no_room
    try:
        save_value(folder, 2.0)
    except RunError as error:
        return str(error), saved_value(folder), sorted(path.name for path in folder.iterdir())
    finally:
        os.fsync = sync
    raise AssertionError


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path: Path, fails_at: int) -> None:
    ((sentence, value, left),) = run_ranks(1, save_on_a_full_disk, tmp_path, fails_at)
    assert re.match(
        r"the checkpoint of step 4 could not be written to .*: No space left on device\. Those before", sentence
    )
    assert value == 1.0
    assert left == ["latest", "step_00000004"]


def kill_all_at(event: str, text: str, occurrence: int) -> None:
    """Planted in a job: SIGKILL to all of it when a rank meets `event` on a path with `text` in it."""
    left = [occurrence]

    def audit(name: str, arguments: tuple[Any, ...]) -> None:
        if name == event and any(text in str(argument) for argument in arguments):
            left[0] -= 1
            if left[0] == 0:
                os.killpg(0, signal.SIGKILL)

    sys.addaudithook(audit)


def kill_all_in_step(number: int) -> None:
    """Planted in a job: SIGKILL to all of it in the middle of a step."""
    clip, left = Engine.clip, [number]

    def clip_or_die(self: Engine, grad_norm: float) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.killpg(0, signal.SIGKILL)
        clip(self, grad_norm)

    Engine.clip = clip_or_die  # type: ignore[method-assign]


KILLS: dict[str, tuple[Callable[..., None], tuple[Any, ...], int]] = {
    "in-the-first-step": (kill_all_in_step, (1,), 0),
    "in-a-later-step": (kill_all_in_step, (4,), 2),
    "while-tensors-are-written": (kill_all_at, ("open", ".step_00000004.partial/__0_0.distcp", 1), 2),
    "before-the-state": (kill_all_at, ("open", ".step_00000004.partial/state.json", 1), 2),
    "before-it-has-its-name": (kill_all_at, ("os.rename", ".step_00000004.partial/", 1), 2),
    "before-the-pointer": (kill_all_at, ("open", "checkpoints/latest", 2), 4),
}


@pytest.mark.parametrize(
    ("moment", "layout"),
    [
        *((moment, "") for moment in KILLS),
        *((moment, "--tp 2 --pp 2") for moment in list(KILLS)[1::2]),
    ],
)
def test_a_killed_run_resumes_as_if_nothing_had_been(
    tmp_path: Path, six_steps: Path, six_steps_of_four: Path, moment: str, layout: str
) -> None:
    plant, arguments, resumed_from = KILLS[moment]
    argv = tiny(tmp_path / "run", f"--save-interval 2 {layout}")
    killed = run_job(argv, tmp_path, plant=plant, plant_args=arguments)
    assert killed.status == -signal.SIGKILL
    output = train_on_ranks(argv, world_size=4 if layout else 1)
    assert "continuing from" not in output if resumed_from == 0 else f"step_{resumed_from:08d}" in output
    assert steps_of(tmp_path / "run") == steps_of(six_steps_of_four if layout else six_steps)
    assert checkpoints_of(tmp_path / "run") == ["latest", "step_00000002", "step_00000004", "step_00000006"]


def test_a_run_killed_while_it_replaced_its_only_checkpoint_has_it_still(tmp_path: Path, six_steps: Path) -> None:
    """Between the two renames no folder has the checkpoint's name."""
    run_dir = tmp_path / "run"
    train_on_ranks(tiny(run_dir, "--exit-interval 4 --save-interval 4"))
    aside = run_dir / "checkpoints" / ".step_00000004.replaced"
    (run_dir / "checkpoints" / "step_00000004").rename(aside)
    shutil.copytree(aside, aside.with_name(".step_00000004.partial"))
    assert "step_00000004" in train_on_ranks(tiny(run_dir))
    assert steps_of(run_dir) == steps_of(six_steps)
    assert checkpoints_of(run_dir) == ["latest", "step_00000004", "step_00000006"]
