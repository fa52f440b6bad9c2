"""Theorem: every layout trains the same model as one process.

Each of the 55 layouts of dp x tp x pp x cp (cp 1, 2 or 4) with at most eight ranks is trained, with features that a
seeded pairwise array has dealt to it, and compared with one process that takes each global batch as a single
micro-batch: initial values bit by bit, losses and gradient norms of two steps, an evaluation, every element of the
first gradient (clipped) and of every parameter after the steps. Where Adam (damped) steps, that may differ by as much
more as it makes of rounding noise in a gradient that is next to nothing, a key bias's for one. The optimizer is
one of the features that are dealt, so that each of the three meets every other feature. The tolerance is the same for
all: 1e-5 in fp32. Then the same ranks train adapters of it for a step: LoRA, IA3 or LoRA of a quantised base,
dealt so that each of them meets every feature, in as few of the cases as that takes.

Some of the layouts, so that every value of every feature is among them, run under the check that no collective is
accessed before its wait (support/happens_before.py); `pytest --check-races` takes all of them.
`pytest --all-layouts` takes the product of the features that meet in the maths, for every layout.
"""

from dataclasses import replace

import comparison
import pytest
from comparison import (
    aspects_that_differ,
    assert_equal_to_serial,
    assert_near_in_half_precision,
    off_by_cancellation,
    serial,
)
from pairwise import Chosen, covered_pairs, one_of_each, possible_pairs
from problem import CHUNKS
from sweeps import some_of
from theorem import Record
from theorem_cases import (
    ADAPTED,
    ADAPTERS,
    CASES,
    CHOICES,
    DEALT,
    LAYOUTS,
    adapted_problem_of,
    all_cases,
    choices,
    cost_of,
    name_of,
    pairs_of_adapters,
    problem_of,
    spread_of,
)

from megatronish.core.layout import Layout


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chosen" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-layouts")
        cases = all_cases() if everything else list(zip(CASES, DEALT, strict=True))
        every = everything or metafunc.config.getoption("--check-races")
        is_adapted = metafunc.function is test_a_layout_trains_the_same_adapters_as_one_process
        checked = range(len(cases)) if every else checked_cases(is_adapted=is_adapted)
        metafunc.parametrize(
            ("layout", "chosen", "is_checked"),
            [(*case, n in checked) for n, case in enumerate(cases) if not is_adapted or every or n in ADAPTED],
            ids=[name_of(*case) for n, case in enumerate(cases) if not is_adapted or every or n in ADAPTED],
        )


def checked_cases(*, is_adapted: bool) -> set[int]:
    """Cheap cases with every value of every feature; those that train adapters have every kind of adapter."""
    costs = [cost_of(*case) for case in zip(CASES, DEALT, strict=True)]
    if not is_adapted:
        return one_of_each(DEALT, costs)
    numbers = sorted(ADAPTED)
    kinds = [{"adapter": DEALT[number]["adapter"]} for number in numbers]
    return {numbers[n] for n in one_of_each(kinds, [costs[number] for number in numbers])}


def test_a_layout_trains_the_same_model_as_one_process(layout: Layout, chosen: Chosen, is_checked: bool) -> None:
    assert_equal_to_serial(problem_of(layout, chosen), spread_of(layout, chosen), is_checked=is_checked)


def test_a_layout_trains_the_same_adapters_as_one_process(layout: Layout, chosen: Chosen, is_checked: bool) -> None:
    """LoRA, IA3 or QLoRA alone: one step, as their second is that of other parameters."""
    assert_equal_to_serial(adapted_problem_of(layout, chosen), spread_of(layout, chosen), is_checked=is_checked)


POSITIONS_WITHOUT_LAYERS = [
    ("interleaved", Layout(pp=4), {}),
    ("interleaved", Layout(dp=2, pp=2), {"zero": 3}),
    ("zb-v", Layout(tp=2, pp=2), {"zero": 1, "sequence_parallel": True}),
    ("1f1b", Layout(pp=3, cp=2), {"recompute": "uniform", "zero": 2, "documents": True}),
    ("gpipe", Layout(dp=2, pp=3), {"zero": 1, "overlap": True, "optimizer": "muon", "tied": False}),
]


@pytest.mark.parametrize(
    ("schedule", "layout", "others"), some_of(POSITIONS_WITHOUT_LAYERS, POSITIONS_WITHOUT_LAYERS[1:])
)
def test_positions_that_hold_the_embedding_or_the_head_alone_train_the_same_model(
    schedule: str, layout: Layout, others: Chosen
) -> None:
    """Embedding and head count as layers, and there are so few layers that the two ends of the pipeline have none."""
    plain = {feature: values[0] for feature, values in choices(layout).items()}
    chosen = plain | {"schedule": schedule, "num_microbatches": 4, "dropout": 0.1, "split": "ends"} | others
    problem = problem_of(layout, chosen)
    problem = replace(problem, model=replace(problem.model, num_layers=layout.pp * CHUNKS[schedule] - 2))
    assert_equal_to_serial(problem, spread_of(layout, chosen))


