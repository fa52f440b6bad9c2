"""Tests of the outer step of islands (DiLoCo): its moves as codes, the bytes that it sends, and its formulas."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engines import open_job, take_step, world_size_of
from jobs import VOCABULARY, tiny
from ranks import run_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatronish.config.read import read_config
from megatronish.core.layout import Layout
from megatronish.engine import engine as engine_module
from megatronish.engine.engine import Engine
from megatronish.estimate.costs.outer_traffic import outer_traffic
from megatronish.launch.place import Place
from megatronish.optim.outer import CODE_BLOCK, OuterOptimizer, OuterSettings
from megatronish.parallel.block_codes import LARGEST_CODE, decoded, encoded
from megatronish.parallel.bucketing import bytes_of_block
from megatronish.parallel.mesh import Domain, Mesh
from megatronish.parallel.sharding import Sharding
from megatronish.parallel.stages import stage_loads
from megatronish.train.hooks.replicas import differences

KINDS = {"allreduce_": "all-reduce", "alltoall_base_": "all-to-all", "_allgather_base_": "all-gather"}
ISLANDS = "--outer-optimizer nesterov --outer-interval 100 --global-batch-size 12"


class Calls(TorchDispatchMode):
    """Bytes that collectives are given, of each call those of its largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.dtypes = Counter[str](), set[torch.dtype]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            tensors = [each for given in args for each in (given if isinstance(given, list | tuple) else [given])]
            largest = max((each for each in tensors if isinstance(each, Tensor)), key=lambda each: each.nbytes)
            self.sent[KINDS[function.name().removeprefix("c10d::")]] += largest.nbytes
            self.dtypes.add(largest.dtype)
        return function(*args, **(kwargs or {}))


class OuterStep(NamedTuple):
    """What a rank sent in an outer step, and of what type; what the formulas expect; what differs between copies."""

    sent: Counter[str]
    dtypes: set[torch.dtype]
    expected: dict[str, int]
    differs: list[str]


def step_outside(place: Place, flags: str) -> OuterStep:
    job = open_job(place, flags)
    engine = job.build_engine()
    take_step(job, engine, 0)
    assert engine.outer is not None
    engine.data_parallel.wait_for_parameters()
    with Calls() as calls:
        engine.outer.step()
    engine.data_parallel.gather_parameters()
    mesh, config = engine.mesh, job.config
    expected = outer_traffic(
        config,
        stage_loads(config, VOCABULARY)[mesh.pp.rank],
        mesh.pp.rank,
        vocab_size=VOCABULARY,
        shard_ranks={name: domain.shard.rank for name, domain in mesh.domains.items()},
    )
    return OuterStep(
        calls.sent, calls.dtypes, {key.collective: size for key, size in expected.items()}, differences(engine)
    )


@pytest.mark.parametrize(
    "flags",
    [
        "--dp 2 --dp-replicate 2",
        "--dp 4 --dp-replicate 2 --zero-stage 1 --bf16 --ddp-bucket-size 3000 --outer-move-dtype int8",
        "--dp 4 --dp-replicate 2 --zero-stage 3 --outer-move-dtype int4",
        "--dp 3 --dp-replicate 3 --pp 2 --outer-move-dtype int8",
    ],
)
def test_a_rank_sends_what_the_formula_says(flags: str) -> None:
    flags = f"{ISLANDS} {flags}"
    for rank in run_ranks(world_size_of(flags), step_outside, flags):
        assert rank.sent == rank.expected
        assert rank.dtypes == {torch.uint8 if "--outer-move-dtype" in flags else torch.float32}
        assert rank.differs == []


