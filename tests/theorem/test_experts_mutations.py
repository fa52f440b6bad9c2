"""Mutations of the rules of experts: each mistake that a layout could make fails the comparison with one process.

Each is planted in the ranks of a layout alone, and what must show it is named: a wrong norm changes a gradient by its
clipping alone, and a wrong bias shows in choices and states long before it does in a loss.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from comparison import aspects_that_differ, assert_same_training, serial, with_margin
from expert_cases import EXPERTS
from problem import Problem, Spread
from ranks import run_ranks
from sweeps import some_of
from theorem import Record, train

from megatronish.config.sections.model import ModelConfig
from megatronish.core.layout import Layout
from megatronish.engine import engine, results
from megatronish.engine.balancing import TOKENS
from megatronish.engine.results import StepSums
from megatronish.launch.place import Place
from megatronish.layers.dispatch import Capacity, TokenRoute, kept_choices, make_route
from megatronish.layers.router import Balance, Router
from megatronish.model import experts as experts_of_model
from megatronish.model import gpt
from megatronish.model.routing import Tally
from megatronish.parallel.mesh import Axis, Domain, Mesh
from megatronish.parallel.sharding import Sharding

Patch = pytest.MonkeyPatch


def router_not_summed_over_tp(patch: Patch) -> None:
    """Each tp rank keeps the gradient of its own tokens."""
    shardings = Router.shardings

    def planted(self: Router) -> dict[str, Sharding]:
        return {name: replace(found, partial_over=frozenset()) for name, found in shardings(self).items()}

    patch.setattr(Router, "shardings", planted)


def change_experts_domain(patch: Patch, change: Callable[[Mesh, Domain], Domain]) -> None:
    """Meshes are made with another domain of experts."""
    start = Mesh.start

    def planted(*args: Any, **options: Any) -> Mesh:
        mesh = start(*args, **options)
        return mesh.with_domain(change(mesh, mesh.domains["experts"]))

    patch.setattr(Mesh, "start", planted)


def experts_summed_over_dp_and_cp(patch: Patch) -> None:
    """Ranks that hold different experts add up their gradients."""
    change_experts_domain(patch, lambda mesh, domain: replace(domain, replicate=mesh.domains["dense"].replicate))


def experts_not_summed_over_edp(patch: Patch) -> None:
    """Copies of an expert each keep the gradient of the tokens that they have seen."""
    change_experts_domain(patch, lambda _mesh, domain: replace(domain, replicate=Axis("replicate")))


def expert_norm_summed_over_tp(patch: Patch) -> None:
    """The norm of experts is summed over tp, instead of over ep and etp."""
    axes = Domain.counting_axes.fget
    assert axes is not None
    of_dense: list[Axis] = []

    def planted(self: Domain) -> tuple[Axis, ...]:
        found = axes(self)
        if self.name == "dense":
            of_dense[:] = [self.model["tp"]]
        return found if self.name == "dense" else (self.shard, *of_dense)

    patch.setattr(Domain, "counting_axes", property(planted))


def sequence_loss_of_own_counts(patch: Patch) -> None:
    """The frequencies of a sequence's loss are those of the rank's own tokens."""

    def planted(balance: Balance, _axes: tuple[Axis, ...]) -> Tally:
        return Tally(balance, ())

    patch.setattr(gpt, "Tally", planted)


def bias_without_other_tp_ranks(patch: Patch) -> None:
    """Choices of experts are counted on the first rank of tp alone, as sums of the objective are."""

    def planted(sums: dict[str, torch.Tensor], *args: Any, mesh: Mesh, **options: Any) -> StepSums:
        if TOKENS in sums and not mesh.tp.is_first:
            sums = sums | {TOKENS: torch.zeros_like(sums[TOKENS])}
        return results.reduce_sums(sums, *args, mesh=mesh, **options)

    patch.setattr(engine, "reduce_sums", planted)


def bias_of_own_counts(patch: Patch) -> None:
    """Each rank moves the bias by the choices of its own tokens."""

    def planted(sums: dict[str, torch.Tensor], *args: Any, **options: Any) -> StepSums:
        found = results.reduce_sums(sums, *args, **options)
        return found._replace(model={**found.model, TOKENS: sums[TOKENS].double()}) if TOKENS in sums else found

    patch.setattr(engine, "reduce_sums", planted)


def received_rows_not_sorted(patch: Patch) -> None:
    """Rows are multiplied as they arrive: by source, and not by expert."""

    def planted(*args: Any, **options: Any) -> TokenRoute:
        return make_route(*args, **options)._replace(local_order=None, local_inverse=None)

    patch.setattr(experts_of_model, "make_route", planted)


def capacity_without_ranks_before(patch: Patch) -> None:
    """Each rank counts the earlier choices of its own tokens alone."""

    def planted(choices: torch.Tensor, positions: torch.Tensor, capacity: Capacity, **options: Any) -> torch.Tensor:
        return kept_choices(choices, positions, capacity._replace(cp=Axis("cp"), tp=Axis("tp")), **options)

    patch.setattr(experts_of_model, "kept_choices", planted)


class Mutation(NamedTuple):
    """A mistake, the layout and the kind of experts that it needs, and some of what shows it."""

    plant: Callable[[Patch], None]
    spread: Spread
    kind: str
    shown_by: set[str]


TP = Spread(Layout(tp=2), 2, ep=2, etp=1, sequence_parallel=True)
DP, CP = Spread(Layout(dp=2), 2, ep=2, etp=1), Spread(Layout(cp=2), 4, ep=2, etp=1)
MUTATIONS = [
    Mutation(router_not_summed_over_tp, TP, "softmax", {"gradients", "norm", "metrics"}),
    Mutation(experts_summed_over_dp_and_cp, DP, "softmax", {"gradients", "norm", "metrics"}),
    Mutation(experts_not_summed_over_edp, replace(DP, ep=1), "softmax", {"gradients", "norm", "metrics"}),
    Mutation(expert_norm_summed_over_tp, DP, "softmax", {"norm"}),
    Mutation(sequence_loss_of_own_counts, CP, "softmax", {"gradients", "metrics"}),
    Mutation(bias_without_other_tp_ranks, TP, "sigmoid", {"choices", "states"}),
    Mutation(bias_of_own_counts, DP, "sigmoid", {"choices", "states"}),
    Mutation(received_rows_not_sorted, DP, "softmax", {"gradients", "norm", "metrics"}),
    Mutation(capacity_without_ranks_before, CP, "capacity", {"gradients", "norm", "metrics"}),
]


def planted_train(place: Place, problem: Problem, spread: Spread, plant: Callable[[Patch], None]) -> Record:
    """`train` with a mistake; the rank is as before afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        return train(place, problem, spread)


