"""How does a checkpoint get written while training goes on?

Training stands still while this rank's tensors are copied to host memory; a thread writes from the copy. The thread
touches no tensor of training's, and talks to other ranks over an axis of its own. One is at work at most, so every
rank's threads do the same in the same order, and the copies of one save are free when the next one needs them.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from megatronish.checkpoint.tensors import GlobalTensor

T = TypeVar("T")


class HostCopies:
    """Room in host memory for what this rank writes, kept from save to save; pinned where a GPU is copied from."""

    def __init__(self) -> None:
        self._room: dict[str, Tensor] = {}

    def of(self, tensors: dict[str, GlobalTensor]) -> dict[str, GlobalTensor]:
        """Copies of those that this rank writes. Those handed out before are overwritten."""
        found = {}
        for name, tensor in tensors.items():
            local = tensor.local
            if not tensor.writes:
                continue
            if name not in self._room:
                self._room[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            found[name] = replace(tensor, local=self._room[name].copy_(local, non_blocking=True))
        if any(tensor.local.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return found


def in_background(work: Callable[[], T]) -> Future[T]:
    """Do `work` in a thread that does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="save", daemon=True).start()
    return future
