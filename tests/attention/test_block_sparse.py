"""Tests of block-sparse attention on a CPU: against a dense mask; work and memory are those of what is seen."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from documents import documents_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatronish.attention import block_sparse, operations
from megatronish.attention.block_sparse import block_attention
from megatronish.attention.explicit import explicit_attention
from megatronish.attention.mask import AttentionMask, alibi_slopes
from megatronish.specs.block_pattern import BlockPattern

LENGTH, HEADS, KV_HEADS, SIZE = 300, 4, 2, 16  # the last block of queries is ragged
CPU = torch.device("cpu")
SIGHTS: dict[str, dict[str, Any]] = {
    "a window of three": {"window_size": 3},
    "a short window": {"window_size": 40},
    "a window longer than a block": {"window_size": 131},
    "a long window": {"window_size": 257},
    "a window of all but one": {"window_size": LENGTH - 1},
    "sliding": {"pattern": BlockPattern("sliding", 64, 2)},
    "sliding, several rows at a time": {"pattern": BlockPattern("sliding", 16, 3)},
    "fixed": {"pattern": BlockPattern("fixed", 32, 3, 1)},
    "longformer": {"pattern": BlockPattern("longformer", 70, 1, 1)},
    "bigbird": {"pattern": BlockPattern("bigbird", 24, 2, 1, 2)},
}


def tensors(length: int = LENGTH, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys, values and sinks, with gradients, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(length, 2, HEADS, SIZE), *[(length, 2, KV_HEADS, SIZE)] * 2, (HEADS,)]
    made = [(1.5 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]
    return [*made, torch.randn(length, 2, HEADS * SIZE, generator=generator).to(dtype)]


def by_dense_mask(mask: AttentionMask, *, sinks: bool) -> list[Tensor]:
    """Output and gradients in float64, from all scores."""
    *leaves, dout = (x.detach().double() for x in tensors())
    q, k, v, sink = (x.requires_grad_() for x in leaves)
    given = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    out = explicit_attention(*given, mask=mask, fused=False, sinks=sink if sinks else None)
    out = out.permute(2, 0, 1, 3).flatten(2)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v, *([sink] if sinks else [])), dout)]


@pytest.mark.long
@pytest.mark.parametrize("others", ["nothing", "documents", "alibi", "sinks", "all"])
@pytest.mark.parametrize("name", SIGHTS)
def test_it_is_attention_under_a_dense_mask(name: str, others: str) -> None:
    """Outputs and gradients, within 1e-6 of the largest element."""
    documents = documents_of(LENGTH) if others in ("documents", "all") else None
    slopes = alibi_slopes(HEADS) if others in ("alibi", "all") else ()
    mask = AttentionMask(LENGTH, document_ids=documents, slopes=slopes, **SIGHTS[name])
    sinks = others in ("sinks", "all")
    assert mask.runs_by_blocks(CPU)
    q, k, v, sink, dout = tensors()
    out = block_attention(q, k, v, mask=mask, sinks=sink if sinks else None)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v, *([sink] if sinks else [])), dout)]
    for actual, expected in zip(found, by_dense_mask(mask, sinks=sinks), strict=True):
        assert (actual - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max()))


def test_what_is_not_sparse_or_not_on_a_cpu_runs_elsewhere() -> None:
    pattern = BlockPattern("sliding", 8, 2)
    assert AttentionMask(24, pattern=pattern).runs_by_blocks(CPU)
    assert not AttentionMask(24, pattern=pattern).runs_by_blocks(torch.device("cuda"))
    assert not AttentionMask(24, pattern=pattern, num_cached=4).runs_by_blocks(CPU)
    assert not AttentionMask(16, pattern=pattern).runs_by_blocks(CPU)
    assert not AttentionMask(16, 16, documents_of(16)).runs_by_blocks(CPU)


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Scores that are computed for a head of a sample, and the largest tensor that is made, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.scores += args[0].shape[2] * args[1].shape[2]
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("name", ["a short window", "a window longer than a block", "sliding", "longformer"])
def test_work_and_memory_grow_with_the_sequence_and_not_with_its_square(name: str) -> None:
    found: list[list[int]] = []
    for length in (1024, 4096):
        q, k, v, _, dout = tensors(length)
        mask, kept = AttentionMask(length, **SIGHTS[name]), 0

        def keep(x: Tensor) -> Tensor:
            nonlocal kept
            kept += x.nbytes
            return x

        with Watch() as watch, saved_tensors_hooks(keep, lambda x: x):
            torch.autograd.grad(block_attention(q, k, v, mask=mask), (q, k, v), dout)
        found.append([watch.scores, watch.largest, kept])
    short, long = found
    assert all(more <= 4.3 * few for few, more in zip(short, long, strict=True))
    assert long[1] <= 4096 * 2 * HEADS * SIZE * 4, "nothing is larger than the queries"


@pytest.mark.parametrize(("name", "most"), [("a window longer than a block", 1.5), ("sliding", 1.35), ("fixed", 1.5)])
def test_little_is_computed_that_is_not_seen(name: str, most: float) -> None:
    """Scores over those that a query sees: the own block is computed whole, and edges of a window."""
    q, k, v, *_ = tensors(2048)
    mask = AttentionMask(2048, **SIGHTS[name])
    with Watch() as watch, torch.no_grad():
        block_attention(q, k, v, mask=mask)
    places = torch.arange(2048)
    assert watch.scores <= most * int(mask.dense(places, places).sum())


def test_layers_that_share_a_mask_make_its_edge_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.dtype] = []
    edge_of = block_sparse._edge_of
    monkeypatch.setattr(block_sparse, "_edge_of", lambda mask, dtype: made.append(dtype) or edge_of(mask, dtype))
    mask = AttentionMask(LENGTH).variant(40, ())
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        q, k, v, *_ = tensors(dtype=dtype)
        with torch.no_grad():
            block_attention(q, k, v, mask=mask)
    assert made == [torch.float32, torch.bfloat16]


# Mistakes


def unscattered(patch: pytest.MonkeyPatch) -> None:
    """Gradients of the keys of the last run are lost."""
    scatter = block_sparse._GatheredBlock.scatter

    def planted(self: Any, sums: Tensor, terms: Tensor) -> None:
        scatter(self._replace(keys=self.keys[:1]), sums, terms)

    patch.setattr(block_sparse._GatheredBlock, "scatter", planted)


def shifted(patch: pytest.MonkeyPatch) -> None:
    """The edge of a window is a key too long."""
    edge_of = block_sparse._edge_of
    patch.setattr(block_sparse, "_edge_of", lambda mask, dtype: edge_of(mask, dtype).roll(-1, 0))


def own_alone(patch: pytest.MonkeyPatch) -> None:
    """Of several rows of a pattern the last one's keys are gathered alone."""
    runs_of = BlockPattern.runs_of
    patch.setattr(BlockPattern, "runs_of", lambda self, queries: runs_of(self, range(queries[-1], queries.stop)))


