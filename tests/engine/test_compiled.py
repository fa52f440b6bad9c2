"""Tests of --compile: compiled ranks train what one eager process trains, and nothing is compiled twice.

A layout of two ranks runs code that inductor has made. The others run their graphs with torch's own operations
(aot_eager), which takes seconds and not minutes: what is ours, where graphs begin and end and what is constant in them,
is the same. With `pytest --all-layouts` inductor compiles all of `LAYOUTS`, of which every run takes two.
"""

from dataclasses import replace
from typing import Any

import pytest
from comparison import COMPILE_SECONDS, assert_equal_to_serial, assert_near_in_half_precision
from expert_cases import EXPERTS
from pairwise import Chosen
from problem import EOD, Problem, Spread
from ranks import run_ranks
from sweeps import some_of
from theorem import Samples, build
from theorem_cases import choices, problem_of, spread_of
from torch._dynamo.utils import counters

from megatronish.config.sections.training import AttentionBackend
from megatronish.core.layout import Layout
from megatronish.data.loader import BatchShare, Collator, micro_batches
from megatronish.launch.place import Place
from megatronish.model.compiled import why_not_compiled
from megatronish.parallel.mesh import Mesh

LAYOUTS: dict[str, tuple[Layout, Chosen]] = {
    "one process": (Layout(), {"family": "gpt2"}),
    "tp, sequence parallel": (Layout(tp=2), {"family": "llama", "sequence_parallel": True}),
    "ring, selective recomputation": (Layout(cp=2), {"family": "qwen", "sight": "window", "recompute": "selective"}),
    "zb-h1, recomputation": (Layout(pp=2), {"family": "llama", "schedule": "zb-h1", "recompute": "uniform"}),
    "ZeRO-3": (Layout(dp=2), {"family": "gpt2", "zero": 3}),
}
MORE_LAYOUTS: dict[str, tuple[Layout, Chosen]] = {
    "1f1b, tp": (Layout(tp=2, pp=2), {"family": "gpt2", "schedule": "1f1b"}),
    "interleaved": (Layout(pp=2), {"family": "qwen", "sight": "window", "schedule": "interleaved"}),
    "zb-v, ZeRO-1": (Layout(dp=2, pp=2), {"family": "llama", "schedule": "zb-v", "zero": 1}),
    "ZeRO-2, all-to-all over cp": (Layout(dp=2, cp=2), {"family": "llama", "zero": 2, "cp_comm_type": "a2a"}),
    "documents, recomputation by blocks": (Layout(tp=2), {"family": "bloom", "documents": True, "recompute": "block"}),
}

BY_INDUCTOR = ("tp, sequence parallel",)


def backend_of(name: str, request: pytest.FixtureRequest) -> str:
    """What compiles a case."""
    return "inductor" if name in BY_INDUCTOR or request.config.getoption("--all-layouts") else "aot_eager"


def case(layout: Layout, others: Chosen, *, backend: str = "aot_eager") -> tuple[Problem, Spread]:
    """The first value of each feature, with dropout, and two layers or more; compiled."""
    first = {feature: values[0] for feature, values in choices(layout).items()}
    chosen = first | {"dropout": 0.1, "documents": False, "num_microbatches": 3} | others
    return problem_of(layout, chosen), replace(spread_of(layout, chosen), compile=backend)


@pytest.mark.parametrize("name", some_of(LAYOUTS, ["tp, sequence parallel", "zb-h1, recomputation"]))
def test_compiled_ranks_train_what_one_eager_process_trains(name: str, request: pytest.FixtureRequest) -> None:
    assert_equal_to_serial(*case(*LAYOUTS[name], backend=backend_of(name, request)))


@pytest.mark.sweep
@pytest.mark.parametrize("name", MORE_LAYOUTS)
def test_more_compiled_layouts(name: str) -> None:
    assert_equal_to_serial(*case(*MORE_LAYOUTS[name]))


def test_compiled_experts_train_what_one_eager_process_trains(request: pytest.FixtureRequest) -> None:
    problem, spread = case(Layout(dp=2), {"family": "llama"}, backend=backend_of("experts", request))
    model = replace(problem.model, num_experts=4, moe_router_topk=2, **EXPERTS["softmax"])
    assert_equal_to_serial(replace(problem, model=model), replace(spread, ep=2))


@pytest.mark.sweep
def test_in_bf16_compiled_layers_are_as_near_to_fp32_as_eager_ones(request: pytest.FixtureRequest) -> None:
    backend = backend_of("bf16", request)
    assert_near_in_half_precision(*case(Layout(), {"family": "llama", "dropout": 0.0}, backend=backend), bf16=True)


def graphs(place: Place, problem: Problem, spread: Spread) -> list[int]:
    """Graphs after each of four steps, of other samples each, and of four more with another seed, and an evaluation."""
    mesh, found = Mesh.of(spread.parallel, place), []
    counters.clear()
    for seed in (problem.seed, problem.seed + 1):
        engine = build(mesh, replace(problem, seed=seed, decoupled=False), spread)
        for step in range(4):
            batches = micro_batches(
                Samples(problem.seq_length),
                consumed_samples=step * problem.global_batch_size,
                global_batch_size=problem.global_batch_size,
                share=BatchShare(mesh.dp.rank, mesh.dp.size, spread.micro_batch_size),
                collate=Collator(EOD),
            )
            engine.step(batches, num_steps_done=100 * seed + step, learning_rate=1e-3, weight_decay=0.1)
            found.append(counters["stats"]["unique_graphs"])
    # Attention by blocks has a backward by hand, and stands between graphs, as collectives do.
    by_blocks = any(problem.model.windowed_layers) and spread.attention_backend == "auto"
    assert not counters["graph_break"] or place.world_size > 1 or by_blocks, counters["graph_break"]
    return found


