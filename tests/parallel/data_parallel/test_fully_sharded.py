"""Tests of ZeRO-3: a rank keeps its rows alone, gathers each layer twice, and trains the same model as other stages."""

import shutil
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from engines import evaluated, world_size_of
from jobs import run_job, steps_of, tiny, train_on_ranks
from ranks import run_ranks
from saved_runs import assert_same_bits
from sweeps import further, some_of
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatronish.commands import verify as verify_layout
from megatronish.config.read import read_config
from megatronish.engine.build import build_engine
from megatronish.engine.engine import Engine
from megatronish.launch.place import Place
from megatronish.model.block import TransformerBlock
from megatronish.parallel.data_parallel import units
from megatronish.parallel.mesh import Axis, Mesh
from megatronish.report.statistics import num_zeros, params_norm
from megatronish.train.setup import TrainingJob
from megatronish.train.start import start_mesh
from megatronish.watch.record import RankRecord

STEPS = 2


class Seen(NamedTuple):
    """What a run shows, the same on every rank, and the rectangles of this one's masters by name and offset."""

    losses: list[float]
    grad_norms: list[float]
    evaluation: tuple[float, int]
    params_norm: float
    num_zeros: int
    masters: dict[tuple[str, tuple[int, ...]], Tensor]


def build(
    place: Place, flags: str, make_block: Callable[..., Any] = TransformerBlock
) -> tuple[Mesh, Engine, TrainingJob]:
    config, _ = read_config(tiny(Path("never-written"), flags))
    mesh = start_mesh(config, place)
    job = TrainingJob.open(config, mesh)
    engine = build_engine(config, mesh, vocab_size=job.vocab_size, make_block=make_block)
    return mesh, engine, job


def run(place: Place, flags: str, make_block: Callable[..., Any] = TransformerBlock) -> Seen:
    """Two steps and an evaluation."""
    _, engine, job = build(place, flags, make_block)
    batch, batches = job.config.global_batch_size, job.batches_of(job.datasets.train)
    results = [
        engine.step(batches(step * batch, batch), num_steps_done=step, learning_rate=1e-3, weight_decay=0.1)
        for step in range(STEPS)
    ]
    return Seen(
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        evaluation=evaluated(engine, batches(0, batch)),
        params_norm=params_norm(engine),
        num_zeros=num_zeros(engine),
        masters={
            (name, piece.global_offset): piece.view(shard.master.detach()).clone()
            for name, shard in engine.data_parallel.shards.items()
            for piece in shard.pieces
        },
    )


def whole(ranks: list[Seen]) -> dict[str, Tensor]:
    """The parameters, put together."""
    pieces = {key: values for rank in ranks for key, values in rank.masters.items()}
    found: dict[str, Tensor] = {}
    for name in sorted({name for name, _ in pieces}):
        mine = {offset: values for (of, offset), values in pieces.items() if of == name}
        ends = [[o + s for o, s in zip(offset, values.shape, strict=True)] for offset, values in mine.items()]
        found[name] = torch.full([max(sizes) for sizes in zip(*ends, strict=True)], torch.nan)
        for offset, values in mine.items():
            spans = zip(offset, values.shape, strict=True)
            found[name][tuple(slice(start, start + size) for start, size in spans)] = values
    return found


# What a rank keeps, and what it sends


class Kept(NamedTuple):
    """Elements that a rank keeps of the model between two actions, and those there are."""

    parameters: int
    masters: int
    gradients: int
    in_all: int
    gathers: int
    reductions: int


class Called(TorchDispatchMode):
    """Counts the operations of torch, collectives among them."""

    def __init__(self) -> None:
        super().__init__()
        self.times: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times[function.name()] += 1
        return function(*args, **(kwargs or {}))


def keep(place: Place, flags: str) -> Kept:
    _, engine, job = build(place, flags)
    batch, batches = job.config.global_batch_size, job.batches_of(job.datasets.train)
    with Called() as called:
        engine.step(batches(0, batch), num_steps_done=0, learning_rate=1e-3, weight_decay=0.1)
    engine.evaluate(batches(0, batch))
    sharing = engine.data_parallel
    parameters = [p for p in engine.stage.model.parameters() if isinstance(p, DTensor)]
    return Kept(
        parameters=sum(p.to_local().numel() for p in parameters),
        masters=sum(shard.master.numel() for shard in sharing.shards.values()),
        gradients=sum(gradient.numel() for gradient in sharing.gradients.values()),
        in_all=sum(p.numel() for p in parameters),
        gathers=called.times["c10d::_allgather_base_"],
        reductions=called.times["c10d::_reduce_scatter_base_"],
    )


FULL = "--recompute-granularity full --recompute-num-layers 2"


