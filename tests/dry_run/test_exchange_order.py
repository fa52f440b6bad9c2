"""Tests of the order of starts, waits and products in a step: what is computed while an exchange is in progress."""

from typing import Any

import pytest
from exchange_order import RUNS, OrderRecorder, order_of, row_of
from paths import ROOT

from megatronish.parallel import comm

BUCKETS = "--ddp-bucket-size 120000"  # a layer has 111,840 elements
LAST = 2
EXPERTS = "--dp 2 --ep 2 --num-experts 4 --moe-router-topk 2"


def in_table() -> dict[str, str]:
    """Rows of the document, by run."""
    text = (ROOT / "docs/SHARDING.md").read_text().partition("### What hides what")[2].partition("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith(("| `", "| the same"))]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def place(recorder: OrderRecorder, what: str, name: str, phase: str) -> int:
    """Place of the first such event in the last micro-batch."""
    last = [event.phase for event in recorder.events if event.phase.startswith(phase)][-1]
    return next(
        place
        for place, event in enumerate(recorder.events)
        if (event.what, event.name, event.phase) == (what, name, last)
    )


@pytest.mark.parametrize("name", RUNS)
def test_the_table_of_what_hides_what_is_what_the_dry_run_shows(name: str) -> None:
    assert in_table()[name] == row_of(name, RUNS[name])


def test_the_table_has_every_run() -> None:
    assert list(in_table()) == list(RUNS)


@pytest.mark.parametrize("flags", ["--dp 2", "--dp 2 --zero-stage 1", "--dp 2 --zero-stage 2"])
def test_a_bucket_is_on_its_way_before_the_layer_before_it_is_computed(flags: str) -> None:
    """And no backward waits for its own buckets before its last product."""
    recorder = order_of(f"{flags} {BUCKETS}")
    last_product = max(place for place, event in enumerate(recorder.events) if event.what == "product")
    for layer in range(LAST):
        started = recorder.of_layer(layer, "backward")
        assert started, f"no bucket is started while layer {layer} is computed"
        for flight in started:
            assert flight.products
            assert flight.wait is not None
            assert recorder.events.index(flight.wait) > last_product


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_computes_between_the_start_of_a_transfer_and_its_wait(schedule: str) -> None:
    recorder = order_of(f"--pp 2 --num-layers 4 --pipeline-schedule {schedule} --global-batch-size 8")
    flights = [flight for flight in recorder.flights() if " up " in flight.start.name or " down " in flight.start.name]
    in_step = [flight for flight in flights if flight.start.phase != "build"]
    sends = [flight for flight in in_step if flight.start.name == "F up send"]
    receives = [flight for flight in in_step if flight.start.name == "B down receive"]
    assert len(sends) == len(receives) == len(in_step) / 2 > 2
    assert all(flight.products for flight in sends)
    # The last receives of a step may have nothing left to hide them: the forwards are done.
    assert [bool(flight.products) for flight in receives].count(False) <= 1


@pytest.mark.parametrize("layer", [1, 2])
def test_zero_3_gathers_the_next_layer_before_a_backward_computes_one(layer: int) -> None:
    recorder = order_of("--dp 2 --zero-stage 3")
    begin = place(recorder, "begin", f"layer {layer}", "backward")
    first, second = recorder.events[begin + 1 : begin + 3]
    assert (first.what, second.what, first.name) == ("start", "wait", "shard all-gather")  # a CPU has no streams
    # So when its own turn comes nothing is left to gather for it.
    before = place(recorder, "begin", f"layer {layer - 1}", "backward")
    between = recorder.events[begin + 3 : before]
    assert [event.name for event in between if event.what == "start"] == ["shard reduce-scatter"]


@pytest.mark.parametrize("flags", ["--tp 2", "--tp 2 --sequence-parallel"])
def test_the_input_gradient_is_summed_while_the_weight_gradient_is_computed(flags: str) -> None:
    name = "tp reduce-scatter" if "sequence" in flags else "tp all-reduce"
    sums = [flight for flight in order_of(flags).of_layer(1, "backward") if flight.start.name == name]
    assert len(sums) == 2
    assert all(flight.products for flight in sums)


def test_a_ring_of_attention_sends_keys_while_it_computes_with_those_it_has() -> None:
    flights = order_of("--cp 2").of_layer(1, "forward")
    assert [flight.start.name for flight in flights] == ["cp send", "cp receive"]
    assert all(flight.products for flight in flights)


@pytest.mark.parametrize("more", ["", "--tp 2 --etp 1 --sequence-parallel", "--zero-stage 3"])
def test_shared_experts_are_computed_while_rows_go_to_the_experts(more: str) -> None:
    """And their backward, gradients of weights included, while the gradients of these rows come back."""
    recorder = order_of(f"{EXPERTS} --moe-shared-expert-intermediate-size 64 {more}")
    forward, backward = (
        [flight for flight in recorder.of_layer(1, part) if flight.start.name == "ep all-to-all"]
        for part in ("forward", "backward")
    )
    # Counts, rows to the experts, rows back; then the gradients of rows, in the opposite order.
    assert [len(flight.products) for flight in forward] == [0, 2, 0]
    assert [len(flight.products) for flight in backward] == [0, 4]


def test_a_wait_that_comes_too_early_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    start = comm.start_all_reduce

    def finished(*args: Any, **kwargs: Any) -> comm.Pending:
        return comm.Pending(start(*args, **kwargs).wait())

    monkeypatch.setattr(comm, "start_all_reduce", finished)
    assert not any(flight.products for flight in order_of("--tp 2").of_layer(1, "backward"))
    assert not any(flight.products for flight in order_of(f"--dp 2 {BUCKETS}").of_layer(1, "backward"))
