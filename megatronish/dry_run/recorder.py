"""Recorder of a dry run: every operator of a step passes here on its way to tensors that have no memory.

It counts operators, FLOPs, the bytes that groups of ranks exchange, and what the host waits for; it answers what
tensors without values cannot, and tells the ledger of every storage.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatronish.dry_run.gpu import Reference
from megatronish.dry_run.ledger import StorageLedger
from megatronish.estimate.costs.step_traffic import TrafficKey

aten, prim = torch.ops.aten, torch.ops.prim

# FLOPs of the products in a dry run: torch's formulas, those that it lacks, and what is a product by its name.


# A part of an operator's name that only matrix products, convolutions and attention have.
PRODUCT = re.compile(
    r"(^|_)(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|v?dot|matmul|linear|bilinear|einsum|gemm|\w*conv(olution)?(\d?d)?|\w*attention|lstm|gru|rnn)(_|$)"
)


def grouped_flops(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Of rows by their groups, [N, k] x [E, k, n]; of sums over groups of rows, [m, N] x [N, n]; of all pairs."""
    rows = x.shape if weight.dim() == 3 else x.shape[-2:]  # [E, m, k] x [k, N]: each of the N columns has one group
    return 2 * prod(rows) * weight.shape[-1]


OWN_FORMULAS: dict[Any, Callable[..., Any]] = {aten._grouped_mm: grouped_flops}
FACTORS = {aten.mm: 2, aten.bmm: 2, aten.addmm: 3, aten.baddbmm: 3}
"""Arguments that are tensors, of products whose result may have a dtype of its own."""
LIKE = {  # the same product under another name
    "_addmm_activation": "addmm",
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}


def formula_of(packet: Any) -> Callable[..., Any] | None:
    """What counts an operator's FLOPs from its arguments; in place or not, a product has the same."""
    # A formula belongs to one operator; forms in place have the underscore in addition, and fused ones another name.
    if (formula := flop_registry.get(packet) or OWN_FORMULAS.get(packet)) is not None:
        return formula
    name = packet.__name__.removesuffix("_")
    other = LIKE.get(name, name if name != packet.__name__ else None)
    if other is None or not is_product(name) or not hasattr(aten, other):
        return None
    return flop_registry.get(getattr(aten, other))


def is_product(name: str) -> bool:
    """Whether an operator multiplies matrices, by its name: without a formula it must be reported, not counted as 0."""
    return PRODUCT.search(name) is not None


# Devices of an operator's tensors in a dry run: what a GPU would refuse is refused.
#
# Tensors without memory meet more freely than those of a GPU: next to tensors on a device they take any tensor of no
# dimension on the CPU, as torch takes a number. torch does that where a kernel computes element by element and is
# handed such a tensor as a number. Elsewhere (stack, cat, foreach, norms, fused optimizers, our own operators) it
# raises, or reads the CPU's memory by a pointer of the device.


# Between devices; and those that move, or make a number of, a tensor without dimensions.
MOVING = {aten.copy_, aten._to_copy, aten.copy, aten._foreach_copy_, aten.set_, aten._pin_memory, aten.is_pinned}
TAKES_NUMBERS = {aten.where, aten.masked_fill, aten.masked_fill_, aten.fill, aten.fill_}
WITH_INDICES_ON_CPU = {
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
}  # indices on the CPU are copied
RANDOM_STATE = "attention"  # SDPA's seed and offset are numbers on the CPU, which its backward is given back


def refuse_mixed_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """RuntimeError if an operator has tensors of several devices and torch's kernels would not take them."""
    # 1. Most operators have tensors of one device. Copies between two, and collectives, are what moves them.
    tensors = list(_tensors((args, kwargs)))
    devices = {tensor.device for tensor in tensors}
    packet = func._overloadpacket
    if len(devices) < 2 or func.namespace in ("c10d", "prim") or packet in MOVING:
        return
    # 2. Indices may be on the CPU, as torch copies them; what is indexed and what is written there must be together.
    if packet in WITH_INDICES_ON_CPU and args[0].device.type != "cpu":
        others = [args[0], *args[2:3]]
        if len({tensor.device for tensor in others if isinstance(tensor, Tensor) and tensor.dim()}) == 1:
            return
    # 3. A tensor without dimensions on the CPU may stand for a number, but only where the kernel takes one.
    numbers = [tensor for tensor in tensors if tensor.dim() == 0 and tensor.device.type == "cpu"]
    rest = {tensor.device for tensor in tensors if not any(tensor is number for number in numbers)}
    if len(rest) == 1 and _takes_numbers(func, args, numbers):
        return
    shapes = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
    raise RuntimeError(f"{func} of tensors on several devices, which a GPU refuses: {shapes}")


def _takes_numbers(func: Any, args: tuple[Any, ...], numbers: list[Tensor]) -> bool:
    """Whether these tensors without dimensions stand where a kernel takes a number."""
    packet, name = func._overloadpacket, func._overloadpacket.__name__
    if RANDOM_STATE in name and func.namespace == "aten":
        return True
    if name.startswith("_foreach_"):  # of two lists, each element with its own; a tensor that is in no list is a number
        return func._overloadname == "Tensor" and all(any(number is arg for arg in args) for number in numbers)
    # What is written in place is no number to a kernel.
    is_written = name.endswith("_") and any(args[0] is number for number in numbers)
    return (torch.Tag.pointwise in func.tags or packet in TAKES_NUMBERS) and not is_written


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


