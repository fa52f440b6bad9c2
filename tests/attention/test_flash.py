"""Tests of attention without probabilities in memory: which kernel runs, and FlexAttention's numbers on a CPU."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from documents import documents_of
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode

from megatronish.attention import flash
from megatronish.attention.flash import AttentionProblem, flash_attention, has_flash, kernel_for, masked_by_blocks
from megatronish.attention.mask import BLOCK, AttentionMask, BidirectionalMask, alibi_slopes
from megatronish.specs.block_pattern import BlockPattern

PLAIN = AttentionProblem("cuda", torch.bfloat16, 128, is_grouped=False, is_masked=False, capability=(9, 0))
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CAPABILITIES = ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
LENGTHS = (1, 128, 300)
WINDOWS = (None, 1, 50, 200)
PATTERNS = [
    BlockPattern("sliding", 128, 2),
    BlockPattern("fixed", 48, 3, 1),
    BlockPattern("longformer", 256, 1, 1),
    BlockPattern("bigbird", 40, 2, 1, 1),
]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "sdpa"),
        ({"is_grouped": True}, "sdpa"),  # flash shares key/value heads
        ({"is_grouped": True, "dtype": torch.float32}, "sdpa, heads repeated"),
        ({"is_grouped": True, "capability": (7, 5)}, "sdpa, heads repeated"),
        ({"is_grouped": True, "head_size": 512}, "sdpa, heads repeated"),
        ({"is_grouped": True, "head_size": 224, "capability": (8, 9)}, "sdpa, heads repeated"),
        ({"is_masked": True, "may_compile": True}, "flex"),
        ({"is_masked": True, "may_compile": True, "is_grouped": True, "dtype": torch.float32}, "flex"),
        ({"is_masked": True, "is_grouped": True}, "sdpa, heads repeated"),
        ({"is_masked": True}, "sdpa"),
        ({"is_masked": True, "may_compile": True, "capability": (7, 5)}, "sdpa"),
        ({"is_masked": True, "may_compile": True, "head_size": 8}, "sdpa"),
        ({"is_masked": True, "may_compile": True, "dtype": torch.float64}, "sdpa"),
        ({"device": "cpu", "is_masked": True, "may_compile": True, "is_grouped": True}, "sdpa"),
    ],
)
def test_the_kernel_is_chosen_by_device_dtype_mask_heads_and_capability(
    change: dict[str, object], expected: str
) -> None:
    """The device is not needed: the choice is asked for any GPU."""
    assert kernel_for(PLAIN._replace(**change)) == expected


def test_no_problem_on_cuda_falls_to_the_math_backend_of_sdpa() -> None:
    """SDPA's efficient kernels take everything but shared heads; its flash attention takes them without a mask."""
    sizes, answers = (8, 64, 224, 256, 512), (False, True)
    for dtype, capability, size, grouped, masked, compiles in product(
        DTYPES, CAPABILITIES, sizes, answers, answers, answers
    ):
        problem = AttentionProblem("cuda", dtype, size, grouped, masked, capability, compiles)
        if grouped and kernel_for(problem) == "sdpa":
            assert has_flash(problem), problem
            assert not masked, problem


@pytest.mark.parametrize("documents", [False, True])
def test_a_block_mask_is_that_of_torch(documents: bool) -> None:
    """Same blocks to compute, same blocks that need no look inside: torch finds them from all S x S places."""
    for seq_length, window in product(LENGTHS, WINDOWS):
        ids = documents_of(seq_length) if documents else None
        ours = AttentionMask(seq_length, window, ids).blocks
        samples = None if ids is None else len(ids)
        theirs = create_block_mask(ours.mask_mod, samples, None, seq_length, seq_length, device="cpu")
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (seq_length, window, name)
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        assert ours.seq_lengths == theirs.seq_lengths
    ids = documents_of(300) if documents else None
    ours = BidirectionalMask(300, document_ids=ids).blocks
    theirs = create_block_mask(ours.mask_mod, None if ids is None else len(ids), None, 300, 300, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())


