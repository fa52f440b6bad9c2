"""Tests of the dropout kernels: masks bit for bit those of streams.py, tiles of attention against fp64."""

from itertools import product

import pytest
import torch
from kernel_runs import DTYPES, LENGTHS, ORDERS, PLACES, Kernels, assert_rounded, kernels, misaligned
from torch import Tensor

from megatronish.ops.dropout import DroppedTile, ProbabilityDropout
from megatronish.parallel.streams import keep_mask, mask_keys

RATES = (0.1, 0.5)


def keys_of(device: torch.device) -> Tensor:
    return mask_keys([(7, "dropout", 3, 1, "x")], device=device)[0]


def values(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def added(run: Kernels, x: Tensor, residual: Tensor | None, rate: float) -> tuple[Tensor, Tensor]:
    """The kernel's result, and what torch's operations make of the mask of streams.py."""
    keys = keys_of(run.device)
    samples = torch.arange(x.shape[1], device=run.device) + 2**31 - 5
    positions = torch.arange(x.shape[0], device=run.device) * 3 + 11
    keep = keep_mask(
        keys,
        places=(samples, positions.unsqueeze(-1)),
        columns=torch.arange(x.shape[2], device=run.device),
        rate=rate,
    )
    expected = torch.where(keep, x * (1 / (1 - rate)), 0.0)
    found = run.ops.dropout_add(x, residual, keys, samples, positions, rate)
    return found, expected if residual is None else expected + residual


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", LENGTHS)
def test_hidden_states_are_dropped_as_streams_say_to_the_bit(columns: int, dtype: torch.dtype, where: str) -> None:
    run = kernels(where, order="random", seed=columns)
    samples = 3 if columns < 2000 else 1
    x, residual = (values(2, samples, columns, dtype=dtype, device=run.device, seed=seed) for seed in (0, 1))
    for rate in RATES:
        for one, other in ((x, None), (x, residual), (misaligned(x), residual), (x, misaligned(residual))):
            found, expected = added(run, one, other, rate)
            assert torch.equal(found, expected), (rate, other is None)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 3, 0)])
def test_nothing_is_dropped_of_nothing(shape: tuple[int, int, int], where: str) -> None:
    run = kernels(where)
    found, _ = added(run, torch.empty(shape, device=run.device), None, 0.1)
    assert found.shape == shape
    scores = torch.empty(*shape, 4, device=run.device)
    lse = torch.empty(shape, device=run.device)
    tile = tile_of(run, *scores.shape)
    run.ops.softmax_dropout(scores, lse, *tile.arguments(0.3))
    run.ops.softmax_dropout_backward(scores, scores.clone(), lse, lse.clone(), *tile.arguments(0.3))


def test_strides_and_a_gradient_do_not_matter() -> None:
    run = kernels("cpu")
    x, residual = (values(4, 3, 5, dtype=torch.float32, device=run.device, seed=seed) for seed in (0, 1))
    turned, expected = added(run, x.mT.contiguous().mT.requires_grad_(), residual.mT.contiguous().mT, 0.3)
    assert torch.equal(turned, expected)
    leaf, other = x.clone().requires_grad_(), residual.clone().requires_grad_()
    out, _ = added(run, leaf, other, 0.3)
    grad = values(4, 3, 5, dtype=torch.float32, device=run.device, seed=2)
    of_x, of_residual = torch.autograd.grad(out, (leaf, other), grad)
    assert torch.equal(of_x, added(run, grad, None, 0.3)[1]) and torch.equal(of_residual, grad)


def tile_of(
    run: Kernels,
    samples: int,
    heads: int,
    queries: int,
    keys: int,
    *,
    window: int | None = None,
    documents: bool = False,
    slopes: bool = False,
    causal: bool = True,
    first_key: int = 3,
    rate: float = 0.1,
) -> DroppedTile:
    """A tile somewhere in a sequence; its last query stands three keys beyond the tile's last key."""
    device, first_query = run.device, first_key + keys - queries + 3
    ids = torch.arange(first_query + queries + keys, device=device) // 5
    return DroppedTile(
        ProbabilityDropout(keys_of(device), torch.arange(samples, device=device) + 40, rate),
        first_head=2,
        first_query=first_query,
        first_key=first_key,
        window_size=window,
        documents=torch.stack([ids + sample for sample in range(samples)]) if documents and samples else None,
        slopes=0.5 ** torch.arange(1, heads + 1, device=device) if slopes else None,
        causal=causal,
    )


