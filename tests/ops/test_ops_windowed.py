"""Tests of attention in a sliding window in C++: against all scores in float64, opcheck, threads, planted mistakes."""

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_runs import needs_compiler
from sweeps import some_of
from torch import Tensor

from megatronish.attention.flash import attend_alone
from megatronish.attention.mask import AttentionMask
from megatronish.ops import native as cpp
from megatronish.ops import windowed
from megatronish.ops.build import find_compiler

SHAPES = [
    (100, 2, 4, 2, 32, 20),
    (320, 1, 3, 1, 64, 70),
    (333, 2, 2, 2, 24, 64),
    (97, 1, 2, 1, 5, 3),
    (64, 1, 1, 1, 128, 64),
    (700, 1, 2, 2, 80, 512),
    (49, 1, 2, 1, 16, 48),
    (7, 3, 2, 1, 8, 2),
]
"""Tokens, samples, heads, key/value heads, head size and window: sizes in whole panels and blocks, and ragged."""

Shape = tuple[int, int, int, int, int, int]


def tensors(shape: Shape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    length, batch, heads, kv_heads, size, _ = shape
    generator = torch.Generator().manual_seed(0)
    sizes = [(length, batch, heads, size), *[(length, batch, kv_heads, size)] * 2, (length, batch, heads * size)]
    return [(1.5 * torch.randn(each, generator=generator)).to(dtype) for each in sizes]


def trained(shape: Shape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    *leaves, dout = tensors(shape, dtype)
    leaves = [x.requires_grad_() for x in leaves]
    out = attend_alone(*leaves, mask=AttentionMask(shape[0], shape[-1]))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def from_all_scores(shape: Shape, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same by torch's SDPA in float64, with a dense mask, of what is as near to these as `dtype` is."""
    *leaves, dout = (x.double() for x in tensors(shape, dtype))
    leaves = [x.requires_grad_() for x in leaves]
    q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
    places = torch.arange(shape[0])
    mask = AttentionMask(shape[0], shape[-1]).dense(places, places)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    out = out.permute(2, 0, 1, 3).flatten(2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def near_all_scores(shape: Shape) -> bool:
    """Whether fp32 is within 4e-6 of the largest element: rounding, of scores too, which a head of 128 makes large."""
    pairs = zip(trained(shape), from_all_scores(shape), strict=True)
    return all((actual - right).abs().max() <= 4e-6 * max(1.0, float(right.abs().max())) for actual, right in pairs)


def assert_near(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    for actual, right in zip(found, expected, strict=True):
        assert (actual - right).abs().max() <= bound * max(1.0, float(right.abs().max()))


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_attention_from_all_scores(shape: Shape) -> None:
    assert windowed.can_run_windowed(tensors(shape)[0])
    assert near_all_scores(shape)


@needs_compiler
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[5]])
def test_bf16_is_computed_in_fp32(shape: Shape) -> None:
    """So what is rounded are results alone, to 8 bits; of any size of a head, whose root may be no power of two."""
    assert windowed.can_run_windowed(tensors(shape, torch.bfloat16)[0])
    found = trained(shape, torch.bfloat16)
    assert all(x.dtype == torch.bfloat16 for x in found)
    out, *grads = zip(found, from_all_scores(shape, torch.bfloat16), strict=True)
    # Gradients are computed from the rounded output, too.
    for pairs, bound in (([out], 2**-8), (grads, 2**-7)):
        assert_near([x.double() for x, _ in pairs], [right for _, right in pairs], bound)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_references_are_attention_from_all_scores(shape: Shape) -> None:
    q, k, v, dout = (x.double() for x in tensors(shape))
    out, lse = windowed._forward_reference(q, k, v, shape[-1])
    grads = windowed._backward_reference(dout.view(q.shape), q, k, v, out, lse, shape[-1])
    assert_near([out.flatten(2), *grads], from_all_scores(shape), 1e-13)


@needs_compiler
def test_a_hidden_key_counts_for_nothing() -> None:
    """Not even one that is not a number, except for queries of the same tile of six."""
    shape = (200, 1, 2, 1, 16, 20)
    q, k, v, _ = tensors(shape)
    expected = trained(shape)
    k[60:70], v[60:70] = torch.nan, torch.inf
    out = attend_alone(q, k, v, mask=AttentionMask(200, 20))
    assert torch.equal(out[90:], expected[0][90:]) and out[60:89].isnan().all()


@needs_compiler
def test_threads_change_no_bit() -> None:
    shape, threads = SHAPES[0], torch.get_num_threads()
    found = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(trained(shape))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_opcheck(dtype: torch.dtype) -> None:
    q, k, v, dout = tensors((40, 2, 4, 2, 8, 9), dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(windowed.OPS.windowed_attention.default, (*leaves, 9))
    out, lse = windowed.OPS.windowed_attention(q, k, v, 9)
    given = [x.detach() for x in (dout.view(q.shape), q, k, v, out, lse)]
    torch.library.opcheck(windowed.OPS.windowed_attention_backward.default, (*given, 9))


MISTAKES = {
    "a window one key too long": ("begin + row - window + 1)", "begin + row - window)"),
    "a key too early": ("return begin + row + 1 - first", "return begin + row - first"),
    "a panel left out": ("key + kPanel <= from(row)", "key <= from(row)"),
    "keys without the gradient of a block's last rows": ("std::min(rows(), last_key", "std::min(rows() - 1, last_key"),
    "sums that begin in the middle": ("size, key > earliest)", "size, false)"),
    "hidden scores with a gradient": ("block.hide(p, row, -INFINITY);\n          block.hide(d", "block.hide(d"),
    "gradients of rows without their mean": ("(d[n] - mean)", "d[n]"),
    "keys of the first head for all": ("all[1], sample, kv_head", "all[1], sample, 0"),
}


FEW = ("a window one key too long", "a panel left out", "hidden scores with a gradient")


@needs_compiler
@pytest.mark.processes
@pytest.mark.parametrize("mistake", some_of(MISTAKES, FEW))
def test_a_mistake_is_found(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = MISTAKES[mistake]
    path, *flags = cpp.SOURCES["windowed"]
    source = path.read_text()
    assert right in source
    (tmp_path / "windowed.cpp").write_text(source.replace(right, wrong))
    command: list[Any] = [
        find_compiler(),
        *cpp.FLAGS,
        *flags,
        "-O1",  # the last level counts: a mistake is as wrong, and compiled in less time
        "-fopenmp",
        f"-I{path.parent}",
        tmp_path / "windowed.cpp",
    ]
    subprocess.run([*command, "-o", tmp_path / "windowed.so"], check=True)
    library = cpp.Native(ctypes.CDLL(str(tmp_path / "windowed.so")))
    monkeypatch.setattr(windowed, "native", lambda _: library)
    found = [near_all_scores(shape) for shape in SHAPES[:2]]
    assert not all(found)
