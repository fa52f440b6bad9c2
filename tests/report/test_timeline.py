"""Tests of the breakdown of steps: traces made by hand, of a CPU and of a GPU, and what a moment is charged to."""

from itertools import count
from typing import Any

import pytest
import torch
from torch.profiler import profile

from megatronish.parallel.ranges import marked
from megatronish.report.breakdown import MEANINGS, ROWS, Breakdown, Event

_numbers = count(1)


def event(name: str, start: float, end: float, *, thread: int = 1, is_range: bool = False, **args: Any) -> Event:
    """An event of the host from `start` to `end`, in microseconds."""
    category = "user_annotation" if is_range else "cpu_op"
    place = {"pid": 1, "tid": thread, "ts": start, "dur": end - start}
    return {"ph": "X", "cat": category, "name": name, **place, "args": {"External id": next(_numbers), **args}}


def kernel(name: str, start: float, end: float, launched_by: Event, stream: int = 7, **args: Any) -> Event:
    """A kernel that an operator of the host has launched."""
    number = launched_by["args"]["External id"]
    place = {"pid": 0, "tid": stream, "ts": start, "dur": end - start}
    return {"ph": "X", "cat": "kernel", "name": name, **place, "args": {"External id": number, **args}}


def in_range(name: str, start: float, end: float) -> Event:
    return event(name, start, end, is_range=True)


def rows_of(*events: Event) -> dict[str, float]:
    """Microseconds of each row of the only step."""
    (step,) = Breakdown.of_events(events, rank=0).steps
    return {row: round(seconds * 1e6, 3) for row, seconds in step.rows.items()}


STEP = [in_range("step 5", 0, 1000), in_range("data", 10, 110), in_range("update", 120, 960)]


def test_every_moment_belongs_to_the_innermost_that_means_something() -> None:
    assert rows_of(
        *STEP,
        event("aten::linear", 200, 300),
        event("aten::t", 200, 210),
        event("aten::addmm", 210, 290),
        event("aten::copy_", 220, 230),  # of the product
        event("aten::gelu", 300, 350),
        in_range("wait tp", 350, 400),
        in_range("wait F up", 400, 410),
        in_range("pipeline bubble", 410, 460),
        in_range("wait F up", 412, 458),
        in_range("wait world", 460, 470),
        in_range("FSDP::all_gather_copy_out", 470, 490),
        event("aten::copy_", 472, 488),
        in_range("optimizer", 500, 600),
        event("aten::_fused_adamw_", 520, 590),
    ) == {
        "matrix products": 80,
        "other compute": 70,
        "optimizer": 70,
        "communication tp": 50,
        "communication dp": 20,
        "communication pp": 10,
        "communication, other": 10,
        "pipeline bubble": 50,
        "data": 100,
        "host": 840 - 360,
        "hooks": 60,
    }


def test_the_backward_of_attention_is_attention() -> None:
    forward = {"Fwd thread id": 0}
    backward = {"Fwd thread id": 1}
    rows = rows_of(
        *STEP,
        event("aten::linear", 130, 140, **forward, **{"Sequence number": 6}),
        in_range("attention", 140, 200),
        event("aten::detach", 140, 141, **forward, **{"Sequence number": 7}),
        event("aten::bmm", 150, 180, **forward, **{"Sequence number": 7}),
        event(
            "aten::detach", 190, 191, **forward, **{"Sequence number": 8}
        ),  # makes no node: 8 is the product after it
        event("aten::bmm", 210, 220, **forward, **{"Sequence number": 8}),
        event("autograd::engine::evaluate_function: BmmBackward0", 300, 340, **backward, **{"Sequence number": 8}),
        event("aten::bmm", 310, 330),
        event("autograd::engine::evaluate_function: BmmBackward0", 400, 450, **backward, **{"Sequence number": 7}),
        event("BmmBackward0", 402, 448, **backward, **{"Sequence number": 7}),
        event("aten::bmm", 410, 440),
    )
    assert rows["attention"] == 1 + 30 + 1 + 30
    assert rows["matrix products"] == 10 + 20


def test_what_gloo_does_in_the_background_hides_nothing() -> None:
    rows = rows_of(*STEP, in_range("gloo:send", 200, 900), event("aten::mm", 210, 310), event("aten::add", 310, 320))
    assert (rows["matrix products"], rows["other compute"]) == (100, 10)


