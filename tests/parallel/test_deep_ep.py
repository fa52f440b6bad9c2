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
import torch
from deep_ep_stand_in import Buffer, EventOverlap
from problem import Problem, Spread
from ranks import RankError, run_ranks
from theorem import train

from megatronish.config.config import Config
from megatronish.config.sections.model import ModelConfig
from megatronish.config.sections.training import RecomputeConfig, TrainingConfig
from megatronish.core.layout import DeepEPNeeds, Layout
from megatronish.engine.build import build_engine, nothing
from megatronish.launch.place import Place
from megatronish.layers.deep_dispatch import DeepRoute
from megatronish.model.mlp import MLP
from megatronish.parallel import deep_ep
from megatronish.parallel.deep_ep import TokenExchange, runs_on, why_not_deep_ep
from megatronish.parallel.mesh import Mesh
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
NEEDS = DeepEPNeeds(ep=8, hidden_size=64, precision="bf16", num_experts=256, num_chosen=8)


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, "cpu", "its kernels are for GPUs"),
        ({"precision": "fp16"}, "cuda", "it moves bf16, and this run computes in fp16"),
        ({"hidden_size": 24}, "cuda", "hidden_size=24 is not divisible by 16"),
        ({"hidden_size": 8192}, "cuda", "a token of hidden_size=8192 takes 16496 bytes, and its kernels hold 16376"),
        ({"num_experts": 1032}, "cuda", "num_experts=1032 on ep=8 are more than 128 a rank"),
        ({"num_chosen": 33}, "cuda", "moe_router_topk=33 is more than 32"),
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


def runs_where_it_is_installed(place: Place, is_installed: list[bool]) -> bool:
    """Whether DeepEP runs, where some ranks have its package."""
    axis = Mesh.of(DP.parallel, place, has_experts=True).experts.ep
    with pytest.MonkeyPatch.context() as patch:
        if is_installed[place.rank]:
            deep_ep_stand_in.install(patch, of_theorem=False)
            patch.setattr(deep_ep.importlib.util, "find_spec", lambda _name: object())
        return runs_on(axis, NEEDS._replace(ep=2), "cuda")


@pytest.mark.processes
def test_all_ranks_go_by_deep_ep_or_none() -> None:
    assert run_ranks(2, runs_where_it_is_installed, [True, True]) == [True, True]
    assert run_ranks(2, runs_where_it_is_installed, [False, False]) == [False, False]
    with pytest.raises(RankError) as error:
        run_ranks(2, runs_where_it_is_installed, [True, False])
    assert "on some ranks of ep=2 and not on rank 1, where tokens go to experts by all-to-all, and" in str(error.value)
    assert "package deep_ep is not installed; install the same on all machines, or use --moe-token" in str(error.value)


def train_without_nvlink(place: Place) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("PCIe GPUs only have pairwise NVLink connections")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "__init__", refused)
        train(place, PROBLEM, DP)


@pytest.mark.processes
def test_a_buffer_that_cannot_be_made_is_a_sentence() -> None:
    # Whichever rank is first to fail.
    with pytest.raises(
        RankError, match=r"could not make its buffer for ep=2 on rank [01] \(PCIe GPUs only have pairwise"
    ):
        run_ranks(2, train_without_nvlink)


def buffers_of_two_models(place: Place) -> int:
    """Buffers of a model and of a frozen one on its mesh."""
    made: list[Buffer] = []
    config = Config(
        model=MODEL,
        parallel=DP.parallel,
        training=TrainingConfig(seq_length=16, micro_batch_size=1, global_batch_size=4),
    )
    with pytest.MonkeyPatch.context() as patch:
        deep_ep_stand_in.install(patch)
        make = Buffer.__init__

        def noting(self: Buffer, *args: Any) -> None:
            made.append(self)
            make(self, *args)

        patch.setattr(Buffer, "__init__", noting)
        engine = build_engine(config, Mesh.of(DP.parallel, place, has_experts=True), vocab_size=8)
        build_engine(config, engine.mesh, vocab_size=8, trainable=nothing)
    return len(made)


@pytest.mark.processes
def test_a_frozen_model_shares_the_buffer() -> None:
    assert run_ranks(2, buffers_of_two_models) == [1, 1]


def sizes_kept(place: Place) -> list[tuple[torch.dtype, bool]]:
    """Of each route of a run the numbers of what a recomputation keeps, and whether the way back keeps them, too."""
    kept = []
    from_experts = DeepRoute.from_experts

    def noted(self: DeepRoute, rows: Any, weights: Any, *, ep: Any) -> Any:
        y = from_experts(self, rows, weights, ep=ep)
        assert self.sizes is not None
        if y.grad_fn is not None:
            kept.append((self.sizes.choices.dtype, hasattr(y.grad_fn, "sent")))
        return y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepRoute, "from_experts", noted)
        train(place, PROBLEM, DP)
    return kept


@pytest.mark.processes
def test_what_is_kept_of_choices_is_small() -> None:
    for kept in run_ranks(2, sizes_kept):
        assert kept and set(kept) == {(torch.int16, False)}
