"""Identity of a model: a checksum of its weights that no layout, no cut into files and no name of a folder changes.

SHA-256 over the sorted lines (name, shape, dtype, SHA-256 of the bytes) of all tensors, under our names. So a Hugging
Face folder and our checkpoint converted from it have one identity, as long as the conversion kept the precision.
"""

import hashlib
from collections.abc import Mapping

import torch

from megatronish.formats.weights import LazyTensor
from megatronish.parallel.all_or_none import from_all
from megatronish.parallel.mesh import Axis


def identity_of(tensors: Mapping[str, LazyTensor], *, over: Axis) -> str:
    """Identity of these weights, 64 hexadecimal digits. Collective: each rank of `over` reads a part of the tensors."""
    names = sorted(tensors)[over.rank :: over.size]
    parts = from_all(over, lambda: [_line(name, tensors[name]) for name in names])
    lines = sorted(line for part in parts for line in part)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _line(name: str, tensor: LazyTensor) -> str:
    values = tensor.read().contiguous().flatten()
    digest = hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()
    return f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {digest}"