@pytest.mark.parametrize(("chunks", "recompute"), some_of(product((1, 2), ("", FULL)), [(1, ""), (2, FULL)]))
def test_a_rank_keeps_rows_alone_and_gathers_each_unit_once_a_pass(recompute: str, chunks: int) -> None:
    """Two layers and the rest of the stage, over three micro-batches; every forward of a chunk takes in the rest."""
    interleaved = f"--num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
    flags = f"--dp 3 --zero-stage 3 --global-batch-size 9 --num-layers 4 {recompute} {interleaved}"
    ranks = run_ranks(3, keep, flags)
    for rank in ranks:
        assert rank.parameters == rank.masters == rank.gradients
        units, micro_batches = 4 + chunks, 3
        assert rank.gathers == 2 * units * micro_batches
        assert rank.reductions == units * micro_batches
    assert sum(rank.parameters for rank in ranks) == ranks[0].in_all
    # Rows of 101, 72, 48, 24 and 16 over three ranks: the first has at most one more of each than the last.
    assert ranks[0].parameters - ranks[2].parameters < 0.02 * ranks[0].in_all


# What it computes


def assert_same(ranks: list[Seen], reference: Seen, *, tolerance: float) -> None:
    """Numbers, and masters relative to the largest element of each."""
    for rank in ranks:
        assert rank.losses == pytest.approx(reference.losses, rel=tolerance)
        assert rank.grad_norms == pytest.approx(reference.grad_norms, rel=tolerance)
        assert rank.evaluation == pytest.approx(reference.evaluation, rel=tolerance)
        assert rank.params_norm == pytest.approx(reference.params_norm, rel=tolerance)
        assert rank.num_zeros == reference.num_zeros
    actual, expected = whole(ranks), whole([reference])
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name] - tensor).abs().max() <= tolerance * tensor.abs().max(), name


SGD = "--optimizer sgd --hidden-dropout 0.1 --attention-dropout 0.1"


@pytest.mark.parametrize(
    "flags", ["", "--param-cpu-offload", "--optimizer-cpu-offload --bf16", "--recompute-granularity full --bf16"]
)
def test_one_process_computes_the_same_bits_with_it_and_without(flags: str) -> None:
    plain = flags.replace("--param-cpu-offload", "").replace("--optimizer-cpu-offload", "")
    for batch, tolerance in ("--global-batch-size 1", 0.0), ("", 0.0 if "bf16" in flags else 1e-6):
        # Of several micro-batches stage 0 computes fp32 gradients into the sum, which rounds otherwise. Adam would make
        # whole steps of the noise in what is truly zero, the gradient of the keys' bias.
        optimizer = "--optimizer sgd" if tolerance else ""
        (expected,) = run_ranks(1, run, f"{plain} {batch} {optimizer}")
        (actual,) = run_ranks(1, run, f"{flags} {batch} {optimizer} --zero-stage 3")
        assert_same([actual], expected, tolerance=tolerance)


# Each rank rounds the gradients of its micro-batches to bf16, in both stages; after that all is fp32. Only the order of
# the sums differs, and a loss that this moves by a rounding of fp32 can turn a rounding to bf16 in the next step.
@pytest.mark.parametrize("layout", ["--dp 4 --dp-replicate 2", further("--dp 2 --tp 2 --sequence-parallel --pp 2")])
def test_in_bf16_it_trains_what_stage_0_trains(layout: str) -> None:
    flags = f"{layout.replace('--dp-replicate 2', '')} --bf16 --global-batch-size 8 --num-layers 4 {SGD}"
    size = 8 if "--tp" in layout else 4
    plain = run_ranks(size, run, flags)
    reference = plain[0]._replace(masters={key: values for rank in plain for key, values in rank.masters.items()})
    assert_same(run_ranks(size, run, f"{flags} {layout} --zero-stage 3"), reference, tolerance=2**-9)