PACKAGE = str(Path(__file__).parents[1])
OWN = str(Path(__file__).parent)

# What a GPU computes in two parts, between which the host reads a size or a value.
WAITING = {aten.nonzero, aten.masked_select, aten._unique2, aten.bincount, aten._local_scalar_dense, aten.equal}
INDEXED = {aten.index, aten.index_put, aten.index_put_}
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "send": "send",
    "recv_": "receive",
}
FROM_HOST = {"world", "dp", "checkpoint"}  # axes of the mesh that move what is not on a GPU, too
# Files that read what is 0 or False where all goes well. To nan_origin.py False says "not finite": it has a look.
SOUND = {"train/hooks/replicas.py", "train/checkpoint_state.py", "engine/nan_origin.py", "inference/generate.py"}


@dataclass
class StepCounts:
    """What a part of a step does. `sent` are bytes: of each call, those of its largest tensor."""

    calls: Counter[TrafficKey] = field(default_factory=Counter)
    sent: Counter[TrafficKey] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)  # calls of products whose FLOPs no formula counts
    waits: Counter[str] = field(default_factory=Counter)
    operators: int = 0
    launches: int = 0  # of kernels on the device, an operator of torch's as one


# What starts no kernel: views, which the schema tells, and these. And operators of ours that start several.
WITHOUT_KERNEL = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._unsafe_view),
    *(aten.set_, aten.resize_, aten.record_stream, aten.is_pinned, aten._pin_memory, aten.detach, aten.lift_fresh),
}
SEVERAL = {"layer_norm_backward": 2, "rms_norm_backward": 2, "dropped_attention_backward": 3}


class FixedResult(NamedTuple):
    """Result of an operator that is not computed."""

    value: Any


