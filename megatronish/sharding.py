"""Where does each parameter live? Stated once by the layer that owns it, read by everybody else.

Initialisation, gradient reduction, norm clipping, checkpoints, conversion and counting all ask the same record. It is
keyed by the parameter's full name, never by the Parameter object (wrappers replace those).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megatronish.mesh import Axis
from megatronish.streams import normal_rectangle


class Piece(NamedTuple):
    """A rectangle of the global tensor that this rank holds."""

    global_offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    sizes: tuple[int, ...]

    def view(self, local: Tensor) -> Tensor:
        """The rectangle inside the local tensor."""
        for dim, (start, size) in enumerate(zip(self.local_offset, self.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local


class FlatPiece(NamedTuple):
    """A rectangle of the global tensor that lies in one piece in a flat tensor."""

    global_offset: tuple[int, ...]
    start: int
    sizes: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The rectangle inside the flat tensor."""
        return flat.narrow(0, self.start, torch.Size(self.sizes).numel()).view(self.sizes)


@dataclass(frozen=True)
class Shard:
    """What one rank keeps of a parameter for the optimizer: fp32 values, and where they lie in the global tensor.

    Elements that no piece covers are padding.
    """

    master: Tensor
    pieces: tuple[Piece | FlatPiece, ...]


@dataclass(frozen=True)
class Sharding:
    """How one parameter is spread.

    `shape` is the true global shape (a vocabulary without its padding). `dim` is the dim that tp cuts, None where every
    tp rank holds the whole. `sections` are parts of that dim which are cut one by one (queries, keys, values; gate,
    up), padding included: their sum is tp times the local size. `partial` says that each tp rank computes only a part
    of the gradient although it holds the whole parameter (norms under sequence parallelism). `tied` says that the
    first and the last stage both hold it. `init_std` is None for a constant `init_value`.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    sections: tuple[int, ...] = ()
    partial: bool = False
    tied: bool = False
    init_std: float | None = None
    init_value: float = 0.0

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.shape) > 1

    @property
    def num_elements(self) -> int:
        """Elements of the global tensor, padding left out."""
        return int(torch.Size(self.shape).numel())

    def pieces(self, tp: Axis) -> Iterator[Piece]:
        """The rectangles that this tp rank holds; rows of padding belong to none."""
        zeros = (0,) * len(self.shape)
        if self.dim is None:
            yield Piece(zeros, zeros, self.shape)
            return
        local, start = 0, 0
        for section in self.sections or (self.shape[self.dim],):
            size = section // tp.size
            first = start + tp.rank * size
            true_size = min(size, self.shape[self.dim] - first)
            if true_size > 0:
                yield Piece(
                    global_offset=_replace(zeros, self.dim, first),
                    local_offset=_replace(zeros, self.dim, local),
                    sizes=_replace(self.shape, self.dim, true_size),
                )
            local += size
            start += section


def flat_pieces(pieces: Iterable[Piece], shape: Sequence[int], start: int, stop: int) -> tuple[FlatPiece, ...]:
    """Elements `start` to `stop` of a tensor of this local shape, flattened, as rectangles of the global one.

    `pieces` are the rectangles of the whole local tensor; they cut no dim but the first into parts.
    """
    found = []
    for offset, sizes in _rectangles(tuple(shape), start, stop):
        for piece in pieces:
            lows = [max(a, b) for a, b in zip(offset, piece.local_offset, strict=True)]
            ends = [
                min(a + m, b + n) for a, m, b, n in zip(offset, sizes, piece.local_offset, piece.sizes, strict=True)
            ]
            common = tuple(end - low for low, end in zip(lows, ends, strict=True))
            if min(common, default=1) > 0:
                moved = zip(lows, piece.local_offset, piece.global_offset, strict=True)
                found.append(
                    FlatPiece(
                        tuple(low - here + there for low, here, there in moved), _index(lows, shape) - start, common
                    )
                )
    return tuple(found)


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, sizes) of the rectangles that elements start to stop make up: a broken row, whole rows, a broken row."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    row = torch.Size(shape[1:]).numel()
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # all within one row
        yield from _in_row(last, shape, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _in_row(first - 1, shape, start - (first - 1) * row, row)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(last, shape, 0, stop - last * row)


def _in_row(
    row: int, shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, sizes in _rectangles(shape[1:], start, stop):
        yield (row, *offset), (1, *sizes)


def _index(offset: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for place, size in zip(offset, shape, strict=True):
        index = index * size + place
    return index


def _replace(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


@runtime_checkable
class HasShardings(Protocol):
    """A module that owns parameters and says where they live, by their local names."""

    def shardings(self) -> dict[str, Sharding]: ...


def collect_shardings(module: nn.Module) -> dict[str, Sharding]:
    """The sharding of every parameter by its full name; an assertion if a module forgot one or invented one."""
    found: dict[str, Sharding] = {}
    for prefix, child in module.named_modules():
        if isinstance(child, HasShardings):
            found |= {f"{prefix}.{name}" if prefix else name: sharding for name, sharding in child.shardings().items()}
    names = [name for name, _ in module.named_parameters()]
    assert sorted(names) == sorted(found), f"no sharding, or no parameter: {set(names) ^ set(found)}"
    return {name: found[name] for name in names}


@torch.no_grad()
def initialize(module: nn.Module, shardings: dict[str, Sharding], *, seed: int, tp: Axis) -> None:
    """Fill every parameter as (seed, its name, its place in the global tensor) says; padding is zero."""
    for name, parameter in module.named_parameters():
        sharding = shardings[name]
        parameter.zero_()
        for piece in sharding.pieces(tp):
            target = piece.view(parameter)
            if sharding.init_std is None:
                target.fill_(sharding.init_value)
            else:
                values = normal_rectangle(sharding.shape, piece.global_offset, piece.sizes, names=(seed, "init", name))
                target.copy_(values * sharding.init_std)
