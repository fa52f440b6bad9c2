"""Files of a checkpoint of Megatron-LM in its format `torch_dist`, which torch.distributed.checkpoint wrote.

    metadata.json                  the backend: torch_dist
    common.pt                      all that is the same on every rank, the arguments among it
    .metadata                      which rectangles of which tensors lie where (checkpoint/foreign.py)
    __0_0.distcp, __0_1.distcp     rectangles of rank 0, and objects, each by torch.save, one after the other
    __1_0.distcp, ...

Tensors are global: how many ranks wrote them is only seen in the rectangles. A region of a tensor is read rectangle by
rectangle, each straight from the bytes that it has, without running code (formats/torch_file).
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megatronish.checkpoint.foreign import ListedTensor, Rectangle, read_listing
from megatronish.checkpoint.metadata import METADATA
from megatronish.core.errors import UserError
from megatronish.formats.megatron.values import LARGEST, quote
from megatronish.formats.torch_file.archive import TorchFile
from megatronish.formats.torch_file.unpickler import Arguments, Stored

COMMON = "common.pt"
BACKEND_FILE = "metadata.json"
BACKEND = "torch_dist"
STEPS = ("common_step", "step")
SCALER = "grad_scaler"  # of fp16
LARGEST_SCALE = 2.0**120
LOSS_SCALE = ("scale", "growth_tracker", "hysteresis_tracker")
DEPTH = 8  # levels of nested states of optimizers
REMEDY = "load it into Megatron-LM and save it again with --ckpt-format torch_dist"


def is_distributed(folder: Path) -> bool:
    """Whether an iteration's folder has the files of a distributed format, of whatever backend."""
    return (folder / BACKEND_FILE).is_file() or (folder / METADATA).is_file()


def check_backend(folder: Path) -> None:
    """UserError for a folder in a distributed format other than torch_dist."""
    path = folder / BACKEND_FILE
    if not path.is_file():
        raise UserError(
            f"{folder} has {METADATA} and no {BACKEND_FILE}: its save was not finished, or it is in Megatron-LM's "
            f"format torch_dcp or fsdp_dtensor, which are not read here; name an older iteration, or {REMEDY}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); fetch it again") from error
    backend = content.get("sharded_backend") if isinstance(content, dict) else None
    if backend != BACKEND:
        raise UserError(
            f"{path} says sharded_backend {quote(backend)}, and only {BACKEND} and the format torch are read here; "
            f"{REMEDY}"
        )
    if not (folder / METADATA).is_file():
        raise UserError(f"{folder / METADATA} is missing, and only it says where tensors lie; fetch it again")


class Common(NamedTuple):
    """Content of common.pt: the arguments, the iteration of the save, and the number of Adam's steps, if said.

    `loss_scale` is the state of a dynamic one, and empty without it.
    """

    args: Mapping[str, Any]
    iteration: int
    num_updates: int | None
    loss_scale: Mapping[str, float]


def read_common(folder: Path) -> Common:
    """Content of common.pt; UserError if it has no arguments."""
    path = folder / COMMON
    if not path.is_file():
        raise UserError(f"{path} is missing, which holds the arguments of the model; fetch it again")
    file = TorchFile(path)
    content = file.content if isinstance(file.content, dict) else {}
    args = content.get("args")
    if not isinstance(args, Arguments):
        raise UserError(
            f"{path} holds no arguments (args), as Megatron-LM's training writes them, so it is not known which model "
            f"it holds; {REMEDY}"
        )
    states = content.get("optimizer")
    steps = {count_of(_read(file, value)) for value in _named_in(states, STEPS)}
    num_updates = steps.pop() if len(steps) == 1 else None
    scales = [_loss_scale(file, scaler) for scaler in _named_in(states, (SCALER,))]
    loss_scale = scales[0] if scales and all(scale == scales[0] for scale in scales) else {}
    return Common(args.values, count_of(content.get("iteration")) or 0, num_updates, loss_scale)


def _named_in(states: Any, names: Collection[str], depth: int = 0) -> Iterator[Any]:
    """Values of these names in the states of one optimizer or of several, which differ in form by their kind."""
    if depth > DEPTH or not isinstance(states, dict | list):  # bounded: a pickle can hold a dict that holds itself
        return
    for key, value in states.items() if isinstance(states, dict) else enumerate(states):
        if key in names and value is not None:
            yield value
        else:
            yield from _named_in(value, names, depth + 1)