def test_a_compiled_graph_is_other_compute_but_for_its_products() -> None:
    graph = [event("Torch-Compiled Region: 0/0", 200, 300), event("aten::mm", 220, 280)]
    rows = rows_of(*STEP, *graph)
    assert (rows["matrix products"], rows["other compute"]) == (60, 40)


def test_a_gpu_is_charged_with_the_kernels_that_run_and_communication_with_what_none_hides() -> None:
    mm = event("aten::mm", 130, 140)
    gelu = event("aten::gelu", 140, 150)
    call = event("record_param_comms", 150, 151, **{"Process Group Description": "tp"})
    range_ = in_range("attention", 160, 180)
    attention = event("aten::_some_new_kernel", 165, 170)
    step_range = in_range("optimizer", 190, 200)
    adam = event("aten::_fused_adamw_", 191, 195)
    rows = rows_of(
        *STEP,
        *(mm, gelu, call, range_, attention, step_range, adam),
        kernel("sm90_xmma_gemm", 200, 300, mm),
        kernel("elementwise", 290, 340, gelu),  # 10 of it beside the product
        kernel("ncclDevKernel_AllReduce", 320, 400, call, stream=9),  # 60 of it alone
        kernel("anything", 400, 450, attention),
        kernel("multi_tensor_apply", 450, 460, adam),
        kernel("ncclDevKernel_SendRecv", 455, 480, gelu, stream=9, **RECEIVE),
        kernel("ncclDevKernel_SendRecv", 480, 485, gelu, stream=9, **SEND),
    )
    assert rows == {
        "matrix products": 100,
        "attention": 50,
        "other compute": 40,
        "optimizer": 10,
        "communication tp": 60,
        "communication pp": 5,
        "pipeline bubble": 20,
        "data": 100,
        "host": 840 - 285,
        "hooks": 60,
    }


RECEIVE = {"Process Group Description": "F up", "Collective name": "recv"}
SEND = {"Process Group Description": "F up", "Collective name": "send"}


def test_a_backward_in_a_thread_of_autograd_launches_kernels_of_known_rows() -> None:
    marked_forward = in_range("attention", 130, 150)
    forward = event("aten::mul", 135, 140, **{"Sequence number": 3, "Fwd thread id": 0})
    names = {"Sequence number": 3, "Fwd thread id": 1}
    node = event("autograd::engine::evaluate_function: MulBackward0", 300, 320, thread=2, **names)
    inside = event("aten::mul", 305, 315, thread=2)
    after = event("aten::mul", 330, 335, thread=2)
    kernels = [kernel("elementwise", 400, 450, inside), kernel("elementwise", 450, 460, after)]
    rows = rows_of(*STEP, marked_forward, forward, node, inside, after, *kernels)
    assert (rows["attention"], rows["other compute"]) == (50, 10)


def test_steps_are_charged_one_by_one_and_shown_as_their_mean() -> None:
    second = [in_range("step 6", 2000, 2500), in_range("update", 2000, 2500), event("aten::mm", 2100, 2400)]
    found = Breakdown.of_events([*STEP, *second, event("aten::mm", 200, 300), event("aten::mm", 1500, 1600)], rank=3)
    assert [(each.step, round(each.seconds * 1e6)) for each in found.steps] == [(5, 1000), (6, 500)]
    assert found.mean["matrix products"] == pytest.approx(200e-6)
    title, first, *_ = found.table()
    assert title == " where a step of rank 3 went: 0.75 ms, the mean of 2"
    assert first.split() == [
        "0.20",
        "ms",
        "26.7%",
        "matrix",
        "products",
        "#####",
        "linear",
        "layers,",
        "experts,",
        "logits",
    ]
    assert MEANINGS.keys() == set(ROWS)


def test_a_trace_without_a_step_has_no_breakdown() -> None:
    assert Breakdown.of_events([event("aten::mm", 0, 10)], rank=0).steps == []


def test_a_range_is_there_while_the_profiler_records_and_costs_nothing_else() -> None:
    assert marked("data") is marked("update")  # one object, which does nothing
    with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded, marked("data"):
        pass
    assert [each.key for each in recorded.key_averages()] == ["data"]
    assert marked("data") is marked("update")