def exact(tile: DroppedTile, scores: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Probabilities, log-sum-exp, mask and factor, in fp64 and by dense masks."""
    queries = torch.arange(scores.shape[2], device=scores.device) + tile.first_query
    keys = torch.arange(scores.shape[3], device=scores.device) + tile.first_key
    distance = queries[:, None] - keys
    seen = (distance >= 0) & (distance < (tile.window_size or 2**40))
    if not tile.causal:
        seen = torch.ones_like(seen)
    if tile.documents is not None:
        seen = seen & (tile.documents[:, queries][:, None, :, None] == tile.documents[:, keys][:, None, None])
    logits = scores.double() * scale
    if tile.slopes is not None:
        logits = logits - tile.slopes.double()[:, None, None] * distance
    logits = logits.masked_fill(~seen, -torch.inf)
    heads = torch.arange(scores.shape[1], device=scores.device) + tile.first_head
    places = (tile.dropout.sample_ids[:, None, None], heads[:, None], queries)
    keep = keep_mask(tile.dropout.keys, places=places, columns=keys, rate=tile.dropout.rate)
    return logits.softmax(-1).nan_to_num(0.0), logits.logsumexp(-1), keep, torch.tensor(1 / (1 - tile.dropout.rate))


def check_tile(run: Kernels, tile: DroppedTile, scores: Tensor, scale: float = 0.3) -> None:
    probabilities, exact_lse, keep, factor = exact(tile, scores, scale)
    dropped, lse = scores.clone(), torch.full(scores.shape[:3], torch.nan, device=run.device)
    run.ops.softmax_dropout(dropped, lse, *tile.arguments(scale))
    assert_rounded(dropped, probabilities * keep * factor, slack=probabilities * 1e-5)
    assert torch.equal(dropped != 0, (probabilities.float() != 0) & keep)  # the mask itself, to the bit
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=2e-6)

    grads = values(*scores.shape, dtype=torch.float32, device=run.device, seed=2)
    means = values(*scores.shape[:3], dtype=torch.float32, device=run.device, seed=3)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)  # over all keys of a sequence it is finite
    expected = probabilities * (grads.double() * keep * factor - means.double().unsqueeze(-1)) * scale
    again = scores.clone()
    run.ops.softmax_dropout_backward(again, grads, lse, means, *tile.arguments(scale))
    torch.testing.assert_close(again.double(), probabilities * keep * factor, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(grads.double(), expected, rtol=2e-5, atol=1e-6)


TILES = [
    *({"causal": False, "documents": documents} for documents in (False, True)),
    *(
        {"window": window, "documents": documents, "slopes": slopes}
        for window, documents, slopes in product((None, 1, 7), (False, True), (False, True))
    ),
]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("keys", [1, 2, 31, 33, 129, 1025, 2500])
def test_a_tile_of_attention_is_its_definition(keys: int, where: str) -> None:
    run = kernels(where, order="random", seed=keys)
    samples, heads = (2, 3) if keys < 1000 else (1, 1)
    for how in TILES if keys < 1000 else TILES[:6]:
        tile = tile_of(run, samples, heads, 5, keys, **how)  # type: ignore[arg-type]
        check_tile(run, tile, values(samples, heads, 5, keys, dtype=torch.float32, device=run.device))


@pytest.mark.parametrize("where", PLACES)
def test_a_query_before_all_keys_sees_nothing(where: str) -> None:
    run = kernels(where)
    tile = tile_of(run, 1, 2, 4, 9)._replace(first_query=0, first_key=2)
    scores, lse = values(1, 2, 4, 9, dtype=torch.float32, device=run.device), torch.empty(1, 2, 4, device=run.device)
    run.ops.softmax_dropout(scores, lse, *tile.arguments(1.0))
    assert (scores[:, :, :2] == 0).all() and (lse[:, :, :2] == -torch.inf).all() and lse[:, :, 2:].isfinite().all()


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_lanes_changes_no_tile(order: str) -> None:
    found = []
    for run in (kernels("cpu"), kernels("cpu", order=order, seed=5)):
        scores, lse = values(1, 2, 4, 1100, dtype=torch.float32, device=run.device), torch.empty(1, 2, 4)
        run.ops.softmax_dropout(scores, lse, *tile_of(run, 1, 2, 4, 1100).arguments(1.0))
        found.append((scores, lse))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("where", PLACES)
def test_what_no_kernel_of_dropout_can_do_is_said(where: str) -> None:
    run = kernels(where)
    x = torch.zeros(2, 3, 4, device=run.device)
    with pytest.raises(RuntimeError, match="take float32, float16 and bfloat16 alone"):
        added(run, x.double(), None, 0.1)
    with pytest.raises(RuntimeError, match="residual must be like x"):
        added(run, x, x.half(), 0.1)
    scores, lse = torch.zeros(1, 2, 4, 9, device=run.device), torch.empty(1, 2, 4, device=run.device)
    tile = tile_of(run, 1, 2, 4, 9)
    for changed, said in (
        (tile._replace(window_size=0), "window_size must be at least 1"),
        (tile._replace(slopes=torch.zeros(3, device=run.device)), r"slopes must be fp32 \[heads\]"),
        (tile._replace(documents=torch.zeros(1, 4, dtype=torch.int64, device=run.device)), "documents must be int64"),
    ):
        with pytest.raises(RuntimeError, match=said):
            run.ops.softmax_dropout(scores, lse, *changed.arguments(1.0))
    with pytest.raises(RuntimeError, match="scores must be contiguous fp32"):
        run.ops.softmax_dropout(scores.half(), lse, *tile.arguments(1.0))