def _loss_scale(file: TorchFile, scaler: Any) -> dict[str, float]:
    """State of a dynamic loss scale; empty for that of a constant one, and for one that cannot be read."""
    if not isinstance(scaler, dict) or any(name not in scaler for name in LOSS_SCALE):
        return {}
    state = {name: _number_of(_read(file, scaler[name])) for name in LOSS_SCALE}
    known = {name: value for name, value in state.items() if value is not None and abs(value) < LARGEST_SCALE}
    return known if len(known) == len(state) and known["scale"] > 0 else {}


def _read(file: TorchFile, value: Any) -> Any:
    return file.tensor(value).read() if isinstance(value, Stored) else value


def _number_of(value: Any) -> float | None:
    """A number, of whatever type; None for anything else."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return number if type(number) in (int, float) else None


def count_of(value: Any) -> int | None:
    """A whole number that is at least zero, of whatever type; None for anything else."""
    number = _number_of(value)
    return int(number) if number is not None and 0 <= number < LARGEST and number % 1 == 0 else None


class DistributedFiles:
    """Reader of the tensors of a folder: `tensors` by name, and the names of the `objects` that are none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.tensors, objects = read_listing(folder)
        except Exception as error:  # a damaged pickle may raise an error of any class
            reason = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:200])
            raise UserError(
                f"{folder / METADATA} is refused ({reason}); nothing of it was run, fetch it from a source you trust"
            ) from error
        self.objects = tuple(objects)

    def check(self, names: Iterable[str]) -> None:
        """UserError unless all elements of these tensors are there, and every file has the bytes of them."""
        ends: dict[str, int] = {}
        for name in names:
            tensor = self.tensors[name]
            for _, _, (file, start, length) in tensor.rectangles:
                ends[file] = max(ends.get(file, 0), start + length)
            stored = sum(prod(rectangle.sizes) for rectangle in tensor.rectangles)
            if stored != prod(tensor.shape):
                raise UserError(
                    f"{self.folder}: {name} is {list(tensor.shape)}, and {stored} elements of it are there; its save "
                    "was not finished, name another iteration"
                )
        for file, end in ends.items():
            path = self.folder / file
            size = path.stat().st_size if path.is_file() else None
            if size is None:
                raise UserError(f"{path} is missing, and {METADATA} says that tensors lie in it; fetch it again")
            if size < end:
                raise UserError(f"{path} has {size} bytes, and {METADATA} says {end}; it is cut short, fetch it again")

    def fill(self, target: Tensor, name: str, index: tuple[int, ...]) -> None:
        """Fill `target` with the rows from 0 on of a tensor, at `index` in its first dims."""
        view = target.view(*(1 for _ in index), *target.shape)
        first = (*index, *(0 for _ in target.shape))
        listed = self.tensors[name]
        for rectangle in listed.rectangles:
            # Where the region and the rectangle overlap: from `begin` to `end` of each dim of the global tensor.
            begin = [max(edges) for edges in zip(first, rectangle.offsets, strict=True)]
            ends = zip(first, view.shape, rectangle.offsets, rectangle.sizes, strict=True)
            end = [min(start + size, offset + width) for start, size, offset, width in ends]
            sizes = tuple(stop - start for start, stop in zip(begin, end, strict=True))
            if all(size > 0 for size in sizes):
                place = view
                for dim, size in enumerate(sizes):
                    place = place.narrow(dim, begin[dim] - first[dim], size)
                inside = tuple(start - offset for start, offset in zip(begin, rectangle.offsets, strict=True))
                place.copy_(self._part(name, listed, rectangle, inside, sizes))

    def _part(
        self,
        name: str,
        listed: ListedTensor,
        rectangle: Rectangle,
        inside: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> Tensor:
        """Part [*sizes] of a stored rectangle, at `inside` in it; no other elements are read where it is of rows."""
        file, start, length = rectangle.place
        saved = TorchFile(self.folder / file, (start, length))
        stored = saved.content
        if (
            not isinstance(stored, Stored)
            or saved.tensor(stored).shape != rectangle.sizes
            or stored.dtype != listed.dtype
        ):
            raise UserError(
                f"{self.folder / file} holds no {listed.dtype} {list(rectangle.sizes)} where {name} lies; it is of "
                "another checkpoint, fetch all files again"
            )
        skipped = sum(number * stride for number, stride in zip(inside, stored.strides, strict=True))
        return saved.tensor(replace(stored, offset=stored.offset + skipped, shape=sizes)).read()
