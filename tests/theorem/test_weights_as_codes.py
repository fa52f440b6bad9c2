"""Theorem of qwZ: with weights as codes a layout computes with the same bits as one process, and learns the same.

Blocks of codes are those of a tensor's rows, so the codes of one process are those of any layout. What a model computes
with is compared bit by bit; what it learns, as in the theorem of all layouts, whose features are dealt here, too.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from comparison import aspects_that_differ, assert_equal_to_serial, serial, whole
from engines import evaluated
from expert_cases import expert_problem, expert_spread
from pairwise import Chosen, covered_pairs, one_of_each, possible_pairs
from problem import Problem, Spread
from ranks import run_ranks
from sweeps import some_of
from theorem import Held, Parts, Record, batches_of, build, masters_of, parts, train
from theorem_cases import choices, cost_of, deal, name_of, problem_of, spread_of
from torch import Tensor, nn

from megatronish.core.layout import Layout
from megatronish.data.loader import BatchShare
from megatronish.launch.place import Place
from megatronish.parallel.block_codes import decode, decoded, encoded
from megatronish.parallel.data_parallel import coded_weights, zero
from megatronish.parallel.data_parallel.units import CodedAllGather
from megatronish.parallel.mesh import Axis, Mesh

BLOCK = 8
LAYOUTS = [
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(dp=4),
    Layout(cp=2),
    Layout(dp=2, tp=2),
    Layout(dp=2, pp=2),
    Layout(dp=2, cp=2),
    Layout(dp=8),
    Layout(dp=4, tp=2),
    Layout(dp=4, pp=2),
    Layout(dp=2, tp=2, pp=2),
    Layout(dp=2, tp=2, cp=2),
    Layout(dp=2, cp=2, pp=2),
]
SEED = 4
MEETING = ("zero", "overlap", "offload", "on_disk", "copies", "tied", "schedule", "kept")
"""Features of which every two that can meet do so; the others are dealt, too."""


def choices_of(layout: Layout) -> dict[str, tuple[Any, ...]]:
    """What each feature may be in this layout; `kept`: neighbours keep what ZeRO-3 has gathered (hpZ).

    Muon is left out: what it makes of rounding is enough for one of thousands of codes to become its neighbour.
    """
    of_layout = {"kept": (False, True) if layout.dp * layout.cp >= 4 else (False,), "optimizer": ("sgd", "adam")}
    return choices(layout) | of_layout


CHOICES = [choices_of(layout) for layout in LAYOUTS]


def of_meeting(pairs: set[frozenset[tuple[str, Any]]]) -> set[frozenset[tuple[str, Any]]]:
    """The pairs of two features that matter."""
    return {pair for pair in pairs if all(feature in MEETING for feature, _ in pair)}


DEALT = deal(LAYOUTS, CHOICES, seed=SEED, wanted=of_meeting(possible_pairs(CHOICES)))


def with_blocks(problem: Problem) -> Problem:
    """The same with weights as codes, and rows of whole blocks on every rank."""
    width = BLOCK * problem.model.num_attention_heads
    model = replace(problem.model, hidden_size=width, kv_channels=BLOCK, ffn_hidden_size=width)
    if model.num_experts is not None:
        shared = None if model.moe_shared_expert_intermediate_size is None else width
        model = replace(model, moe_ffn_hidden_size=width, moe_shared_expert_intermediate_size=shared)
    return replace(problem, model=model, weight_block=BLOCK)


def case_of(layout: Layout, chosen: Chosen) -> tuple[Problem, Spread]:
    """What is trained, and how it is spread."""
    spread = spread_of(layout, chosen)
    keeps = chosen["kept"] and spread.zero == 3 and layout.dp * layout.cp // spread.copies >= 4
    return with_blocks(problem_of(layout, chosen)), replace(spread, secondary=2 if keeps else None)


CASES = list(zip(LAYOUTS, DEALT, strict=True))
SPREADS = [case_of(*case)[1] for case in CASES]
MET = [
    {"schedule": each.schedule, "zero": each.zero, "overlap": each.overlap, "offload": each.offload}
    | {"on_disk": each.on_disk, "copies": each.copies, "kept": each.secondary is not None, "tied": chosen["tied"]}
    | {"recompute": chosen["recompute"], "has_many": chosen["num_microbatches"] > 1}
    for each, chosen in zip(SPREADS, DEALT, strict=True)
]
"""What the cases have in effect."""
FEW = [CASES[number] for number in one_of_each(MET, [cost_of(*case) for case in CASES])]
"""Cheap cases with every value of the features that meet; `pytest --all-layouts` takes all."""


@pytest.mark.parametrize(("layout", "chosen"), some_of(CASES, FEW), ids=map(name_of, LAYOUTS, DEALT))
def test_a_layout_learns_the_same_with_weights_as_codes(layout: Layout, chosen: Chosen) -> None:
    assert_equal_to_serial(*case_of(layout, chosen))


def test_features_that_can_meet_do_so() -> None:
    possible, met = of_meeting(possible_pairs(CHOICES)), of_meeting(covered_pairs(DEALT))
    assert len(possible & met) > 0.75 * len(possible)
    assert {item for chosen in DEALT for item in chosen.items()} >= {item for pair in possible for item in pair}


EXPERTS = [
    (Layout(dp=4, tp=2), {"experts": "sigmoid", "ep": "fewest", "etp": "tp", "zero": 3, "sequence_parallel": True}),
    (Layout(dp=2, pp=2), {"experts": "softmax", "ep": "most", "etp": "one", "zero": 2, "family": "llama"}),
    (Layout(dp=2), {"experts": "mixed", "ep": "most", "etp": "one", "zero": 3, "family": "qwen"}),
]


def experts_of(layout: Layout, main: Chosen) -> tuple[Problem, Spread]:
    """A model with experts, and how it is spread."""
    chosen = {feature: values[0] for feature, values in choices(layout).items()} | main
    return with_blocks(expert_problem(layout, chosen)), expert_spread(layout, chosen)


@pytest.mark.parametrize(("layout", "main"), some_of(EXPERTS, EXPERTS[:2]))
def test_a_layout_of_experts_learns_the_same_with_weights_as_codes(layout: Layout, main: Chosen) -> None:
    assert_equal_to_serial(*experts_of(layout, main))


# Bits of what is computed with


def operands(place: Place, problem: Problem, spread: Spread) -> tuple[Parts, Parts]:
    """Every parameter as a forward reads it, and the masters: what this rank has of both."""
    mesh = Mesh.of(spread.parallel, place, has_experts=problem.model.num_experts is not None)
    share = BatchShare(mesh.dp.rank, mesh.dp.size, spread.micro_batch_size)
    engine = build(mesh, problem, spread)
    seen: dict[str, Tensor] = {}

    def see(path: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            seen[f"{path}.{name}"] = parameter.detach().clone()

    for path, module in engine.stage.model.named_modules():
        module.register_forward_pre_hook(lambda module, _, path=path: see(path, module))
    evaluated(engine, batches_of(problem, share, 0))
    read: Parts = {}
    for name, local in seen.items():
        sharding = engine.stage.shardings[name]
        pieces = sharding.pieces(mesh.domains[sharding.domain].model)
        read[name] = [Held(piece.global_offset, piece.view(local).clone()) for piece in pieces]
    return read, parts(engine, masters_of(engine))


PLAIN: Chosen = {"offload": "none", "on_disk": False, "copies": None, "kept": False, "dropout": 0.0, "family": "llama"}
BITS = [
    (Layout(dp=2, tp=2), {"zero": 1}),
    (Layout(dp=4), {"zero": 2, "offload": "optimizer"}),
    (Layout(dp=4), {"zero": 3, "kept": True}),
    (Layout(tp=2), {"zero": 3}),
    (Layout(dp=2, pp=2), {"zero": 0}),
    (Layout(dp=2, tp=2), {"zero": 3, "offload": "parameters", "on_disk": True}),
]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("layout", "main"), some_of(BITS, BITS[:3]))
def test_what_a_model_computes_with_has_the_same_bits_in_every_layout(layout: Layout, main: Chosen, bf16: bool) -> None:
    chosen = {feature: values[0] for feature, values in choices_of(layout).items()} | PLAIN | main
    problem, spread = case_of(layout, chosen)
    assert_equal_operands(replace(problem, bf16=bf16), spread)


def test_what_experts_compute_with_has_the_same_bits() -> None:
    assert_equal_operands(*experts_of(*EXPERTS[0]))


def assert_equal_operands(problem: Problem, spread: Spread) -> None:
    """Matrices are their masters' codes, in every layout, and vectors are the masters."""
    ranks = run_ranks(spread.layout.world_size, operands, problem, spread)
    alone, masters = operands(Place(), problem, Spread(Layout(), problem.global_batch_size))
    expected, found = whole([alone]), whole([read for read, _ in ranks])
    assert found.keys() == expected.keys()
    for name, value in whole([masters]).items():
        if name not in found:  # a head that is the embedding's table
            continue
        assert torch.equal(found[name], expected[name]), name
        codes = (
            decoded(encoded(value.reshape(-1, BLOCK), "int8"), "int8").view(value.shape) if value.dim() > 1 else value
        )
        assert torch.equal(expected[name].float(), codes.bfloat16().float() if problem.bf16 else codes), name
        assert value.dim() == 1 or not torch.equal(codes, value), "nothing was rounded"


