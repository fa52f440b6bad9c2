"""Asynchronous saving: a copy of this rank's tensors in host memory, and a thread that writes the copy.

Training waits only for the copy to host memory. The thread reads no tensor of the training, and communicates with the
other ranks' threads over a process group that training does not use. At most one save runs at a time, so the threads
of all ranks call the same collectives in the same order, and the buffers of one save are free for the next one.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from megatronish.checkpoint.tensors import GlobalTensor
from megatronish.parallel.pinned import Form, pinned_zeros

T = TypeVar("T")


class HostCopies:
    """Buffers in host memory for the tensors that this rank writes, reused by every save; pinned for GPU tensors."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def of(self, tensors: dict[str, GlobalTensor]) -> dict[str, GlobalTensor]:
        """Copies of the tensors that this rank writes. They overwrite the copies of the call before."""
        written = {name: tensor for name, tensor in tensors.items() if tensor.writes}
        self._make([(name, each.local) for name, each in written.items() if name not in self._buffers])
        copies = {
            name: replace(tensor, local=self._buffers[name].copy_(tensor.local, non_blocking=True))
            for name, tensor in written.items()
        }
        # Copies from a GPU are asynchronous: training may change the tensors only after they are complete.
        if any(tensor.local.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return copies

    def _make(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Make buffers, those for GPU tensors together."""
        forms = {name: Form(tuple(each.shape), each.dtype) for name, each in tensors if each.is_cuda}
        self._buffers |= dict(zip(forms, pinned_zeros(list(forms.values())), strict=True))
        self._buffers |= {name: torch.empty(each.shape, dtype=each.dtype) for name, each in tensors if not each.is_cuda}


def in_background(work: Callable[[], T]) -> Future[T]:
    """Future of `work`, which runs in a daemon thread: it does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="save", daemon=True).start()
    return future
