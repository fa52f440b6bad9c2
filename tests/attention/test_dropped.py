"""Tests of attention with dropout block by block: against explicit probabilities, by its memory, and as an operator."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from sweeps import some_of
from torch import Tensor

from megatronish.attention import dropout_attention
from megatronish.attention.flash import attend_alone
from megatronish.attention.mask import AttentionMask, BidirectionalMask, alibi_slopes
from megatronish.ops import native as native_operators
from megatronish.ops.dropout import ProbabilityDropout
from megatronish.ops.native import Native
from megatronish.parallel.streams import mask_keys
from megatronish.specs.chunk_sizes import CPU

SEQUENCE, BATCH, HEADS, SIZE = 150, 3, 4, 8  # three blocks of queries, the last of them short
KEYS = mask_keys([(7, "dropout", 3, 1, "attention")])[0]
DOCUMENTS = (torch.arange(SEQUENCE) // 41 + torch.arange(3)[:, None]).contiguous()
MASKS = {
    "causal": AttentionMask(SEQUENCE),
    "a window": AttentionMask(SEQUENCE, window_size=30),
    "a window of one": AttentionMask(SEQUENCE, window_size=1),
    "documents": AttentionMask(SEQUENCE, document_ids=DOCUMENTS),
    "bidirectional": BidirectionalMask(SEQUENCE),
    "bidirectional documents": BidirectionalMask(SEQUENCE, document_ids=DOCUMENTS),
    "alibi": AttentionMask(SEQUENCE, slopes=alibi_slopes(HEADS)),
    "all": AttentionMask(SEQUENCE, window_size=70, document_ids=DOCUMENTS, slopes=alibi_slopes(HEADS)),
}


def inputs(kv_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v as slices of one product, as a layer has them, and sinks."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, kv_heads, kv_heads)
    product = torch.randn(SEQUENCE, BATCH, sum(heads), SIZE, generator=generator).to(dtype)
    sinks = torch.randn(HEADS, generator=generator).to(dtype)
    return [*(x.detach().requires_grad_() for x in product.split(heads, dim=2)), sinks.requires_grad_()]


def results(backend: Any, mask: AttentionMask, given: list[Tensor], *, sinks: bool) -> list[Tensor]:
    """Output and gradients."""
    dropout = ProbabilityDropout(KEYS, torch.arange(BATCH) + 40, 0.2)
    q, k, v, sink = given
    leaves = given if sinks else given[:3]
    out = attend_alone(
        q, k, v, mask=mask, backend=backend, first_head=5, dropout=dropout, sinks=sink if sinks else None
    )
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


@pytest.mark.long
@pytest.mark.parametrize("cpp", [True, False], ids=["in C++", "by torch"])
@pytest.mark.parametrize(
    ("kv_heads", "sinks"), some_of(product((4, 2, 1), (False, True)), [(4, True), (2, False), (1, True)])
)
@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_attention_with_explicit_probabilities(
    name: str, kv_heads: int, sinks: bool, cpp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpp:
        monkeypatch.setattr(native_operators, "native", lambda: Native(None, "there is no C++ compiler here"))
    exact = results("unfused", MASKS[name], inputs(kv_heads, torch.float64), sinks=sinks)
    for dtype, tolerance in (
        (torch.float32, 2e-6),
        (torch.bfloat16, 5e-2),
    ):  # the output is rounded to bf16, and enters gradients
        given = inputs(kv_heads, dtype)
        if dtype == torch.bfloat16:
            exact = results("unfused", MASKS[name], [x.detach().double().requires_grad_() for x in given], sinks=sinks)
        for found, expected in zip(results("auto", MASKS[name], given, sinks=sinks), exact, strict=True):
            assert found.dtype == dtype
            assert (found.double() - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


def test_blocks_of_some_samples_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, mask in MASKS.items():
        whole = results("auto", mask, inputs(2), sinks=True)
        two = CPU._replace(score_bytes=2 * HEADS * SEQUENCE * CPU.score_queries * 4)
        monkeypatch.setattr(dropout_attention, "chunk_sizes", lambda _, two=two: two)
        for found, expected in zip(results("auto", mask, inputs(2), sinks=True), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=name)
        monkeypatch.undo()


@pytest.mark.long
def test_the_gradients_in_fp64_are_those_of_differences() -> None:
    mask = AttentionMask(7, window_size=4)
    dropout = ProbabilityDropout(KEYS, torch.arange(2), 0.3)
    q, k, v = (torch.randn(7, 2, heads, 3, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, k, v, sinks: attend_alone(q, k, v, mask=mask, dropout=dropout, sinks=sinks), (q, k, v, sinks)
    )


def saved_bytes(run: Callable[[], Any]) -> int:
    storages: dict[int, int] = {}

    def see(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
        kept = run()
    assert kept is not None
    return sum(storages.values())


@pytest.mark.parametrize("name", MASKS)
def test_what_is_kept_grows_with_the_sequence_and_not_with_its_square(name: str) -> None:
    q, k, v, _ = (x.detach().clone().requires_grad_() for x in inputs(2))
    dropout, mask = ProbabilityDropout(KEYS.clone(), torch.arange(BATCH), 0.1), MASKS[name]
    found = saved_bytes(lambda: attend_alone(q, k, v, mask=mask, dropout=dropout))
    rows = SEQUENCE * BATCH * HEADS
    others = 8 + BATCH * 8 + (DOCUMENTS.nbytes if mask.document_ids is not None else 0) + 4 * len(mask.slopes)
    assert found == 4 * (2 * rows * SIZE + 2 * SEQUENCE * BATCH * 2 * SIZE + rows) + others


def test_the_memory_in_between_is_that_of_blocks() -> None:
    """At 2048 tokens a sample's scores would take 128 MiB; two blocks, and the gradients, take a fraction."""
    length, heads = 2048, 8
    mask, dropout = AttentionMask(length), ProbabilityDropout(KEYS, torch.arange(1), 0.1)
    q, k, v = (torch.randn(length, 1, heads, 8).requires_grad_() for _ in range(3))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for each in out if isinstance(out, tuple | list) else (out,):
                if isinstance(each, Tensor):
                    largest = max(largest, each.untyped_storage().nbytes())
            return out

    with Watch():
        attend_alone(q, k, v, mask=mask, dropout=dropout).sum().backward()
    assert largest <= heads * CPU.score_queries * length * 4 < length * length * heads * 4 // 16


@pytest.mark.long
def test_torch_finds_nothing_wrong_with_the_operator() -> None:
    q, k, v, sinks = inputs(2)
    others = (KEYS, torch.arange(BATCH), DOCUMENTS, torch.tensor([0.5, 0.25, 0.1, 0.05]), 5, 40, True, 0.2)
    for given in (sinks, None):
        torch.library.opcheck(torch.ops.megatronish.dropped_attention.default, (q, k, v, given, *others))


@pytest.mark.long
def test_it_compiles_without_a_break() -> None:
    torch._dynamo.reset()
    mask, dropout = MASKS["causal"], ProbabilityDropout(KEYS, torch.arange(BATCH), 0.2)
    q, k, v, _ = inputs(2)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_alone(q * 2, k, v, mask=mask, dropout=dropout) * 3

    found = []
    for how in (torch.compile(run, fullgraph=True, backend="aot_eager"), run):
        out = how(q, k, v)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
