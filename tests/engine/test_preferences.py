"""Tests of learning from preferences: losses, norms and gradients of every layout are those of one process."""

from functools import cache
from itertools import product

import pytest
from comparison import assert_close, whole
from preference_runs import LORA, Case, Seen, Spread, one_step, write_preferences
from ranks import run_ranks
from sweeps import some_of

from megatronish.config.sections.parallel import ParallelConfig
from megatronish.config.sections.training import RecomputeConfig

FULL = RecomputeConfig(recompute_granularity="full")
DPO = Case("dpo", {"beta": 0.5, "label_smoothing": 0.1}, LORA, dropout=0.1)
CASES = {
    "dpo": DPO,
    "hinge": Case("dpo", {"beta": 0.5, "dpo_loss_type": "hinge"}, LORA),
    "robust": Case("dpo", {"beta": 0.5, "dpo_loss_type": "robust", "label_smoothing": 0.2}, LORA),
    "ipo": Case("ipo", {"beta": 0.5}, LORA),
    "simpo": Case("simpo", {"beta": 2.0}, dropout=0.1),
    "cpo": Case("cpo", {"beta": 0.5}, dropout=0.1),
    "orpo": Case("orpo", {"beta": 0.5}, dropout=0.1),
    "kto": Case("kto", {"beta": 0.5, "undesirable_weight": 1.3}, LORA, dropout=0.1),
    "orpo, a pair a row": Case("orpo", {"beta": 0.5}, dropout=0.1, pack=False),
    "dpo with a model": Case("dpo", {"beta": 0.5, "reference": "model"}),
    "kto with a model": Case("kto", {"beta": 0.5, "reference": "model"}),
}
LAYOUTS = {
    "dp 2 x tp 2": Spread(
        ParallelConfig(tensor_model_parallel_size=2, data_parallel_size=2, sequence_parallel=True), micro_batch_size=3
    ),
    "cp 2, micro-batches of 2": Spread(ParallelConfig(context_parallel_size=2), micro_batch_size=2),
    "cp 2 a2a x dp 2, ZeRO 2": Spread(
        ParallelConfig(context_parallel_size=2, cp_comm_type="a2a", data_parallel_size=2, zero_stage=2)
    ),
    "pp 2 x cp 2": Spread(ParallelConfig(pipeline_model_parallel_size=2, context_parallel_size=2), micro_batch_size=3),
    "pp 2, zb-h1, recomputed": Spread(
        ParallelConfig(pipeline_model_parallel_size=2, pipeline_schedule="zb-h1"), 2, FULL
    ),
    "dp 2, ZeRO 3, recomputed": Spread(ParallelConfig(data_parallel_size=2, zero_stage=3), 3, FULL),
    "dp 2, ZeRO 1": Spread(ParallelConfig(data_parallel_size=2, zero_stage=1)),
}
# Every layout with one objective or more. The others are other functions of the same numbers, and of one row
# (objectives/test_preference_losses.py).
CHOSEN = [
    ("dpo", "pp 2, zb-h1, recomputed"),
    ("dpo with a model", "pp 2 x cp 2"),
    ("dpo with a model", "dp 2, ZeRO 3, recomputed"),
    ("kto with a model", "dp 2 x tp 2"),
    ("orpo, a pair a row", "cp 2, micro-batches of 2"),
    ("robust", "dp 2, ZeRO 1"),
    ("simpo", "dp 2 x tp 2"),
    ("orpo", "cp 2 a2a x dp 2, ZeRO 2"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_preferences(tmp_path_factory.mktemp("preferences")))


@cache
def alone(name: str, folder: str) -> Seen:
    """The same in one process."""
    (found,) = run_ranks(1, one_step, CASES[name], Spread(micro_batch_size=6), folder)
    return found


def assert_equal(found: list[Seen], expected: Seen) -> None:
    # A reward is a small difference of two sums of log-probabilities, so it is as exact as these: one rounding of a sum
    # of 80 in fp32 is 8e-6.
    rounding = 1e-7 * max((abs(value) for name, value in expected.metrics.items() if "logps" in name), default=0)
    for each in found:
        assert each.metrics.keys() == expected.metrics.keys()
        for name, value in expected.metrics.items():
            nearest = 1e-6 + (rounding if name.startswith("rewards/") else 0)
            assert each.metrics[name] == pytest.approx(value, rel=1e-5, abs=nearest), name
        assert each.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-5)
        assert each.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert each.evaluation == pytest.approx(expected.evaluation, rel=1e-5)
        assert each.weight == expected.weight
    gradients = whole([expected.gradients])
    for name, gradient in whole([each.gradients for each in found]).items():
        assert_close(name, gradient, gradients[name])


@pytest.mark.parametrize(("name", "layout"), some_of(product(CASES, LAYOUTS), CHOSEN))
def test_preferences_are_learned_the_same_in_every_layout(name: str, layout: str, folder: str) -> None:
    spread = LAYOUTS[layout]
    expected = alone(name, folder)
    assert expected.grad_norm > 0.01
    assert_equal(run_ranks(spread.parallel.layout.world_size, one_step, CASES[name], spread, folder), expected)
