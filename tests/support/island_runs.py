"""Runs of islands (DiLoCo): by ranks with an outer optimizer, and in one process with the outer step by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from problem import DECOUPLED, OPTIMIZERS, SGD, Problem, Spread
from theorem import Parts, batches_of, build, masters_of, parts
from torch import Tensor

from megatronish.config.sections.optimizer import OptimizerConfig
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
STEPS = {"sgd": 5, "adam": 3, "muon": 3}
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
    matrices: Parts
    """Outer parameters of what Muon steps, at the end."""


def optimizers_of(problem: Problem) -> list[OptimizerConfig]:
    """SGD, after which parameters are compared, and the other one."""
    others = DECOUPLED if problem.decoupled else {}
    return [replace(each, **others) for each in (SGD, OPTIMIZERS[problem.optimizer])]


def step_of(
    engine: Engine, batches: list[MicroBatch], step: int, problem: Problem, optimizer: OptimizerConfig
) -> StepResult:
    return engine.step(
        batches,
        num_steps_done=step,
        learning_rate=optimizer.lr or 0.1,
        weight_decay=0.1,
        decoupled_learning_rate=0.2 * (optimizer.lr or 1.0) if problem.decoupled else None,
        is_last=step + 1 == STEPS[optimizer.optimizer],
    )


def train_islands(place: Place, problem: Problem, spread: Spread, *, checks: bool = True) -> IslandRecord:
    """Steps of SGD, then of the other optimizer from the initial values again, on a rank of a layout with islands.

    It `checks` what is alike then: replicas, and masters with outer parameters.
    """
    mesh = Mesh.of(spread.parallel, place, has_experts=problem.model.num_experts is not None)
    share = BatchShare.of(mesh, spread.micro_batch_size)
    results, found = list[StepResult](), dict[str, Parts]()
    for optimizer in optimizers_of(problem):
        engine = build(mesh, problem, spread, optimizer)
        for step in range(STEPS[optimizer.optimizer]):
            results.append(step_of(engine, batches_of(problem, share, step), step, problem, optimizer))
            if step + 1 != BETWEEN or optimizer.optimizer != "sgd":
                continue
            engine.data_parallel.wait_for_parameters()
            found["island"] = parts(engine, masters_of(engine))
            with outer_parameters(engine):
                totals = engine.evaluate(batches_of(problem, share, BETWEEN))
            engine.data_parallel.wait_for_parameters()
            assert_equal(parts(engine, masters_of(engine)), found["island"])
        engine.data_parallel.wait_for_parameters()
        assert engine.outer is not None
        assert not checks or differences(engine) == []
        outer, momentum = ({name: both[i] for name, both in engine.outer.state.items()} for i in range(2))
        learned = {name: each for name, each in masters_of(engine).items() if name in outer}
        if checks:
            assert_equal(parts(engine, learned), parts(engine, outer))
        if optimizer.optimizer == "sgd":
            found |= {"outer": parts(engine, outer), "momentum": parts(engine, momentum)}
        found["matrices"] = of_muon(engine, parts(engine, outer), optimizer)
    return IslandRecord(
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        evaluation=totals.sums["loss"] / totals.weight,
        islands={mesh.islands.rank: found["island"]},
        outer=found["outer"],
        momentum=found["momentum"],
        matrices=found["matrices"],
    )


def of_muon(engine: Engine, found: Parts, optimizer: OptimizerConfig) -> Parts:
    if optimizer.optimizer != "muon":
        return {}
    return {name: held for name, held in found.items() if engine.stage.shardings[name].role == "matrix"}


def assert_equal(some: Parts, others: Parts) -> None:
    for name, helds in some.items():
        for held, other in zip(helds, others[name], strict=True):
            assert torch.equal(held.values, other.values), name


def serial_islands(problem: Problem, num_islands: int) -> IslandRecord:
    """As many runs of one process, each with its row of every batch, and the outer step by hand, in fp64."""
    size = problem.global_batch_size // num_islands
    spread = Spread(Layout(), micro_batch_size=size)
    results, found = list[list[StepResult]](), dict[str, Parts]()
    flags = ParallelConfig()
    islands: dict[int, Parts] = {}
    for optimizer in optimizers_of(problem):
        meshes = [
            Mesh.of(spread.parallel, has_experts=problem.model.num_experts is not None) for _ in range(num_islands)
        ]
        engines = [build(mesh, problem, spread, optimizer) for mesh in meshes]
        shares = [BatchShare(0, 1, size, island, num_islands) for island in range(num_islands)]
        theta = {name: engines[0].optimizer.masters[name].detach().double() for name in engines[0].optimizer.masters}
        momentum = {name: torch.zeros_like(each) for name, each in theta.items()}
        for step in range(STEPS[optimizer.optimizer]):
            of_step = zip(engines, shares, strict=True)
            results.append(
                [
                    step_of(engine, batches_of(problem, share, step), step, problem, optimizer)
                    for engine, share in of_step
                ]
            )
            if (step + 1) % INTERVAL == 0 or step + 1 == STEPS[optimizer.optimizer]:
                for name, outer in theta.items():
                    move = sum(outer - engine.optimizer.masters[name].detach() for engine in engines) / num_islands
                    momentum[name] = flags.outer_momentum * momentum[name] + move
                    outer -= flags.outer_lr * (move + flags.outer_momentum * momentum[name])
                for engine in engines:
                    put(engine, theta)
            if step + 1 == BETWEEN and optimizer.optimizer == "sgd":
                islands = {number: parts(engine, masters_of(engine)) for number, engine in enumerate(engines)}
                with other_values(engines[0], theta):
                    totals = [engines[0].evaluate(batches_of(problem, share, BETWEEN)) for share in shares]
        if optimizer.optimizer == "sgd":
            found |= {
                name: parts(engines[0], {key: each.float() for key, each in values.items()})
                for name, values in (("outer", theta), ("momentum", momentum))
            }
        found["matrices"] = of_muon(
            engines[0], parts(engines[0], {key: each.float() for key, each in theta.items()}), optimizer
        )
    weights = [[result.num_loss_tokens for result in step] for step in results]
    losses = [[result.loss for result in step] for step in results]
    return IslandRecord(
        losses=[
            sum(a * b for a, b in zip(loss, weight, strict=True)) / sum(weight)
            for loss, weight in zip(losses, weights, strict=True)
        ],
        grad_norms=[sum(result.grad_norm for result in step) / num_islands for step in results],
        evaluation=sum(each.sums["loss"] for each in totals) / sum(each.weight for each in totals),
        islands=islands,
        outer=found["outer"],
        momentum=found["momentum"],
        matrices=found["matrices"],
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
