"""Experts with biases, as gpt-oss has them, by every layout: what one process trains is what ranks train.

With the dense parts of gpt-oss: sinks, windows in some layers, clamped gates, and a YaRN whose range is not rounded.
Mistakes that are planted in it are found.
"""

from dataclasses import replace
from typing import Any

import pytest
from comparison import aspects_that_differ, assert_equal_to_serial, assert_same_training, serial, with_margin
from expert_cases import choices_of_experts, expert_problem, expert_spread
from pairwise import Chosen
from problem import Problem
from ranks import run_ranks
from sweeps import some_of
from test_experts_mutations import Patch, no_mistake, planted_train
from theorem_cases import ADAPTERS, name_of
from torch import Tensor

from megatronish.config.sections.training import RecomputeConfig
from megatronish.core.layout import Layout
from megatronish.layers import experts as layer
from megatronish.layers.experts import StackedLinear
from megatronish.layers.router import Router
from megatronish.ops.grouped_mm import Groups
from megatronish.parallel.sharding import Init, Sharding

BIASED: dict[str, Any] = {
    "moe_add_bias_linear": True,
    "disable_bias_linear": True,
    "add_attention_bias": True,
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_original_max_positions": 8,
    "rope_beta_fast": 2.0,
    "yarn_correction_range_round_to_int": False,
}
CASES: list[tuple[Layout, Chosen]] = [
    (Layout(dp=2), {"ep": "most", "zero": 1, "overlap": True}),
    (Layout(dp=2), {"ep": "most", "zero": 2, "optimizer": "muon", "sight": "window"}),
    (Layout(dp=2), {"experts": "capacity", "ep": "most", "zero": 3, "recompute": "block"}),
    (Layout(tp=2), {"ep": "most", "sequence_parallel": True, "recompute": "uniform", "sight": "window"}),
    (Layout(tp=2), {"etp": "tp", "sequence_parallel": True, "experts": "capacity"}),
    (Layout(tp=2), {"etp": "tp", "sequence_parallel": False, "recompute": "selective"}),
    (Layout(cp=2), {"ep": "most", "cp_comm_type": "p2p", "documents": True}),
    (Layout(cp=2), {"cp_comm_type": "a2a", "num_microbatches": 3, "sight": "window"}),
    (Layout(pp=2), {"schedule": "zb-h1", "num_microbatches": 3}),
    (Layout(pp=2), {"schedule": "zb-v", "num_microbatches": 3, "family": "llama", "experts": "sigmoid"}),
    (Layout(tp=2, pp=2), {"etp": "tp", "schedule": "1f1b", "sequence_parallel": True, "num_microbatches": 3}),
    (Layout(dp=2, tp=2), {"ep": "fewest", "etp": "tp", "sequence_parallel": True, "zero": 3}),
]


def case_of(layout: Layout, given: Chosen) -> Chosen:
    plain = {feature: values[0] for feature, values in choices_of_experts(layout).items()}
    optimizer = "adam" if layout.dp > 1 or layout.pp > 1 else "sgd"
    own = {"family": "gpt_oss", "experts": "softmax", "etp": "one", "clamped": True, "tied": False}
    return plain | {"optimizer": optimizer, "zero": 0, "offload": "none"} | own | given


def biased_problem(layout: Layout, chosen: Chosen) -> Problem:
    problem = expert_problem(layout, chosen)
    return replace(problem, model=replace(problem.model, **BIASED))


@pytest.mark.parametrize(
    ("layout", "given"), CASES, ids=[name_of(layout, case_of(layout, given)) for layout, given in CASES]
)
def test_a_layout_trains_the_same_biases_as_one_process(layout: Layout, given: Chosen) -> None:
    chosen = case_of(layout, given)
    assert_equal_to_serial(biased_problem(layout, chosen), expert_spread(layout, chosen))


