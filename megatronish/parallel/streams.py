"""Named random streams: every random value is a function of a name, never of the rank that draws it or of the layout.

An initial weight is named by (seed, "init", parameter, tile): a tensor is drawn in fixed tiles of the *global* tensor,
each from a generator of its own, and a rank draws just the tiles that it overlaps. A dropout mask is named by
(seed, "dropout", step, layer, site) and, inside, by the global sample, head, position and channel: every element's
value is a hash of its own place (a counter-based generator in the sense of Salmon et al. 2011), so no layout can cut
it wrongly, recomputation replays it without any saved state, and a resumed run draws the same masks.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

TILE = 512


def seed_of(*names: str | int) -> int:
    """Seed of a stream: 63 bits that depend on every name and on their order."""
    digest = hashlib.sha256(repr(names).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def numpy_stream(*names: str | int) -> np.random.Generator:
    """Generator of numpy for the stream of these names, such as the order of the data."""
    return np.random.Generator(np.random.Philox(seed_of(*names)))


def torch_stream(*names: str | int) -> torch.Generator:
    """CPU generator of torch for the stream of these names."""
    return torch.Generator().manual_seed(seed_of(*names))


def normal_rectangle(
    shape: Sequence[int], offset: Sequence[int], sizes: Sequence[int], *, names: tuple[str | int, ...]
) -> Tensor:
    """Standard normal values, [*sizes] fp32: the rectangle at `offset` of the global tensor of this shape.

    `names` name the tensor. Its last two dims are drawn in tiles; the index on each dim before them is part of a tile's
    name, so one expert of a stacked [E, 2, F, D] is drawn without the other experts. A vector is a matrix of one row.
    Values are drawn on the CPU for every device, so that a GPU run starts from the same weights.
    """
    if len(shape) == 1:
        return normal_rectangle((1, *shape), (0, *offset), (1, *sizes), names=names)[0]
    values = torch.empty(*sizes)
    for index in product(*(range(size) for size in sizes[:-2])):
        stack = (start + place for start, place in zip(offset[:-2], index, strict=True))
        values[index] = _normal_matrix(shape[-2:], offset[-2:], sizes[-2:], names=(*names, *stack))
    return values


def _normal_matrix(
    shape: Sequence[int], offset: Sequence[int], sizes: Sequence[int], *, names: tuple[str | int, ...]
) -> Tensor:
    """Rectangle of one matrix, [height, width], assembled from the tiles that it overlaps."""
    (rows, columns), (top, left), (height, width) = shape, offset, sizes
    values = torch.empty(height, width)
    # Every tile that the rectangle overlaps is drawn whole, at most [TILE, TILE]; tiles at the edges are smaller.
    for tile_row in range(top // TILE, -(-(top + height) // TILE)):
        for tile_column in range(left // TILE, -(-(left + width) // TILE)):
            y, x = tile_row * TILE, tile_column * TILE
            tile_shape = (min(TILE, rows - y), min(TILE, columns - x))
            tile = torch.randn(tile_shape, generator=torch_stream(*names, tile_row, tile_column))
            # Rows y0:y1 and columns x0:x1 of the matrix are in both, the tile and the rectangle.
            y0, y1 = max(y, top), min(y + tile_shape[0], top + height)
            x0, x1 = max(x, left), min(x + tile_shape[1], left + width)
            values[y0 - top : y1 - top, x0 - left : x1 - left] = tile[y0 - y : y1 - y, x0 - x : x1 - x]
    return values


def _mix(bits: Tensor) -> Tensor:
    """Scramble int32 in place so that each input bit moves each output bit with probability near one half.

    Xor-shift and multiply, with the constants of Wellons' search for hashes of lowest bias ("lowbias32").
    int32 arithmetic wraps around; `>>` carries the sign in, which the masks take out again.
    """
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def mask_keys(streams: Iterable[tuple[str | int, ...]], *, device: torch.device | None = None) -> Tensor:
    """Keys of the hashes of streams, [streams, 2] int32: two for each name.

    They are tensors, in one for all layers of a forward: so they are copied to a device once and without waiting, and a
    compiled layer reads a step's name from its inputs instead of being compiled for it.
    """
    seeds = [seed_of(*names) for names in streams]
    on_gpu = device is not None and device.type == "cuda"
    pairs = [((seed & 0xFFFFFFFF) - 2**31, (seed >> 31) - 2**31) for seed in seeds]
    keys = torch.tensor(pairs, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
    return keys if device is None else keys.to(device, non_blocking=True)


def keep_mask(keys: Tensor, *, places: Sequence[Tensor], columns: Tensor, rate: float) -> Tensor:
    """Dropout mask, [*broadcast(places), columns] bool: False with probability `rate`; for the rest see `_hashes`."""
    return _hashes(keys, places=places, columns=columns) >= drop_threshold(rate)


def drop_threshold(rate: float) -> int:
    """The hash below which elements are dropped: at `rate` of the range of hashes, so with that probability."""
    return round(rate * 2**32) - 2**31


def uniform(keys: Tensor, *, places: Sequence[Tensor], columns: Tensor) -> Tensor:
    """Uniform values of -1 to 1, [*broadcast(places), columns] fp32; for the rest see `_hashes`."""
    return _hashes(keys, places=places, columns=columns) / 2.0**31


def _hashes(keys: Tensor, *, places: Sequence[Tensor], columns: Tensor) -> Tensor:
    """Uniform integers in [-2^31, 2^31), [*broadcast(places), columns] int32.

    `keys` [2] are those of the stream (`mask_keys`). `places` are integer tensors that broadcast against each other:
    the global coordinates of each row (sample, head, position), each below 2^31. `columns` [columns] are the global
    coordinates on the last dim: channels, or the keys of a query.
    """
    rows, last = keys.unbind()
    # One hash per row, int32 [*broadcast(places)]: every coordinate is mixed in, one after the other.
    for place in places:
        rows = _mix(rows ^ place.to(torch.int32))
    rows = _mix(rows ^ last)
    # One hash per element: the column, times an odd constant near 2^32 / golden ratio, is added to the row's hash.
    # Inductor would take a range times a constant for an index, which C++ forbids to wrap around; not behind an xor.
    spread = columns.to(torch.int32).bitwise_xor(0) * (0x9E3779B9 - 2**32)
    return _mix(rows.unsqueeze(-1) + spread)
