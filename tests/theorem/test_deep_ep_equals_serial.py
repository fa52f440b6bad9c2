"""Theorem for tokens that go to experts by DeepEP, whose place a stand-in over gloo takes: equal to one process.

The stand-in has the rules of its kernels, and no result before the wait for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from comparison import aspects_that_differ, assert_same_training, serial
from problem import Spread
from ranks import run_ranks
from test_experts_mutations import Patch, no_mistake, planted_train, problem_with
from theorem import Record
from torch import Tensor

from megatronish.config.sections.training import RecomputeConfig
from megatronish.core.layout import Layout
from megatronish.layers import deep_dispatch
from megatronish.parallel.deep_ep import Returning, Sent, TokenExchange

DP2 = Spread(Layout(dp=2), 2, ep=2, etp=1, dispatcher="deepep")
DP4 = Spread(Layout(dp=4), 1, ep=4, etp=1, dispatcher="deepep")
TP2 = Spread(Layout(tp=2), 2, ep=2, etp=1, sequence_parallel=True, dispatcher="deepep")
FULL = RecomputeConfig("full", "uniform", 1)
MOE = RecomputeConfig("selective", recompute_modules=("moe",))
SHARED = RecomputeConfig("selective", recompute_modules=("shared_experts", "moe_act"))
CASES: dict[str, tuple[str, Spread]] = {
    "ep 2": ("softmax", DP2),
    "ep 4": ("softmax", DP4),
    "ep over tp": ("softmax", TP2),
    "ep over tp, whole sequences": ("softmax", replace(TP2, sequence_parallel=False)),
    "ep and etp": ("softmax", Spread(Layout(dp=2, tp=2), 2, ep=2, etp=2, dispatcher="deepep")),
    "ep over cp, all computed again": (
        "softmax",
        replace(DP2, layout=Layout(cp=2), micro_batch_size=4, recompute=FULL),
    ),
    "experts computed again": ("sigmoid", replace(DP2, recompute=MOE)),
    "stages": ("softmax", replace(DP2, layout=Layout(dp=2, pp=2), micro_batch_size=1, schedule="zb-h1")),
    "shared experts, biases of routers": ("sigmoid", replace(DP4, ep=2, zero=1)),
    "shared experts and activations computed again": ("sigmoid", replace(DP4, recompute=SHARED)),
    "ZeRO-2": ("softmax", replace(DP4, ep=2, zero=2)),
    "ZeRO-3": ("softmax", replace(DP4, ep=2, zero=3)),
    "capacity": ("capacity", DP2),
    "capacity, ep over tp": ("capacity", TP2),
    "capacity, ep over cp, computed again": (
        "capacity",
        replace(DP2, layout=Layout(cp=2), micro_batch_size=4, recompute=FULL),
    ),
}


def trained(kind: str, spread: Spread, plant: Callable[[Patch], None] = no_mistake) -> list[Record]:
    """What the ranks saw."""
    return run_ranks(spread.layout.world_size, planted_train, problem_with(kind), spread, plant)


@pytest.mark.parametrize("name", CASES)
def test_tokens_by_deep_ep_train_the_model_of_one_process(name: str) -> None:
    kind, spread = CASES[name]
    assert_same_training(trained(kind, spread), serial(problem_with(kind)))


def unfinished_tokens(patch: Patch) -> None:
    """Tokens are read before they have arrived."""
    patch.setattr(deep_dispatch._TokensInProgress, "end", lambda *_: None)


def weights_without_gradients(patch: Patch) -> None:
    """The gradients of the weights stay where the experts are."""
    start_back = TokenExchange.start_back

    def planted(self: TokenExchange, rows: Tensor, handle: Any, **options: Any) -> Returning:
        back = start_back(self, rows, handle, **options)
        return back._replace(weights=None if back.weights is None else torch.zeros_like(back.weights))

    patch.setattr(TokenExchange, "start_back", planted)


def choices_of_the_next_expert(patch: Patch) -> None:
    """What arrives is computed by the expert behind the one that was chosen."""

    def planted(sent: Sent) -> Any:
        choices = torch.where(sent.choices < 0, -1, (sent.choices + 1) % len(sent.counts))
        return local_route(sent._replace(choices=choices))

    local_route = deep_dispatch._local_route
    patch.setattr(deep_dispatch, "_local_route", planted)


def gradients_of_one_rank_alone(patch: Patch) -> None:
    """A token's gradient goes to the experts, and what other ranks than this one make of it is lost."""
    start_again = TokenExchange.start_again

    def planted(self: TokenExchange, x: Tensor, handle: Any, **options: Any) -> Any:
        return start_again(self, x * (self.axis.rank == 0), handle, **options)

    patch.setattr(TokenExchange, "start_again", planted)


MISTAKES: Sequence[tuple[Callable[[Patch], None], set[str]]] = [
    (weights_without_gradients, {"gradients"}),
    (choices_of_the_next_expert, {"gradients", "metrics"}),
    (gradients_of_one_rank_alone, {"gradients"}),
]


@pytest.mark.parametrize(("plant", "shown_by"), MISTAKES, ids=[plant.__name__ for plant, _ in MISTAKES])
def test_a_mistake_in_the_exchange_is_found(plant: Callable[[Patch], None], shown_by: set[str]) -> None:
    differing = aspects_that_differ(trained("softmax", DP2, plant), serial(problem_with("softmax")))
    assert shown_by <= differing, differing


def test_tokens_that_are_read_before_they_arrive_are_found() -> None:
    with pytest.raises(AssertionError, match=r"finite|nan|NaN"):
        trained("softmax", DP2, unfinished_tokens)
