"""Tests of operator registration: implementation by device, the reported reason, and rejected uses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatronish.ops import build, library, report


@pytest.fixture
def fresh_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What has been found about the library of kernels is forgotten, before and after; there is no Triton."""
    monkeypatch.delenv("MEGATRONISH_KERNELS", raising=False)
    monkeypatch.setattr(library, "why_no_triton", lambda: "Triton is not installed")
    monkeypatch.setattr(library, "_IN_TRITON", set[str]())
    library.load_kernels.cache_clear()
    yield
    library.load_kernels.cache_clear()


def test_every_family_has_its_line_and_its_sources() -> None:
    assert [line.partition(":")[0] for line in report.kernels_report("cpu")] == [each.name for each in report.FAMILIES]
    in_cuda = sorted(each.name for each in report.FAMILIES if each.in_cuda)
    assert sorted(path.stem for path in build.kernel_sources()) == in_cuda


def test_who_defines_a_family_loads_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(library, "load_kernels", lambda: asked.append("kernels"))
    library.define(library.OperatorFamily("none", ()))
    assert asked == ["kernels"]


def test_every_operator_has_a_reference_on_every_device() -> None:
    for name in (f"megatronish::{each.name}" for family in report.FAMILIES for each in family.operators):
        for device in ("CPU", "CUDA", "MPS", "XPU"):
            assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, device), (name, device)


@pytest.mark.usefixtures("fresh_library")
def test_a_run_says_why_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "kernels_cuda.so"
    monkeypatch.setattr(library, "LIBRARY", path)
    assert report.kernels_report("cpu")[0] == "softmax: torch, because the kernels are for CUDA and this runs on cpu"
    families = ", ".join(each.name for each in report.FAMILIES if each.name != "dropout")  # dropout has C++
    assert report.kernels_line("cpu").startswith(f"fused operations: {families} by torch, because the kernels are for")
    built = "the kernels are not built: python setup.py build_ext --inplace"
    assert report.kernels_report("cuda")[0] == f"softmax: torch, because {built}"

    library.load_kernels.cache_clear()
    path.write_text("no library" + build.sources_hash())
    said = f"softmax: torch, because {path} does not load: "
    found = report.kernels_report("cuda")[0]
    assert found.startswith(said) and not found.endswith(f"Could not load this library: {path}")  # which is torch's

    library.load_kernels.cache_clear()
    path.write_text("no library" + "0" * 16)
    others = "the kernels were built from other sources than these: python setup.py build_ext --inplace"
    assert report.kernels_report("cuda")[0] == f"softmax: torch, because {others}"

    library.load_kernels.cache_clear()
    monkeypatch.setattr(library, "SOURCES", tmp_path)  # as in an installation
    assert report.kernels_report("cuda")[0].startswith(said)

    library.load_kernels.cache_clear()
    monkeypatch.setenv("MEGATRONISH_KERNELS", "0")
    assert report.kernels_report("cuda")[0] == "softmax: torch, because MEGATRONISH_KERNELS is 0"


@pytest.mark.usefixtures("fresh_library")
def test_a_library_of_another_version_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "kernels_cuda.so")
    library.LIBRARY.write_text(build.sources_hash())
    monkeypatch.setattr(torch.ops, "load_library", lambda _: None)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, _: "masked" not in name)
    absent = "megatronish::scaled_masked_softmax, megatronish::scaled_masked_softmax_backward"
    expected = f"softmax: torch, because kernels_cuda.so has no {absent}: build it again"
    assert report.kernels_report("cuda")[0] == expected
    assert not library.has_kernels(report.FAMILIES[0]) and library.has_kernels(report.FAMILIES[1])


def test_gradients_have_no_gradient_and_it_is_said() -> None:
    def save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(_: Any, ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * ctx.saved_tensors[0]

    square = library.Operator(
        "square(Tensor x) -> Tensor",
        reference=lambda x: x * x,
        setup_context=save,
        backward=backward,
    )
    ops = library.define(library.OperatorFamily("squares", (square,)), namespace="megatronish_squares")
    x = torch.tensor([3.0], requires_grad=True)
    assert torch.autograd.grad(ops.square(x), x)[0].item() == 6.0
    with pytest.raises(RuntimeError, match="square can be differentiated once: its gradients have no gradient"):
        torch.autograd.grad(ops.square(x), x, create_graph=True)
