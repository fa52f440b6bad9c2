"""Tests of a second reduction domain, built outside the package: parameters reduced over half of the data ranks.

Each layer scales its output by the sum of two rows. Each half of four data ranks holds one of them, as it would hold
half of the experts, so its gradient is summed over two ranks and not over four. Losses, norms, parameters, optimizer
states and checkpoints must be those of one process, which has both rows.
"""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from jobs import VOCABULARY
from ranks import run_ranks
from saved_runs import read_whole
from sweeps import some_of
from torch import Tensor, nn

from megatronish.checkpoint.load import load_tensors
from megatronish.checkpoint.save import save_checkpoint
from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import TrainingConfig
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.data.mock import MockSamples
from megatronish.engine.build import build_engine
from megatronish.engine.engine import Engine
from megatronish.launch.place import Place
from megatronish.model.block import TransformerBlock
from megatronish.model.context import Context
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, Domain, Mesh, new_axis
from megatronish.parallel.sharding import Cut, Init, Sharding
from megatronish.report.statistics import num_zeros, params_norm
from megatronish.train.checkpoint_state import tensors_of

HIDDEN, STEPS, BATCH, RTOL = 24, 2, 4, 1e-5
SCALE = "layers.0.scale"
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=HIDDEN,
    num_attention_heads=4,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    make_vocab_size_divisible_by=1,
    init_method_std=0.1,
    disable_bias_linear=True,  # the gradient of a key bias is zero but for rounding, which may or may not be zero
)


class _GatherRows(torch.autograd.Function):
    """[1, D] -> [2, D]: all-gather over the axis forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return comm.start_all_gather(rows, axis).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return comm.start_reduce_scatter(grads[0], ctx.axis).wait(), None


class ScaledBlock(TransformerBlock):
    """[S, B, D] -> [S, B, D]: a layer times 1 + the sum of two rows, of which a rank of `ep` holds its own.

    The first number of each row has no part in it, so its gradient is zero.
    """

    def __init__(self, *arguments: Any, ep: Axis, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ep = ep
        self.scale = nn.Parameter(torch.empty(2 // ep.size, HIDDEN))

    def shardings(self) -> dict[str, Sharding]:
        """One row on each half of the ranks."""
        return {"scale": Sharding((2, HIDDEN), (Cut(0, "ep"),), domain="half", init=Init(0.5))}

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The output of the layer, scaled by both rows."""
        rows = _GatherRows.apply(self.scale, self.ep) if self.ep.size > 1 else self.scale
        return super().forward(x, context) * (1.0 + rows.sum(0) * (torch.arange(HIDDEN) > 0))


class Seen(NamedTuple):
    """What one rank saw: (loss, gradient norm) of each step, the last one after a resume."""

    steps: list[tuple[float, float]]
    params_norm: float
    num_zeros: int
    num_held: int


def mesh_of(place: Place, parallel: ParallelConfig) -> Mesh:
    """Data ranks {0, 1} hold the first row, {2, 3} the second; one process holds both."""
    mesh = Mesh.of(parallel, place)
    if place.world_size == 1:
        return mesh.with_domain(Domain("half", model={"ep": Axis("ep")}))
    halves = new_axis("half", [[0, 1], [2, 3]], rank=place.rank)
    ep = new_axis("ep", [[0, 2], [1, 3]], rank=place.rank)
    over = {"shard": halves} if parallel.zero else {"replicate": halves}
    return mesh.with_domain(Domain("half", model={"ep": ep}, **over))


def engine_of(mesh: Mesh, parallel: ParallelConfig, optimizer: str, *, seed: int) -> Engine:
    config = Config(
        model=MODEL,
        parallel=parallel,
        training=TrainingConfig(seq_length=8, micro_batch_size=1, seed=seed),
        optimizer=OptimizerConfig(optimizer=optimizer, clip_grad=0.3),  # type: ignore[arg-type]
    )
    make_block = partial(ScaledBlock, ep=mesh.domains["half"].model["ep"])
    return build_engine(config, mesh, vocab_size=VOCABULARY, make_block=make_block)


