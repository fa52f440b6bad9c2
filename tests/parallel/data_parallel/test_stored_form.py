"""Weights stored in another form: int8 parameters that only their product can read, in layouts and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engines import in_few_micro_batches, world_size_of
from jobs import tiny
from ranks import run_ranks
from saved_runs import read_whole
from sweeps import some_of
from torch import Tensor, nn

from megatronish.checkpoint.load import load_tensors
from megatronish.checkpoint.save import save_checkpoint
from megatronish.checkpoint.storage import CheckpointReader
from megatronish.checkpoint.tensors import stored_tensors
from megatronish.config.read import read_config
from megatronish.engine.build import build_engine
from megatronish.launch.place import Place
from megatronish.layers.linear import LinearLayer
from megatronish.layers.product import Product
from megatronish.model.block import TransformerBlock
from megatronish.parallel.sharding import Sharding
from megatronish.report.statistics import params_norm
from megatronish.train.checkpoint_state import tensors_of
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh

STEP = 2.0**-9


class Int8(Product):
    """Product with the weight `STEP` times int8; the weight is frozen."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.to(x.dtype) * STEP, bias)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        return dy @ (weight.to(dy.dtype) * STEP)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> None:
        raise AssertionError("the weight is frozen")


class Int8MLP(TransformerBlock):
    """Block whose MLP holds its weights in int8."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for module in self.mlp.modules():
            if isinstance(module, LinearLayer):
                module.product = Int8()
                module.weight = nn.Parameter(torch.empty_like(module.weight, dtype=torch.int8), requires_grad=False)


def is_stored(name: str) -> bool:
    return ".mlp." in name and name.endswith(".weight") and ".norm" not in name


def learns(name: str, _sharding: Sharding) -> bool:
    return not is_stored(name)


def train(place: Place, flags: str, folder: Path) -> tuple[list[tuple[float, float]], float]:
    """Loss and gradient norm of three steps, two of them after a checkpoint was loaded into another engine."""
    config, _ = read_config(tiny(Path("never-written"), flags))
    mesh = start_mesh(config, place)
    job = TrainingJob.open(config, mesh)
    batches = job.batches_of(job.datasets.train)

    def built(seed: int) -> Any:
        torch.manual_seed(seed)
        engine = build_engine(config, mesh, vocab_size=job.vocab_size, make_block=Int8MLP, trainable=learns)
        for name, parameter in engine.stage.model.named_parameters():
            if is_stored(name):
                assert parameter.dtype == torch.int8 and parameter.data_ptr() % 16 == 0
                sharding = engine.stage.shardings[name]
                whole = torch.arange(torch.Size(sharding.shape).numel()).mul(37 + seed).remainder(251).sub(125)
                for piece in sharding.pieces({"tp": mesh.tp}):
                    of_rank = whole.view(sharding.shape)
                    for dim, (start, size) in enumerate(zip(piece.global_offset, piece.sizes, strict=True)):
                        of_rank = of_rank.narrow(dim, start, size)
                    piece.view(parameter.data).copy_(of_rank)
        return engine

    engine, other = built(0), built(1)
    found = []
    for step in range(3):
        if step == 1:
            norm = params_norm(engine)
            saved = save_checkpoint(
                folder, step=1, tensors=tensors_of(engine, with_optimizer=True), state={}, mesh=mesh
            )
            load_tensors(saved, tensors_of(other, with_optimizer=True), mesh=mesh)
            other.data_parallel.gather_parameters(frozen=True)
            other.optimizer.num_steps = engine.optimizer.num_steps
            engine = other
        result = engine.step(batches(8 * step, 8), num_steps_done=step, learning_rate=1e-2, weight_decay=0.1)
        found.append((result.loss, result.grad_norm))
    return found, norm


LAYOUTS = ["--dp 2 --tp 2", "--dp 4 --zero-stage 2", "--pp 2 --dp 2 --zero-stage 1 --pipeline-schedule zb-h1"]


@pytest.mark.parametrize("layout", some_of(LAYOUTS, LAYOUTS[::2]))
def test_int8_weights_are_trained_around_saved_and_loaded_in_every_layout(tmp_path: Path, layout: str) -> None:
    flags = "--num-layers 2 --seq-length 16"
    ((expected, norm),) = run_ranks(1, train, flags, tmp_path / "one")
    assert len({loss for loss, _ in expected}) == 3
    flags = in_few_micro_batches(f"{flags} {layout} --global-batch-size 8")
    for found, found_norm in run_ranks(world_size_of(flags), train, flags, tmp_path / "more"):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        assert found_norm == pytest.approx(norm, rel=1e-5)
    one, more = (tmp_path / name / "step_00000001" for name in ("one", "more"))
    stored = [name for name, found in stored_tensors(CheckpointReader(more)).items() if found.dtype == torch.int8]
    assert len(stored) == 4
    for name in stored:
        assert torch.equal(read_whole(one)[name], read_whole(more)[name])
