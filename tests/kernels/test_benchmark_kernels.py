"""Tests of benchmarks/kernels.py without a GPU: a dry run of every case, and the refusal to measure."""

import importlib
from types import ModuleType

import pytest
import torch
from paths import ROOT

OPERATIONS = (
    "scaled masked softmax",
    "scaled causal softmax",
    "layer norm",
    "rms norm",
    "layer norm of a sum",
    "rms norm of a sum",
    "cross entropy",
    "bias + gelu",
    "bias + gelu by tanh",
    "bias + swiglu",
    "dropout + residual",
)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, as if Python had been started with it."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("kernels")


@pytest.mark.processes
def test_every_operation_runs_forward_and_backward_in_a_dry_run(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(["--dry-run", "--markdown"]) == 0
    first, line, *table = capsys.readouterr().out.splitlines()
    assert "dry run on the CPU, numbers mean nothing" in first
    assert line.startswith("fused operations: ")
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    assert tuple(rows[0]) == benchmark.COLUMNS
    assert [(row[0], row[2]) for row in rows[2:]] == [
        (name, direction) for name in OPERATIONS for direction in ("forward", "backward")
    ]


def test_a_contender_that_computes_something_else_is_not_timed(benchmark: ModuleType) -> None:
    sizes = benchmark.Sizes(torch.device("cpu"), torch.float32, 4096, features=(32,))
    case, *_ = benchmark.FAMILIES["activation"](sizes)
    wrong = case._replace(ours=lambda x, bias: case.ours(x, bias) * 1.01)
    with pytest.raises(RuntimeError, match=r"^bias \+ gelu 32x32: number 0 of ours is off by 0\.0"):
        benchmark.measure_case(wrong, num_turns=1, compile_backend="eager")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_there_is_nothing_to_measure(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("the kernels are measured on a CUDA GPU, and torch sees none here") and not told.out
