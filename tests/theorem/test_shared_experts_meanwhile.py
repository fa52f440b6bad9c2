"""Theorem for shared experts that are computed while rows travel: the model of one process, and no wait too few."""

from dataclasses import replace
from typing import Any

import pytest
from comparison import assert_equal_to_serial
from happens_before import Collectives, RaceError
from problem import Problem, Spread
from ranks import run_ranks
from theorem import train

from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import RecomputeConfig
from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.parallel import comm

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=24,
    swiglu=True,
    num_experts=4,
    moe_router_topk=2,
    moe_shared_expert_intermediate_size=12,
    moe_aux_loss_coeff=0.1,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.2,
    make_vocab_size_divisible_by=4,
)
GATED = replace(MODEL, moe_shared_expert_gate=True)
CAPPED = replace(MODEL, moe_expert_capacity_factor=0.75, moe_router_pre_softmax=True)
DP = Spread(Layout(dp=2), 1, ep=2)
TP = Spread(Layout(dp=2, tp=2), 1, sequence_parallel=True, ep=4, etp=1)
AGAIN = RecomputeConfig("selective", recompute_modules=("shared_experts", "moe_act"))
CASES = {
    "dp 2": (MODEL, DP),
    "gated, ZeRO-3": (GATED, replace(DP, zero=3)),
    "over tp and dp": (GATED, TP),
    "without sequence parallelism, capacity": (CAPPED, replace(TP, sequence_parallel=False)),
    "by pieces, etp 2": (MODEL, replace(TP, by_pieces=True, ep=2, etp=2)),
    "recomputed": (GATED, replace(DP, recompute=AGAIN)),
    "weight gradients later": (MODEL, replace(DP, layout=Layout(dp=2, pp=2), schedule="zb-h1")),
}


@pytest.mark.parametrize("name", CASES)
def test_shared_experts_meanwhile_train_the_model_of_one_process(name: str) -> None:
    model, spread = CASES[name]
    problem = Problem(model, seq_length=16, global_batch_size=4)
    assert_equal_to_serial(problem, spread, is_checked=True)


def said_without_waiting(place: Place, problem: Problem, is_backward: bool) -> str:
    """What the check of races says if rows, or their gradients, are read while they arrive."""
    start, kept = comm._RowsInProgress.start, []

    def started(rows: Any, x: Any, **options: Any) -> Any:
        arriving = start(rows, x, **options)
        if bool(options) == is_backward:
            kept.append(rows.pending)
            rows.pending = comm.Pending(arriving)
        return arriving

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm._RowsInProgress, "start", started)
        with pytest.raises(RaceError) as error:
            train_checked(place, problem)
    assert kept
    return str(error.value)


def train_checked(place: Place, problem: Problem) -> None:
    with Collectives():
        train(place, problem, DP)


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_missing_wait_is_found(is_backward: bool) -> None:
    problem = Problem(MODEL, seq_length=16, global_batch_size=4)
    for said in run_ranks(2, said_without_waiting, problem, is_backward):
        assert "reads what c10d::alltoall_base_" in said