class PartlyFrozen(TransformerBlock):
    """A layer of which only the MLP learns."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.attention.requires_grad_(False)


@pytest.mark.parametrize(
    "layout",
    [
        further("--dp 3 --zero-stage 3"),
        "--dp 2 --tp 2 --zero-stage 3 --optimizer-cpu-offload",
        "--dp 2 --tp 2 --sequence-parallel --zero-stage 2",
        "--dp 2 --pp 2 --zero-stage 1 --pipeline-schedule zb-h1",
        further("--dp 2 --tp 2"),
    ],
)
def test_what_is_frozen_stays_and_the_rest_learns(layout: str) -> None:
    flags = f"{SGD} --global-batch-size 4"
    (before,) = run_ranks(1, initial, flags)
    (expected,) = run_ranks(1, run, flags, PartlyFrozen)
    world_size = read_config(tiny(Path("never-written"), f"{flags} {layout}")).config.layout.world_size
    ranks = run_ranks(world_size, run, f"{flags} {layout}", PartlyFrozen)
    assert_same(ranks, expected, tolerance=1e-5)
    for name, tensor in whole(ranks).items():
        assert torch.equal(tensor, before[name]) == (".attention." in name), name


def initial(place: Place, flags: str) -> dict[str, Tensor]:
    """The parameters as they are initialised."""
    _, engine, _ = build(place, flags)
    return {name: parameter.detach().clone() for name, parameter in engine.stage.model.named_parameters()}


@pytest.mark.parametrize("flags", ["--dp-replicate 2 --param-cpu-offload", "--zero-hpz-partition-size 2"])
def test_verify_layout_takes_it_for_any_other_stage(tmp_path: Path, flags: str) -> None:
    argv = tiny(tmp_path / "run", f"--steps 2 --dp 4 --zero-stage 3 {flags}")
    ended = run_job(argv, tmp_path, main=verify_layout.main)
    assert ended.status == 0, ended
    assert "trains the same model" in ended.output


@pytest.mark.parametrize("layout", ["--dp 4", further("--dp 4 --cp 2 --dp-replicate 2")])
def test_a_run_whose_neighbours_keep_what_is_gathered_writes_the_same_run(tmp_path: Path, layout: str) -> None:
    """With evaluations, checks of replicas and saves in between; from another layout, resumed in its own, and back."""
    flags = "--zero-stage 3 --global-batch-size 8 --eval-interval 1 --eval-iters 1 --save-interval 2"
    flags += " --check-replicas-interval 1 --train-iters 5"
    plain = f"{flags} {layout} --exit-interval 4"
    kept, size = f"{plain} --zero-hpz-partition-size 2", world_size_of(plain)
    train_on_ranks(tiny(tmp_path / "kept", f"{flags} --dp 2 --exit-interval 1"), world_size=2)
    shutil.copytree(tmp_path / "kept", tmp_path / "plain")
    train_on_ranks(tiny(tmp_path / "plain", plain), world_size=size)
    train_on_ranks(tiny(tmp_path / "kept", kept.replace("--exit-interval 4", "--exit-interval 3")), world_size=size)
    train_on_ranks(tiny(tmp_path / "kept", kept), world_size=size)
    assert steps_of(tmp_path / "kept") == steps_of(tmp_path / "plain")
    assert list(steps_of(tmp_path / "kept")) == [1, 2, 3, 4]
    mine, other = (tmp_path / name / "checkpoints" / "step_00000004" for name in ("kept", "plain"))
    assert_same_bits(mine, other)
    train_on_ranks(tiny(tmp_path / "kept", f"{flags} --dp 2"), world_size=2)
    assert list(steps_of(tmp_path / "kept")) == [1, 2, 3, 4, 5]


def bytes_of_gradients(place: Place) -> tuple[int, int]:
    """Bytes of this rank's rows of experts, and of the memory behind gradients without rows, after a step."""
    flags = "--num-experts 2 --moe-router-topk 1 --moe-ffn-hidden-size 24 --dp 4 --ep 2 --etp 1 --zero-stage 3"
    _, engine, job = build(place, flags)
    batches = job.batches_of(job.datasets.train)(0, job.config.global_batch_size)
    engine.step(batches, num_steps_done=0, learning_rate=0.1, weight_decay=0.0)
    rows = more = 0
    for name, parameter in engine.stage.model.named_parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor), name
        local = parameter.grad.to_local()
        rows += local.nbytes if ".experts." in name else 0
        more += 0 if local.numel() else local.untyped_storage().nbytes()
    return rows, more


def test_a_rank_without_rows_keeps_no_padding_of_their_gradients() -> None:
    """Two ranks share one expert, whose rows all lie on the first of them."""
    seen = run_ranks(4, bytes_of_gradients)
    assert [rows > 0 for rows, _ in seen] == [True, True, False, False]
    assert [more for _, more in seen] == [0] * 4


def test_a_transfer_is_counted_on_the_line_of_its_own_group() -> None:
    """Also where another line, that of cp, has the same ranks."""
    record = RankRecord()
    lines = [record.line(name, [0, 1]) for name in ("cp", "shard", "secondary")]
    groups = [SimpleNamespace(group_name=str(number)) for number in range(3)]
    axes = [Axis("", 2, 0, (0, 1), group, line) for group, line in zip(groups, lines, strict=True)]  # type: ignore[arg-type]
    record.count_bytes()
    for number in (2, 2, 1, 0):  # the last is not one of the unit's
        units._count(axes[1:], "all_gather", torch.zeros(5), groups[number])  # type: ignore[arg-type]
    assert [dict(line.sent) for line in lines] == [{}, {"all_gather": 20}, {"all_gather": 40}]
