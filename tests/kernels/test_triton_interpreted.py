"""Tests of the kernels in Triton by its interpreter, `make test-triton`: no GPU, in an environment of their own."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton_checks as checks
from paths import ROOT

FOLDER = ROOT / "megatronish" / "ops" / "triton"
IS_INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1: `make test-triton`"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of hashes that wrap around and of log(0)
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("seed", range(8))
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
    ],
)
def test_a_kernel_computes_what_its_reference_does(check: Callable[[int], None], seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("seed", range(24))
def test_attention_with_dropout_is_that_of_the_cpu(seed: int) -> None:
    checks.check_attention(seed)


@pytest.mark.parametrize(("queries", "size"), [(130, 64), (70, 128), (40, 256)])
def test_attention_of_large_heads(queries: int, size: int) -> None:
    for seed in (0, 1):
        checks.check_attention(seed, queries=queries, size=size)


def test_long_rows_and_a_large_vocabulary() -> None:
    for seed in range(4):
        checks.check_norm(seed, columns=16384)
        checks.check_cross_entropy(seed, columns=128256)


def test_masks_are_those_of_the_cpu_bit_for_bit() -> None:
    """With values that add to the number of kept keys: each probability is alike, and none is lost in a sum."""
    family = checks.dropout_attention.FAMILY
    forward, _ = checks.of_family(family, "dropped_attention")
    length = 64
    q = torch.zeros(length, 1, 1, length)
    v = torch.eye(length).view(length, 1, 1, length)
    given = (checks.mask_keys(), torch.tensor([2**30 + 7]), None, None, 3, None, False, 0.3)
    out, _ = forward(q, torch.zeros_like(v), v, None, *given)
    dropout = checks.dropout.ProbabilityDropout(checks.mask_keys(), given[1], 0.3)
    places = torch.arange(length)
    kept = dropout.drop(torch.ones(1, 1, length, length), first_head=3, queries=places, keys=places) != 0
    assert torch.equal(out[:, 0, 0] != 0, kept[0, 0])


def test_not_a_number_stays_one() -> None:
    logits = torch.randn(2, 50)
    logits[0, 40] = torch.nan
    statistics, _ = checks.of_family(checks.cross_entropy.FAMILY, "cross_entropy_statistics")
    maximum, total, _ = statistics(logits.clone(), torch.zeros(2, dtype=torch.int64), 0, 50)
    assert maximum[0].isnan() and total[0].isnan() and maximum[1] == logits[1].max()


def test_two_runs_have_the_same_bits() -> None:
    norm = checks.norm.FAMILY
    backward, _ = checks.of_family(norm, "rms_norm_backward")
    given = (torch.randn(700, 64), None, torch.randn(700, 64), torch.randn(64), torch.rand(700, 1), False)
    assert all(torch.equal(one, other) for one, other in zip(backward(*given), backward(*given), strict=True))


MISTAKES = [
    (checks.check_rope, "rope", "d = -d", "d = d"),
    (checks.check_rope, "rope", "cos_b + pair", "cos_s + pair"),
    (checks.check_nf4, "nf4", "first_block + block % width", "block % width"),
    (checks.check_nf4, "nf4", "tl.join(high * absmax[:, None], low", "tl.join(low * absmax[:, None], high"),
    (checks.check_cross_entropy, "cross_entropy", "tl.exp(largest - base) +", "1.0 +"),
    (checks.check_cross_entropy, "cross_entropy", "(column < num_true)\n", "(column < num_columns)\n"),
    (checks.check_norm, "norm", "values = values.to(total.dtype.element_ty)  #", "#"),
    (checks.check_norm, "norm", "along -= tl.sum(h, axis=0) / columns", "pass"),
    (checks.check_norm, "norm", "for row in range(part, rows, parts)", "for row in range(part, parts, parts)"),
    (checks.check_permutation, "permutation", "row < num_rows, columns", "row < num_rows - 1, columns"),
    (checks.check_permutation, "permutation", "(dy * weight)", "dy"),
    (checks.check_dropout_add, "dropout", "bits * 0x7FEB352D", "bits * 0x7FEB352B"),
    (checks.check_dropout_add, "dropout", "value, 0.0).to(out.dtype.element_ty)", "value, 0.0)"),
    (checks.check_softmax, "dropout", "distance < sight.window", "distance <= sight.window"),
    (checks.check_softmax, "dropout", "tl.load(tile.means + row)", "0.0"),
    (checks.check_attention, "attention", "total = total * shrunk[:, None] +", "total = total +"),
    (
        checks.check_attention,
        "attention",
        "begin + SHAPE.keys + sight.window - 1",
        "begin + SHAPE.keys + sight.window - 9",
    ),
    (checks.check_attention, "attention", "first, begin - offset", "first, begin"),
    (checks.check_attention, "attention", "of_keys, key, sample, kv,", "of_keys, key, sample, 0,"),
]


@pytest.mark.parametrize(("check", "module", "right", "wrong"), MISTAKES)
def test_a_planted_mistake_is_found(
    check: Callable[[int], None], module: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (FOLDER / f"{module}.py").read_text()
    assert right in source, "the mistake is planted nowhere"
    path, name = tmp_path / f"{module}.py", f"megatronish.ops.triton.{module}"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    planted = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, planted)
    spec.loader.exec_module(planted)
    with pytest.raises((AssertionError, IndexError)):
        any(map(check, range(24)))
