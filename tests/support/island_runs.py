"""Runs of islands (DiLoCo): by ranks with an outer optimizer, and in one process with the outer step by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from problem import Problem, Spread
from theorem import Parts, amplification, batches_of, build, masters_of, one_step, parts
from torch import Tensor

from megatronish.config.sections.parallel import ParallelConfig
from megatronish.core.layout import Layout
from megatronish.data.loader import BatchShare
from megatronish.engine.engine import Engine
from megatronish.engine.results import StepResult
from megatronish.launch.place import Place
from megatronish.model.batch import MicroBatch
from megatronish.parallel.mesh import Mesh
from megatronish.train.hooks.evaluate import outer_parameters
from megatronish.train.hooks.replicas import differences

INTERVAL = 2
NUM_STEPS = 5
"""The interval does not divide them: outer steps follow every second step, and the last."""
BETWEEN = 3
"""Steps after which the islands differ, and are looked at and evaluated."""


class IslandRecord(NamedTuple):
    """What one rank, or one process, saw. `islands` has the masters of each island between two outer steps."""

    losses: list[float]
    grad_norms: list[float]
    evaluation: float
    islands: dict[int, Parts]
    outer: Parts
    momentum: Parts
    amplified: dict[str, float]
    """What steps make of an error of one in each gradient."""


def step_of(engine: Engine, batches: list[MicroBatch], step: int, problem: Problem) -> StepResult:
    return one_step(engine, problem, batches, step, is_last=step + 1 == NUM_STEPS)


def train_islands(place: Place, problem: Problem, spread: Spread, *, checks: bool = True) -> IslandRecord:
    """Steps on a rank of a layout with islands.

    It `checks` what is alike then: replicas, and masters with outer parameters.
    """
    mesh = Mesh.of(spread.parallel, place, has_experts=problem.model.num_experts is not None)
    share = BatchShare.of(mesh, spread.micro_batch_size)
    engine = build(mesh, problem, spread)
    results = []
    for step in range(NUM_STEPS):
        results.append(step_of(engine, batches_of(problem, share, step), step, problem))
        if step + 1 == BETWEEN:
            engine.data_parallel.wait_for_parameters()
            island = parts(engine, masters_of(engine))
            with outer_parameters(engine):
                totals = engine.evaluate(batches_of(problem, share, BETWEEN))
            engine.data_parallel.wait_for_parameters()
            assert_equal(parts(engine, masters_of(engine)), island)
    engine.data_parallel.wait_for_parameters()
    assert engine.outer is not None
    outer, momentum = ({name: both[i] for name, both in engine.outer.state.items()} for i in range(2))
    learned = {name: master for name, master in masters_of(engine).items() if name in outer}
    if checks:
        assert differences(engine) == []
        assert_equal(parts(engine, learned), parts(engine, outer))
    return IslandRecord(
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        evaluation=totals.objective["loss"] / totals.weight,
        islands={mesh.islands.rank: island},
        outer=parts(engine, outer),
        momentum=parts(engine, momentum),
        amplified={name: NUM_STEPS * amplification(engine, problem, name) for name in outer},
    )


def assert_equal(some: Parts, others: Parts) -> None:
    for name, helds in some.items():
        for held, other in zip(helds, others[name], strict=True):
            assert torch.equal(held.values, other.values), name


def serial_islands(problem: Problem, num_islands: int) -> IslandRecord:
    """As many runs of one process, each with its row of every batch, and the outer step by hand, in fp64."""
    size = problem.global_batch_size // num_islands
    spread = Spread(Layout(), micro_batch_size=size)
    flags = ParallelConfig()
    has_experts = problem.model.num_experts is not None
    engines = [build(Mesh.of(spread.parallel, has_experts=has_experts), problem, spread) for _ in range(num_islands)]
    shares = [BatchShare(0, 1, size, island, num_islands) for island in range(num_islands)]
    theta = {name: master.detach().double() for name, master in engines[0].optimizer.masters.items()}
    momentum = {name: torch.zeros_like(outer) for name, outer in theta.items()}
    results = []
    for step in range(NUM_STEPS):
        of_step = zip(engines, shares, strict=True)
        results.append([step_of(engine, batches_of(problem, share, step), step, problem) for engine, share in of_step])
        if (step + 1) % INTERVAL == 0 or step + 1 == NUM_STEPS:
            for name, outer in theta.items():
                move = sum(outer - engine.optimizer.masters[name].detach() for engine in engines) / num_islands
                momentum[name] = flags.outer_momentum * momentum[name] + move
                outer -= flags.outer_lr * (move + flags.outer_momentum * momentum[name])
            for engine in engines:
                put(engine, theta)
        if step + 1 == BETWEEN:
            islands = {number: parts(engine, masters_of(engine)) for number, engine in enumerate(engines)}
            with other_values(engines[0], theta):
                totals = [engines[0].evaluate(batches_of(problem, share, BETWEEN)) for share in shares]
    weights = [[result.num_loss_tokens for result in step] for step in results]
    losses = [[result.loss for result in step] for step in results]
    return IslandRecord(
        losses=[
            sum(a * b for a, b in zip(loss, weight, strict=True)) / sum(weight)
            for loss, weight in zip(losses, weights, strict=True)
        ],
        grad_norms=[sum(result.grad_norm for result in step) / num_islands for step in results],
        evaluation=sum(each.objective["loss"] for each in totals) / sum(each.weight for each in totals),
        islands=islands,
        outer=parts(engines[0], {name: outer.float() for name, outer in theta.items()}),
        momentum=parts(engines[0], {name: moved.float() for name, moved in momentum.items()}),
        amplified={name: NUM_STEPS * amplification(engines[0], problem, name) for name in theta},
    )


@torch.no_grad()
def put(engine: Engine, values: dict[str, Tensor]) -> None:
    """Give the masters these values, and the model with them."""
    for name, value in values.items():
        engine.optimizer.masters[name].copy_(value)
    engine.data_parallel.gather_parameters()


@contextmanager
def other_values(engine: Engine, values: dict[str, Tensor]) -> Iterator[None]:
    kept = {name: master.detach().clone() for name, master in engine.optimizer.masters.items()}
    put(engine, values)
    yield
    put(engine, kept)
