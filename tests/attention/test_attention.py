"""Tests of attention without ranks: every backend computes what the definition says."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from documents import documents_of, sees
from torch import Tensor

from megatronish.attention.flash import attend_alone
from megatronish.attention.mask import AttentionMask, BidirectionalMask, alibi_slopes
from megatronish.config.sections.training import AttentionBackend
from megatronish.layers.dropout import Dropout
from megatronish.ops import softmax
from megatronish.ops.dropout import ProbabilityDropout
from megatronish.specs.block_pattern import BlockPattern

SIZES = [(12, 1), (12, 2), (12, 3), (24, 3), (32, 4), (70, 5)]  # S, cp
WINDOWS = (None, 1, 2, 3, 5, 8, 11, 12, 13, 100)  # S is 12 below


@dataclass(frozen=True)
class Case:
    """Twelve query heads of two samples; the last `queries` of S tokens look at all."""

    kv_heads: int = 12
    size: int = 16
    window: int | None = None
    documents: bool = False
    dropout: float = 0.0
    seq_length: int = 40
    queries: int = 40
    alibi: bool = False
    sinks: bool = False
    pattern: BlockPattern | None = None
    bidirectional: bool = False

    def mask(self, device: str) -> AttentionMask:
        documents = documents_of(self.seq_length).to(device) if self.documents else None
        num_cached = self.seq_length - self.queries or None
        slopes = alibi_slopes(20)[7:19] if self.alibi else ()
        make = BidirectionalMask if self.bidirectional else AttentionMask
        where = torch.device(device)
        return make(self.seq_length, self.window, documents, where, num_cached, slopes, self.pattern)

    def drop(self, device: str) -> ProbabilityDropout | None:
        if self.dropout == 0.0:
            return None
        samples = torch.arange(2, device=device) + 40
        return Dropout(1, 5, samples, layers=(3,)).of_layer(3).attention(self.dropout)


CASES = {
    "causal": Case(),
    "one token": Case(seq_length=1, queries=1),
    "grouped, heads of an odd size": Case(kv_heads=3, size=10),
    "one kv head": Case(kv_heads=1, size=64),
    "a window of one": Case(window=1),
    "a window, grouped": Case(window=7, kv_heads=4),
    "a window longer than all": Case(window=100),
    "documents": Case(documents=True),
    "documents in a window, grouped": Case(documents=True, window=11, kv_heads=2),
    "dropout": Case(dropout=0.3),
    "dropout, grouped": Case(dropout=0.3, kv_heads=3, size=10),
    "dropout of all": Case(dropout=0.2, kv_heads=4, window=9, documents=True),
    "a cache and one token": Case(queries=1, kv_heads=3),
    "a cache and some tokens": Case(queries=6, kv_heads=4),
    "a cache, one token and a window": Case(queries=1, window=5),
    "a cache, some tokens, a window": Case(queries=6, window=5, kv_heads=1),
    "a cache, texts of several lengths": Case(queries=6, documents=True, window=9, kv_heads=6),
    "alibi": Case(alibi=True),
    "alibi of all, grouped": Case(alibi=True, kv_heads=4, window=9, documents=True),
    "alibi and dropout": Case(alibi=True, kv_heads=3, size=10, dropout=0.2),
    "alibi, a cache and one token": Case(alibi=True, queries=1),
    "alibi, a cache and some tokens": Case(alibi=True, queries=6, documents=True),
    "bidirectional": Case(bidirectional=True),
    "bidirectional, documents, grouped": Case(bidirectional=True, documents=True, kv_heads=3, size=10),
    "bidirectional, sinks": Case(bidirectional=True, sinks=True),
    "bidirectional, dropout": Case(bidirectional=True, dropout=0.2, documents=True, kv_heads=4),
    "sinks": Case(sinks=True),
    "sinks of all, grouped": Case(sinks=True, alibi=True, kv_heads=4, window=9, documents=True),
    "sinks in a window": Case(sinks=True, window=3, kv_heads=6, size=10),
    "sinks and dropout": Case(sinks=True, kv_heads=3, dropout=0.2),
    "sinks, a cache and one token": Case(sinks=True, queries=1, kv_heads=3),
    "sinks, a cache and some tokens": Case(sinks=True, queries=6, window=5),
    "sliding blocks": Case(pattern=BlockPattern("sliding", 4, 2), kv_heads=4),
    "sliding blocks of one token": Case(pattern=BlockPattern("sliding", 1, 3), size=10),
    "fixed blocks, the last one ragged": Case(pattern=BlockPattern("fixed", 7, 2, 1), kv_heads=3),
    "longformer": Case(pattern=BlockPattern("longformer", 5, 1, 2), documents=True),
    "bigbird": Case(pattern=BlockPattern("bigbird", 4, 1, 1, 2, seed=3), alibi=True, kv_heads=6),
    "bigbird and sinks": Case(pattern=BlockPattern("bigbird", 3, 2, 1, 1), sinks=True),
    "blocks of all": Case(pattern=BlockPattern("fixed", 4, 3, 2), sinks=True, alibi=True, documents=True, kv_heads=2),
    "blocks and dropout": Case(pattern=BlockPattern("bigbird", 4, 2, 1, 1), dropout=0.3, kv_heads=3),
    "blocks of all, with dropout": Case(
        pattern=BlockPattern("longformer", 7, 1, 1), dropout=0.2, alibi=True, documents=True, sinks=True
    ),
    "a pattern that hides nothing": Case(pattern=BlockPattern("sliding", 8, 5)),
    "blocks, a cache and one token": Case(pattern=BlockPattern("bigbird", 4, 1, 1, 1), queries=1),
    "blocks, a cache and some tokens": Case(pattern=BlockPattern("fixed", 4, 2, 1), queries=6, kv_heads=4),
}


def computed(
    case: Case, backend: AttentionBackend, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """The output and the gradients of q, k, v (and sinks), of the same numbers in whatever dtype."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(case.queries, 2, 12, case.size), *[(case.seq_length, 2, case.kv_heads, case.size)] * 2]
    q, k, v = (
        (torch.randn(shape, generator=generator) * 1.5).bfloat16().to(device, dtype).requires_grad_()
        for shape in shapes
    )
    dout = torch.randn(case.queries, 2, 12 * case.size, generator=generator).to(device, dtype)
    mask, dropout = case.mask(device), case.drop(device)
    sinks = sinks_of(case, generator).to(device, dtype).requires_grad_() if case.sinks else None
    out = attend_alone(q, k, v, mask=mask, backend=backend, first_head=7, dropout=dropout, sinks=sinks)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v) if sinks is None else (q, k, v, sinks), dout)]


