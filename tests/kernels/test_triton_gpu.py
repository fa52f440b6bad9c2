"""Tests of the kernels in Triton on a GPU, `make gpu`: the checks of the interpreter, in bf16 too."""

import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch
import triton_checks as checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which this torch lacks"),
]


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    torch.set_default_device("cuda")
    torch.manual_seed(1)
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "check",
    [
        checks.check_rope,
        checks.check_nf4,
        checks.check_cross_entropy,
        checks.check_norm,
        checks.check_permutation,
        checks.check_dropout_add,
        checks.check_softmax,
        checks.check_attention,
    ],
)
def test_a_kernel_computes_what_its_reference_does(check: Callable[[int], None], seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_attention_of_large_heads(size: int) -> None:
    for seed in range(6):
        checks.check_attention(seed, queries=300, size=size)


def test_long_rows_and_a_large_vocabulary() -> None:
    for seed in range(6):
        checks.check_norm(seed, columns=16384)
        checks.check_cross_entropy(seed, columns=128256)
