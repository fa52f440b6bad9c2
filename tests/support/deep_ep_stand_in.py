"""Stand-in for the package deep_ep over gloo: its class Buffer, with the rules that its kernels have (DeepEP 1.2).

What is not on its rank yet is no number: results are filled in when the event is waited for. Rows of fp32 are moved,
too, where `Buffer.moves` says so, as the theorem compares in fp32.
"""

import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatronish.engine import build

topk_idx_t = torch.int64


class Config(NamedTuple):
    """Sizes of buffers."""

    num_ranks: int

    def get_nvl_buffer_size_hint(self, row: int, num_ranks: int) -> int:
        """Bytes of the buffer between ranks of a machine."""
        assert num_ranks == self.num_ranks
        return row * num_ranks

    def get_rdma_buffer_size_hint(self, row: int, num_ranks: int) -> int:
        """Bytes of the buffer between machines."""
        assert num_ranks > 8, "between machines alone"
        return row


class EventOverlap:
    """Event whose results are there after the wait."""

    def __init__(self, *, fill: Callable[[], None] = lambda: None) -> None:
        self._fill = fill

    def current_stream_wait(self) -> None:
        """Fill in what has arrived."""
        self._fill()


class Handle(NamedTuple):
    """What a second exchange needs: of each rank the tokens sent there, and how many come from each."""

    buffer: "Buffer"
    tokens: list[Tensor]
    received: list[int]


class Buffer:
    """DeepEP's buffer of a group."""

    moves: ClassVar[set[torch.dtype]] = {torch.bfloat16}
    sizes: ClassVar[Collection[int]] = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0 and (num_rdma_bytes > 0) == (group.size() > 8)
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.dtypes = self.moves

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Settings for so many ranks."""
        assert num_ranks in Buffer.sizes, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(num_ranks)

    get_combine_config = get_dispatch_config

    @staticmethod
    def capture() -> EventOverlap:
        """Event of what was computed until now."""
        return EventOverlap()

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **options: Any) -> tuple[Any, ...]:
        """Tokens for each rank, for each machine, for each expert, and whether a token goes to a rank."""
        self._check(options)
        assert topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous() and num_experts % self.size == 0
        assert num_experts // self.size <= 128 and topk_idx.shape[1] <= 32
        assert bool(((topk_idx >= -1) & (topk_idx < num_experts)).all())
        of_experts = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        rank_of = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // self.size))
        goes_to = torch.stack([(rank_of == rank).any(1) for rank in range(self.size)], 1)
        return goes_to.sum(0).int(), None, of_experts, goes_to, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        """Each token to each of its ranks: by a new layout, or by the handle of an earlier one."""
        self._check(options)
        self._check_rows(x)
        if handle is not None:
            assert topk_idx is None and topk_weights is None and handle.buffer is self
            (arriving,), event = self._late(self._exchange(x, handle.tokens, handle.received))
            return arriving, None, None, None, None, event
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None and num_tokens_per_rdma_rank is None
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        tokens = [goes.nonzero().flatten() for goes in is_token_in_rank.t()]
        counts = torch.empty(self.size, dtype=torch.int32)
        dist.all_to_all_single(counts, num_tokens_per_rank.contiguous(), group=self.group)
        received = counts.tolist()
        per_rank = len(num_tokens_per_expert) // self.size
        local = self._exchange(topk_idx, tokens, received) - self.rank * per_rank
        is_here = (local >= 0) & (local < per_rank)
        local = local.masked_fill(~is_here, -1)
        weights = self._exchange(topk_weights, tokens, received).masked_fill(~is_here, 0)
        of_experts = torch.bincount(local[is_here], minlength=per_rank).tolist()
        late, event = self._late(self._exchange(x, tokens, received), local, weights)
        return *late, of_experts, Handle(self, tokens, received), event

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sums of what comes back for each token, computed in fp32."""
        self._check(options)
        self._check_rows(x)
        assert handle.buffer is self
        sums = self._sums(x, handle)
        if topk_weights is None:
            (sums,), event = self._late(sums)
            return sums, None, event
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        late, event = self._late(sums, self._sums(topk_weights, handle))
        return late[0], late[1], event

    def _sums(self, x: Tensor, handle: Handle) -> Tensor:
        sent = [len(tokens) for tokens in handle.tokens]
        assert len(x) == sum(handle.received)
        arriving = x.new_empty(sum(sent), *x.shape[1:])
        dist.all_to_all_single(arriving, x, sent, handle.received, group=self.group)
        sums = torch.zeros(self._num_tokens, *x.shape[1:])
        for tokens, rows in zip(handle.tokens, arriving.split(sent), strict=True):
            sums.index_add_(0, tokens, rows.float())
        return sums.to(x.dtype)

    def _exchange(self, x: Tensor, tokens: list[Tensor], received: list[int]) -> Tensor:
        self._num_tokens = len(x)
        leaving = torch.cat([x[of_rank] for of_rank in tokens])
        arriving = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(arriving, leaving, received, [len(of_rank) for of_rank in tokens], group=self.group)
        return arriving

    def _late(self, *values: Tensor) -> tuple[list[Tensor], EventOverlap]:
        late = [torch.full_like(value, float("nan") if value.is_floating_point() else -9) for value in values]

        def fill() -> None:
            for into, value in zip(late, values, strict=True):
                into.data.copy_(value)

        return late, EventOverlap(fill=fill)

    def _check(self, options: dict[str, Any]) -> None:
        assert set(options) == {"previous_event", "async_finish", "allocate_on_comm_stream"}
        assert isinstance(options["previous_event"], EventOverlap) and options["async_finish"]

    def _check_rows(self, x: Tensor) -> None:
        assert x.dim() == 2 and x.is_contiguous() and x.dtype in self.dtypes, (x.shape, x.dtype)
        assert x.shape[1] * x.element_size() % 16 == 0
        assert x.dtype != torch.bfloat16 or (x.shape[1] % 16 == 0 and 2 * x.shape[1] + 8 < 2**14)


def install(patch: pytest.MonkeyPatch, *, of_theorem: bool = True) -> None:
    """Let DeepEP be there, and be used on a CPU; `of_theorem`: for fp32, and ep of any size."""
    module: Any = ModuleType("deep_ep")
    module.Buffer, module.topk_idx_t = Buffer, topk_idx_t
    patch.setitem(sys.modules, "deep_ep", module)
    patch.setattr(build, "runs_on", lambda *_: True)
    if of_theorem:
        patch.setattr(Buffer, "moves", {torch.bfloat16, torch.float32})
        patch.setattr(Buffer, "sizes", range(2, 9))