@pytest.mark.long
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: f"{pattern.name} of {pattern.block_size}")
def test_a_block_mask_of_a_pattern_is_that_of_torch(pattern: BlockPattern) -> None:
    """Blocks of the pattern are smaller than those of FlexAttention, larger, or equal."""
    for seq_length, ids in product((128, 400), (None, documents_of(400))):
        given = None if ids is None else ids[:, :seq_length]
        ours = AttentionMask(seq_length, document_ids=given, pattern=pattern).blocks
        theirs = create_block_mask(
            ours.mask_mod, None if ids is None else 2, None, seq_length, seq_length, device="cpu"
        )
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (seq_length, name)
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        with torch.no_grad():
            q, k, v = _tensors(kv_heads=2, seq_length=seq_length)
        mask = AttentionMask(seq_length, document_ids=given, pattern=pattern)
        found, expected = masked_by_blocks(q, k, v, mask=mask), _by_sdpa(q, k, v, mask)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_padded_sequence_has_the_same_pattern() -> None:
    mask = AttentionMask(300, pattern=PATTERNS[-1])
    assert torch.equal(mask.longer(384).layout[:7, :7], mask.layout[:7, :7])


def test_a_window_saves_work() -> None:
    """A window of one block in sixteen: at most two blocks a row are computed, of up to sixteen."""
    blocks = AttentionMask(2048, 128).blocks
    computed = blocks.kv_num_blocks + blocks.full_kv_num_blocks
    assert computed.max() == 2


@pytest.mark.long
def test_documents_in_any_order_lose_no_pair() -> None:
    """Ids that do not rise cost blocks, never scores."""
    ids = torch.randint(0, 3, (2, 300), generator=torch.Generator().manual_seed(0))
    mask = AttentionMask(300, 90, ids)
    with torch.no_grad():
        q, k, v = _tensors(kv_heads=2, seq_length=300)
    torch.testing.assert_close(masked_by_blocks(q, k, v, mask=mask), _by_sdpa(q, k, v, mask), rtol=1e-5, atol=1e-6)


