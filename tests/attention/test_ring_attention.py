"""Tests of attention over cp, ring and all-to-all, against attention of the whole sequence in float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatronish.attention import tile
from megatronish.attention.flash import attend_alone
from megatronish.attention.mask import AttentionMask, BidirectionalMask, alibi_slopes
from megatronish.attention.zigzag import places_of
from megatronish.core.layout import Layout
from megatronish.launch.place import Place
from megatronish.layers.dropout import Dropout
from megatronish.model.attention import attend
from megatronish.ops.dropout import ProbabilityDropout
from megatronish.ops.library import accumulation_dtype
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis, Mesh
from megatronish.specs.block_pattern import BlockPattern


@dataclass(frozen=True)
class Case:
    """Sizes, and what attention sees. S = 2 cp `chunk`."""

    chunk: int = 8
    batch: int = 2
    heads: int = 12
    kv_heads: int = 12
    size: int = 8
    window: int | None = None
    documents: bool = False
    dropout: float = 0.0
    alibi: bool = False
    sinks: bool = False
    pattern: BlockPattern | None = None
    bidirectional: bool = False
    dtype: torch.dtype = torch.float32


CASES = {
    "causal": Case(),
    "a chunk of one token, heads of an odd size": Case(chunk=1, size=5, batch=3),
    "grouped": Case(kv_heads=4, chunk=5),
    "one kv head": Case(kv_heads=1),
    "a window within a chunk": Case(window=3),
    "a window over chunks": Case(window=19, kv_heads=3),
    "a window of two": Case(window=2),
    "a window as long as all": Case(window=1000),
    "a window of all but one, of cp 2": Case(window=31),
    "documents": Case(documents=True),
    "documents in a window, grouped": Case(documents=True, window=11, kv_heads=2, chunk=7),
    "bidirectional": Case(bidirectional=True),
    "bidirectional documents, grouped": Case(bidirectional=True, documents=True, kv_heads=4, chunk=5),
    "bidirectional, dropout": Case(bidirectional=True, documents=True, dropout=0.2),
    "dropout": Case(dropout=0.3),
    "dropout of all": Case(dropout=0.2, documents=True, window=17, kv_heads=4, chunk=5),
    "alibi": Case(alibi=True),
    "alibi of all": Case(alibi=True, documents=True, window=17, kv_heads=4, chunk=5, dropout=0.2),
    "alibi in a window": Case(alibi=True, window=11, kv_heads=3),
    "sinks": Case(sinks=True, kv_heads=4),
    "sinks of all": Case(sinks=True, alibi=True, documents=True, window=17, kv_heads=4, chunk=5),
    "sinks and dropout": Case(sinks=True, dropout=0.2),
    "fp64 sinks": Case(sinks=True, alibi=True, dtype=torch.float64, window=9, kv_heads=6),
    "bf16 sinks": Case(sinks=True, dtype=torch.bfloat16, chunk=16, kv_heads=6),
    "bf16": Case(dtype=torch.bfloat16, chunk=16),
    "bf16 documents": Case(dtype=torch.bfloat16, documents=True, kv_heads=4),
    "fp64 of all": Case(dtype=torch.float64, documents=True, window=17, kv_heads=6, dropout=0.1),
    "fp64 in a window": Case(dtype=torch.float64, window=9, kv_heads=6),
    "blocks within a chunk": Case(pattern=BlockPattern("sliding", 3, 1)),
    "blocks as long as a chunk": Case(pattern=BlockPattern("sliding", 8, 2), kv_heads=4),
    "blocks over chunks": Case(pattern=BlockPattern("longformer", 13, 1, 1), chunk=5),
    "fixed blocks": Case(pattern=BlockPattern("fixed", 2, 2, 1), kv_heads=3, dropout=0.2),
    "blocks of all": Case(
        pattern=BlockPattern("bigbird", 3, 1, 1, 1), documents=True, alibi=True, sinks=True, kv_heads=4, chunk=5
    ),
    "blocks of all, with dropout": Case(
        pattern=BlockPattern("bigbird", 3, 2, 0, 2), documents=True, alibi=True, sinks=True, chunk=7, dropout=0.1
    ),
    "bf16 blocks": Case(dtype=torch.bfloat16, pattern=BlockPattern("bigbird", 4, 2, 1, 1), chunk=16),
    "bf16 of all": Case(dtype=torch.bfloat16, documents=True, kv_heads=4, dropout=0.1),
}
Method = Literal["p2p", "a2a"]
METHODS: tuple[Method, ...] = ("p2p", "a2a")
Answers = dict[tuple[str, Method], list[Tensor]]


class Tensors(NamedTuple):
    """Of the whole sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