KINDS_OF_MASK: dict[str, Any] = {
    "one causal mask": {},
    "ALiBi": {"position_embedding_type": "alibi"},
    "every other layer in a window": {"window_size": 5, "window_attn_skip_freq": "2"},
    "every other layer with a pattern": {
        "attention_pattern": "bigbird",
        "attention_block_size": 2,
        "attention_local_blocks": 1,
        "window_attn_skip_freq": "2",
    },
}


@pytest.mark.parametrize(
    ("name", "kind", "dropout"),
    some_of(
        [
            ("one process", "one causal mask", 0.1),
            ("tp, sequence parallel", "one causal mask", 0.1),
            *[("one process", kind, rate) for kind in list(KINDS_OF_MASK)[1:] for rate in (0.0, 0.1)],
        ],
        [("one process", "ALiBi", 0.0)],
    ),
)
def test_nothing_is_compiled_after_the_first_step(name: str, kind: str, dropout: float) -> None:
    problem, spread = case(*LAYOUTS[name])
    model = replace(problem.model, num_layers=4, attention_dropout=dropout, **KINDS_OF_MASK[kind])
    for counted in run_ranks(
        spread.layout.world_size, graphs, replace(problem, model=model), spread, timeout=COMPILE_SECONDS
    ):
        assert counted[0] > 0 and counted == counted[:1] * 8


WARM_UP = [(12, 3), (8, 3)]
LATER = [(10, 3), (6, 3), (12, 3), (4, 3), (8, 1), (10, 2)]
"""Lengths of rows as chats are cut to, and micro-batches of a step: fewer at the end of an epoch."""


def graphs_of_lengths(place: Place, problem: Problem, spread: Spread) -> list[int]:
    """Graphs after each step and evaluation at these lengths."""
    mesh, counted = Mesh.of(spread.parallel, place), []
    counters.clear()
    engine = build(mesh, replace(problem, decoupled=False), spread)
    for step, (length, number) in enumerate([*WARM_UP, *LATER]):
        batches = micro_batches(
            Samples(length),
            consumed_samples=0,
            global_batch_size=number * spread.micro_batch_size,
            share=BatchShare(mesh.dp.rank, mesh.dp.size, spread.micro_batch_size),
            collate=Collator(EOD, reset_attention_mask=problem.documents),
        )
        engine.step(batches, num_steps_done=step, learning_rate=1e-3, weight_decay=0.1)
        engine.evaluate(batches)
        counted.append(counters["stats"]["unique_graphs"])
    return counted


@pytest.mark.parametrize("documents", some_of([False, True], [True]))
def test_after_two_lengths_no_length_is_compiled_again(documents: bool) -> None:
    """The second one makes a graph of any length; a last step of fewer micro-batches has the graphs of the others."""
    problem, spread = case(*LAYOUTS["one process"])
    problem = replace(problem, documents=documents)
    for counted in run_ranks(1, graphs_of_lengths, problem, spread, timeout=COMPILE_SECONDS):
        warm = counted[len(WARM_UP) - 1]
        assert warm > 0 and counted[len(WARM_UP) :] == [warm] * len(LATER), counted


@pytest.mark.parametrize("backend", some_of(["unfused", "fused_softmax"], ["fused_softmax"]))
def test_explicit_probabilities_under_a_window_are_compiled_once(backend: AttentionBackend) -> None:
    problem, spread = case(*LAYOUTS["one process"])
    model = replace(problem.model, num_layers=4, **KINDS_OF_MASK["every other layer in a window"])
    spread = replace(spread, attention_backend=backend)
    (counted,) = run_ranks(1, graphs, replace(problem, model=model), spread, timeout=COMPILE_SECONDS)
    assert counted[0] > 0 and counted == counted[:1] * 8


def compiled_without_a_compiler(
    _place: Place, problem: Problem, spread: Spread, name: str
) -> tuple[str | None, list[str]]:
    """What is said, and which layers of an engine are compiled all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", name)
        engine = build(Mesh.start(), problem, spread)
        layers = engine.stage.model.layers.items()
        return why_not_compiled("cpu"), [name for name, layer in layers if "forward" in vars(layer)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no-such-compiler", "there is no C++ compiler 'no-such-compiler'; install one, or name it in CXX"),
        (
            "false",
            "the C++ compiler 'false' cannot build a library with Python's headers (exit status 1, and nothing was "
            "said); repair it (it may need python3-dev), or name another one in CXX",
        ),
        ("true -O2", "CXX='true -O2' is not the name of a program; leave its options out: CXX=true"),
        ("", "CXX is set to nothing; name a C++ compiler in it, or unset it to have g++"),
    ],
)
def test_without_a_compiler_one_sentence_says_so_and_layers_run_eagerly(name: str, reason: str) -> None:
    note, compiled = run_ranks(1, compiled_without_a_compiler, *case(*LAYOUTS["one process"]), name)[0]
    assert compiled == []
    assert note == f"--compile has no effect, the layers run eagerly: {reason}"
    assert why_not_compiled("cpu") is None