# Mistakes


def blocks_of_a_buffer(patch: pytest.MonkeyPatch) -> None:
    """Blocks run over the ends of rows: their elements depend on the part that a rank keeps."""

    def planted(values: Tensor, axis: Axis, block: int, *, into: Tensor) -> coded_weights.PendingWeights:
        wider = 3 * block if len(values) % (3 * block) == 0 else 2 * block if len(values) % (2 * block) == 0 else block
        return coded_weights.start_coded_gather(values, axis, wider, into=into)

    patch.setattr(zero, "start_coded_gather", planted)


def masters_of_codes(patch: pytest.MonkeyPatch) -> None:
    """Masters are rounded with what is computed with, so that a small step is lost."""

    def planted(values: Tensor, axis: Axis, block: int, *, into: Tensor) -> coded_weights.PendingWeights:
        pending = coded_weights.start_coded_gather(values, axis, block, into=into)
        decode(encoded(values.view(-1, block), "int8"), "int8", values.view(-1, block))
        return pending

    patch.setattr(zero, "start_coded_gather", planted)


def exact_rows(patch: pytest.MonkeyPatch) -> None:
    """ZeRO-3 gathers what torch hands over."""
    patch.setattr(CodedAllGather, "__call__", CodedAllGather.__mro__[1].__call__)


MISTAKES: dict[str, tuple[int, Callable[[pytest.MonkeyPatch], None]]] = {
    "blocks of a buffer": (2, blocks_of_a_buffer),
    "masters of codes": (1, masters_of_codes),
    "exact rows": (3, exact_rows),
}


def planted_train(place: Place, problem: Problem, spread: Spread, mistake: str) -> Record:
    with pytest.MonkeyPatch.context() as patch:
        MISTAKES[mistake][1](patch)
        return train(place, problem, spread)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    layout = Layout(dp=2)
    plain = {feature: values[0] for feature, values in choices_of(layout).items()} | PLAIN
    problem, spread = case_of(layout, plain | {"zero": MISTAKES[mistake][0]})
    assert aspects_that_differ(run_ranks(2, planted_train, problem, spread, mistake), serial(problem))
