"""Cases of the theorem for models with experts: what they are, and how they are laid over the ranks."""

from dataclasses import replace
from itertools import product
from typing import Any

from pairwise import Chosen, Pair, pairwise, possible_pairs
from problem import Problem, Spread
from theorem_cases import LAYOUTS, choices, deal, problem_of, spread_of

from megatronish.config.sections.model import ModelConfig
from megatronish.core.layout import Layout

EXPERTS: dict[str, dict[str, Any]] = {
    "softmax": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01},
    "sigmoid": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.0,
        "moe_shared_expert_gate": True,
        "moe_aux_loss_coeff": 0.1,
    },
    "capacity": {
        "moe_expert_capacity_factor": 0.75,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.1,
    },
    "mixed": {"moe_layer_freq": "2", "moe_router_pre_softmax": True, "moe_router_norm_topk_prob": True}
    | {"moe_z_loss_coeff": 0.01},
}
OWN = ("experts", "ep", "etp", "dispatcher")


def choices_of_experts(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """Those of a dense model, and four of its own: experts, how many ranks share and cut them, and how tokens go there.

    `ep`: one rank, or the fewest or the most that the layout can have. `dispatcher`: DeepEP by its stand-in.
    """
    many = ranks_of_stage(layout) > 1
    of_layout = choices(layout)
    return of_layout | {
        "family": tuple(family for family in of_layout["family"] if family != "t5"),  # which has no experts
        "experts": tuple(EXPERTS),
        "ep": ("one", "fewest", "most") if many else ("one",),
        "etp": ("one", "tp") if layout.tp > 1 else ("one",),
        "dispatcher": ("alltoall", "deepep") if many else ("alltoall",),
    }


def ranks_of_stage(layout: Layout) -> int:
    """Ranks over which the experts of a layer may lie."""
    return layout.dp * layout.cp * layout.tp


# Every layout's kind: which of the axes cut a model, and how long the ring and the pipeline are.
EXPERT_CASES = [
    Layout(),
    Layout(dp=2),
    Layout(dp=8),
    Layout(tp=2),
    Layout(tp=4),
    Layout(cp=4),
    Layout(dp=2, tp=2),
    Layout(dp=3, tp=2),
    Layout(dp=4, cp=2),
    Layout(dp=2, tp=2, cp=2),
    Layout(tp=3, cp=2),
    Layout(tp=2, cp=4),
    Layout(dp=2, cp=4),
    *[Layout(dp=2, pp=2)] * 3,
    *[Layout(tp=2, pp=2)] * 4,
    *[Layout(cp=2, pp=2)] * 3,
    *[Layout(dp=2, tp=2, pp=2)] * 5,
    *[Layout(tp=2, pp=2, cp=2)] * 3,
    *[Layout(pp=2, cp=4)] * 2,
    *[Layout(dp=2, pp=3)] * 2,
    Layout(tp=2, pp=3),
    Layout(pp=3, cp=2),
    Layout(pp=4, tp=2),
    Layout(dp=4, pp=2),
]
EXPERT_CHOICES = [choices_of_experts(layout) for layout in EXPERT_CASES]


def of_experts(pairs: set[Pair]) -> set[Pair]:
    """The pairs in which a feature of experts is one: those of two others are the dense model's."""
    return {pair for pair in pairs if any(feature in OWN for feature, _ in pair)}


EXPERT_DEALT = deal(EXPERT_CASES, EXPERT_CHOICES, seed=12, wanted=of_experts(possible_pairs(EXPERT_CHOICES)))


def expert_problem(layout: Layout, chosen: Chosen) -> Problem:
    """The dense problem, with experts in the place of MLPs."""
    problem = problem_of(layout, chosen)
    return replace(problem, model=with_experts(problem.model, layout, chosen["experts"]))


def with_experts(model: ModelConfig, layout: Layout, kind: str) -> ModelConfig:
    """Two experts for each rank, or more where there are few, so that all layouts of a size can share them out."""
    ranks = ranks_of_stage(layout)
    number = 2 * ranks if ranks in (3, 5, 6, 7) else 8
    size = -(-model.hidden_size // layout.tp) * layout.tp  # which tp cuts
    options: dict[str, Any] = {"num_experts": number, "moe_router_topk": 2, "moe_ffn_hidden_size": size}
    if kind == "sigmoid":
        options |= {
            "moe_router_num_groups": 2,
            "moe_shared_expert_intermediate_size": size,
        }
    return replace(model, **options, **EXPERTS[kind])


def expert_spread(layout: Layout, chosen: Chosen) -> Spread:
    """As the dense model is spread, with the grid of experts on the ranks of each stage."""
    etp = layout.tp if chosen["etp"] == "tp" else 1
    number, ranks = expert_problem(layout, chosen).model.num_experts, ranks_of_stage(layout) // etp
    assert number is not None
    spread = spread_of(layout, chosen)
    # Copies of shards (HSDP) are copies of experts, too: each group of them has all experts.
    able = [ep for ep in range(2, ranks + 1) if ranks % (ep * spread.copies) == 0 and number % ep == 0]
    ep = {"fewest": min, "most": max}[chosen["ep"]](able) if able and chosen["ep"] in ("fewest", "most") else 1
    if (ranks // ep) % spread.copies:
        spread = replace(spread, copies=1)
    return replace(spread, ep=ep, etp=etp, dispatcher=chosen.get("dispatcher", "alltoall"))


def all_expert_cases() -> list[tuple[Layout, Chosen]]:
    """Every layout with the product of what experts are and of what they meet; the others as they were dealt."""
    features = (*OWN[:3], "sequence_parallel", "schedule", "cp_comm_type", "zero")
    every = [choices_of_experts(layout) for layout in LAYOUTS]
    return [
        (layout, dealt | dict(zip(features, values, strict=True)))
        for layout, dealt, of_layout in zip(LAYOUTS, pairwise(every, seed=6), every, strict=True)
        for values in product(*(of_layout[feature] for feature in features))
    ]
