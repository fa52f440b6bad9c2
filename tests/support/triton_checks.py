"""Checks of the kernels in Triton against the references in fp64: by its interpreter on the CPU, or on a GPU.

They run on torch's default device. The interpreter computes bf16 wrongly (a cast is off by a rounding, products are
nonsense), so there they are fp32 and fp16; what bf16 adds is the cast at both ends, which test_triton_builds.py
compiles.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from kernel_runs import assert_rounded, misaligned
from torch import Tensor

from megatronish.attention import dropout_attention
from megatronish.layers.nf4 import NF4Form
from megatronish.ops import cross_entropy, dropout, nf4, norm, permutation, rope
from megatronish.ops.library import OperatorFamily, in_triton
from megatronish.parallel.mesh import Axis

HALVES = (torch.float32, torch.float16)
PRECISIONS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def mask_keys() -> Tensor:
    """Keys of a stream."""
    return torch.tensor([123456789, -987654321], dtype=torch.int32)


def dtype_of(seed: int) -> torch.dtype:
    """The precision of a check: fp32 or fp16, on a GPU bf16, too."""
    is_gpu = torch.get_default_device().type == "cuda"
    return [*PRECISIONS][seed % 3] if is_gpu else HALVES[seed % 2]


def of_family(family: OperatorFamily, name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An operator as Triton computes it, and its reference."""
    (operator,) = (each for each in family.operators if each.name == name)
    return in_triton(operator), operator.reference