def test_codes_are_a_quarter_and_an_eighth_of_the_bytes() -> None:
    block = torch.randn(1, CODE_BLOCK)
    for dtype, part in (("int8", 0.25), ("int4", 0.125)):
        sent = encoded(block, dtype)
        assert sent.dtype == torch.uint8
        assert sent.nbytes == bytes_of_block(dtype) < 1.07 * part * block.nbytes


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_code_is_the_nearest_and_zero_stays_zero(dtype: str) -> None:
    blocks = torch.randn(64, CODE_BLOCK) * torch.logspace(-20, 15, 64)[:, None]
    blocks[3] = 0.0
    blocks[4, 1:] = 0.0
    limit = blocks.abs().amax(1, keepdim=True) / LARGEST_CODE[dtype] / 2
    found = decoded(encoded(blocks, dtype), dtype)
    assert bool(((found - blocks).abs() <= limit * (1 + 1e-5)).all())
    assert torch.equal(found[3], blocks[3])
    assert found[4, 0] == pytest.approx(float(blocks[4, 0]))


SHAPES = {"matrix": (40, 13), "vector": (7,), "other": (300,)}
LARGE = {"matrix": 1.0, "vector": 1e-4, "other": 1e3}


def moved(place: Place, dtype: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The moves of this rank's island, and the mean that it receives."""
    layout = Layout(dp=place.world_size)
    mesh = Mesh.start(layout, rank=place.rank, init_method=place.rendezvous, islands=place.world_size)
    generator = torch.Generator().manual_seed(place.rank)
    masters = {name: torch.zeros(torch.Size(shape).numel()) for name, shape in SHAPES.items()}
    shardings = {name: Sharding(shape) for name, shape in SHAPES.items()}
    settings = OuterSettings(1, 0.7, 0.9, dtype)  # type: ignore[arg-type]
    outer = OuterOptimizer(masters, shardings, mesh.domains, settings, device=mesh.device)
    moves = {name: LARGE[name] * torch.randn(len(each), generator=generator) for name, each in masters.items()}
    for name, master in outer.masters.items():
        master.sub_(moves[name])
    (parts,) = outer._buckets
    return moves, dict(zip(masters, outer._mean_moves(parts), strict=True))


@pytest.mark.parametrize(("number", "dtype"), [(2, "fp32"), (2, "int4"), (3, "int8"), (4, "int4")])
def test_the_mean_move_is_within_its_bound_and_the_same_on_all_islands(number: int, dtype: str) -> None:
    """Blocks end at parameters: a small vector is not lost beside a large one."""
    ranks = run_ranks(number, moved, dtype)
    for name, shape in SHAPES.items():
        moves = torch.stack([moves[name] for moves, _ in ranks]).double()
        found, mean = ranks[0][1][name], moves.mean(0)
        assert all(torch.equal(found, others[name]) for _, others in ranks)
        if dtype == "fp32":
            assert torch.allclose(found.double(), mean, rtol=1e-6, atol=1e-7 * LARGE[name])
            continue
        blocks = [slice(begin, begin + CODE_BLOCK) for begin in range(0, torch.Size(shape).numel(), CODE_BLOCK)]
        for block in blocks:
            of_islands = moves[:, block].abs().amax(1).mean()
            limit = (of_islands + found[block].abs().amax()) / (2 * LARGEST_CODE[dtype])
            worst = (found[block].double() - mean[block]).abs().amax()
            assert limit / 100 < worst <= limit * (1 + 1e-5), name


def test_a_tied_parameter_moves_by_itself() -> None:
    """On its two stages it has other neighbours, and three islands may sum another order by the place in a buffer."""
    masters = {"first": torch.zeros(40), "table": torch.zeros(300), "last": torch.zeros(7)}
    shardings = {name: Sharding(each.shape, tied="ends" if name == "table" else None) for name, each in masters.items()}
    settings = OuterSettings(1, 0.7, 0.9)
    outer = OuterOptimizer(masters, shardings, {"dense": Domain()}, settings, device=torch.device("cpu"))
    assert [[part.name for part in parts] for parts in outer._buckets] == [["table"], ["first", "last"]]


class Flipped(NamedTuple):
    found: list[str]
    sound: list[str]


def flip_outside(place: Place, flags: str) -> Flipped:
    """A bit of an outer parameter on one island alone."""
    job = open_job(place, flags)
    engine = job.build_engine()
    take_step(job, engine, 0)
    sound = differences(engine)
    if place.rank == 1:
        _outer_of(engine).view(torch.int32)[0] ^= 1 << 3
    return Flipped(differences(engine), sound)


def _outer_of(engine: Engine) -> Tensor:
    assert engine.outer is not None
    return engine.outer.state["layers.0.mlp.fc1.weight"].parameter


def test_islands_may_differ_and_their_outer_parameters_may_not() -> None:
    flags = f"{ISLANDS} --dp 2 --dp-replicate 2"
    for found, sound in run_ranks(2, flip_outside, flags):
        assert sound == []
        assert found == ["outer parameter of layers.0.mlp.fc1.weight differs between the ranks 0, 1 of islands"]


class Left(NamedTuple):
    skipped: list[bool]
    scale: float
    changed: list[bool]


def overflow_on_one(place: Place, flags: str) -> Left:
    """Three steps in fp16, the second of which overflows on island 1 alone; an outer step follows it."""
    job = open_job(place, flags)
    engine = job.build_engine()
    skipped, changed = list[bool](), list[bool]()
    master = engine.data_parallel.shards["layers.0.mlp.fc1.weight"].master
    for step in range(3):
        with pytest.MonkeyPatch.context() as patch:
            if step == 1 and engine.mesh.islands.rank == 1:
                patch.setattr(engine_module, "global_norm", lambda *_, **__: torch.tensor(torch.inf).double())
            before = master.detach().clone()
            batches = job.batches_of(job.datasets.train)(12 * step, 12)
            result = engine.step(batches, num_steps_done=step, learning_rate=1e-3, weight_decay=0.1)
            skipped.append(result.skipped)
            changed.append(not torch.equal(before, master))
    return Left(skipped, engine.rule.loss_scale.scale, changed)


def test_a_step_that_one_island_must_leave_out_is_left_out_by_all_and_joined() -> None:
    flags = f"{ISLANDS} --outer-interval 2 --dp 2 --dp-replicate 2 --fp16 --initial-loss-scale 64 --hysteresis 1"
    for rank in run_ranks(2, overflow_on_one, flags.replace("--outer-interval 100", "")):
        assert rank == Left([False, True, False], 32.0, [True, True, True])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--dp 4 --dp-replicate 3", "num_distributed_optimizer_instances=3 islands of outer_optimizer=nesterov must"),
        ("--dp 2 --cp 2 --dp-replicate 4", "must divide data_parallel_size=2, as an island has whole sequences; use"),
        ("--dp 2 --dp-replicate 2 --no-save-optim", "leave --no-save-optim out"),
        (
            "--dp 2 --dp-replicate 2 --num-experts 4 --moe-router-score-function sigmoid "
            "--moe-router-enable-expert-bias",
            "the biases of moe_router_enable_expert_bias move by counts",
        ),
        (
            "--dp 2 --dp-replicate 2 --num-experts 4 --moe-router-load-balancing-type global_aux_loss "
            "--moe-aux-loss-coeff 0.01",
            "use seq_aux_loss",
        ),
    ],
)
def test_what_cannot_be_combined_is_one_sentence(flags: str, told: str) -> None:
    with pytest.raises(Exception, match=r".") as caught:
        read_config(tiny(Path("never-written"), f"--outer-optimizer nesterov --global-batch-size 12 {flags}"))
    assert told in str(caught.value)


def test_settings_of_an_outer_step_need_one() -> None:
    with pytest.raises(Exception, match=r"add --outer-optimizer nesterov, or leave --outer-lr out"):
        read_config(tiny(Path("never-written"), "--outer-lr 0.5"))
