"""Sharding records: where each parameter lives, stated once by the layer that owns it.

Initialisation, gradient reduction, norms, Muon, checkpoints, conversion and counting all read the same record. It is
keyed by the parameter's full name, never by the Parameter object (wrappers replace those). A record names axes; a
`Domain` of the mesh has them. What follows from the two is derived here and nowhere else:

    pieces        the rectangles of the global tensor that a rank holds
    sums_over     the axes over which a gradient is summed besides those of the data ranks
    is_counted    of the model ranks and stages that hold the same elements, the one that counts them (norms, Muon,
                  checkpoints)

Data ranks are no part of `is_counted`: shards are disjoint, and replicas are left out by `Domain.counting_axes` (norms)
or take turns (checkpoints). The whole rule stands in `global_norm` (optim/global_norm.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megatronish.parallel.mesh import Axis, Domain
from megatronish.parallel.streams import normal_rectangle

Tied = Literal["ends", "stages"]
"""Which pipeline stages hold a parameter that several hold: the first and the last, or every one."""
Role = Literal["matrix", "embedding", "head", "positions", "vector", "qk_norm", "router", "end", "lora_a", "lora_b"]
"""What a parameter is to the optimizer: vectors (norms, biases) do not decay, and Muon steps matrices alone.

The norms of queries and keys, which are vectors, decay if --apply-wd-to-qk-layernorm says so. Word embedding and head
have a learning rate of their own with --decoupled-lr. "end" are matrices after the layers, which every rank of tp has
whole.

The two factors of LoRA may have different learning rates (LoRA+).
"""


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
    """A rectangle of the global tensor whose elements are consecutive in a flat tensor."""

    global_offset: tuple[int, ...]
    start: int
    sizes: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The rectangle inside the flat tensor."""
        return flat.narrow(0, self.start, torch.Size(self.sizes).numel()).view(self.sizes)


@dataclass(frozen=True)
class Shard:
    """The elements of a parameter that this rank keeps for the optimizer, and where they lie in the global tensor.

    Elements that no piece covers are padding.
    """

    master: Tensor
    pieces: tuple[Piece | FlatPiece, ...]


class Cut(NamedTuple):
    """A dim that the ranks of an axis hold in parts.

    `sections` are parts of the dim that are cut one by one (queries, keys, values; gate, up), padding included: their
    sum is the axis's size times the local size. Empty: the dim is one section without padding.
    """

    dim: int
    axis: str
    sections: tuple[int, ...] = ()


class Init(NamedTuple):
    """Initial values: normal with standard deviation `std`, or where that is None the constant `value`."""

    std: float | None = None
    value: float = 0.0


ZEROS = Init()


@dataclass(frozen=True)
class Sharding:
    """Layout of one parameter over the model axes of its reduction domain.

    `shape` is the true global shape (a vocabulary without its padding). `cuts` name the axes that cut it; every other
    model axis of the domain holds copies. `partial_over` names the axes over which each rank computes a part of the
    gradient although it holds the whole parameter (norms under sequence parallelism). `domain` names the groups of data
    ranks that sum its gradient. `role` None stands for a matrix, or for a vector where there is one dim. `tied` says
    which pipeline stages hold it, if they are several.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    partial_over: frozenset[str] = frozenset()
    domain: str = "dense"
    role: Role | None = None
    tied: Tied | None = None
    init: Init = ZEROS

    def __post_init__(self) -> None:
        if self.role is None:
            object.__setattr__(self, "role", "matrix" if len(self.shape) > 1 else "vector")

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to all except norms and biases."""
        return not self.is_vector

    @property
    def is_vector(self) -> bool:
        """Whether the parameter is a norm's or a bias."""
        return self.role in ("vector", "qk_norm")

    @property
    def is_rounded(self) -> bool:
        """Whether a model with weights as codes (qwZ) rounds it: a matrix, but no table of score biases."""
        return not self.is_vector and self.tied != "stages"

    @property
    def is_vocabulary(self) -> bool:
        """Whether the parameter is the word embedding or the output layer."""
        return self.role in ("embedding", "head")

    @property
    def num_elements(self) -> int:
        """Elements of the global tensor, padding left out."""
        return int(torch.Size(self.shape).numel())

    @property
    def cut_axes(self) -> frozenset[str]:
        """Names of the axes that cut the parameter."""
        return frozenset(cut.axis for cut in self.cuts)

    def pieces(self, axes: Mapping[str, Axis]) -> Iterator[Piece]:
        """Rectangles that this rank holds; rows of padding belong to none. `axes` are the model axes by name."""
        runs = [[(0, 0, size)] for size in self.shape]  # of each dim: (global start, local start, size)
        for cut in self.cuts:
            runs[cut.dim] = list(_runs(self.shape[cut.dim], cut.sections, axes[cut.axis]))
        for rectangle in product(*runs):
            global_offset, local_offset, sizes = zip(*rectangle, strict=True) if rectangle else ((), (), ())
            yield Piece(global_offset, local_offset, sizes)

    @property
    def is_shared(self) -> bool:
        """Whether several layers read the parameter, so that its gradient comes in parts of one backward."""
        return self.tied == "stages"

    def holders(self, domain: Domain) -> Axis:
        """The pipeline stages that hold the parameter and sum its gradient, or this one alone."""
        return Axis("stage") if self.tied is None else domain.holders.get(self.tied, Axis("stage"))

    def sums_over(self, domain: Domain) -> tuple[Axis, ...]:
        """Axes of more than one rank over which the gradient is summed besides the domain's data ranks."""
        axes = [axis for name, axis in domain.model.items() if name in self.partial_over]
        return tuple(axis for axis in (*axes, self.holders(domain)) if axis.size > 1)

    def is_counted(self, domain: Domain) -> bool:
        """Whether this rank's elements count where every element must count once over the model axes and stages.

        Of the model ranks that hold the same elements, the first counts them: rank 0 of every model axis that does not
        cut the parameter, and the first of the stages that hold a tied one. Replicas on data ranks are not told apart
        here: see `Domain.counting_axes`.
        """
        uncut = [axis for name, axis in domain.model.items() if name not in self.cut_axes]
        return all(axis.is_first for axis in (*uncut, self.holders(domain)))