def exact(values: Any) -> Any:
    """Floats as fp64, the rest as it is; in a tuple, each."""
    if isinstance(values, tuple):
        return tuple(map(exact, values))
    return values.double() if isinstance(values, Tensor) and values.is_floating_point() else values


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values, one in eight of them -0, one element beyond a 16-byte boundary."""
    x = torch.randn(shape, dtype=dtype)
    return misaligned(x.masked_fill(torch.rand(shape) < 0.125, -0.0))


def check_rope(seed: int) -> None:
    """Both orders of pairs, partial rotation, strides of a fused product; backward is the opposite angle."""
    draw = random.Random(seed)
    dtype, interleaved = dtype_of(seed), seed % 4 < 2
    length, batch, heads, pairs = (draw.randint(1, most) for most in (5, 3, 19, 40))
    rest = draw.choice((0, 0, 6))
    qkv = values(length, batch, heads + 3, 2 * pairs + rest, dtype=dtype)
    x = qkv[:, :, 2 : heads + 2]
    angles = 100 * torch.rand(length, draw.choice((1, batch)), 1, pairs)
    rotate, reference = of_family(rope.FAMILY, "rotate")
    for inverse in (False, True):
        found = rotate(x, angles.cos(), angles.sin(), interleaved, inverse)
        expected = reference(x, angles.cos(), angles.sin(), interleaved, inverse)
        assert found.is_contiguous() and torch.equal(found, expected)


def check_nf4(seed: int) -> None:
    """Rows of a section, whole or of a rank of tp, with and without double quantisation: the bits of the reference."""
    draw = random.Random(seed)
    rows, blocks, ranks = draw.randint(2, 70), draw.choice((2, 12, 100)), draw.choice((1, 2, 2))
    form = NF4Form((rows, 3), 64 * blocks, double=seed % 2 == 0)
    weight = torch.randn(rows + 3, 64 * blocks)
    weight[0, :64] = 0.0
    weight[1, 3] = -0.0
    stored, scales = form.pack(weight)
    level = scales.view(torch.float32)[: form.scales_of(rows)] if form.double else None
    first, rank = draw.randrange(rows), draw.randrange(ranks)
    columns = Axis("tp", ranks, rank)
    width = form.row_bytes(form.in_features // ranks)
    part = stored[first:rows, rank * width : (rank + 1) * width].contiguous()
    unpack, reference = of_family(nf4.FAMILY, "nf4_unpack_")
    for dtype in HALVES:
        found, expected = (torch.full((rows - first, form.in_features // ranks), 7.0, dtype=dtype) for _ in range(2))
        place = (first, form.blocks, columns.rank * (form.blocks // ranks))
        unpack(found, part, level, *place)
        reference(expected, part, level, *place)
        assert torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())


def check_cross_entropy(seed: int, *, columns: int | None = None) -> None:
    """A shard with padding, labels of other shards, rows of -inf, extremes; the gradient is written over the logits."""
    draw = random.Random(seed)
    dtype = dtype_of(seed)
    tokens, columns = draw.randint(1, 4), columns or draw.choice((1, 31, 4096, 5000, 9000))
    num_true = draw.choice((columns, max(0, columns - draw.randint(0, 40))))
    logits = (values(tokens, columns) * draw.choice((1, 30))).to(dtype)
    if seed % 3 == 0:
        logits[0] = -torch.inf
    first = draw.choice((0, 1000))
    labels = torch.randint(max(0, first - 5), first + columns, (tokens,))
    statistics, reference = of_family(cross_entropy.FAMILY, "cross_entropy_statistics")
    gradient, reference_of_gradient = of_family(cross_entropy.FAMILY, "cross_entropy_gradient_")
    mine, theirs = logits.clone(), exact(logits)
    found, expected = statistics(mine, labels, first, num_true), reference(theirs, labels, first, num_true)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)
    factor, grad = torch.rand(tokens), torch.randn(tokens)
    gradient(mine, labels, found[0], factor, grad, first, num_true)
    reference_of_gradient(theirs, labels, expected[0], exact(factor), exact(grad), first, num_true)
    assert_rounded(mine, theirs, slack=1e-5)


def check_norm(seed: int, *, columns: int | None = None) -> None:
    """All four forwards with their backwards, with one_plus and a weight in fp32."""
    draw = random.Random(seed)
    dtype = dtype_of(seed)
    rows, columns = draw.choice((1, 3, 300)) if columns is None else 2, columns or draw.choice((1, 7, 64, 100))
    centres, adds, one_plus = seed % 3 == 0, draw.random() < 0.5, draw.random() < 0.5
    name = f"{'add_' if adds else ''}{'layer' if centres else 'rms'}_norm"
    x, residual = values(rows, columns, dtype=dtype), values(rows, columns, dtype=dtype)
    weight = values(columns, dtype=draw.choice((dtype, torch.float32)))
    bias = values(columns, dtype=weight.dtype)
    given = (x, *([residual] if adds else []), weight, *([bias] if centres else []), 1e-5, one_plus)
    forward, reference = of_family(norm.FAMILY, name)
    found = forward(*given)
    # The sum is rounded before it is normalised.
    total = (x + residual) if adds else x
    expected = of_family(norm.FAMILY, name.removeprefix("add_"))[1](*exact((total, *given[2 if adds else 1 :])))
    if adds:
        assert torch.equal(found[1], total)
        found = (found[0], *found[2:])
    for one, other in zip(found, expected, strict=True):
        assert_rounded(one, other, slack=2e-6 * (1 + other.abs()))
    grad, grad_sum = values(rows, columns, dtype=dtype), values(rows, columns, dtype=dtype) if adds else None
    backward, reference = of_family(norm.FAMILY, f"{'layer' if centres else 'rms'}_norm_backward")
    given = (grad, grad_sum, total, weight, *found[1:], one_plus)
    found, expected = backward(*given), reference(*exact(given))
    sizes = (1.0, rows**0.5, rows**0.5)
    for one, other, size in zip(found, expected, sizes, strict=False):
        assert_rounded(one, other, slack=1e-5 * size * (1 + other.abs()))


def check_permutation(seed: int) -> None:
    """Choices sorted by expert, some dropped, and rows of none: rows, sums with and without weights, gradients."""
    draw = random.Random(seed)
    dtype = dtype_of(seed)
    tokens, choices, columns = draw.randint(1, 9), draw.randint(1, 4), draw.choice((1, 16, 100, 4100))
    num_dropped = draw.choice((0, draw.randrange(tokens * choices)))
    order = torch.randperm(tokens * choices)
    inverse, order = order.argsort(), order[: tokens * choices - num_dropped]
    padding = torch.randint(tokens * choices, (draw.choice((0, 3)),))
    inverse[inverse >= len(order)] = len(order) + len(padding)
    is_choice = torch.arange(len(order) + len(padding)) < len(order)
    order = torch.cat([order, padding])
    spread, reference = of_family(permutation.FAMILY, "spread")
    x = values(tokens, columns, dtype=dtype)
    assert torch.equal(spread(x, order, inverse, choices), reference(x, order, inverse, choices))
    rows, weights = values(len(order), columns, dtype=dtype), torch.rand(tokens, choices)
    collect, reference = of_family(permutation.FAMILY, "collect")
    for each in (weights, None):
        given = (rows, each, order, inverse, choices)
        assert_rounded(collect(*given), reference(*exact(given)), slack=1e-6)
    backward, reference = of_family(permutation.FAMILY, "collect_backward")
    given = (values(tokens, columns, dtype=dtype), rows, weights, order, inverse)
    (of_rows, of_weights), (expected, expected_weights) = backward(*given), reference(*exact(given))
    assert_rounded(of_rows[is_choice], expected[is_choice], slack=1e-6)
    torch.testing.assert_close(of_weights.double(), expected_weights, rtol=1e-5, atol=1e-5 * columns**0.5)


def check_dropout_add(seed: int) -> None:
    """The bits of the reference: its mask, and its roundings."""
    dtype = dtype_of(seed)
    columns = (1, 70, 1025)[seed % 3]
    x, residual = values(5, 2, columns, dtype=dtype), values(5, 2, columns, dtype=dtype)
    samples, positions = torch.tensor([2**30 + seed, 3]), torch.arange(seed, seed + 5)
    add, reference = of_family(dropout.FAMILY, "dropout_add")
    for each in (residual, None):
        given = (x, each, mask_keys(), samples, positions, 0.25)
        assert torch.equal(add(*given), reference(*given))


def check_softmax(seed: int) -> None:
    """A tile with window, documents and ALiBi, rows that see nothing: masks bit for bit, and gradients."""
    draw = random.Random(seed)
    queries, keys, first_query, first_key = (draw.randint(*ends) for ends in ((1, 9), (1, 40), (0, 30), (0, 20)))
    length = 1 + max(first_query + queries, first_key + keys)
    causal = draw.random() < 0.7
    place = (
        *(mask_keys(), torch.tensor([5, 2**30 + 7])),
        draw.choice((None, torch.randint(0, 3, (2, length)).sort(1).values)),
        draw.choice((None, torch.tensor([0.5, 0.25, 0.1]))),
        *(1, first_query, first_key, draw.choice((None, 13)) if causal else None, causal, 0.25, 0.3),
    )
    scores, grads = torch.randn(2, 3, queries, keys), torch.randn(2, 3, queries, keys)
    lse, means = torch.empty(2, 3, queries), torch.randn(2, 3, queries)
    forward, reference = of_family(dropout.FAMILY, "softmax_dropout")
    mine, theirs, their_lse = scores.clone(), scores.double(), lse.double()
    forward(mine, lse, *place)
    reference(theirs, their_lse, *place)
    assert torch.equal(mine == 0, theirs == 0), "masks are equal bit for bit"
    assert_rounded(mine, theirs, slack=1e-6)
    torch.testing.assert_close(lse.double(), their_lse, rtol=1e-6, atol=1e-6)
    whole = their_lse.masked_fill(their_lse == -torch.inf, 3.0)  # over all keys of the sequence it is finite
    backward, reference = of_family(dropout.FAMILY, "softmax_dropout_backward")
    mine, theirs, of_mine, of_theirs = scores.clone(), scores.double(), grads.clone(), grads.double()
    backward(mine, of_mine, whole.float(), means, *place)
    reference(theirs, of_theirs, whole, means.double(), *place)
    assert_rounded(mine, theirs, slack=1e-5)
    assert_rounded(of_mine, of_theirs, slack=1e-5)


def check_attention(seed: int, *, queries: int | None = None, size: int | None = None) -> None:
    """Attention with dropout under every kind of mask, forward and backward, with shared heads and sinks."""
    draw = random.Random(seed)
    dtype = dtype_of(seed)
    kv, group, size = draw.choice((1, 2)), draw.choice((1, 3)), size or draw.choice((4, 16, 20, 40))
    num_queries = queries or draw.randint(1, 70)
    length, heads, causal = num_queries + draw.choice((0, 0, 37)), kv * group, draw.random() < 0.7
    q = values(num_queries, 2, heads + 1, size, dtype=dtype)[:, :, 1:]
    kv_both = values(length, 2, 2 * kv, size, dtype=dtype)
    k, v = kv_both[:, :, :kv], kv_both[:, :, kv:]
    sinks = draw.choice((None, torch.randn(heads)))
    given = (
        *(mask_keys(), torch.tensor([5, 2**30 + 7])),
        draw.choice((None, torch.randint(0, 3, (2, length)).sort(1).values)),
        draw.choice((None, torch.tensor([2.0**-i for i in range(1, heads + 1)]))),
        *(2, draw.choice((None, 9, 33)) if causal else None, causal, draw.choice((0.1, 0.5))),
    )
    dout = values(num_queries, 2, heads, size, dtype=dtype)
    family = dropout_attention.FAMILY
    forward, reference = of_family(family, "dropped_attention")
    found, expected = forward(q, k, v, sinks, *given), reference(*exact((q, k, v, sinks)), *given)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-5)
    backward, reference = of_family(family, "dropped_attention_backward")
    found = (found[0], *backward(dout, q, k, v, sinks, *found, *given))
    expected = (expected[0], *reference(*exact((dout, q, k, v, sinks)), *expected, *given))
    precision = PRECISIONS[dtype]
    for one, other in zip(found, expected, strict=True):
        if other.numel():
            worst = (one.double() - other).abs().max()
            assert worst <= precision * (1 + other.abs().max()), f"{worst} of {other.abs().max()}"