def sinks_of(case: Case, generator: torch.Generator) -> Tensor:
    """[n], exact in bf16; they take a large part of some rows, and next to nothing of others."""
    return (3 * torch.randn(12, generator=generator)).bfloat16().double()


def by_definition(case: Case) -> list[Tensor]:
    """`computed` without dropout, in float64 and token by token."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(case.queries, 2, 12, case.size), *[(case.seq_length, 2, case.kv_heads, case.size)] * 2]
    q, k, v = ((torch.randn(s, generator=generator) * 1.5).bfloat16().double().requires_grad_() for s in shapes)
    dout = torch.randn(case.queries, 2, 12 * case.size, generator=generator).double()
    sinks = sinks_of(case, generator).requires_grad_() if case.sinks else None
    mask, group, rows = case.mask("cpu"), 12 // case.kv_heads, []
    for query in range(case.queries):
        place = case.seq_length - case.queries + query
        heads = []
        for sample, head in product(range(2), range(12)):
            documents = None if mask.document_ids is None else mask.document_ids[sample]
            seen = {"window": case.window, "documents": documents, "pattern": case.pattern}
            later = case.seq_length if case.bidirectional else place + 1
            keys = [
                key
                for key in range(later)
                if (case.bidirectional and (documents is None or documents[place] == documents[key]))
                or (not case.bidirectional and sees(place, key, **seen))
            ]
            scores = k[keys, sample, head // group] @ q[query, sample, head] / math.sqrt(case.size)
            if case.alibi:
                scores = scores - alibi_slopes(20)[7 + head] * torch.tensor([float(place - key) for key in keys])
            weights = scores.exp()
            below = weights.sum() + (0.0 if sinks is None else sinks[head].exp())
            heads.append((weights / below) @ v[keys, sample, head // group])
        rows.append(torch.cat(heads).view(2, -1))
    out = torch.stack(rows)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v) if sinks is None else (q, k, v, sinks), dout)]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.dropout])
def test_attention_is_what_its_definition_says(name: str) -> None:
    found, expected = computed(CASES[name], "unfused", dtype=torch.float64), by_definition(CASES[name])
    for actual, exact in zip(found, expected, strict=True):
        assert (actual - exact).abs().max() <= 1e-6 * max(1.0, float(exact.abs().max()))


def test_slopes_are_those_of_the_paper_for_any_number_of_heads() -> None:
    assert alibi_slopes(8) == tuple(2.0**-n for n in range(1, 9))
    assert alibi_slopes(16)[:4] == pytest.approx([2**-0.5, 2**-1, 2**-1.5, 2**-2])
    assert alibi_slopes(1) == (2.0**-8,)
    # Between powers of two: those of 4 heads, then every other one of 8.
    assert alibi_slopes(6) == (2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3)
    assert all(len(alibi_slopes(heads)) == heads for heads in range(1, 130))


def test_what_layers_share_is_made_once() -> None:
    mask = AttentionMask(12)
    alike = mask.variant(3, (0.5, 0.25))
    assert mask.variant(3, (0.5, 0.25)) is alike
    assert alike.whole_bias(torch.float32) is alike.whole_bias(torch.float32)
    part = alike.for_heads(range(1, 2))
    assert part is alike.for_heads(range(1, 2)) and part.slopes == (0.25,)
    assert torch.equal(part.whole_bias(torch.float32), alike.whole_bias(torch.float32)[:, 1:])
    assert mask.for_heads(range(1, 2)) is mask


BACKENDS: tuple[AttentionBackend, ...] = ("auto", "flash", "fused_softmax", "unfused")


def check_backends(case: Case, *, dtype: torch.dtype, device: str, tolerance: float) -> None:
    """Against the plainest of them in float64; relative to the largest element, or to 1, as a gradient may be zero."""
    expected = computed(case, "unfused", dtype=torch.float64, device=device)
    for backend in BACKENDS:
        found = computed(case, backend, dtype=dtype, device=device)
        for name, actual, exact in zip(("out", "dq", "dk", "dv", "dsinks"), found, expected, strict=False):
            assert actual.dtype == dtype
            assert (actual - exact).abs().max() <= tolerance * max(1.0, float(exact.abs().max())), (backend, name)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_every_backend_is_the_same_attention(name: str) -> None:
    check_backends(CASES[name], dtype=torch.float32, device="cpu", tolerance=1e-5)
    check_backends(CASES[name], dtype=torch.bfloat16, device="cpu", tolerance=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_every_backend_is_the_same_attention_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    for case in CASES.values():  # more kernels of FlexAttention than torch's own limit of one function
        check_backends(case, dtype=dtype, device="cuda", tolerance=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_without_kernels_the_fused_softmax_is_torchs_to_the_bit(name: str) -> None:
    found = (computed(CASES[name], backend) for backend in ("fused_softmax", "unfused"))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("documents", [False, True])
def test_the_fused_softmax_alone_is_an_operator(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def recorded(name: str, called: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given, **how: asked.append(name) or called(*given, **how)

    for name in ("scaled_causal_softmax", "scaled_masked_softmax"):
        monkeypatch.setattr(f"megatronish.attention.explicit.{name}", recorded(name, getattr(softmax, name)))
    computed(Case(documents=documents), "unfused")
    assert asked == []
    computed(Case(documents=documents), "fused_softmax")
    assert asked == ["scaled_masked_softmax" if documents else "scaled_causal_softmax"]


@pytest.mark.parametrize("name", ["grouped, heads of an odd size", "dropout, grouped"])
def test_auto_is_flash_attention_with_dropout_and_without(name: str) -> None:
    found = (computed(CASES[name], backend) for backend in ("auto", "flash"))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_keys_and_values_are_not_copied_for_every_query_head() -> None:
    """What is kept for the backward: q, k and v, and a number for every score."""
    case = Case(kv_heads=2)
    for backend in ("fused_softmax", "unfused"):
        storages: dict[int, int] = {}

        def count(x: Tensor, storages: dict[int, int] = storages) -> Tensor:
            if x.is_floating_point():
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            computed(case, backend)  # type: ignore[arg-type]
        scores, channels = 2 * 12 * case.seq_length**2, 2 * case.seq_length * (12 + 2 + 2) * case.size
        assert sum(storages.values()) == 4 * (scores + channels)