def problem_with(kind: str) -> Problem:
    """A small model that the layouts above share out."""
    model = ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_experts=8,
        moe_ffn_hidden_size=12,
        **{"moe_router_num_groups": 2} if kind == "sigmoid" else {},
        **EXPERTS[kind] | ({"moe_shared_expert_intermediate_size": 8} if kind == "sigmoid" else {}),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        make_vocab_size_divisible_by=4,
    )
    return with_margin(Problem(model, seq_length=12, global_batch_size=4))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.plant.__name__ for mutation in MUTATIONS])
def test_a_mistake_in_a_rule_of_experts_is_found(mutation: Mutation) -> None:
    problem = problem_with(mutation.kind)
    ranks = run_ranks(mutation.spread.layout.world_size, planted_train, problem, mutation.spread, mutation.plant)
    found = aspects_that_differ(ranks, serial(problem))
    assert mutation.shown_by <= found, found
    with pytest.raises(AssertionError):
        assert_same_training(ranks, serial(problem))


def no_mistake(_patch: Patch) -> None:
    """What the others are compared with."""


SPREADS = {"tp": TP, "dp": DP, "cp": CP}
KINDS = ("softmax", "sigmoid", "capacity")


@pytest.mark.parametrize(
    ("kind", "spread"), some_of(product(KINDS, SPREADS), [("softmax", "tp"), ("sigmoid", "dp"), ("capacity", "cp")])
)
def test_without_a_mistake_nothing_is_found(kind: str, spread: str) -> None:
    problem = problem_with(kind)
    ranks = run_ranks(SPREADS[spread].layout.world_size, planted_train, problem, SPREADS[spread], no_mistake)
    assert_same_training(ranks, serial(problem))
