"""Conversion of a model from any format to any other, one tensor in memory at a time.

Every format translates between its names and ours (weights.py), so no format knows another one. Tensors are lazy: each
is read when the writer of the target asks for it. Tensors without a counterpart are found before anything is written.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from megatronish.checkpoint.folder import find_checkpoint, read_state
from megatronish.checkpoint.tensors import ALONE
from megatronish.core.errors import UserError
from megatronish.formats import native
from megatronish.formats.adapters import merged, read_native
from megatronish.formats.chat_files import trained_with, with_chat_files
from megatronish.formats.hf import tensors as hf
from megatronish.formats.load_sharded import Allowed, check_source, check_target
from megatronish.formats.megatron import read as megatron
from megatronish.formats.megatron.torch_dist import write as torch_dist
from megatronish.formats.peft import folder as peft
from megatronish.formats.read_adapter import read_adapter, refuse_other_model
from megatronish.formats.safetensors import nbytes_of
from megatronish.formats.weights import (
    Description,
    LazyTensor,
    Model,
    TensorRule,
    Training,
    from_ours,
    is_bias,
    to_ours,
)


class Format(NamedTuple):
    """Format of models: its reader, rules of names and writer; `reads` and `writes` map their options to flags.

    `read_training` reads what a run needs beyond weights, where a folder has it; `keeps_training`: `write` takes it.
    """

    read: Callable[..., Model]
    rules: Callable[[Description], list[TensorRule]]
    write: Callable[..., None]
    reads: Mapping[str, str] = {}
    writes: Mapping[str, str] = {}
    read_training: Callable[..., Training | None] = lambda _load, _description, **_reading: None
    keeps_training: bool = False


OURS = "megatronish"
FORMATS = {
    "hf": Format(hf.read, hf.rules, hf.write, writes={"max_shard_bytes": "--max-shard-bytes"}),
    OURS: Format(
        native.read,
        native.rules,
        native.write,
        reads={"step": "--ckpt-step"},
        read_training=native.read_training,
        keeps_training=True,
    ),
    "megatron": Format(
        megatron.read,
        megatron.rules,
        megatron.write,
        reads={"vocab_size": "--vocab-size"},
        writes={
            "tensor_parallel_size": "--target-tensor-parallel-size",
            "pipeline_parallel_size": "--target-pipeline-parallel-size",
            "expert_parallel_size": "--target-expert-parallel-size",
            "expert_tensor_parallel_size": "--target-expert-tensor-parallel-size",
            "transformer_impl": "--transformer-impl",
        },
        read_training=megatron.read_training,
    ),
    "megatron-dist": Format(
        megatron.read,
        megatron.rules,
        torch_dist.write,
        reads={"vocab_size": "--vocab-size"},
        writes={
            "expert_parallel_size": "--target-expert-parallel-size",
            "transformer_impl": "--transformer-impl",
        },
        read_training=megatron.read_training,
        keeps_training=True,
    ),
}


BEGINNING = "weights alone were taken: the optimizer's state and the order of the data start from the beginning"


@dataclass(frozen=True)
class Report:
    """Result of a conversion. Unmatched: tensors of the source, and parameters of ours, without a counterpart."""

    tensors_in: int
    tensors_out: int
    num_parameters: int
    num_bytes: int
    seconds: float
    unmatched_in: tuple[str, ...] = ()
    unmatched_out: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the source that are no weights, each with the reason."""
    training: Training | None = None
    """What was kept beyond weights."""
    allowed: Allowed = False
    """What could be left out for lack of a counterpart."""

    def __str__(self) -> str:
        lines = [
            f"{self.tensors_in} tensors in, {self.tensors_out} tensors out: {self.num_parameters:,} parameters, "
            f"{_size(self.num_bytes)} in {self.seconds:.1f} s"
        ]
        for reason, count in Counter(self.left_out.values()).items():
            first = next(name for name, why in self.left_out.items() if why == reason)
            more = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"left out on purpose: {first}{more}, {reason}")
        lines += [f"left out, without a counterpart of ours: {name}" for name in self.unmatched_in]
        lines += [f"left out, without a counterpart in the target: {name}" for name in self.unmatched_out]
        names = (*self.unmatched_in, *self.unmatched_out, *self.left_out)
        patterns = () if isinstance(self.allowed, bool) else self.allowed
        idle = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
        lines += [f"left out nothing, as none is called so: {pattern}" for pattern in idle]
        lines.append(BEGINNING if self.training is None else f"kept for the run that continues: {self.training}")
        return "\n".join([*lines, *self._table()])

    def _table(self) -> Iterator[str]:
        """Numbers of tensors. A target whose tensors were not all given is an error, and never comes so far."""
        unused = len(self.unmatched_in) + len(self.unmatched_out)
        counts = {"in": self.tensors_in, "out": self.tensors_out, "left out on purpose": len(self.left_out)}
        counts |= {"unused": unused, "unset": 0}
        width = max(map(len, counts))
        for name, count in counts.items():
            yield f"  {name:{width}}  {count:>7,}"


