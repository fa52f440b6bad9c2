"""Recorder of a dry run: every operator of a step passes here on its way to tensors that have no memory.

It counts operators, FLOPs, bytes that groups of ranks exchange, and what the host waits for; it answers what tensors
without values cannot, and tells the ledger of every storage.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatronish.dry_run.ledger import Ledger

PACKAGE = Path(__file__).parents[1]
aten = torch.ops.aten

# What a GPU computes in two parts, between which the host reads a size or a value.
WAITING = {aten.nonzero, aten.masked_select, aten._unique2, aten.bincount, aten._local_scalar_dense, aten.equal}
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "send": "send",
    "recv_": "receive",
    "broadcast_": "broadcast",
}


class Sent(NamedTuple):
    """A kind of traffic: the axis, the collective, and the part of the step that repeats it."""

    axis: str
    collective: str


class Totals(NamedTuple):
    """What a part of a step has counted."""

    calls: Counter[Sent]
    bytes: Counter[Sent]
    flops: Counter[str]
    waits: Counter[str]

    @classmethod
    def empty(cls) -> "Totals":
        """Nothing counted yet."""
        return cls(Counter(), Counter(), Counter(), Counter())


class Recorder(TorchDispatchMode):
    """Dispatch mode above FakeTensorMode. `part` names the part of the step that counts are for.

    `number` is what the host reads wherever it reads an integer; truth values are True and fractions 2.
    """

    def __init__(self, ledger: Ledger, *, number: int, references: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.ledger, self.number, self.references = ledger, number, references
        self.num_operators = 0
        self.part = "build"
        self.totals: dict[str, Totals] = {}
        self._counts = Totals.empty()
        self.begin_part("build")

    def begin_part(self, part: str) -> None:
        """From now on counts are for this part."""
        self.part = part
        self._counts = self.totals.setdefault(part, Totals.empty())

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        self._counts.waits[f"{_call_site()} {what}"] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile lists of tensors and sizes of storages are seen, too, which pass no operator."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            self.ledger.resized(storage, size)
            return done

        def as_list(tensor: Tensor) -> Any:
            if tensor.device.type == self.ledger.device_type:
                self.wait("tolist")
            return _nested(tensor.shape, self._value(tensor.dtype))

        with patch.object(torch.UntypedStorage, "resize_", resized), patch.object(FakeTensor, "tolist", as_list), self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator: counted, answered here or carried out on tensors without memory."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, with the local tensors
        kwargs = kwargs or {}
        self.num_operators += 1
        packet = func._overloadpacket
        if func.namespace == "c10d":
            self._exchange(func, args)
        elif packet in flop_registry:
            self._counts.flops[packet.__name__] += 0
        reference = self.references.get(packet)
        if reference is not None:
            with self:
                return reference(*args, **kwargs)
        self._see_waits(packet, args, kwargs)
        answer = self._answer(packet, args, kwargs)
        out = func(*args, **kwargs) if answer is None else answer.value
        if packet in flop_registry:
            self._counts.flops[packet.__name__] += flop_registry[packet](*args, **kwargs, out_val=out)
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self.ledger.note(each, packet.__name__)
        return out

    def _exchange(self, func: Any, args: tuple[Any, ...]) -> None:
        name = func._overloadpacket.__name__
        group = next((each for each in args if isinstance(each, torch.ScriptObject)), None)
        axis = "" if group is None else torch.distributed.ProcessGroup.unbox(group).group_desc
        tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        sent = Sent(axis, COLLECTIVES.get(name, name))
        self._counts.calls[sent] += 1
        self._counts.bytes[sent] += max((each.numel() * each.element_size() for each in tensors), default=0)

    def _see_waits(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        device = self.ledger.device_type
        if packet in WAITING:
            if args[0].device.type == device:
                self.wait(packet.__name__)
        elif packet is aten._to_copy:
            to = kwargs.get("device")
            if to is not None and {to.type, args[0].device.type} == {device, "cpu"} and not kwargs.get("non_blocking"):
                self.wait("copy")
        elif packet is aten.copy_:
            target, source = args[:2]
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            if waits and {target.device.type, source.device.type} == {device, "cpu"}:
                self.wait("copy")

    def _answer(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Answer | None":
        """What tensors without values cannot compute."""
        if packet is aten._local_scalar_dense:
            return Answer(self._value(args[0].dtype))
        if packet is aten._pin_memory:
            return Answer(args[0].clone())
        if packet is aten.is_pinned:
            return Answer(False)
        if packet is aten.record_stream:
            return Answer(None)
        if packet is aten.nonzero:  # what is looked for is what has gone wrong
            return Answer(args[0].new_empty((0, args[0].dim()), dtype=torch.int64))
        if packet is aten.bincount:
            return Answer(args[0].new_empty(args[2] if len(args) > 2 else kwargs["minlength"], dtype=torch.int64))
        return None

    def _value(self, dtype: torch.dtype) -> bool | int | float:
        if dtype == torch.bool:
            return True
        return 2.0 if dtype.is_floating_point else self.number


class Answer(NamedTuple):
    """Result of an operator that is not carried out."""

    value: Any


def _nested(shape: Sequence[int], value: Any) -> Any:
    return [_nested(shape[1:], value) for _ in range(shape[0])] if shape else value


def _call_site() -> str:
    """`file:line function` of the innermost line of the package that is no part of the dry run."""
    frame = sys._getframe(1)
    own = str(PACKAGE / "dry_run")
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(PACKAGE)) and not path.startswith(own):
            return f"{Path(path).relative_to(PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"