@pytest.mark.parametrize("modules", [("moe",), ("moe_act", "core_attn")], ids="+".join)
def test_parts_that_are_computed_again_have_the_same_biases(modules: tuple[Any, ...]) -> None:
    layout = Layout(tp=2)
    chosen = case_of(layout, {"etp": "tp", "sequence_parallel": True})
    recompute = RecomputeConfig(recompute_granularity="selective", recompute_modules=modules)
    spread = replace(expert_spread(layout, chosen), recompute=recompute)
    assert_equal_to_serial(biased_problem(layout, chosen), spread)


@pytest.mark.parametrize("kind", some_of(["lora", "ia3", "qlora"], ["lora"]))
@pytest.mark.parametrize(
    "given", [{"etp": "tp", "sequence_parallel": True}, {"ep": "most", "sequence_parallel": False}], ids=str
)
def test_a_layout_trains_the_same_adapters_over_biases(kind: str, given: Chosen) -> None:
    layout = Layout(tp=2)
    chosen = case_of(layout, given)
    problem, adapter = biased_problem(layout, chosen), ADAPTERS[kind]
    if adapter.quantize_base is not None:
        sizes = {"hidden_size": 64, "kv_channels": 64, "ffn_hidden_size": 128, "moe_ffn_hidden_size": 128}
        problem = replace(problem, model=replace(problem.model, **sizes, init_method_std=0.1))
    assert_equal_to_serial(replace(problem, adapter=adapter), expert_spread(layout, chosen))


# Planted mistakes


def whole_bias_on_every_rank(patch: Patch) -> None:
    """Ranks of etp add the same columns of the bias of the down-projection, those of the first."""
    init = StackedLinear.__init__

    def planted(self: StackedLinear, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.bias_columns = slice(0, self.bias_columns.stop - self.bias_columns.start)

    patch.setattr(StackedLinear, "__init__", planted)


def bias_of_another_expert(patch: Patch) -> None:
    """Rows have the bias of the first expert that the rank holds."""
    add = layer.add_grouped_bias

    def planted(y: Tensor, bias: Tensor, groups: Groups) -> None:
        add(y, bias[:1].expand_as(bias), groups)

    patch.setattr(layer, "add_grouped_bias", planted)


def bias_of_router_not_summed(patch: Patch) -> None:
    """Each tp rank keeps the gradient of the router's bias by its own tokens."""
    shardings = Router.shardings

    def planted(self: Router) -> dict[str, Sharding]:
        given = shardings(self)
        return given | {"logit_bias": replace(given["logit_bias"], partial_over=frozenset())}

    patch.setattr(Router, "shardings", planted)


def biases_as_matrices(patch: Patch) -> None:
    """Biases of experts are matrices to the optimizer."""
    shardings = StackedLinear.shardings

    def planted(self: StackedLinear) -> dict[str, Sharding]:
        given = shardings(self)
        return given | {"bias": replace(given["bias"], role="matrix", init=Init(0.2))}

    patch.setattr(StackedLinear, "shardings", planted)


@pytest.mark.parametrize(
    ("given", "plant", "shown"),
    some_of(
        [
            ({"etp": "tp"}, whole_bias_on_every_rank, "gradients"),
            ({"ep": "most"}, bias_of_another_expert, "trained"),  # biases begin at zero
            ({"ep": "most"}, bias_of_router_not_summed, "gradients"),
            ({"etp": "tp"}, biases_as_matrices, "gradients"),
        ],
        [({"etp": "tp"}, whole_bias_on_every_rank, "gradients")],
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_mistake_is_found(given: Chosen, plant: Any, shown: str) -> None:
    layout = Layout(tp=2)
    chosen = case_of(layout, {"sequence_parallel": True, **given})
    problem = with_margin(biased_problem(layout, chosen))
    spread = expert_spread(layout, chosen)
    assert_same_training(run_ranks(2, planted_train, problem, spread, no_mistake), serial(problem))
    assert shown in aspects_that_differ(run_ranks(2, planted_train, problem, spread, plant), serial(problem))
