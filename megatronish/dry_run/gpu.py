"""GPU of a dry run, which is not there: answers of `torch.cuda`, and operators in the place of attention kernels."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megatronish.attention import dropout_attention, flash
from megatronish.attention.mask import BLOCK, AttentionMask, slopes_on
from megatronish.ops.dropout import DroppedTile
from megatronish.ops.library import Operator, OperatorFamily, define
from megatronish.specs.block_pattern import BlockPattern

CAPABILITY = (9, 0)
MULTI_PROCESSORS = 132


class FakeEvent:
    """An event of a stream whose work is done at once."""

    on_wait: Callable[[str], None]

    def __init__(self, *_: Any, **__: Any) -> None:
        """Settings of an event mean nothing here."""

    def record(self, _stream: Any = None) -> None:
        """Nothing is in progress on any stream."""

    def wait(self, _stream: Any = None) -> None:
        """A stream waits, and the host does not."""

    def query(self) -> bool:
        """Whether what was recorded is done."""
        return True

    def synchronize(self) -> None:
        """The host waits for the device here."""
        self.on_wait("Event.synchronize")


class FakeStream:
    """A stream whose work is done at once."""

    on_wait: Callable[[str], None]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.stream_id, self.cuda_stream = torch.device("cuda", 0), 0, 0

    def wait_stream(self, _other: Any) -> None:
        """A stream waits, and the host does not."""

    def wait_event(self, _event: Any) -> None:
        """A stream waits, and the host does not."""

    def record_event(self, event: Any = None) -> FakeEvent:
        """An event that is over."""
        return event or FakeEvent()

    def query(self) -> bool:
        """Whether everything is done."""
        return True

    def synchronize(self) -> None:
        """The host waits for the device here."""
        self.on_wait("Stream.synchronize")


@contextmanager
def answered_for(device_type: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile `torch.cuda` answers as on one GPU; `on_wait` is called with what the host waits for."""
    if device_type != "cuda":
        yield
        return
    event, stream = (
        type(kind.__name__, (kind,), {"on_wait": staticmethod(on_wait)}) for kind in (FakeEvent, FakeStream)
    )
    properties = SimpleNamespace(
        name="fake CUDA device",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=MULTI_PROCESSORS,
        total_memory=0,
    )
    the_stream = stream()

    def entered(*_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    answers: dict[str, Any] = {
        "Event": event,
        "Stream": stream,
        "stream": entered,
        "device": entered,
        "current_stream": lambda *_: the_stream,
        "default_stream": lambda *_: the_stream,
        "set_stream": lambda *_: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda *_: None,
        "is_initialized": lambda: True,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name,
        "synchronize": lambda *_: on_wait("torch.cuda.synchronize"),
        "is_current_stream_capturing": lambda: False,
    }
    # FSDP asks torch.accelerator, too: its own streams would read the memory of a FakeEvent as that of an event of C++.
    of_accelerator = {
        "current_stream": answers["current_stream"],
        "set_stream": answers["set_stream"],
        "synchronize": lambda *_: on_wait("torch.accelerator.synchronize"),
        "current_device_index": answers["current_device"],
    }
    with patch.multiple(torch.cuda, **answers), patch.multiple(torch.accelerator, **of_accelerator):
        yield


# Attention of a dry run: what a GPU with Triton computes in one kernel, and a few blocks of attention with dropout.
#
# FlexAttention is compiled for a mask, which tensors without memory cannot be; so an operator of the dry run takes
# its place. It allocates what the compiled kernels do: forward the output and a log-sum-exp, backward the three
# gradients and the sum of dout x out. Its FLOPs are those of the blocks of scores that are not skipped.
#
# Attention with dropout, where no kernel runs, is block by block. Only the largest blocks run here; FLOPs are
# scaled to all of them, of which each has FLOPs in proportion to its scores.

NAMESPACE = "megatronish_dry_run"
BLOCKS_BEFORE, BLOCKS_AFTER = 2, 1  # of the largest one: a block's tensors live on while the next one is at work


class Reference(NamedTuple):
    """Operator that runs by those that it is made of; `times` is the factor of their FLOPs, by its arguments."""

    run: Callable[..., Any]
    times: Callable[..., Fraction] | None = None


# FlexAttention


@contextmanager
def attention_of_a_gpu() -> Iterator[None]:
    """Meanwhile masks go to FlexAttention, as on a GPU with Triton, and to its stand-in there."""
    answers: dict[str, Any] = {
        "HAS_COMPILER": True,
        "_compiled_flex": lambda: None,
        "masked_by_blocks": _masked_by_blocks,
    }
    with patch.multiple(flash, **answers):
        yield


def _masked_by_blocks(q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionMask, **_: Any) -> Tensor:
    blocks = mask.blocks  # made once for a mask, and kept with it
    if mask.slopes:
        slopes_on(mask.slopes, q.device)
    assert blocks.shape[-1] == k.shape[2], "queries are the whole sequence"
    places = computed_scores(mask.seq_length, mask.window_size, mask.pattern, causal=mask.causal)
    out: Tensor = OPERATORS.flex_attention(q, k, v, places)[0]
    return out


@cache
def computed_scores(
    seq_length: int, window_size: int | None, pattern: BlockPattern | None = None, *, causal: bool = True
) -> int:
    """Scores in the blocks of a mask with window or pattern that are not skipped; documents are taken as one."""
    if not causal:
        return seq_length**2
    window, scores = window_size or seq_length, 0
    for first in range(0, seq_length, BLOCK):
        end = min(first + BLOCK, seq_length)
        begin = max(0, first - window + 1) // BLOCK * BLOCK
        keys = end - begin
        if pattern is not None:
            runs = pattern.runs_of(range(first, end))
            blocks = {place // BLOCK for run in runs for place in (*run[::BLOCK], run[-1])}
            keys = sum(min(BLOCK, seq_length - block * BLOCK) for block in blocks)
        scores += (end - first) * keys
    return scores


def _flex(q: Tensor, _k: Tensor, v: Tensor, _places: int) -> tuple[Tensor, Tensor]:
    return _ordered(q, v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _flex_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, _out: Tensor, lse: Tensor, _places: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (_ordered(x, x.shape[-1]) for x in (q, k, v))
    return dq, dk, dv, dout.new_empty(lse.shape, dtype=lse.dtype)


def _ordered(x: Tensor, last: int) -> Tensor:
    """New [..., last] without holes, whose dims are in memory in the order of those of x, as the kernels allocate."""
    order = sorted(range(x.dim()), key=lambda dim: -x.stride()[dim])
    shape = (*x.shape[:-1], last)
    return x.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(x.dim())])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.places = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ops: Any, ctx: Any, dout: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv, _ = ops.flex_attention_backward(dout, *ctx.saved_tensors, ctx.places)
    return dq, dk, dv, None


OPERATORS = define(
    OperatorFamily(
        "flex_attention",
        (
            Operator(
                "flex_attention(Tensor q, Tensor k, Tensor v, int places) -> (Tensor out, Tensor lse)",
                reference=_flex,
                fake=_flex,
                setup_context=_save,
                backward=_gradients,
            ),
            Operator(
                "flex_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int places)"
                " -> (Tensor dq, Tensor dk, Tensor dv, Tensor sums)",
                reference=_flex_backward,
                fake=_flex_backward,
            ),
        ),
    ),
    namespace=NAMESPACE,
)


@register_flop_formula(OPERATORS.flex_attention)
def _flex_flops(q: tuple[int, ...], _k: Any, v: tuple[int, ...], places: int, **_: Any) -> int:
    return 2 * q[0] * q[1] * places * (q[-1] + v[-1])


@register_flop_formula(OPERATORS.flex_attention_backward)
def _flex_backward_flops(
    _dout: Any, q: tuple[int, ...], _k: Any, v: tuple[int, ...], _out: Any, _lse: Any, places: int, **_: Any
) -> int:
    # Scores again, and gradients of queries and keys; gradients of probabilities and of values.
    return 2 * q[0] * q[1] * places * (3 * q[-1] + 2 * v[-1])


# Attention with dropout


@register_flop_formula(torch.ops.megatronish.dropped_attention)
def _dropped_flops(q: tuple[int, ...], k: tuple[int, ...], *rest: Any, **_: Any) -> int:
    length, batch, heads, size = q
    causal, window = rest[-2], rest[-3]
    places = computed_scores(k[0], window, causal=causal) if length == k[0] else length * k[0]
    return 2 * batch * heads * places * 2 * size


@register_flop_formula(torch.ops.megatronish.dropped_attention_backward)
def _dropped_backward_flops(_dout: Any, q: tuple[int, ...], k: tuple[int, ...], *rest: Any, **_: Any) -> int:
    # Scores, and gradients of probabilities: each twice, for the kernel of keys and that of queries; three gradients.
    return _dropped_flops(q, k, *rest) // 2 * 7


def dropped_references() -> dict[Any, Reference]:
    """Operators of attention with dropout by their names: the largest blocks in the place of all."""
    forward, backward = dropout_attention.FAMILY.operators
    ops = torch.ops.megatronish
    return {
        ops.dropped_attention: Reference(_on_few_blocks(forward.reference), _times),
        ops.dropped_attention_backward: Reference(
            _on_few_blocks(backward.reference), lambda _dout, *rest: _times(*rest)
        ),
    }


all_blocks = dropout_attention._blocks


def _few_blocks(q: Tensor, k: Tensor, whole: DroppedTile) -> list[Any]:
    """Largest block of all, and its neighbours."""
    blocks = list(all_blocks(q, k, whole))
    sizes = [_num_scores(block) for block in blocks]
    largest = len(blocks) - 1 - sizes[::-1].index(max(sizes))
    return blocks[max(0, largest - BLOCKS_BEFORE) : largest + 1 + BLOCKS_AFTER]


def _num_scores(block: Any) -> int:
    number = 1
    for part in (block.samples, block.queries, block.keys):
        number *= part.stop - part.start
    return number


def _on_few_blocks(reference: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with patch.object(dropout_attention, "_blocks", _few_blocks):
            return reference(*args)

    return run


def _times(q: Tensor, k: Tensor, *rest: Any) -> Fraction:
    """Scores of all blocks over those of the blocks that run."""
    whole = dropout_attention._whole(*rest[-8:])
    return Fraction(*(sum(map(_num_scores, blocks(q, k, whole))) for blocks in (all_blocks, _few_blocks)))
