"""Tests of operators whose kernels are in Triton: which runs where, their references and gradients, without Triton.

The kernels themselves: `make test-triton` (tests/kernels/test_triton_interpreted.py, test_triton_builds.py).
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT
from torch import Tensor

from megatronish.attention import dropout_attention
from megatronish.layers import dispatch
from megatronish.model import compiled
from megatronish.ops import library, nf4, permutation, report, rope, triton_host

FOLDER = ROOT / "megatronish" / "ops" / "triton"
FAMILIES = (*report.FAMILIES, dropout_attention.FAMILY)
WITH_TRITON = {"cross_entropy", "norm", "dropout", "rope", "nf4", "permutation", "dropped_attention"}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What has been found is forgotten, before and after."""
    monkeypatch.delenv("MEGATRONISH_KERNELS", raising=False)
    for answer in (library.load_kernels, library.why_no_triton):
        answer.cache_clear()
    yield monkeypatch
    for answer in (library.load_kernels, library.why_no_triton):
        answer.cache_clear()


def test_every_operator_names_a_function_of_triton_with_its_parameters() -> None:
    assert {family.name for family in FAMILIES if all(each.triton for each in family.operators)} == WITH_TRITON
    for operator in (each for family in FAMILIES for each in family.operators if each.triton):
        module, _, name = (operator.triton or "").partition(".")
        tree = ast.parse((FOLDER / f"{module}.py").read_text())
        (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
        number = len(operator.schema.partition("(")[2].partition(")")[0].split("Tensor(")[0].split(","))
        if function.args.vararg is None and "(a!)" not in operator.schema:
            assert len(function.args.args) == number, operator.schema


def test_a_gpu_runs_triton_where_the_library_has_no_kernel(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(library, "LIBRARY", ROOT / "absent.so")
    fresh.setattr(library, "why_triton_cannot_compile", lambda: None)
    norm = next(family for family in report.FAMILIES if family.name == "norm")
    activation = next(family for family in report.FAMILIES if family.name == "activation")
    device = torch.device("cuda")
    assert library.has_kernels(norm) and library.has_kernels(rope.FAMILY) and not library.has_kernels(activation)
    assert library.report_line(norm, device) == "norm: Triton" and library.fuses_dropout("cuda")
    assert library.report_line(activation, device).startswith("activation: torch, because the kernels are not built")
    assert not library.fuses_dropout("cpu")


def test_without_triton_or_against_kernels_it_says_so(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(library, "LIBRARY", ROOT / "absent.so")
    reason = "Triton finds no C compiler: install gcc, or name one in CC"
    fresh.setattr(library, "why_triton_cannot_compile", lambda: reason)
    line = f"rope: torch, because {reason}"
    assert library.report_line(rope.FAMILY, torch.device("cuda")) == line and not library.fuses_dropout("cuda")
    library.why_no_triton.cache_clear()
    fresh.setenv("MEGATRONISH_KERNELS", "0")
    assert library.report_line(rope.FAMILY, torch.device("cuda")).endswith("MEGATRONISH_KERNELS is 0")


def test_without_what_triton_needs_no_kernel_of_it_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton compiles C at its first launch, with the compiler that CC names or gcc or clang, and Python's headers."""
    why = triton_host.why_triton_cannot_compile.__wrapped__
    programs = {"gcc", "/opt/cc"}
    monkeypatch.setattr(triton_host, "find_spec", lambda _: object())
    monkeypatch.setattr(triton_host.shutil, "which", lambda name: name if name in programs else None)
    monkeypatch.setattr(triton_host, "_headers", lambda: tmp_path)
    monkeypatch.delenv("CC", raising=False)
    assert why() == f"Triton's C compiler needs Python's headers, and {tmp_path} has none: install python3-dev"
    (tmp_path / "Python.h").touch()
    assert why() is None
    monkeypatch.setenv("CC", "icc")
    assert why() == "Triton finds no C compiler CC='icc': install gcc, or name one in CC"
    monkeypatch.setenv("CC", "/opt/cc")
    assert why() is None
    monkeypatch.delenv("CC")
    programs.clear()
    assert why() == "Triton finds no C compiler: install gcc, or name one in CC"
    monkeypatch.setattr(triton_host, "find_spec", lambda _: None)
    assert why() == "Triton is not installed: pip install triton"
    monkeypatch.setattr(compiled, "why_triton_cannot_compile", why)
    assert compiled.why_not_compiled("cuda") == f"--compile has no effect, the layers run eagerly: {why()}"


def test_what_a_kernel_does_not_take_is_computed_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Kernels:
        @staticmethod
        def double(x: Tensor) -> Any:
            asked.append(str(x.dtype))
            return NotImplemented if x.dim() > 1 else x + x

    monkeypatch.setattr(library.importlib, "import_module", lambda _: Kernels)
    run = library.in_triton(library.Operator("double(Tensor x) -> Tensor", lambda x: x * 2.0, triton="none.double"))
    for x in (torch.ones(3), torch.ones(2, 2), torch.ones(3, dtype=torch.float64)):
        assert torch.equal(run(x), 2 * x)
    assert asked == ["torch.float32", "torch.float32"], "fp64 is for references alone"


def test_where_triton_fails_the_way_round_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_name: str) -> None:
        raise OSError("no /sbin/ldconfig")

    monkeypatch.setattr(library.importlib, "import_module", fails)
    run = library.in_triton(library.Operator("double(Tensor x) -> Tensor", lambda x: x * 2.0, triton="none.double"))
    with pytest.raises(OSError, match="ldconfig") as caught:
        run(torch.ones(3))
    assert caught.value.__notes__ == ["double is a kernel in Triton; MEGATRONISH_KERNELS=0 takes torch's operations"]


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_operator_of_rope_has_the_gradients_of_torch(interleaved: bool) -> None:
    x, angles = torch.randn(5, 2, 3, 10, dtype=torch.float32, requires_grad=True), torch.randn(5, 2, 1, 4)
    grad = torch.randn(5, 2, 3, 10)
    results = []
    for rotated in (
        rope.rotate(x, angles.cos(), angles.sin(), interleaved=interleaved),
        torch.ops.megatronish.rotate(x, angles.cos(), angles.sin(), interleaved, False),
    ):
        results.append((rotated, *torch.autograd.grad(rotated, x, grad)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("num_dropped", "num_padded"), [(0, 0), (5, 0), (0, 4), (5, 4)])
def test_rows_of_experts_are_those_of_dispatch(num_dropped: int, num_padded: int) -> None:
    tokens, choices, columns = 6, 3, 8
    x = torch.randn(tokens, columns, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, choices, dtype=torch.float64, requires_grad=True)
    sorted_choices = torch.randperm(tokens * choices)
    order = torch.cat([sorted_choices[: tokens * choices - num_dropped], torch.zeros(num_padded, dtype=torch.int64)])
    inverse = sorted_choices.argsort()
    inverse[inverse >= tokens * choices - num_dropped] = len(order)
    lacks = num_dropped > 0

    def by_dispatch() -> Tensor:
        rows = dispatch._TakeTokens.apply(x, order, inverse, choices, lacks).square()
        return dispatch._WeightedSum.apply(rows, weights, order, inverse, lacks)

    def by_operators() -> Tensor:
        rows = permutation.spread(x, order, inverse, choices).square()
        return permutation.collect(rows, weights, order, inverse)

    grad = torch.randn(tokens, columns, dtype=torch.float64)
    results = []
    for compute in (by_dispatch, by_operators):
        y = compute()
        results.append((y, *torch.autograd.grad(y, (x, weights), grad)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def opchecked() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    ops, order = torch.ops.megatronish, torch.randperm(12)
    inverse, order = order.argsort(), order[:11]  # the last choice is dropped
    x, rows = torch.randn(4, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    weights, angles = torch.rand(4, 3, requires_grad=True), torch.randn(5, 1, 1, 4)
    stored = torch.randint(0, 256, (3, 66), dtype=torch.uint8)
    turned = torch.randn(5, 2, 3, 10, requires_grad=True)
    return {
        "rotate": (ops.rotate, (turned, angles.cos(), angles.sin(), True, False)),
        "spread": (ops.spread, (x, order, inverse, 3)),
        "collect": (ops.collect, (rows, weights, order, inverse, 3)),
        "collect_backward": (ops.collect_backward, tuple(t.detach() for t in (x, rows, weights, order, inverse))),
        "nf4_unpack_": (ops.nf4_unpack_, (torch.empty(3, 128), stored, torch.rand(3), 1, 4, 2)),
    }


@pytest.mark.parametrize("name", ["rotate", "spread", "collect", "collect_backward", "nf4_unpack_"])
def test_torch_finds_nothing_wrong_with_an_operator_of_triton(name: str) -> None:
    operator, given = opchecked()[name]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, given, test_utils=checks)


def test_tables_of_nf4_are_those_of_the_format() -> None:
    pairs = nf4.table_on("pairs", torch.device("cpu"))
    table = nf4.table_on("nf4", torch.device("cpu"))
    assert torch.equal(pairs[0x3A], torch.stack((table[3], table[10])))
