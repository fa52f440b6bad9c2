"""Exchange of tokens with the ranks of experts by DeepEP (the package deep_ep, its class Buffer), where it can run.

All-to-all sends a token once for each expert that it has chosen. DeepEP sends it once to each rank that has any of
them, and adds on the way back what ranks have made of it: over 8 ranks with 8 experts chosen two thirds of the rows,
and over machines each goes once to a machine and by NVLink from there. Its kernels move bf16 and are for GPUs of
NVIDIA.

Its names and rules are those of DeepEP 1.2 (deep_ep/buffer.py, read in its source, and kept by later versions as the
class of old). It has not run here, as it needs several GPUs; a stand-in over gloo with its rules takes its place in
tests.
"""

import importlib
import importlib.util
import socket
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.core.errors import UserError
from megatronish.core.layout import DeepEPNeeds
from megatronish.parallel import comm
from megatronish.parallel.comm import Pending
from megatronish.parallel.mesh import Axis
from megatronish.watch.record import Entry

PACKAGE = "deep_ep"
PEERS = 8
"""Ranks of a machine, which reach each other by NVLink: more are 8 on each of several machines."""
ALIGNMENT = 16
"""Elements of bf16 that divide a row: its kernels take a row by halves, and 16 bytes of these at once."""
ROW_BYTES = 2**14
"""Bytes that its kernels have room for on an SM: a row, what it brings along, and a barrier."""
EXPERTS_OF_A_RANK = 128
CHOICES = 32
"""Threads of a block that count experts, and of a warp that copies a token's choices: it has no more of each."""


class Sent(NamedTuple):
    """Tokens that DeepEP has sent: all that a second exchange between the same places needs.

    `handle` is DeepEP's own. Of the M tokens that have arrived `choices` [M, K] are the local experts, -1 for
    those of other ranks, `weights` fp32 [M, K] belong to them, and `counts` are the rows of each local expert.
    """

    handle: Any
    choices: Tensor
    weights: Tensor
    counts: list[int]


@dataclass(frozen=True)
class _Event:
    """An event of DeepEP's stream, waited for like a collective of torch."""

    event: Any

    def wait(self) -> None:
        """Have the current stream wait for it."""
        self.event.current_stream_wait()


class Returning(NamedTuple):
    """Sums [T, D] and, where weights were sent, [T, K]; both are there after the wait for the first."""

    rows: Pending
    weights: Tensor | None


class TokenExchange:
    """DeepEP's buffer of the ranks of one axis: every rank calls the same at the same time.

    All is asynchronous: kernels run on a stream of DeepEP's own, and nothing may read a result before its wait.
    """

    def __init__(self, axis: Axis, buffer: Any, index_dtype: torch.dtype) -> None:
        self.axis, self.index_dtype = axis, index_dtype
        self._buffer: Any = buffer

    def start(self, x: Tensor, choices: Tensor, weights: Tensor, *, num_experts: int) -> tuple[Pending, Sent]:
        """Tokens [T, D] to the ranks of the experts that they choose, [T, K] with -1 for none: [M, D].

        The host waits, once, until it knows how many arrive.
        """
        entry = self._enter_dispatch()
        choices, weights = choices.to(self.index_dtype).contiguous(), weights.float().contiguous()
        x = x.contiguous()
        options = self._options()
        *layout, event = self._buffer.get_dispatch_layout(choices, num_experts, **options)
        of_ranks, of_machines, of_experts, goes_to = layout
        arriving, local, its_weights, counts, handle, event = self._buffer.dispatch(
            x,
            num_tokens_per_rank=of_ranks,
            num_tokens_per_rdma_rank=of_machines,
            num_tokens_per_expert=of_experts,
            is_token_in_rank=goes_to,
            topk_idx=choices,
            topk_weights=weights,
            **{**options, "previous_event": event},
        )
        self._count(arriving)
        return self._pending(arriving, event, x, entry), Sent(handle, local, its_weights, counts)

    def start_again(self, x: Tensor, handle: Any) -> Pending:
        """Other rows [T, D] to where tokens were sent with this `handle`: [M, D]."""
        entry, x = self._enter_dispatch(), x.contiguous()
        arriving, *_, event = self._buffer.dispatch(x, handle=handle, **self._options())
        self._count(arriving)
        return self._pending(arriving, event, x, entry)

    def start_back(
        self, rows: Tensor, handle: Any, *, weights: Tensor | None = None, layer: int | None = None
    ) -> Returning:
        """Rows [M, D], and numbers [M, K], of tokens that were sent, back to these: their sums, [T, D] and [T, K]."""
        entry, rows = comm.entry_of("deep_ep_combine", rows, self.axis, layer), rows.contiguous()
        weights = None if weights is None else weights.float().contiguous()
        sums, of_weights, event = self._buffer.combine(rows, handle, topk_weights=weights, **self._options())
        return Returning(self._pending(sums, event, rows, entry), of_weights)

    def _options(self) -> dict[str, Any]:
        """As of what this stream has computed until now, on DeepEP's stream, which has the results' memory."""
        return {"previous_event": self._buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}

    def _enter_dispatch(self) -> Entry | None:
        return None if self.axis.line is None else self.axis.line.enter_objects("deep_ep_dispatch")

    def _count(self, arriving: Tensor) -> None:
        """Count the bytes of what arrives in the place of what is sent, of which the host knows no number."""
        if self.axis.line is not None:
            self.axis.line.count("deep_ep_dispatch", arriving)

    def _pending(self, result: Tensor, event: Any, source: Tensor, entry: Entry | None) -> Pending:
        return Pending(result, _Event(event), axis=self.axis, source=source, entry=entry)


