"""Tests of the exchange by DeepEP: when it is used, what it sends, and what is computed while tokens are on their way.

That it trains the model of one process is the theorem's (test_deep_ep_equals_serial.py). DeepEP itself needs several
GPUs; a stand-in over gloo with its rules takes its place.
"""

import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import deep_ep_stand_in
import pytest
from deep_ep_stand_in import Buffer, EventOverlap
from problem import Problem, Spread
from ranks import RankError, run_ranks
from theorem import train

from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import RecomputeConfig
from megatronish.core.layout import DeepEPNeeds, Layout
from megatronish.launch.place import Place
from megatronish.model.mlp import MLP
from megatronish.parallel import deep_ep
from megatronish.parallel.deep_ep import TokenExchange, why_not_deep_ep
from megatronish.watch.record import LineRecord

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=24,
    num_experts=4,
    moe_router_topk=2,
    moe_shared_expert_intermediate_size=12,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.2,
    make_vocab_size_divisible_by=4,
)
PROBLEM = Problem(MODEL, seq_length=16, global_batch_size=4)
DP = Spread(Layout(dp=2), 1, ep=2, dispatcher="deepep")
NEEDS = DeepEPNeeds(ep=8, hidden_size=64, precision="bf16")


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, "cpu", "its kernels are for GPUs"),
        ({"precision": "fp16"}, "cuda", "it moves bf16, and this run computes in fp16"),
        ({"hidden_size": 20}, "cuda", "hidden_size=20 is not divisible by 8"),
        ({"ep": 12}, "cuda", "it has no settings for ep=12"),
    ],
)
def test_deep_ep_says_why_it_is_not_used(
    changes: dict[str, Any], device: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep_ep_stand_in.install(monkeypatch, of_theorem=False)
    monkeypatch.setattr(deep_ep.importlib.util, "find_spec", lambda _name: object())
    assert why_not_deep_ep(NEEDS, "cuda") is None
    said = why_not_deep_ep(NEEDS._replace(**changes), device)
    assert said == f"tokens go to experts by all-to-all, and not by DeepEP: {reason}"


def test_deep_ep_is_not_used_where_it_is_not_installed() -> None:
    assert why_not_deep_ep(NEEDS, "cuda") == (
        "tokens go to experts by all-to-all, and not by DeepEP: the package deep_ep is not installed"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ImportError('libnvshmem.so: cannot open')", "cannot be loaded (libnvshmem.so: cannot open)"),
        ("raise OSError", "cannot be loaded (OSError)"),
        ("", "has no class Buffer"),
    ],
)
def test_a_package_that_does_not_load_is_named(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep_ep.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    answer = why_not_deep_ep(NEEDS, "cuda")
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    assert answer == f"tokens go to experts by all-to-all, and not by DeepEP: the package deep_ep {said}"


def train_on_hosts(place: Place, hosts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: hosts[place.rank])
        train(place, PROBLEM, DP)


@pytest.mark.processes
def test_neighbours_on_two_machines_are_refused() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(2, train_on_hosts, ["one", "two"])
    assert "DeepEP wants 2 neighbours on ep=2 on one machine, and ranks 0, 1 are not; use --moe-token" in str(
        error.value
    )


def calls_of_a_run(place: Place, spread: Spread) -> list[str]:
    """What a rank calls, in order: of DeepEP and of shared experts."""
    calls: list[str] = []

    def noting(kind: type, method: str, name: str) -> None:
        called = getattr(kind, method)

        def noted(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return called(*args, **options)

        patch.setattr(kind, method, noted)

    with pytest.MonkeyPatch.context() as patch:
        noting(TokenExchange, "start", "start")
        noting(TokenExchange, "start_again", "start again")
        noting(TokenExchange, "start_back", "start back")
        noting(EventOverlap, "current_stream_wait", "wait")
        noting(MLP, "forward", "shared experts")
        noting(Buffer, "get_dispatch_layout", "layout")
        train(place, PROBLEM, spread)
    return calls


@pytest.mark.processes
def test_shared_experts_are_computed_while_tokens_are_on_their_way() -> None:
    for calls in run_ranks(2, calls_of_a_run, DP):
        assert calls[:6] == ["start", "layout", "shared experts", "wait", "start back", "wait"]


@pytest.mark.processes
def test_a_recomputation_asks_for_no_layout() -> None:
    again = replace(DP, recompute=RecomputeConfig("full", "uniform", 1))
    for once, twice in zip(run_ranks(2, calls_of_a_run, DP), run_ranks(2, calls_of_a_run, again), strict=True):
        assert twice.count("layout") == once.count("layout")
        # Of each micro-batch of two steps and of each layer, once more than in the backward alone.
        assert twice.count("start again") == 2 * once.count("start again")


def bytes_of_a_run(place: Place, spread: Spread) -> dict[str, int]:
    """Bytes of one rank's exchanges over ep, by operation."""
    sent: dict[str, int] = {}

    def note(self: LineRecord, operation: str, nbytes: int) -> None:
        if self.name == "ep":
            sent[operation] = sent.get(operation, 0) + nbytes

    with pytest.MonkeyPatch.context() as patch:
        enter, count = LineRecord.enter, LineRecord.count

        def entered(self: LineRecord, operation: str, x: Any, layer: int | None = None) -> Any:
            note(self, operation, x.nbytes)
            return enter(self, operation, x, layer)

        def counted(self: LineRecord, operation: str, x: Any) -> None:
            note(self, operation, x.nbytes)
            count(self, operation, x)

        patch.setattr(LineRecord, "enter", entered)
        patch.setattr(LineRecord, "count", counted)
        train(place, PROBLEM, spread)
    return sent


@pytest.mark.processes
def test_a_token_goes_once_to_a_rank() -> None:
    """Of two experts chosen of four on two ranks, a third of the tokens has both on one rank, if all are as likely."""
    by_deep_ep = run_ranks(2, bytes_of_a_run, DP)
    by_rows = run_ranks(2, bytes_of_a_run, replace(DP, dispatcher="alltoall"))
    rows = sum(sent["all_to_all_rows"] for sent in by_rows)
    # Both ways, forward and backward: what arrives is counted on the way there, what is sent on the way back.
    there = sum(sent["deep_ep_dispatch"] for sent in by_deep_ep)
    back = sum(sent["deep_ep_combine"] for sent in by_deep_ep)
    assert there == back
    assert 0.5 * rows < there + back < 0.95 * rows