def convert(
    load: Path,
    save: Path,
    *,
    source: str,
    target: str,
    reading: Mapping[str, Any] | None = None,
    writing: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    allow_unmatched: Allowed = False,
    adapter: Path | None = None,
) -> Report:
    """Convert the model in `load`, of format `source`, to the folder `save`, of format `target`.

    `dtype` is that of all tensors written; None keeps each tensor's own. `adapter` is merged into the weights.
    UserError, before anything is written, for a tensor without a counterpart (`allow_unmatched` leaves all of them out,
    or those of these names) or of another shape than the model says. The state of a training is kept where the source
    has it whole and the target has a place for it, and the weights stay those that it is of.
    """
    start = time.perf_counter()
    _check_options(source, FORMATS[source].reads, reading or {}, verb="read")
    _check_options(target, FORMATS[target].writes, writing or {}, verb="written")
    # Source: names, shapes and dtypes from its headers, under our names, compared with the parameters of the model.
    description, theirs = FORMATS[source].read(load, **(reading or {}))
    ours = to_ours(theirs, FORMATS[source].rules(description), source=load)
    check_source(load, description, ours, allow_unmatched=allow_unmatched)
    if adapter is not None:
        saved_adapter = read_adapter(adapter, description)
        refuse_other_model([saved_adapter], ours.tensors, source=load, over=ALONE)
        ours = ours._replace(tensors=merged(ours.tensors, saved_adapter, description.model))
    # Target: the same tensors under its names, in the dtype that is asked for. All are still lazy.
    converted = from_ours(ours.tensors, FORMATS[target].rules(description))
    check_target(target, converted, allow_unmatched=allow_unmatched)
    kept = {name for rule in FORMATS[target].rules(description) if is_bias(rule.ours) for name in rule.theirs}
    tensors = {
        name: tensor if dtype is None or name in kept else _in_dtype(name, tensor, dtype)
        for name, tensor in converted.tensors.items()
    }
    num_bytes = sum(map(nbytes_of, tensors.values()))
    kinds = {"source": source, "target": target}
    training = training_of(load, description, **kinds, reading=reading, dtype=dtype) if adapter is None else None
    kept_too = {} if training is None else {"training": training}
    chat = trained_with(([] if adapter is None else [adapter]) + ([load] if source == "megatronish" else []))
    # The writer reads each tensor when its bytes are due, and the bar counts these reads.
    progress = tqdm(total=num_bytes, unit="B", unit_scale=True, disable=None, desc="converting")
    with with_chat_files(description, chat) as described, progress as bar:
        counted = {name: _counted(tensor, bar) for name, tensor in tensors.items()}
        FORMATS[target].write(save, Model(described, counted), **(writing or {}), **kept_too)
    return Report(
        tensors_in=len(theirs),
        tensors_out=len(tensors),
        num_parameters=sum(sharding.num_elements for sharding in description.shardings().values()),
        num_bytes=num_bytes,
        seconds=time.perf_counter() - start,
        unmatched_in=ours.left_over,
        unmatched_out=converted.left_over,
        left_out=_left_out(description, training),
        training=training,
        allowed=allow_unmatched,
    )


def _left_out(description: Description, training: Training | None) -> dict[str, str]:
    """Tensors of the source that are no weights, each with the reason, without those of a training that is kept."""
    kept = frozenset() if training is None else training.names
    return {name: reason for name, reason in description.left_out.items() if name not in kept}


def training_of(
    load: Path,
    description: Description,
    *,
    source: str,
    target: str,
    reading: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None,
) -> Training | None:
    """State of the training in `load` that a conversion keeps; None if it is not whole, or the target has no place.

    Weights that `dtype` rounds are no longer those of the training. One of the two formats is ours: between two others
    neither the settings of the optimizer nor the masters of rounded weights would come along.
    """
    is_from_or_to_ours = (source == OURS) != (target == OURS)
    is_kept = FORMATS[target].keeps_training and dtype in (None, torch.float32) and is_from_or_to_ours
    return FORMATS[source].read_training(load, description, **(reading or {})) if is_kept else None


def export_adapter(load: Path, save: Path, *, step: int | None = None) -> int:
    """Write the adapter of a run in PEFT's format; returns the number of its tensors."""
    adapter = read_native(load, step=step)
    folder = find_checkpoint(load, step=step)
    assert folder is not None
    source = read_state(folder)["base"].get("source")
    peft.write(save, adapter, native.description_of(folder), base=str(source))
    return len(adapter.tensors)


def _check_options(name: str, known: Mapping[str, str], given: Mapping[str, Any], *, verb: str) -> None:
    flags = {option: flag for other in FORMATS.values() for option, flag in {**other.reads, **other.writes}.items()}
    for option in given:
        if option not in known:
            raise UserError(f"{flags[option]} says nothing about how {name} is {verb}; leave it out")


def _size(num_bytes: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 1000:.1f} kB"


def _in_dtype(name: str, tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Lazy tensor of another dtype; UserError, when it is read, for a value that becomes infinite in it."""

    def cast(values: Tensor) -> Tensor:
        cast = values.to(dtype)
        if cast.isinf().sum() != values.isinf().sum():
            largest = values[values.isfinite()].abs().max().item()
            wider = "bfloat16 or float32" if dtype == torch.float16 else "float32"
            raise UserError(
                f"{name} holds {largest:g}, which is infinite in {str(dtype).removeprefix('torch.')}; use "
                f"--dtype {wider}"
            )
        return cast

    return tensor if dtype == tensor.dtype else tensor.mapped(cast, dtype)


def _counted(tensor: LazyTensor, bar: "tqdm[Any]") -> LazyTensor:
    """Lazy tensor that adds its bytes to the bar when they are read for the first time."""
    left = nbytes_of(tensor)

    def count(values: Tensor) -> Tensor:
        nonlocal left
        taken = min(left, values.nbytes)
        left -= taken
        bar.update(taken)
        return values

    return tensor.mapped(count)
