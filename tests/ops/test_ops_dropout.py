"""Tests of dropout's operators: C++ and reference, opcheck, gradients in fp64, and compilation without a break."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_runs import NAMESPACE, kernels, needs_compiler
from torch import Tensor

from megatronish.ops import native as native_operators
from megatronish.ops.dropout import DroppedTile, ProbabilityDropout, dropout_add
from megatronish.ops.native import Native, native
from megatronish.parallel.streams import keep_mask, mask_keys

NAMESPACES = ("megatronish", pytest.param(NAMESPACE, marks=needs_compiler))
KEYS = mask_keys([(7, "dropout", 3, 1, "x")])[0]
RATE, SCALE = 0.2, 0.3


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_operators, "native", lambda: Native(None, "there is no C++ compiler here"))


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def hidden(x: Tensor, residual: Tensor | None, rate: float = RATE) -> Tensor:
    return dropout_add(x, residual, keys=KEYS, sample_ids=SAMPLES[: x.shape[1]], positions=places(x), rate=rate)


SAMPLES = torch.arange(9) + 2**31 - 4


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]) * 5 + 2


def as_streams_say(x: Tensor, residual: Tensor | None, rate: float = RATE) -> Tensor:
    rows = (SAMPLES[: x.shape[1]], places(x).unsqueeze(-1))
    keep = keep_mask(KEYS, places=rows, columns=torch.arange(x.shape[2]), rate=rate)
    kept = torch.where(keep, x * (1 / (1 - rate)), 0.0)
    return kept if residual is None else kept + residual


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [0, 1, 3, 16, 31, 64, 1000])
def test_masks_and_sums_are_those_of_torch_to_the_bit(columns: int, dtype: torch.dtype) -> None:
    assert native().library is not None, native().reason
    for positions, samples in ((5, 3), (0, 2), (1, 1), (7, 9)):
        x, residual = (drawn(positions, samples, columns, dtype=dtype, seed=seed) * 3 for seed in (0, 1))
        for rate in (1e-9, 0.1, 0.5, 0.999):
            for other in (None, residual):
                found = hidden(x, other, rate)
                assert torch.equal(found, as_streams_say(x, other, rate)) and found.dtype == dtype


@needs_compiler
def test_what_is_not_finite_stays_so_where_it_is_kept_and_only_there() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38]).repeat(64).to(dtype).expand(4, 2, 256)
        torch.testing.assert_close(hidden(x, None), as_streams_say(x, None), rtol=0, atol=0, equal_nan=True)
        assert hidden(x, None).isfinite().any() and not hidden(x, None).isfinite().all()


@needs_compiler
def test_threads_change_nothing() -> None:
    x, before = drawn(64, 3, 33), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(hidden(x, x), as_streams_say(x, x))
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_same_is_dropped() -> None:
    x, residual = drawn(5, 3, 33), drawn(5, 3, 33, seed=1)
    assert torch.equal(hidden(x, residual), as_streams_say(x, residual))


def tile(**changes: Any) -> DroppedTile:
    dropout = ProbabilityDropout(KEYS, SAMPLES[:2], RATE)
    return DroppedTile(dropout, first_head=2, first_query=9, first_key=1)._replace(**changes)


DOCUMENTS = (torch.arange(40) // 6).repeat(2, 1)
TILES = {
    "causal": tile(),
    "a window": tile(window_size=4),
    "documents": tile(documents=DOCUMENTS),
    "alibi": tile(slopes=torch.tensor([0.5, 0.25, 0.125])),
    "all": tile(window_size=7, documents=DOCUMENTS, slopes=torch.tensor([0.5, 0.25, 0.125]), first_key=4),
    "bidirectional": tile(causal=False),
    "bidirectional documents": tile(causal=False, documents=DOCUMENTS),
    "some see nothing": tile(first_query=3, first_key=5),
}


def tile_results(here: DroppedTile, dtype: torch.dtype) -> list[Tensor]:
    """What forward and backward of a tile make: dropped probabilities, lse, and gradients."""
    scores, grads = drawn(2, 3, 8, 13, dtype=dtype), drawn(2, 3, 8, 13, dtype=dtype, seed=1)
    means, dropped = drawn(2, 3, 8, dtype=dtype, seed=2), scores.clone()
    lse = here.softmax_(dropped, scale=SCALE)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    here.softmax_backward_(scores, grads, finite, means, scale=SCALE)
    return [dropped, lse, scores, grads]


@needs_compiler
@pytest.mark.parametrize("name", TILES)
def test_a_tile_in_cpp_is_the_reference_s(name: str, request: pytest.FixtureRequest) -> None:
    found = tile_results(TILES[name], torch.float32)
    request.getfixturevalue("no_compiler")
    exact = tile_results(TILES[name], torch.float64)
    for mine, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-6, atol=1e-6)
    assert torch.equal(found[0] != 0, exact[0] != 0)  # the same are dropped


@needs_compiler
def test_cpp_s_exponential_keeps_what_is_not_a_number_and_the_smallest() -> None:
    scores = torch.tensor([0.0, -80.0, -86.9, -200.0, -torch.inf]).expand(2, 3, 1, 5).clone()
    here = tile(first_query=4, first_key=0, dropout=ProbabilityDropout(KEYS, SAMPLES[:2], 0.0))
    lse = here.softmax_(scores, scale=1.0)
    expected = torch.tensor([0.0, -80.0, -86.9, -200.0, -torch.inf]).double().softmax(-1)
    torch.testing.assert_close(scores[0, 0, 0].double(), expected, rtol=3e-7, atol=2e-38)
    assert lse.abs().max() < 1e-6
    scores[0, 0, 0, 2] = torch.nan
    here.softmax_(scores, scale=1.0)
    assert scores[0, 0].isnan().all() and scores[0, 1:].isfinite().all()


def arguments(name: str) -> tuple[Any, ...]:
    if name == "dropout_add":
        x = drawn(5, 3, 8).requires_grad_()
        return (x, drawn(5, 3, 8, seed=1).requires_grad_(), KEYS, SAMPLES[:3], places(x), RATE)
    scores, rows = drawn(2, 3, 8, 13), drawn(2, 3, 8, seed=2)
    tensors = (scores, rows) if name == "softmax_dropout" else (scores, drawn(2, 3, 8, 13, seed=1), rows, rows + 1)
    return (*tensors, *TILES["all"].arguments(SCALE))


@pytest.mark.parametrize("name", ["dropout_add", "softmax_dropout", "softmax_dropout_backward"])
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_torch_finds_nothing_wrong_with_an_operator_of_dropout(namespace: str, name: str) -> None:
    ops = torch.ops.megatronish if namespace == "megatronish" else kernels("cpu").ops
    torch.library.opcheck(getattr(ops, name).default, arguments(name))


def test_the_gradient_of_dropout_is_that_of_differences() -> None:
    x, residual = (drawn(3, 2, 5, dtype=torch.float64, seed=seed).requires_grad_() for seed in (0, 1))
    assert torch.autograd.gradcheck(hidden, (x, residual))
    assert torch.autograd.gradcheck(lambda x: hidden(x, None), (x,))


def test_nothing_but_keys_and_places_is_saved_for_the_backward() -> None:
    saved: list[Tensor] = []
    x = drawn(64, 4, 128).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: saved.append(kept) or kept, lambda kept: kept):
        hidden(x, drawn(64, 4, 128))
    assert sum(kept.nbytes for kept in saved) == 8 + 4 * 8 + 64 * 8


def compiled_and_eager(run: Callable[..., Tensor], *given: Tensor) -> list[list[Tensor]]:
    torch._dynamo.reset()
    found = []
    for how in (torch.compile(run, fullgraph=True, backend="aot_eager"), run):
        out = how(*given)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x for x in given if x.requires_grad])])
    return found


def test_dropout_compiles_without_a_break() -> None:
    x, residual = (drawn(5, 3, 8, seed=seed).requires_grad_() for seed in (0, 1))
    compiled, eager = compiled_and_eager(lambda x, residual: hidden(x * 2, residual), x, residual)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))