def tensors_of(case: Case, seq_length: int) -> Tensors:
    """Whole-sequence tensors [S, B, heads, H], in the dtype of the case; scores that are far from uniform."""
    generator = torch.Generator().manual_seed(seq_length)
    shapes = [(case.heads, case.size), *[(case.kv_heads, case.size)] * 2, (case.heads * case.size,)]
    return Tensors(
        *(torch.randn(seq_length, case.batch, *shape, generator=generator).to(case.dtype) * 1.5 for shape in shapes)
    )


def documents_of(case: Case, seq_length: int) -> Tensor | None:
    """A document ends somewhere in the sequence, in each sample elsewhere, and in one of them every few tokens."""
    if not case.documents:
        return None
    places = torch.arange(seq_length)
    return torch.stack([places // (3 if sample == 0 else seq_length // 2 - sample) for sample in range(case.batch)])


def dropout_of(case: Case) -> ProbabilityDropout | None:
    masks = Dropout(1, 5, torch.arange(case.batch) + 40, layers=(3,)).of_layer(3)
    return masks.attention(case.dropout) if case.dropout else None


def compute(case: Case, whole: Tensors, mine: Tensor, *, cp: Axis, method: Method = "p2p") -> list[Tensor]:
    """The output of this rank and the gradients of its q, k, v, and its terms of those of the sinks."""
    seq_length = len(whole.q)
    q, k, v, dout = (x[mine] for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    slopes = alibi_slopes(case.heads) if case.alibi else ()
    make = BidirectionalMask if case.bidirectional else AttentionMask
    mask = make(seq_length, case.window, documents_of(case, seq_length), slopes=slopes, pattern=case.pattern)
    sinks = torch.linspace(-2, 3, case.heads).to(case.dtype).to(q.dtype).requires_grad_() if case.sinks else None
    leaves += [] if sinks is None else [sinks]
    out = attend(q, k, v, cp=cp, method=method, mask=mask, first_head=7, dropout=dropout_of(case), sinks=sinks)
    assert not out.isnan().any()
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def start_cp(place: Place) -> Axis:
    return Mesh.start(Layout(cp=place.world_size), rank=place.rank, init_method=place.rendezvous).cp


def all_cases(place: Place) -> Answers:
    cp = start_cp(place)
    answers: Answers = {}
    for name, case in CASES.items():
        seq_length = 2 * cp.size * case.chunk
        mine = places_of(seq_length, cp.rank, cp.size)
        for method in METHODS:
            answers[name, method] = compute(case, tensors_of(case, seq_length), mine, cp=cp, method=method)
    return answers


@pytest.fixture(scope="module", params=[2, 3, 4])
def found(request: pytest.FixtureRequest) -> list[Answers]:
    """What each rank found."""
    return run_ranks(request.param, all_cases)


@cache
def on_one_device(case: Case, seq_length: int, dtype: torch.dtype) -> list[Tensor]:
    """Computed in `dtype` from the numbers that the case's own dtype can hold."""
    whole = Tensors(*(x.to(dtype) for x in tensors_of(case, seq_length)))
    return compute(case, whole, torch.arange(seq_length), cp=Axis("cp"))


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_over_cp_attention_is_what_it_is_on_one_device(found: list[Answers], name: str, method: Method) -> None:
    """As near to float64 as one device comes: 1.5 times its error, or a few roundings of fp32.

    Sums are in fp32, so in bf16 there is nothing more to forgive.
    """
    case, cp = CASES[name], len(found)
    seq_length = 2 * cp * case.chunk
    exact, alone = (on_one_device(case, seq_length, dtype) for dtype in (torch.float64, case.dtype))
    order = torch.cat([places_of(seq_length, rank, cp) for rank in range(cp)]).argsort()
    for number, label in enumerate(("out", "dq", "dk", "dv")):
        joined = torch.cat([answer[name, method][number] for answer in found])[order]
        assert joined.dtype == case.dtype
        rounding = torch.finfo(accumulation_dtype(case.dtype)).eps
        bound = max(1.5 * error(alone[number], exact[number]), 8 * rounding)
        assert error(joined, exact[number]) <= bound, label
    if case.sinks:
        summed = torch.stack([answer[name, method][4] for answer in found]).sum(0)
        bound = max(1.5 * error(alone[4], exact[4]), 8 * torch.finfo(case.dtype).eps)
        assert error(summed, exact[4]) <= bound


def test_on_one_rank_it_is_the_attention_of_one_rank_to_the_bit() -> None:
    for case in (CASES["grouped"], CASES["documents in a window, grouped"], CASES["dropout of all"]):
        q, k, v, _ = tensors_of(case, 20)
        mask = AttentionMask(20, case.window, documents_of(case, 20))
        dropout = dropout_of(case)
        before = attend_alone(q, k, v, mask=mask, first_head=7, dropout=dropout)
        for method in METHODS:
            now = attend(q, k, v, cp=Axis("cp"), method=method, mask=mask, first_head=7, dropout=dropout)
            assert torch.equal(now, before)


def forward_and_backward_again(place: Place) -> dict[str, bool]:
    """Whether results repeat: of a second backward, without gradients, and inside a larger graph."""
    cp = start_cp(place)
    case = replace(CASES["grouped"], documents=True)
    seq_length = 2 * cp.size * case.chunk
    q, k, v, dout = (x[places_of(seq_length, cp.rank, cp.size)] for x in tensors_of(case, seq_length))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = AttentionMask(seq_length, None, documents_of(case, seq_length))
    found = {}
    for method in METHODS:
        run = partial(attend, cp=cp, method=method, mask=mask)
        out = run(q, k, v)
        first, second = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(2))
        found[f"{method} backward"] = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        with torch.no_grad():
            quiet = run(q, k, v)
        found[f"{method} no_grad"] = torch.equal(quiet, out) and not quiet.requires_grad
        doubled = run(2 * q.clone(), k / 2, v.clone())  # the same scores
        inner = torch.autograd.grad(doubled, leaves, dout)
        found[f"{method} graph"] = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(first, inner, strict=True))
    return found


def test_backward_twice_and_no_gradients_give_the_same() -> None:
    for answers in run_ranks(2, forward_and_backward_again):
        assert all(answers.values()), answers


def saved_bytes(place: Place) -> dict[tuple[str, Method], int]:
    """Bytes that forward keeps for backward, each storage once."""
    cp = start_cp(place)
    found = {}
    for name in ("causal", "grouped", "dropout of all", "bf16"):
        case = CASES[name]
        for method in METHODS:
            storages: dict[int, int] = {}

            def count(x: Tensor, storages: dict[int, int] = storages) -> Tensor:
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            seq_length = 2 * cp.size * case.chunk
            mine = places_of(seq_length, cp.rank, cp.size)
            with saved_tensors_hooks(count, lambda x: x):
                compute(case, tensors_of(case, seq_length), mine, cp=cp, method=method)
            found[name, method] = sum(storages.values())
    return found


def test_what_is_kept_for_backward_is_this_ranks_part_and_once() -> None:
    """Whatever is masked or dropped, of a ring: queries, keys, values, output, and one number a row."""
    for answers in run_ranks(2, saved_bytes):
        for (name, method), kept in answers.items():
            case = CASES[name]
            tokens = 2 * case.chunk * case.batch
            heads = 2 * case.heads + 2 * case.kv_heads
            expected = tokens * (heads * case.size * case.dtype.itemsize + case.heads * 4)
            if method == "p2p" or not case.dropout:
                assert kept == expected, (name, method)


def order_of_events(place: Place, window: int | None) -> list[str]:
    """When this rank starts a shift, waits for one, and computes a tile, forward then backward."""
    cp = start_cp(place)
    case = Case(window=window)
    seq_length = 2 * cp.size * case.chunk
    events: list[str] = []

    def told(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def tell(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return function(*args, **kwargs)

        return tell

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "start_shift", told("shift", comm.start_shift))
        patch.setattr(tile, "forward", told("tile", tile.forward))
        patch.setattr(tile, "backward", told("tile", tile.backward))
        compute(case, tensors_of(case, seq_length), places_of(seq_length, cp.rank, cp.size), cp=cp)
    return events


def test_a_block_is_on_its_way_before_the_one_at_hand_is_used() -> None:
    forward = ["shift", "tile", "shift", "tile", "tile"]
    backward = ["shift", "tile", "shift", "shift", "tile", "shift", "tile", "shift"]
    assert run_ranks(3, order_of_events, None) == [forward + backward] * 3


def test_tiles_beyond_the_window_are_left_out_though_all_blocks_travel() -> None:
    """A window of half a chunk: each chunk sees itself and a part of the one before, of 6 on 3 ranks."""
    answers = run_ranks(3, order_of_events, 4)
    assert [events.count("tile") for events in answers] == [6, 8, 8]
    assert all(events.count("shift") == 2 + 2 + 3 for events in answers)
