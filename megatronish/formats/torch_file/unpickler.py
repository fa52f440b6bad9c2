"""How is the pickle inside a file of torch.save read without running anything that it names?

A pickle calls what it names. Here a name either stands in an exact table, or it belongs to a package whose objects are
of no use to a conversion and becomes an `Inert` stand-in (Megatron-LM keeps enums among its arguments, numpy its random
states); everything else is refused. What a name becomes is an object of this file that a pickle can only call: it has
no state to be set and no attributes to be changed, so a file can neither run code nor leave a trace for the next one.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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
    ("builtins", "getattr"),  # how some versions of Python spell a member of an enum
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
    """What a pickle asked for and does not get."""


class _Sealed:
    """What a pickle may hold, and not change."""

    def __setstate__(self, state: object) -> None:
        raise Refused("it changes an object that has no state to be changed")


class Inert:
    """Stands for an object of a class that is not looked into: takes whatever a pickle gives it, and does nothing."""

    __slots__ = ()

    def __new__(cls, *_args: object) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *_args: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, item: object) -> None:
        """For a list."""

    def extend(self, items: object) -> None:
        """For a list."""

    def add(self, item: object) -> None:
        """For a set."""


class Arguments:
    """An argparse.Namespace: `values` by name."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise Refused("the state of an argparse.Namespace is no dict of names")
        self.values = dict(state)


@dataclass(frozen=True)
class Storage(_Sealed):
    """Bytes of the file: `length` elements, or without a dtype bytes."""

    key: str
    dtype: torch.dtype | None
    length: int


@dataclass(frozen=True)
class Stored(_Sealed):
    """A tensor as a pickle describes it, unchecked: a view of a storage."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: Any
    strides: Any


@dataclass(frozen=True)
class _StorageKind(_Sealed):
    """What torch.FloatStorage and its like become."""

    dtype: torch.dtype | None


@dataclass(frozen=True)
class _Call(_Sealed):
    """A function of this file that a pickle may call."""

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


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


def _of_subclass(function: Any, _kind: object, args: Any, _state: object) -> Any:
    if not isinstance(function, _Call):
        raise Refused("a tensor is not made by torch")
    return function(*args)


ALLOWED: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): Arguments,
    ("builtins", "complex"): complex,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._tensor", "_rebuild_from_type_v2"): _Call(_of_subclass),
    ("torch._utils", "_rebuild_parameter"): _Call(_first),
    ("torch._utils", "_rebuild_parameter_with_state"): _Call(_first),
    ("torch._utils", "_rebuild_tensor_v2"): _Call(_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): _Call(_tensor_of_bytes),
    ("torch.storage", "UntypedStorage"): _StorageKind(None),
}
ALLOWED |= {("torch", name): _StorageKind(dtype) for name, dtype in STORAGES.items()}
ALLOWED |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _TorchFileUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module  # as Python 2 called it, and torch.save still does
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if (module, name) in INERT or module.partition(".")[0] in INERT_PACKAGES:
            return type(name, (Inert,), {"__slots__": ()})
        raise Refused(f"it names {module}.{name}, which has no place there and might run code")

    def persistent_load(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) != 5:
            raise Refused("it refers to something that is no storage")
        word, kind, key, _location, length = pid
        sound = word == "storage" and isinstance(kind, _StorageKind) and isinstance(key, str)
        if not sound or type(length) is not int or length < 0:
            raise Refused("it refers to something that is no storage")
        return Storage(key, kind.dtype, length)


def unpickle(data: bytes) -> Any:
    """The content of a pickle, with `Stored` for tensors. `Refused` for what it may not ask; damage raises anything."""
    return _TorchFileUnpickler(io.BytesIO(data)).load()
