"""Safe unpickler of torch.save's files: it runs nothing that the pickle names.

A pickle imports names and calls them. Here a name is resolved in one of three ways:

    in ALLOWED                      a function or class of this file, or a builtin, that does what the name would
    in INERT or INERT_PACKAGES      an `Inert` stand-in, for objects of no use to a conversion (Megatron-LM has enums
                                    among its arguments, numpy its random states)
    anything else                   `Refused`

The objects that names resolve to can only be called: they have no state to be set and no attributes to be changed. So
a file can neither run code nor change how the next file is read.
"""

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from megatronish.core.pickles import SealedCall, plain_values, refuse_bombs, shape_of

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
INERT_PACKAGES = {"megatron", "transformer_engine", "apex", "numpy"}
INERT = {
    ("_codecs", "encode"),
    ("_io", "BytesIO"),
    ("builtins", "bytearray"),
    ("builtins", "getattr"),  # by which some versions of Python pickle a member of an enum
    ("builtins", "slice"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("signal", "Signals"),
    ("torch", "Generator"),
    ("torch", "Tensor"),
    ("torch", "device"),
    ("torch.nn.parameter", "Parameter"),
}


class Refused(pickle.UnpicklingError):
    """UnpicklingError: the pickle names something that is not allowed, or changes something that has no state."""


class _Sealed:
    """Base of objects that a pickle may refer to and call, but not change."""

    def __setstate__(self, state: object) -> None:
        raise Refused("it changes an object that has no state to be changed")


class Inert:
    """Stand-in for an object of a class that is not read: it accepts all that a pickle does to it, and ignores it."""

    __slots__ = ()

    def __new__(cls, *_args: object) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *_args: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, item: object) -> None: ...

    def extend(self, items: object) -> None: ...

    def add(self, item: object) -> None: ...


class Arguments:
    """Content of an argparse.Namespace: `values` by name, unchecked."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise Refused("the state of an argparse.Namespace is no dict of names")
        self.values = dict(state)


@dataclass(frozen=True)
class Storage(_Sealed):
    """Storage of the record data/`key`: `length` elements of `dtype`, or bytes if that is None."""

    key: str
    dtype: torch.dtype | None
    length: int


@dataclass(frozen=True)
class Stored(_Sealed):
    """Tensor as a pickle describes it, unchecked: a strided view of a storage, from element `offset` on."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: Any
    strides: Any


@dataclass(frozen=True)
class _StorageKind(_Sealed):
    """Stand-in for torch.FloatStorage and the other typed storages: their dtype."""

    dtype: torch.dtype | None


def _tensor(storage: Storage, offset: int, shape: Any, strides: Any, *_unused: object) -> Stored:
    if not isinstance(storage, Storage) or storage.dtype is None:
        raise Refused("a tensor has no storage")
    return Stored(storage, storage.dtype, offset, shape, strides)


def _tensor_of_bytes(
    storage: Storage,
    offset: int,
    shape: Any,
    strides: Any,
    _requires_grad: object,
    _hooks: object,
    dtype: torch.dtype,
    *_unused: object,
) -> Stored:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise Refused("a tensor has no storage or no dtype")
    return Stored(storage, dtype, offset, shape, strides)


def _first(first: Any, *_unused: object) -> Any:
    return first


def _set(values: Any = ()) -> set[Any]:
    return set(plain_values(values))


def _frozen(values: Any = ()) -> frozenset[Any]:
    return frozenset(plain_values(values))


def _ordered(pairs: Any = ()) -> OrderedDict[str, Any]:
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs
    ):
        raise Refused("an OrderedDict is made of something else than pairs of a name and a value")
    return OrderedDict(pairs)


def _of_subclass(function: Any, _kind: object, args: Any, _state: object) -> Any:
    if not isinstance(function, SealedCall) or not isinstance(args, tuple):
        raise Refused("a tensor is not made by torch")
    return function(*args)


ALLOWED: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): Arguments,
    ("builtins", "complex"): complex,
    ("builtins", "frozenset"): SealedCall(_frozen),
    ("builtins", "set"): SealedCall(_set),
    ("collections", "OrderedDict"): SealedCall(_ordered),
    ("torch", "Size"): SealedCall(shape_of),
    ("torch._tensor", "_rebuild_from_type_v2"): SealedCall(_of_subclass),
    ("torch._utils", "_rebuild_parameter"): SealedCall(_first),
    ("torch._utils", "_rebuild_parameter_with_state"): SealedCall(_first),
    ("torch._utils", "_rebuild_tensor_v2"): SealedCall(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): SealedCall(_tensor_of_bytes),
    ("torch.storage", "UntypedStorage"): _StorageKind(None),
}
ALLOWED |= {("torch", name): _StorageKind(dtype) for name, dtype in STORAGES.items()}
ALLOWED |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _TorchFileUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = (
            "builtins" if module == "__builtin__" else module
        )  # the name in Python 2, which torch.save still writes
        # 1. Exact names: functions and classes that a pickle can call and cannot change.
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        # 2. Names of no use: a new class each time, so that nothing one pickle does to it is left for the next.
        if (module, name) in INERT or module.partition(".")[0] in INERT_PACKAGES:
            return type(name, (Inert,), {"__slots__": ()})
        # 3. Everything else might run code.
        raise Refused(f"it names {module}.{name}, which has no place there and might run code")

    def persistent_load(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) != 5:
            raise Refused("it refers to something that is no storage")
        word, kind, key, _location, length = pid
        # torch writes ("storage", class of the storage, key of its record, device, number of elements).
        valid = word == "storage" and isinstance(kind, _StorageKind) and isinstance(key, str)
        if not valid or type(length) is not int or length < 0:
            raise Refused("it refers to something that is no storage")
        return Storage(key, kind.dtype, length)


def unpickle(data: bytes) -> Any:
    """Content of a pickle, with `Stored` for tensors. `Refused` for a forbidden name; damage may raise any error."""
    refuse_bombs(data)
    return _TorchFileUnpickler(io.BytesIO(data)).load()
