"""muP by every layout: rates, initial weights and factors of a width as in one process; each mistake of it is found."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from comparison import aspects_that_differ, assert_equal_to_serial, assert_same_training, serial
from models import TWO_LAYERS
from pairwise import Chosen
from problem import Problem, Spread
from ranks import run_ranks
from test_experts_mutations import Patch, no_mistake, planted_train
from test_latent_equal_serial import LATENT
from theorem_cases import choices, name_of, problem_of, spread_of

from megatronish.config.sections.optimizer import OptimizerConfig
from megatronish.core.layout import Layout
from megatronish.layers.linear import ColumnParallelLinear
from megatronish.optim import optimizer
from megatronish.parallel.sharding import Init, Sharding

MUP: dict[str, Any] = {
    "use_mup": True,
    "mup_width_mult": 2.5,
    "mup_base_head_dim": 3.0,
    "mup_embedding_mult": 2.0,
    "mup_output_mult": 3.0,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("gpt2", {}),
    "norms": ("qwen", {}),
    "latents": ("llama", LATENT),
    "ahead": ("llama", {"mtp_num_layers": 1}),
    "experts": ("llama", EXPERTS),
}
CASES: list[tuple[str, Layout, Chosen]] = [
    ("biases", Layout(dp=2), {"zero": 1, "tied": True, "dropout": 0.1}),
    ("llama", Layout(dp=2), {"zero": 3, "tied": False, "recompute": "uniform"}),
    ("llama", Layout(dp=2), {"zero": 3, "optimizer": "muon", "tied": True}),
    ("llama", Layout(tp=2), {"sequence_parallel": True, "optimizer": "adam", "tied": True}),
    ("biases", Layout(tp=2), {"sequence_parallel": True, "optimizer": "muon", "tied": False, "decoupled": True}),
    ("biases", Layout(tp=2), {"sequence_parallel": False, "tied": False, "decoupled": True}),
    ("norms", Layout(cp=2), {"cp_comm_type": "p2p", "documents": True, "tied": False}),
    ("norms", Layout(pp=2), {"schedule": "1f1b", "tied": True, "optimizer": "muon"}),
    ("llama", Layout(pp=2), {"schedule": "zb-v", "num_microbatches": 3, "tied": False}),
    ("biases", Layout(dp=2, tp=2), {"zero": 2, "sequence_parallel": True, "offload": "optimizer", "tied": True}),
    ("biases", Layout(dp=2, pp=2), {"zero": 3, "schedule": "1f1b", "tied": True}),
    ("latents", Layout(tp=2), {"sequence_parallel": True, "tied": False}),
    ("ahead", Layout(pp=2), {"schedule": "1f1b", "tied": True}),
    ("experts", Layout(dp=2), {"zero": 1, "tied": True}),
    ("experts", Layout(tp=2), {"sequence_parallel": True, "optimizer": "muon", "tied": False}),
]


def case_of(model: str, layout: Layout, given: Chosen) -> Chosen:
    plain = {feature: values[0] for feature, values in choices(layout).items()}
    usual = {"family": MODELS[model][0], "eod_mask_loss": False, "zero": 0, "offload": "none", "optimizer": "adam"}
    return plain | usual | {"decoupled": False} | given


def scaled(problem: Problem, more: dict[str, Any]) -> Problem:
    return replace(problem, model=replace(problem.model, **MUP, **more).written_out)


@pytest.mark.parametrize(
    ("model", "layout", "given"),
    CASES,
    ids=[f"{model}-{name_of(layout, case_of(model, layout, given))}" for model, layout, given in CASES],
)
def test_a_layout_trains_a_width_as_one_process_does(model: str, layout: Layout, given: Chosen) -> None:
    chosen = case_of(model, layout, given)
    assert_equal_to_serial(scaled(problem_of(layout, chosen), MODELS[model][1]), spread_of(layout, chosen))


# Mistakes

PROBLEM = Problem(
    replace(TWO_LAYERS, **MUP).written_out,
    seq_length=16,
    global_batch_size=4,
)
SPREAD = Spread(Layout(dp=2, tp=2), 2, sequence_parallel=True, zero=1)


def rate_of_cut_matrices_not_divided(patch: Patch) -> None:
    """Matrices that tp cuts have the rate of the others."""
    rate_of = optimizer._rate_of

    def planted(sharding: Sharding, config: OptimizerConfig, width_mult: float) -> optimizer.Rate:
        return rate_of(sharding, config, 1.0 if sharding.cuts else width_mult)

    patch.setattr(optimizer, "_rate_of", planted)


def rate_of_the_vocabulary_divided(patch: Patch) -> None:
    """Word embedding and output layer have the rate of matrices in layers."""
    rate_of = optimizer._rate_of

    def planted(sharding: Sharding, config: OptimizerConfig, width_mult: float) -> optimizer.Rate:
        return "hidden" if sharding.is_vocabulary else rate_of(sharding, config, width_mult)

    patch.setattr(optimizer, "_rate_of", planted)


def cut_matrices_start_as_wide(patch: Patch) -> None:
    """Matrices cut by rows have the initial weights of the base width."""
    shardings = ColumnParallelLinear.shardings

    def planted(self: ColumnParallelLinear) -> dict[str, Sharding]:
        of_layer = shardings(self)
        return of_layer | {"weight": replace(of_layer["weight"], init=Init(PROBLEM.model.init_method_std))}

    patch.setattr(ColumnParallelLinear, "shardings", planted)


MUTATIONS = [
    (rate_of_cut_matrices_not_divided, {"trained"}),
    (rate_of_the_vocabulary_divided, {"trained"}),
    (cut_matrices_start_as_wide, {"initial"}),
]


def test_without_a_mistake_nothing_is_found() -> None:
    assert_same_training(run_ranks(4, planted_train, PROBLEM, SPREAD, no_mistake), serial(PROBLEM))


@pytest.mark.parametrize(("plant", "shown_by"), MUTATIONS, ids=[plant.__name__ for plant, _ in MUTATIONS])
def test_a_mistake_of_a_width_is_found(plant: Callable[[Patch], None], shown_by: set[str]) -> None:
    differing = aspects_that_differ(run_ranks(4, planted_train, PROBLEM, SPREAD, plant), serial(PROBLEM))
    assert shown_by <= differing, differing