def why_not_deep_ep(needs: DeepEPNeeds, device_type: str) -> str | None:
    """The reason why DeepEP does not run here, in one sentence; None where it can."""
    reason = None
    if device_type != "cuda":
        reason = "its kernels are for GPUs"
    elif (trouble := _trouble_of_package()) is not None:
        reason = trouble
    elif needs.precision != "bf16":
        reason = f"it moves bf16, and this run computes in {needs.precision}"
    elif (trouble := _trouble_of_sizes(needs)) is not None:
        reason = trouble
    elif _configs(needs.ep) is None:
        reason = f"it has no settings for ep={needs.ep}"
    return None if reason is None else f"tokens go to experts by all-to-all, and not by DeepEP: {reason}"


def runs_on(axis: Axis, needs: DeepEPNeeds, device_type: str) -> bool:
    """Whether DeepEP runs on all ranks of an axis; UserError where it does on some alone, whose exchange would hang."""
    reasons = comm.all_gather_object(why_not_deep_ep(needs, device_type), axis)
    unable = [(rank, reason) for rank, reason in zip(axis.ranks, reasons, strict=True) if reason is not None]
    if unable and len(unable) < axis.size:
        rank, reason = unable[0]
        raise UserError(
            f"DeepEP runs on some ranks of ep={axis.size} and not on rank {rank}, where {reason}; install the same on "
            "all machines, or use --moe-token-dispatcher-type alltoall"
        )
    return not unable


def exchange_of(axis: Axis, hidden_size: int) -> TokenExchange:
    """DeepEP's buffer over an axis, for rows of bf16; UserError where the axis does not lie on machines as it must."""
    hosts = comm.all_gather_object(socket.gethostname(), axis)
    groups = [hosts[start : start + PEERS] for start in range(0, axis.size, PEERS)]
    if any(len(set(group)) > 1 for group in groups):
        raise UserError(
            f"DeepEP wants {min(PEERS, axis.size)} neighbours on ep={axis.size} on one machine, and ranks "
            f"{', '.join(map(str, axis.ranks[:PEERS]))} are not; use --moe-token-dispatcher-type alltoall, or "
            "--etp 1, which brings ranks of ep closer together"
        )
    library, row = importlib.import_module(PACKAGE), 2 * hidden_size
    configs = _configs(axis.size)
    assert configs is not None and axis.group is not None
    near = max(config.get_nvl_buffer_size_hint(row, axis.size) for config in configs)
    far = max(config.get_rdma_buffer_size_hint(row, axis.size) for config in configs) if len(groups) > 1 else 0
    index_dtype = getattr(library, "topk_idx_t", torch.int64)
    try:
        buffer = library.Buffer(axis.group, near, far)
    except (AssertionError, RuntimeError, ImportError) as error:  # no NVLink, built without NVSHMEM, no memory ...
        raise UserError(
            f"DeepEP could not make its buffer for ep={axis.size} on rank {axis.ranks[axis.rank]} "
            f"({_first_line(error)}); use --moe-token-dispatcher-type alltoall, or install it again"
        ) from error
    return TokenExchange(axis, buffer, index_dtype)


def _trouble_of_sizes(needs: DeepEPNeeds) -> str | None:
    """What its kernels have no room for, on which they would stop the device; None where they have."""
    # With a row go its place (8 bytes, rounded up) and for each choice a number of 8 bytes and a weight of 4.
    row = 2 * needs.hidden_size + 16 + 12 * needs.num_chosen
    if needs.hidden_size % ALIGNMENT:
        return f"hidden_size={needs.hidden_size} is not divisible by {ALIGNMENT}"
    if row + 8 > ROW_BYTES:
        return f"a token of hidden_size={needs.hidden_size} takes {row} bytes, and its kernels hold {ROW_BYTES - 8}"
    if needs.num_experts > EXPERTS_OF_A_RANK * needs.ep:
        return f"num_experts={needs.num_experts} on ep={needs.ep} are more than {EXPERTS_OF_A_RANK} a rank"
    if needs.num_chosen > CHOICES:
        return f"moe_router_topk={needs.num_chosen} is more than {CHOICES}"
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _trouble_of_package() -> str | None:
    """What is wrong with the package; None where it can be used."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"the package {PACKAGE} is not installed"
    try:
        has_buffer = hasattr(importlib.import_module(PACKAGE), "Buffer")
    except (ImportError, OSError) as error:  # of a library that it was built for
        return f"the package {PACKAGE} cannot be loaded ({_first_line(error)})"
    return None if has_buffer else f"the package {PACKAGE} has no class Buffer"


def _configs(ep: int) -> tuple[Any, Any] | None:
    """DeepEP's settings for so many ranks; None where it has none."""
    buffer = importlib.import_module(PACKAGE).Buffer
    try:
        return buffer.get_dispatch_config(ep), buffer.get_combine_config(ep)
    except AssertionError:
        return None