@pytest.fixture
def _gradients_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention refuses a backward on CPU, because no kernel of it is compiled there.

    Its definition in plain operations, forward and backward, runs on any device: with the refusal lifted we see that
    our masks, biases and shared heads have the right gradients. The kernel itself is to be tested on a GPU.
    """
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    return


@pytest.mark.long
@pytest.mark.usefixtures("_gradients_on_cpu")
@pytest.mark.parametrize(
    ("window", "documents", "alibi", "kv_heads"),
    [(50, True, False, 2), (90, False, True, 4)],
)
def test_flex_attention_computes_what_sdpa_does(
    window: int | None, documents: bool, alibi: bool, kv_heads: int
) -> None:
    """Output and gradients, on a CPU."""
    ids, slopes = documents_of(300) if documents else None, alibi_slopes(4) if alibi else ()
    mask = AttentionMask(300, window, ids, slopes=slopes)
    inputs = _tensors(kv_heads=kv_heads, seq_length=300)
    found, expected = masked_by_blocks(*inputs, mask=mask), _by_sdpa(*inputs, mask)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    dout = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = (torch.autograd.grad(out, inputs, dout) for out in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_sizes_that_are_symbols_in_a_graph_break_none() -> None:
    """After another length torch.compile makes sizes symbols, and SDPA takes no symbol where it asks for a bool."""
    compiled = torch.compile(flash_attention, backend="eager", dynamic=True, fullgraph=True)
    with torch.no_grad():
        for kv_heads, seq_length in ((4, 8), (2, 8), (2, 12)):
            inputs, mask = _tensors(kv_heads=kv_heads, seq_length=seq_length), AttentionMask(seq_length)
            found = compiled(*inputs, mask=mask, may_compile=True)
            torch.testing.assert_close(found, _by_sdpa(*inputs, mask))


@pytest.mark.long
def test_another_micro_batch_compiles_nothing() -> None:
    """A mask with new documents is a new function and new tensors; the compiled one serves it."""
    counter = CompileCounter()
    compiled = torch.compile(flex.flex_attention, backend=counter, dynamic=False, fullgraph=True)
    with torch.no_grad():
        for shift in range(4):
            q, k, v = _tensors(kv_heads=2, seq_length=200)
            masked_by_blocks(q, k, v, mask=AttentionMask(200, 90, documents_of(200) + shift), attention=compiled)
        assert counter.frame_count == 1
        masked_by_blocks(q, k, v, mask=AttentionMask(200, 40, documents_of(200)), attention=compiled)
    assert counter.frame_count == 2, "another window is another kernel"


@pytest.mark.long
def test_more_lengths_than_torch_compiles_of_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where torch's limit of 8 ended a run at the ninth length; here it is 1, as each takes seconds.

    A few kernels serve all lengths, and compute what is computed without padding.
    """
    torch.compiler.reset()  # kernels of earlier tests count against the limit of the process, too
    counter, lengths = CompileCounter(), (65, 128, 130, 200, 256, 300)
    monkeypatch.setattr(flash, "kernel_for", lambda _: "flex")
    monkeypatch.setattr(flash, "MOST_KERNELS", 3)
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        compiled = flash._compiled_flex.__wrapped__(counter)
        monkeypatch.setattr(flash, "_compiled_flex", lambda: compiled)
        for seq_length in lengths:
            q, k, v = _tensors(kv_heads=2, seq_length=seq_length)
            mask = AttentionMask(seq_length, 90, documents_of(seq_length))
            found = flash_attention(q, k, v, mask=mask, may_compile=True)
            torch.testing.assert_close(found, masked_by_blocks(q, k, v, mask=mask), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == len({flash.bucket_of(length) for length in lengths}) == 3


def test_a_sequence_is_padded_to_one_of_four_lengths_in_an_octave() -> None:
    buckets = {flash.bucket_of(length) for length in range(1, 131073)}
    assert len(buckets) == 36 and all(length % BLOCK == 0 and flash.bucket_of(length) == length for length in buckets)
    assert {flash.bucket_of(length) for length in range(4097, 8193)} == {5120, 6144, 7168, 8192}
    assert all(length <= flash.bucket_of(length) <= 1.25 * length for length in range(512, 131073))
    # With two kinds of masks that is less than what is compiled of one function, with and without a backward.
    assert 3 * len(buckets) < flash.MOST_KERNELS


@pytest.mark.parametrize("first_query", [0, 29])
def test_generation_compiles_nothing_and_has_no_kernel_planned_for_its_shape(
    first_query: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lengths change with every forward: SDPA takes a dense mask, by all of its backends but cuDNN's."""
    found: list[bool] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention:
                found.append(torch.backends.cuda.cudnn_sdp_enabled())
            return func(*args, **kwargs or {})

    monkeypatch.setattr(flash, "HAS_COMPILER", True)
    q, k, v = _tensors(kv_heads=2, seq_length=30)
    for num_cached in (first_query, None):
        mask = AttentionMask(30, 7, num_cached=num_cached)
        problem = flash._problem(q, k, mask, may_compile=True)
        assert problem.may_compile is (num_cached is None) and problem.is_masked
        with Watch():
            flash_attention(q[:, :, mask.first_query :], k, v, mask=mask, may_compile=True)
    assert found == [False, True]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def _tensors(*, kv_heads: int, seq_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of 2 samples, with 4 query heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, seq_length, 16, generator=generator, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    )
    return (q, k, v) if torch.is_grad_enabled() else (q.detach(), k.detach(), v.detach())


def _by_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """What a CPU runs."""
    return flash_attention(q, k, v, mask=mask, may_compile=True)
