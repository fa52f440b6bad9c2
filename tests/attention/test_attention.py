"""Tests of attention without ranks: head placement, masks, backends, and the tiles of ring attention."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from megatronish.attention import tile
from megatronish.attention.alibi import alibi_slopes
from megatronish.attention.all_to_all import num_repeats
from megatronish.attention.core import ProbabilityDropout, attend_alone
from megatronish.attention.mask import AttentionMask
from megatronish.attention.operations import EFFICIENT, FLASH, Operation, TileMask
from megatronish.attention.ring import tiles_of
from megatronish.attention.zigzag import from_zigzag, places_of, to_zigzag
from megatronish.config.training import AttentionBackend
from megatronish.layers.dropout import Dropout
from megatronish.ops import softmax

SIZES = [(12, 1), (12, 2), (12, 3), (24, 3), (32, 4), (70, 5)]  # S, cp
WINDOWS = (None, 1, 2, 3, 5, 8, 11, 12, 13, 100)  # S is 12 below


def documents_of(seq_length: int) -> Tensor:
    """[2, S]: documents of growing length, and one that ends after a token."""
    places = torch.arange(seq_length)
    return torch.stack([places.double().sqrt().long(), (places > 0).long()])


# Who holds what


@pytest.mark.parametrize(("seq_length", "cp"), SIZES)
def test_every_place_is_held_once_and_the_work_of_all_ranks_is_equal(seq_length: int, cp: int) -> None:
    held = [places_of(seq_length, rank, cp) for rank in range(cp)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(seq_length))
    assert len({int((places + 1).sum()) for places in held}) == 1  # keys that its queries see
    assert all(torch.equal(places, places.sort().values) for places in held)


def test_one_rank_holds_all_in_order_whatever_their_number() -> None:
    assert torch.equal(places_of(7, 0, 1), torch.arange(7))


@pytest.mark.parametrize(("seq_length", "cp"), SIZES)
def test_the_order_of_the_sequence_is_restored_and_undone(seq_length: int, cp: int) -> None:
    held = torch.cat([places_of(seq_length, rank, cp) for rank in range(cp)])
    values = torch.stack((held, -held), dim=1)
    if cp > 1:
        assert torch.equal(from_zigzag(values, cp)[:, 0], torch.arange(seq_length))
        assert torch.equal(to_zigzag(from_zigzag(values, cp), cp), values)


def test_kv_heads_are_repeated_as_little_as_will_do() -> None:
    assert num_repeats(8, 8, 4) == 1
    assert num_repeats(8, 2, 4) == 2
    assert num_repeats(8, 1, 4) == 4
    assert num_repeats(12, 2, 3) == 3
    assert num_repeats(12, 4, 6) == 3
    for cp in range(1, 7):
        for kv_heads in range(1, 7):
            for group in range(1, 13):
                if kv_heads * group % cp == 0:
                    times = num_repeats(kv_heads * group, kv_heads, cp)
                    assert kv_heads * times % cp == 0
                    assert group % times == 0


# Who sees what


def sees(query: int, key: int, *, window: int | None, documents: Tensor | None) -> bool:
    """Token by token, from the definition."""
    near = window is None or query - key < window
    return key <= query and near and (documents is None or bool(documents[query] == documents[key]))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_mask_says_of_any_positions_what_the_definition_says(window: int | None, packed: bool) -> None:
    seq_length = 12
    documents = documents_of(seq_length) if packed else None
    mask = AttentionMask(seq_length, window, documents)
    queries, keys = torch.tensor([11, 3, 4, 0, 7]), torch.tensor([0, 10, 3, 4])
    dense = mask.dense(queries, keys)
    assert dense.shape == (2 if packed else 1, 1, 5, 4)
    for sample, rows in enumerate(dense[:, 0].tolist()):
        ids = None if documents is None else documents[sample]
        assert rows == [
            [sees(query, key, window=window, documents=ids) for key in keys.tolist()] for query in queries.tolist()
        ]
    places = torch.arange(seq_length)
    if mask.whole is None:
        assert mask.is_causal
        assert torch.equal(mask.dense(places, places)[0, 0], places[:, None] >= places)
    else:
        assert torch.equal(mask.whole, mask.dense(places, places))
        assert mask.whole is mask.whole


@pytest.mark.parametrize("window", WINDOWS)
def test_what_runs_see_of_each_other_is_what_their_mask_says(window: int | None) -> None:
    mask = AttentionMask(8, window)
    runs = [range(start, stop) for start in range(8) for stop in range(start + 1, 9)]
    for queries in runs:
        for keys in runs:
            dense = mask.dense(torch.tensor(queries), torch.tensor(keys))[0, 0]
            match mask.between(queries, keys):
                case "nothing":
                    assert not dense.any()
                case "everything":
                    assert dense.all()
                case "causal":
                    assert torch.equal(dense, torch.ones_like(dense).tril())
                case "dense":
                    assert not dense.all()
    assert AttentionMask(8, window, documents_of(8)).between(range(4, 8), range(4)) in ("dense", "nothing")


@pytest.mark.parametrize(("seq_length", "cp"), [size for size in SIZES if size[1] > 1])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("by_chunks", [False, True])
def test_tiles_together_are_the_mask_and_each_token_comes_to_itself_first(
    seq_length: int, cp: int, window: int | None, by_chunks: bool
) -> None:
    mask, places = AttentionMask(seq_length, window), torch.arange(seq_length)
    found, computed = torch.zeros(seq_length, seq_length, dtype=torch.bool), []
    for rank in range(cp):
        mine, begun = places_of(seq_length, rank, cp), torch.zeros(seq_length, dtype=torch.bool)
        for step in range(cp):
            source = (rank - step) % cp
            theirs = places_of(seq_length, source, cp)
            area = 0
            for each in tiles_of(rank, source, cp_size=cp, mask=mask, by_chunks=by_chunks):
                queries, keys = mine[each.queries], theirs[each.keys]
                seen = mask.dense(queries, keys)[0, 0]
                assert seen.any()
                assert each.block_mask != "everything" or seen.all()
                assert each.block_mask != "causal" or torch.equal(seen, torch.ones_like(seen).tril())
                assert not found[queries[:, None], keys].any()
                found[queries[:, None], keys] = seen
                new = queries[~begun[queries]]
                assert torch.isin(new, keys).all()
                begun[queries] = True
                area += seen.numel()
            computed.append(area)
    assert torch.equal(found, mask.dense(places, places)[0, 0])
    if mask.is_causal and not by_chunks:
        square = (seq_length // cp) ** 2
        assert computed == [square, *[square // 2] * (cp - 1)] * cp


# Backends


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

    def mask(self, device: str) -> AttentionMask:
        documents = documents_of(self.seq_length).to(device) if self.documents else None
        first_query = self.seq_length - self.queries
        slopes = alibi_slopes(20)[7:19] if self.alibi else ()
        return AttentionMask(
            self.seq_length, self.window, documents, torch.device(device), first_query=first_query, slopes=slopes
        )

    def drop(self, device: str) -> ProbabilityDropout | None:
        if self.dropout == 0.0:
            return None
        samples = torch.arange(2, device=device) + 40
        return partial(Dropout(1, 5, samples).attention, layer=3, rate=self.dropout)


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
    "sinks": Case(sinks=True),
    "sinks of all, grouped": Case(sinks=True, alibi=True, kv_heads=4, window=9, documents=True),
    "sinks in a window": Case(sinks=True, window=3, kv_heads=6, size=10),
    "sinks and dropout": Case(sinks=True, kv_heads=3, dropout=0.2),
    "sinks, a cache and one token": Case(sinks=True, queries=1, kv_heads=3),
    "sinks, a cache and some tokens": Case(sinks=True, queries=6, window=5),
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
            keys = [key for key in range(place + 1) if sees(place, key, window=case.window, documents=documents)]
            scores = k[keys, sample, head // group] @ q[query, sample, head] / math.sqrt(case.size)
            if case.alibi:
                scores = scores - alibi_slopes(20)[7 + head] * torch.tensor([float(place - key) for key in keys])
            weights = scores.exp()
            below = weights.sum() + (0.0 if sinks is None else sinks[head].exp())
            heads.append((weights / below) @ v[keys, sample, head // group])
        rows.append(torch.cat(heads).view(2, -1))
    out = torch.stack(rows)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v) if sinks is None else (q, k, v, sinks), dout)]


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


def backends_of(case: Case) -> tuple[AttentionBackend, ...]:
    return ("auto", "fused_softmax", "unfused") if case.dropout else ("auto", "flash", "fused_softmax", "unfused")


def check_backends(case: Case, *, dtype: torch.dtype, device: str, tolerance: float) -> None:
    """Against the plainest of them in float64; relative to the largest element, or to 1, as a gradient may be zero."""
    expected = computed(case, "unfused", dtype=torch.float64, device=device)
    for backend in backends_of(case):
        found = computed(case, backend, dtype=dtype, device=device)
        for name, actual, exact in zip(("out", "dq", "dk", "dv", "dsinks"), found, expected, strict=False):
            assert actual.dtype == dtype
            assert (actual - exact).abs().max() <= tolerance * max(1.0, float(exact.abs().max())), (backend, name)


@pytest.mark.parametrize("name", CASES)
def test_every_backend_is_the_same_attention(name: str) -> None:
    check_backends(CASES[name], dtype=torch.float32, device="cpu", tolerance=1e-5)
    check_backends(CASES[name], dtype=torch.bfloat16, device="cpu", tolerance=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_every_backend_is_the_same_attention_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    for case in CASES.values():
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


def test_auto_is_sdpa_and_with_dropout_the_fused_softmax() -> None:
    for name, meant in (("grouped, heads of an odd size", "flash"), ("dropout, grouped", "fused_softmax")):
        found = (computed(CASES[name], backend) for backend in ("auto", meant))  # type: ignore[arg-type]
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


# Tiles


def tensors_of(
    *, queries: int, keys: int, kv_heads: int, size: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout with the strides that a ring gives them, 12 query heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, 2, 12, size), *[(keys, 2, kv_heads, size)] * 2, (queries, 2, 12, size))
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, generator=generator).to(device, dtype).permute(1, 2, 0, 3) for shape in shapes
    )


def mask_of(queries: int, keys: int) -> Tensor:
    """Some of the keys, and for some of the queries none."""
    mask = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, :, 3:6] = False
    return mask


def merged_by_definition(
    q: Tensor, halves: list[tuple[Tensor, Tensor]], visible: Tensor, dout: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """float64: the output of all keys together and the gradients of q, of all keys and of all values."""
    k, v = (torch.cat(parts, dim=2).double().requires_grad_() for parts in zip(*halves, strict=True))
    q = q.double().requires_grad_()
    many_k, many_v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ many_k.mT / math.sqrt(q.shape[-1])).masked_fill(~visible, -torch.inf)
    out = scores.softmax(-1) @ many_v
    return out.detach(), list(torch.autograd.grad(out, (q, k, v), dout.double()))


def check_two_tiles(
    *, device: str, dtype: torch.dtype, kv_heads: int, size: int, masked: bool, explicit: bool, rtol: float
) -> None:
    """A causal square, then keys that with a mask some queries do not see at all: merged as a ring merges them."""
    near, far = 33, 45
    q, k, v, dout = tensors_of(queries=near, keys=near, kv_heads=kv_heads, size=size, dtype=dtype, device=device)
    _, far_k, far_v, _ = tensors_of(queries=1, keys=far, kv_heads=kv_heads, size=size, dtype=dtype, device=device)
    square = torch.ones(2, 1, near, near, dtype=torch.bool).tril().to(device)
    rest = (mask_of(near, far) if masked else torch.ones(2, 1, near, far, dtype=torch.bool)).to(device)
    if explicit:
        tile_masks = [TileMask(dense=mask, drop=lambda probabilities: probabilities) for mask in (square, rest)]
    else:
        tile_masks = [TileMask(causal=True), TileMask(dense=rest if masked else None)]
    tiles = [(k, v, tile_masks[0]), (far_k, far_v, tile_masks[1])]

    outs, lses = zip(*(tile.forward(q, *kv, tile_mask=tile_mask) for *kv, tile_mask in tiles), strict=True)
    lse = torch.logaddexp(*lses)
    out = sum((part * (own - lse).exp().unsqueeze(-1) for part, own in zip(outs, lses, strict=True)), torch.zeros(()))
    found = [tile.backward(dout, q, out.to(dtype), lse, *kv, tile_mask=tile_mask) for *kv, tile_mask in tiles]
    dq, dk, dv = (
        found[0].q.double() + found[1].q,
        torch.cat((found[0].k, found[1].k), dim=2),
        torch.cat((found[0].v, found[1].v), dim=2),
    )
    exact_out, exact = merged_by_definition(q, [(k, v), (far_k, far_v)], torch.cat((square, rest), dim=-1), dout)
    for actual, expected in zip((out, dq, dk, dv), (exact_out, *exact), strict=True):
        assert (actual.double() - expected).norm() <= rtol * expected.norm()


PROBLEMS = [(kv_heads, size, masked) for kv_heads in (12, 3, 1) for size in (16, 10) for masked in (False, True)]


@pytest.mark.parametrize(("kv_heads", "size", "masked"), PROBLEMS)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 3e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("explicit", [False, True])
def test_two_tiles_merged_are_attention_over_both(
    explicit: bool, dtype: torch.dtype, rtol: float, kv_heads: int, size: int, masked: bool
) -> None:
    check_two_tiles(
        device="cpu", dtype=dtype, kv_heads=kv_heads, size=size, masked=masked, explicit=explicit, rtol=rtol
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("explicit", [False, True])
def test_two_tiles_merged_are_attention_over_both_on_a_gpu(explicit: bool, dtype: torch.dtype, rtol: float) -> None:
    for kv_heads, size, masked in [*PROBLEMS, (3, 128, False), (3, 264, False)]:
        check_two_tiles(
            device="cuda", dtype=dtype, kv_heads=kv_heads, size=size, masked=masked, explicit=explicit, rtol=rtol
        )


@pytest.mark.parametrize(
    ("operation", "dtype", "masked"),
    [
        (FLASH, torch.bfloat16, False),
        (EFFICIENT, torch.float32, False),
        (EFFICIENT, torch.bfloat16, True),
        (EFFICIENT, torch.bfloat16, "alibi"),
    ],
    ids=["flash", "efficient", "efficient, masked", "efficient, alibi"],
)
@pytest.mark.parametrize(("kv_heads", "size"), [(12, 16), (3, 10)])
def test_the_operations_of_a_gpu_accept_their_arguments(
    operation: Operation, dtype: torch.dtype, masked: bool | str, kv_heads: int, size: int
) -> None:
    """On tensors without data: names, order, optional arguments and shapes. What they compute takes a GPU to see."""
    q, k, v, dout = tensors_of(queries=33, keys=45, kv_heads=kv_heads, size=size, dtype=dtype, device="meta")
    alibi = torch.empty(1, 12, 33, 45, device="meta") if masked == "alibi" else None
    seen = TileMask(dense=mask_of(33, 45).to("meta") if masked else None, alibi=alibi)
    out, lse = operation.forward(q, k, v, seen)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    grads = operation.backward(dout, q, k, v, out, lse.contiguous(), seen)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
