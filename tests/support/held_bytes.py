"""Bytes of all tensors of this process, for tests of what is held and of what is not."""

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor


def bytes_held() -> int:
    """Bytes of every storage on the CPU that some tensor uses, each counted once.

    A DTensor has no storage: its local tensor is counted. A fake tensor, which torch.compile leaves, has no bytes.
    """
    gc.collect()
    found = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    real = [each for each in found if not isinstance(each, DTensor | FakeTensor)]
    tensors = [each for each in real if each.device.type == "cpu" and each.layout == torch.strided]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())