def _runs(size: int, sections: tuple[int, ...], axis: Axis) -> Iterator[tuple[int, int, int]]:
    """(global start, local start, size) of what a rank of the axis holds of a dim: a run of each section."""
    local, start = 0, 0
    for section in sections or (size,):
        part = section // axis.size
        first = start + axis.rank * part
        if (true_size := min(part, size - first)) > 0:
            yield first, local, true_size
        local += part
        start += section


def flat_pieces(pieces: Iterable[Piece], shape: Sequence[int], start: int, stop: int) -> tuple[FlatPiece, ...]:
    """Elements `start` to `stop` of a tensor of this local shape, flattened, as rectangles of the global one.

    `pieces` are the rectangles of the whole local tensor. One that does not span the later dims of the local tensor
    (sections of a dim other than the first) is taken apart, so that each result is consecutive in the flat tensor.
    """
    flat = []
    for offset, sizes in _rectangles(tuple(shape), start, stop):
        for piece in pieces:
            # The overlap of the run's rectangle and the piece, in local coordinates.
            lows = [max(a, b) for a, b in zip(offset, piece.local_offset, strict=True)]
            ends = [
                min(a + m, b + n) for a, m, b, n in zip(offset, sizes, piece.local_offset, piece.sizes, strict=True)
            ]
            common = tuple(end - low for low, end in zip(lows, ends, strict=True))
            if min(common, default=1) <= 0:
                continue
            for low, part in _consecutive(tuple(lows), common, shape):
                moved = zip(low, piece.local_offset, piece.global_offset, strict=True)
                global_offset = tuple(at - here + there for at, here, there in moved)
                flat.append(FlatPiece(global_offset, _index(low, shape) - start, part))
    return tuple(flat)


def _consecutive(
    offset: tuple[int, ...], sizes: tuple[int, ...], shape: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, sizes) of the parts of a rectangle whose elements are consecutive in the flattened tensor.

    That is so if every dim after the first one of more than one element is spanned.
    """
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    if all(size == whole for size, whole in zip(sizes[dim + 1 :], shape[dim + 1 :], strict=True)):
        yield offset, sizes
        return
    for index in range(sizes[dim]):
        yield from _consecutive(
            (*offset[:dim], offset[dim] + index, *offset[dim + 1 :]), (*sizes[:dim], 1, *sizes[dim + 1 :]), shape
        )


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


@runtime_checkable
class HasShardings(Protocol):
    """A module that owns parameters and states their sharding, by their local names."""

    def shardings(self) -> dict[str, Sharding]: ...


def collect_shardings(module: nn.Module) -> dict[str, Sharding]:
    """The sharding of every parameter by its full name; an assertion if a module forgot one or invented one."""
    shardings: dict[str, Sharding] = {}
    for prefix, child in module.named_modules():
        if isinstance(child, HasShardings):
            shardings |= {
                f"{prefix}.{name}" if prefix else name: sharding for name, sharding in child.shardings().items()
            }
    names = [name for name, _ in module.named_parameters()]
    assert sorted(names) == sorted(shardings), f"no sharding, or no parameter: {set(names) ^ set(shardings)}"
    return {name: shardings[name] for name in names}


@torch.no_grad()
def initialize(
    module: nn.Module, shardings: Mapping[str, Sharding], *, seed: int, domains: Mapping[str, Domain]
) -> None:
    """Fill every parameter as (seed, its name, its place in the global tensor) says; padding is zero."""
    for name, parameter in module.named_parameters():
        sharding = shardings[name]
        parameter.zero_()
        fill_zeros(parameter, sharding, domains[sharding.domain], names=(seed, "init", name))


def fill_zeros(zeros: Tensor, sharding: Sharding, domain: Domain, *, names: tuple[str | int, ...]) -> None:
    """Write the initial values of what this rank holds of a parameter, in any precision, into zeros of its shape."""
    for piece in sharding.pieces(domain.model):
        fill_initial(piece.view(zeros), sharding, piece.global_offset, names=names)


def fill_initial(
    target: Tensor, sharding: Sharding, global_offset: tuple[int, ...], *, names: tuple[str | int, ...]
) -> None:
    """Write the initial values of the rectangle of the global tensor that begins at `global_offset`."""
    if sharding.init.std is None:
        target.fill_(sharding.init.value)
        return
    values = normal_rectangle(sharding.shape, global_offset, tuple(target.shape), names=names)
    target.copy_(values.mul_(sharding.init.std))