LONG_WINDOWS = [
    (Layout(tp=2, cp=2), {"family": "qwen", "cp_comm_type": "a2a", "sequence_parallel": True}),
    (Layout(dp=2, pp=2), {"family": "llama", "schedule": "zb-h1", "recompute": "selective", "num_microbatches": 4}),
]


@pytest.mark.parametrize(("layout", "others"), LONG_WINDOWS)
def test_windows_longer_than_a_block_train_the_same_model(layout: Layout, others: Chosen) -> None:
    """Windows of 70 of 320 tokens: those of the other cases are shorter than a block of queries."""
    plain = {feature: values[0] for feature, values in choices(layout).items()}
    chosen = plain | {"sight": "window", "dropout": 0.0} | others
    problem = problem_of(layout, chosen)
    assert problem.model.window_size is not None
    problem = replace(problem, seq_length=320, model=replace(problem.model, window_size=70))
    assert_equal_to_serial(problem, spread_of(layout, chosen))


def test_a_gradient_that_is_off_a_little_is_off_unless_its_terms_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the tolerance is too much of a gradient of usual size; five times of one far below it, too."""
    plain = {feature: values[0] for feature, values in choices(Layout()).items()}
    problem = problem_of(Layout(), plain)
    exact = serial(problem)
    name, *_ = exact.gradient_parts

    def scaled(record: Record, factor: float) -> Record:
        held = [each._replace(values=each.values * factor) for each in record.gradient_parts[name]]
        return record._replace(gradient_parts=record.gradient_parts | {name: held})

    assert aspects_that_differ([scaled(exact, 1 + 3e-5)], exact) == {"gradients"}
    assert not off_by_cancellation([scaled(exact, 1 + 3e-5)], problem)
    small = scaled(exact, 0.1)
    by_seed = {problem.seed + more: serial(replace(problem, seed=problem.seed + more)) for more in (1, 2, 3)}
    monkeypatch.setattr(comparison, "serial", lambda asked: ({problem.seed: small} | by_seed)[asked.seed])
    assert off_by_cancellation([scaled(small, 1 + 3e-5)], problem)
    assert not off_by_cancellation([scaled(small, 1 + 5e-5)], problem)


def test_there_are_55_layouts_each_taken() -> None:
    assert len(set(LAYOUTS)) == len(LAYOUTS) == len(set(CASES)) == 55
    assert len(DEALT) == len(CASES)


def test_every_two_features_that_can_meet_do_so_in_some_layout() -> None:
    assert possible_pairs(CHOICES) - covered_pairs(DEALT) == set()


def test_every_kind_of_adapter_meets_every_feature() -> None:
    wanted = pairs_of_adapters(possible_pairs([chosen | {"adapter": tuple(ADAPTERS)} for chosen in CHOICES]))
    assert wanted - covered_pairs([DEALT[number] for number in ADAPTED]) == set()


BF16_CASES = [
    (Layout(dp=2, tp=2, pp=2), {"family": "gpt2", "tied": True, "sequence_parallel": True, "dropout": 0.1}),
    (Layout(tp=4), {"family": "llama", "tied": False, "sequence_parallel": False, "dropout": 0.0}),
    (
        Layout(dp=2, pp=4),
        {"family": "qwen", "tied": True, "sequence_parallel": False, "dropout": 0.0, "sight": "window"},
    ),
    # Without its clamp, whose kink makes a gradient jump: rounding alone moves one process by 3.6e-2 from fp32.
    (
        Layout(cp=2, tp=2),
        {
            "family": "gpt_oss",
            "tied": True,
            "sequence_parallel": True,
            "dropout": 0.0,
            "clamped": False,
            "sight": "window",
        },
    ),
    (Layout(cp=2, pp=2), {"family": "bloom", "tied": True, "sequence_parallel": False, "dropout": 0.0}),
    (
        Layout(cp=4, tp=2),
        {"family": "qwen", "tied": True, "sequence_parallel": True, "dropout": 0.0, "sight": "window"},
    ),
    (
        Layout(cp=2, pp=2, tp=2),
        {"family": "llama", "tied": True, "sequence_parallel": False, "dropout": 0.1, "schedule": "zb-v"}
        | {"recompute": "uniform", "cp_comm_type": "a2a"},
    ),
]
BF16_FEW = [case for case in BF16_CASES if case[0] == Layout(cp=2, pp=2, tp=2)]


@pytest.mark.parametrize(
    ("layout", "main"), some_of(BF16_CASES, BF16_FEW), ids=[str(layout) for layout, _ in BF16_CASES]
)
def test_in_bf16_a_layout_is_as_near_to_fp32_as_one_process_is(layout: Layout, main: Chosen) -> None:
    rest = {"eod_mask_loss": True, "documents": True, "micro_batch_size": 1, "num_microbatches": 3, "overlap": True}
    usual: Chosen = {"schedule": "1f1b", "split": "even", "recompute": "none", "cp_comm_type": "p2p"}
    usual |= {
        "attention_backend": "auto",
        "sight": "all",
        "optimizer": "adam",
        "decoupled": False,
        "zero": 0,
        "copies": 1,
        "offload": "none",
        "on_disk": False,
    }
    chosen = usual | rest | main
    assert_near_in_half_precision(problem_of(layout, chosen), spread_of(layout, chosen), bf16=True)