def take_step(engine: Engine, step: int) -> tuple[float, float]:
    batches = micro_batches(
        MockSamples(name="train", seq_length=8, seed=1, vocab_size=VOCABULARY, eod=0),
        consumed_samples=step * BATCH,
        global_batch_size=BATCH,
        share=BatchShare(engine.mesh.dp.rank, engine.mesh.dp.size, 1),
        collate=Collator(eod=0),
    )
    result = engine.step(batches, num_steps_done=step, learning_rate=1e-2, weight_decay=0.1)
    return result.loss, result.grad_norm


def train(place: Place, zero_stage: int, optimizer: str, folder: Path) -> Seen:
    """Train, save, load into an engine of another seed, and take one more step with both."""
    parallel = ParallelConfig(
        data_parallel_size=place.world_size,
        zero_stage=zero_stage,  # type: ignore[arg-type]
        ddp_bucket_size=1000,
    )
    mesh = mesh_of(place, parallel)
    engine = engine_of(mesh, parallel, optimizer, seed=3)
    steps = [take_step(engine, step) for step in range(STEPS)]
    zeros, norm = num_zeros(engine), params_norm(engine)
    tensors = tensors_of(engine, with_optimizer=True)
    checkpoint = save_checkpoint(folder, step=STEPS, tensors=tensors, state={}, mesh=mesh)
    other = engine_of(mesh, parallel, optimizer, seed=4)
    load_tensors(checkpoint, tensors_of(other, with_optimizer=True), mesh=mesh)
    other.data_parallel.gather_parameters(frozen=True)
    other.optimizer.num_steps = engine.optimizer.num_steps
    resumed = take_step(other, STEPS)
    assert resumed == take_step(engine, STEPS)
    held = engine.data_parallel.shards.get(SCALE)
    num_held = 0 if held is None else sum(torch.Size(piece.sizes).numel() for piece in held.pieces)
    return Seen([*steps, resumed], norm, zeros, num_held)


@pytest.mark.parametrize(
    ("zero_stage", "optimizer"), some_of(product((0, 1, 2), ("sgd", "muon")), [(0, "sgd"), (2, "muon")])
)
def test_a_second_domain_trains_and_saves_what_one_process_does(
    tmp_path: Path, zero_stage: int, optimizer: str
) -> None:
    """With Muon the rows are a matrix, of which ep, ZeRO and replicas have parts."""
    expected = train(Place(), 0, optimizer, tmp_path / "one")
    ranks = run_ranks(4, train, zero_stage, optimizer, tmp_path / "four")
    for rank in ranks:
        for mine, theirs in zip(rank.steps, expected.steps, strict=True):
            assert mine == pytest.approx(theirs, rel=RTOL)
        assert rank.params_norm == pytest.approx(expected.params_norm, rel=RTOL)
        assert rank.num_zeros == expected.num_zeros == 4  # two a layer, counted once whoever holds them
    assert expected.num_held == 2 * HIDDEN
    assert sum(rank.num_held for rank in ranks) == (2 if zero_stage else 4) * HIDDEN
    one, four = (read_whole(tmp_path / name / f"step_{STEPS:08d}") for name in ("one", "four"))
    assert one.keys() == four.keys()
    # What AdamW steps beside Muon is left out: it makes whole steps of the noise of gradients that are truly zero.
    momenta = {name.removeprefix("optimizer.momentum_buffer.") for name in one if "momentum_buffer" in name}
    compared = {f"{kind}.{name}" for name in momenta for kind in ("model", "optimizer.momentum_buffer")}
    assert {f"model.{SCALE}", f"optimizer.momentum_buffer.{SCALE}"} <= compared
    for name in compared:
        largest = one[name].abs().max()
        assert (four[name] - one[name]).abs().max() <= RTOL * largest, name