def unmasked(patch: pytest.MonkeyPatch) -> None:
    """An additive mask is left out."""
    bias_of = operations._bias
    patch.setattr(operations, "_bias", lambda q, tile_mask, **how: bias_of(q, tile_mask._replace(bias=None), **how))


MISTAKES = [
    (unscattered, "fixed"),
    (shifted, "a short window"),
    (own_alone, "sliding, several rows at a time"),
    (unmasked, "sliding"),
]


@pytest.mark.parametrize(("mistake", "name"), MISTAKES, ids=[mistake.__name__ for mistake, _ in MISTAKES])
def test_a_mistake_is_found(mistake: Any, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        with pytest.raises(AssertionError):
            test_it_is_attention_under_a_dense_mask(name, "nothing")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_documents_do_not_change_what_blocks_are_gathered() -> None:
    """Their mask is made for a block at a time, and no value of theirs is read by the host."""
    mask = AttentionMask(LENGTH, 40, documents_of(LENGTH))
    q, k, v, *_ = tensors()
    with Watch() as watch, torch.no_grad():
        block_attention(q, k, v, mask=mask)
    plain = Watch()
    with plain, torch.no_grad():
        block_attention(q, k, v, mask=AttentionMask(LENGTH, 40))
    assert watch.scores == plain.scores