class StepRecorder(TorchDispatchMode):
    """Dispatch mode above FakeTensorMode. StepCounts are kept for each part of the step by itself (`begin_part`).

    `number` is what the host reads wherever it reads an integer of the device; truth values are True, fractions 2. What
    the files of SOUND read is 0 and False.
    `references` are the operators that run by the operators that they are made of.
    """

    def __init__(self, device_type: str, *, number: int, references: Mapping[Any, Reference]) -> None:
        super().__init__()
        self.ledger = StorageLedger(device_type, _call_site)
        self.number, self.references = number, references
        self.parts: dict[str, StepCounts] = {}
        self.begin_part("build")

    def begin_part(self, part: str) -> None:
        """From now on counts are for this part."""
        self._counts = self.parts.setdefault(part, StepCounts())

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        self._counts.waits[f"{_call_site()} ({what})"] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile operators are recorded, and lists of tensors and sizes of storages, which pass no operator."""
        # Two ways around the dispatcher: memory is given back and taken by resizing a storage (gradients,
        # `fully_shard`), and tolist reads values.
        resize, to_list = torch.UntypedStorage.resize_, FakeTensor.tolist

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            self.ledger.resized(storage, size)
            return done

        def as_list(tensor: Tensor) -> Any:
            if tensor.device.type == self.ledger.device_type:
                self.wait("tolist")
            return _nested(tensor.shape, self._value(tensor.dtype))

        torch.UntypedStorage.resize_, FakeTensor.tolist = resized, as_list  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_, FakeTensor.tolist = resize, to_list  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One operator: counted, answered here or run on tensors without memory."""
        packet = func._overloadpacket
        # 1. What is no operator of the step: questions about a device, wrappers around other tensors, operators that
        # are run by parts. Their parts come back here and are counted there.
        if packet is prim.device:
            return func(*args)
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its local tensors come here next
        kwargs = kwargs or {}
        reference = self.references.get(packet)
        if reference is not None:
            return self._by_parts(reference, args, kwargs)
        if packet is aten.matmul:  # in a reference, below autograd, which takes it apart elsewhere
            with self:
                return func.decompose(*args, **kwargs)
        # 2. Before it runs: what a GPU would refuse, what is sent, and whether the host would wait for the result.
        self._counts.operators += 1
        refuse_mixed_devices(func, args, kwargs)
        if func.namespace == "c10d":
            self._see_exchange(packet.__name__, args)
        elif func.namespace == "aten":
            self._see_wait(packet, args, kwargs)
        # 3. Run on tensors without memory, or answered: fake tensors raise where a result depends on values.
        answer = self._answer(packet, args, kwargs)
        out = func(*args, **kwargs) if answer is None else answer.value
        self._counts.launches += self._launches(func, args, out)
        # 4. FLOPs. A product without a formula is listed, as 0 would make every throughput too high without a sign.
        formula = formula_of(packet)
        if formula is not None:
            # Products that return another dtype than their operands' have it as a further argument.
            operands = args[: FACTORS.get(packet, len(args))]
            self._counts.flops[packet.__name__] += formula(*operands, **kwargs, out_val=out)
        elif is_product(packet.__name__):
            self._counts.uncounted[packet.__name__] += 1
        # 5. Memory: results whose storage is new are allocations; views and results in place are known to the ledger.
        if isinstance(out, Tensor):
            self.ledger.note(out, packet.__name__)
        elif isinstance(out, tuple | list):
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self.ledger.note(leaf, packet.__name__)
        return out

    def _launches(self, func: Any, args: tuple[Any, ...], out: Any) -> int:
        """Kernels that an operator starts on the device; a collective is none of them."""
        packet = func._overloadpacket
        if func.is_view or packet in WITHOUT_KERNEL or func.namespace in ("c10d", "prim"):
            return 0
        is_here = any(tensor.device.type == self.ledger.device_type for tensor in _tensors((out, args)))
        return SEVERAL.get(packet.__name__, 1) if is_here else 0

    def _by_parts(self, reference: Reference, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operator by those that it is made of, whose FLOPs count as often as it says."""
        flops = self._counts.flops
        before = flops.copy()
        with self:
            out = reference.run(*args, **kwargs)
        # Of attention with dropout only the largest blocks run here; the FLOPs of all blocks are in proportion to
        # theirs.
        if reference.times is not None:
            times = reference.times(*args, **kwargs)
            for name, value in flops.items():
                flops[name] = before[name] + int((value - before[name]) * times)
        return out

    def _see_exchange(self, name: str, args: tuple[Any, ...]) -> None:
        group = next((each for each in args if isinstance(each, torch.ScriptObject)), None)
        axis = (
            ""
            if group is None
            else torch.distributed.ProcessGroup.unbox(group).group_desc.replace("default_pg", "world")
        )
        tensors = [tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]
        traffic = TrafficKey(axis, COLLECTIVES.get(name, name))
        # Groups of gloo move tensors of the CPU, those of NCCL tensors of the GPU; on a GPU this call would fail or
        # hang.
        kinds = {tensor.device.type for tensor in tensors}
        strange = kinds - {self.ledger.device_type}
        if strange and (axis not in FROM_HOST or len(kinds) > 1):
            raise RuntimeError(
                f"{_call_site()}: {traffic.collective} over {axis} of a tensor on {strange.pop()}, where this axis "
                f"only moves tensors on {self.ledger.device_type}"
            )
        self._counts.calls[traffic] += 1
        # The largest tensor is the whole one: of a gather its output, of a reduce-scatter its input.
        self._counts.sent[traffic] += max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)

    def _see_wait(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Whether the host waits: for a value, a size, or a copy between the device and memory that is not pinned."""
        # 1. A value or a size: the host waits only if it is the device's.
        if packet in WAITING:
            if args[0].device.type == self.ledger.device_type:
                self.wait(packet.__name__)
            return
        if packet in INDEXED and args[0].device.type == self.ledger.device_type:
            if any(index is not None and index.device.type == "cpu" for index in args[1]):
                self.wait("copy of the indices")
            return
        # 2. Copies between host and device: without non_blocking the host waits for everything before them.
        ends: set[str] = set()
        if packet is aten._to_copy and kwargs.get("device") is not None:
            ends = {kwargs["device"].type, args[0].device.type}
        elif packet is aten.copy_:
            ends = {args[0].device.type, args[1].device.type}
            kwargs = {"non_blocking": args[2]} if len(args) > 2 else kwargs
        if ends == {self.ledger.device_type, "cpu"} and not kwargs.get("non_blocking"):
            self.wait("copy")

    def _answer(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FixedResult | None:
        """What tensors without values cannot compute."""
        if packet is aten._local_scalar_dense:
            return FixedResult(self._value(args[0].dtype))
        if packet is aten._pin_memory:
            return FixedResult(args[0].clone())
        if packet is aten.is_pinned:
            return FixedResult(False)
        if packet in (aten.record_stream, aten._fused_sgd_):  # both change nothing that is known here
            return FixedResult(None)
        if packet is aten.nonzero:  # what is looked for is what has gone wrong
            return FixedResult(args[0].new_empty((0, args[0].dim()), dtype=torch.int64))
        if packet is aten.bincount:
            return FixedResult(args[0].new_empty(args[2] if len(args) > 2 else kwargs["minlength"], dtype=torch.int64))
        return None

    def _value(self, dtype: torch.dtype) -> bool | int | float:
        # Truth values are True (norms are finite, tensors agree), so that a step succeeds; what files of SOUND read is
        # the opposite.
        is_sound = _call_site().split(":")[0] in SOUND
        if dtype == torch.bool:
            return not is_sound
        return 2.0 if dtype.is_floating_point else 0 if is_sound else self.number


def _nested(shape: Sequence[int], value: Any) -> Any:
    return [_nested(shape[1:], value) for _ in range(shape[0])] if shape else value


def _call_site() -> str:
    """`file:line function` of the innermost line of the package that is no part of the dry run."""
    # Frames of torch and of the dry run lie between: the innermost line of the run itself is what a reader can change.
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE) and not path.startswith(OWN):
            return f"{path[len(PACKAGE) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "torch"
