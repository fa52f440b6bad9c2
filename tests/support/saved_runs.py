"""Checkpoints for tests: written by short runs, and read back for inspection."""

from collections.abc import Callable
from pathlib import Path

import torch
from jobs import VOCABULARY
from torch import Tensor

from megatronish.checkpoint.checksums import Checksums
from megatronish.checkpoint.folder import find_checkpoint, read_state
from megatronish.checkpoint.save import save_checkpoint
from megatronish.checkpoint.storage import CheckpointReader
from megatronish.checkpoint.tensors import GlobalTensor, read_tensors, stored_shapes
from megatronish.config.read import read_config
from megatronish.core.remote import Location
from megatronish.engine.build import build_engine
from megatronish.engine.engine import Engine
from megatronish.launch.place import Place
from megatronish.model.block import MakeBlock, TransformerBlock
from megatronish.parallel.mesh import Mesh
from megatronish.parallel.sharding import Piece
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh


def read_whole(folder: Location) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    tensors = {name: torch.full(shape, torch.nan) for name, shape in stored_shapes(CheckpointReader(folder)).items()}
    read_tensors(folder, {name: alone(tensor) for name, tensor in tensors.items()})
    return tensors


def alone(tensor: Tensor) -> GlobalTensor:
    """A tensor that one process holds whole."""
    zeros = (0,) * tensor.dim()
    return GlobalTensor(tuple(tensor.shape), (Piece(zeros, zeros, tuple(tensor.shape)),), tensor, writes=True)


def assert_same_bits(one: Path, other: Path) -> None:
    assert_holds(other, read_whole(one))


def assert_holds(checkpoint: Path, before: dict[str, Tensor]) -> None:
    """The checkpoint has these tensors, bit by bit."""
    after = read_whole(checkpoint)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.view(torch.int32), after[name].view(torch.int32)), name


def save_value(folder: Location, value: float, *, step: int = 4) -> None:
    """A checkpoint whose tensor holds `value`."""
    tensors = {"model.weight": alone(torch.full((64,), value))}
    save_checkpoint(folder, step=step, tensors=tensors, state={"value": value}, mesh=Mesh.start())


def saved_value(folder: Location) -> float | None:
    """What the newest checkpoint holds, tensor and state agreeing; None if there is none."""
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        return None
    (value,) = set(read_whole(checkpoint)["model.weight"].tolist())
    assert read_state(checkpoint)["value"] == value
    return value


def engine_of_run(
    place: Place, argv: list[str], make_block: MakeBlock = TransformerBlock
) -> tuple[TrainingJob, Engine]:
    """A rank's share of a run that has not begun."""
    config, _ = read_config(argv)
    mesh = start_mesh(config, place)
    engine = build_engine(config, mesh, vocab_size=VOCABULARY, make_block=make_block)
    return TrainingJob.open(config, mesh), engine


def sealed(checkpoint: Path, change: Callable[[Path], object]) -> None:
    """Change a checkpoint, and make the sums fit again: what a forger would do."""
    files = {name: spans for name, spans in Checksums.read(checkpoint).files.items() if name.endswith(".distcp")}
    change(checkpoint)
    Checksums(checkpoint, files).with_other_files().write()
