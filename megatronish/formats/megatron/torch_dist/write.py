"""Writer of Megatron-LM's format `torch_dist`, one tensor in memory at a time.

A tensor is one rectangle, or two, and Megatron-LM cuts it at loading, in whatever layout it runs. The names are those
since megatron-core 0.14, which common.pt says under `content_metadata`.
"""

import io
import json
import logging
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megatronish.checkpoint.foreign import BytesPlace, ListedTensor, Rectangle, write_listing
from megatronish.checkpoint.storage import cause_of, compact
from megatronish.core.files import new_folder
from megatronish.formats.megatron.grid import RankGrid
from megatronish.formats.megatron.names import EMBEDDING, HEAD, LATEST, RELEASE
from megatronish.formats.megatron.our_arguments import arguments_of, flags_to_type
from megatronish.formats.megatron.torch_dist.files import BACKEND, BACKEND_FILE, COMMON
from megatronish.formats.megatron.torch_dist.moments import STATES, common_of_training, states_of_training
from megatronish.formats.megatron.torch_dist.names import keys_of, states_of
from megatronish.formats.megatron.write import VERSION, TransformerImpl, check_layout
from megatronish.formats.torch_file.archive import TorchFileWriter
from megatronish.formats.weights import LazyTensor, Model, Training

logger = logging.getLogger(__name__)

FILE_BYTES = 4 * 10**9
"""Bytes after which a new file begins."""
BACKENDS = {
    "sharded_backend": BACKEND,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
CONTENT = {"singleton_local_shards": True, "chained_optim_avoid_prefix": True}


def write(
    save: Path,
    model: Model,
    *,
    transformer_impl: TransformerImpl = "transformer_engine",
    expert_parallel_size: int = 1,
    training: Training | None = None,
) -> None:
    """Write a folder that Megatron-LM loads in any layout, into layers of its `--transformer-impl`.

    It is a `release`, or with a `training` the checkpoint of its iteration, for a run with expert ranks or for one
    without. RunError if the disk is full or fails.
    """
    description, tensors = model
    is_local = transformer_impl == "local"
    grid = RankGrid(ep=expert_parallel_size)
    check_layout(description.model, grid, is_local=is_local)
    padded = description.model.padded_vocab_size(description.vocab_size, 1)
    args = arguments_of(description, grid, transformer_impl=transformer_impl, dtype=tensors[EMBEDDING].dtype)
    args["ckpt_format"] = BACKEND
    keys = {name: keys_of(name, description.model, is_local=is_local) for name in tensors}
    common = {"args": Namespace(**args), "checkpoint_version": VERSION, "iteration": 0, "content_metadata": CONTENT}
    states: dict[str, dict[str, LazyTensor]] = {}
    if training is not None:
        states = states_of_training(training, description, tensors)
        args |= {"iteration": training.iteration, "consumed_train_samples": training.consumed_samples}
        of_experts = {
            "has_expert_ranks": grid.ep > 1,
            "has_expert_biases": description.model.moe_add_bias_linear,
        }
        common |= common_of_training(training, **of_experts) | {"args": Namespace(**args)}
    with new_folder(save, decisive=LATEST) as folder:
        iteration = folder / (RELEASE if training is None else f"iter_{training.iteration:07d}")
        iteration.mkdir()
        with TorchFileWriter(iteration / COMMON, common) as of_all_ranks:
            of_all_ranks.fill()
        with _ShardFiles(iteration) as files:
            listed = _write_tensors(files, tensors, keys, padded)
            of_states = {
                f"{STATES}{state}.{key}": place
                for state, of_names in states.items()
                for key, place in _write_tensors(files, of_names, keys, padded).items()
            }
            empty = io.BytesIO()
            torch.save([None], empty)
            objects = {name: files.add(empty.getvalue()) for name in states_of(listed, is_local=is_local)}
        write_listing(iteration, listed | of_states, objects)
        backend = {"sharded_backend": BACKEND, "sharded_backend_version": 1}
        (iteration / BACKEND_FILE).write_text(
            json.dumps(backend | {"common_backend": "torch", "common_backend_version": 1})
        )
        (folder / LATEST).write_text(RELEASE if training is None else str(training.iteration))
    if flags := flags_to_type(args):
        logger.warning("Megatron-LM's --use-checkpoint-args leaves out %s; type that too", " ".join(flags))


def _write_tensors(
    files: "_ShardFiles", tensors: Mapping[str, LazyTensor], keys: Mapping[str, tuple[str, ...]], padded: int
) -> dict[str, ListedTensor]:
    """Write all tensors, each read once; their listing."""
    listed: dict[str, ListedTensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.read()
        if name in (EMBEDDING, HEAD) and len(whole) < padded:
            whole = torch.cat((whole, whole.new_zeros(padded - len(whole), *whole.shape[1:])))
        for key, part in zip(keys[name], whole.chunk(len(keys[name])) if whole.dim() else (whole,), strict=True):
            place = files.add(part)
            shape = tuple(part.shape)
            listed[key] = ListedTensor(shape, part.dtype, (Rectangle((0,) * len(shape), shape, place),))
        del whole, part  # before the next is read
    return listed


class _ShardFiles:
    """Files `__0_0.distcp`, `__0_1.distcp`, ..., written one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self._file = self._open()

    def _open(self) -> BinaryIO:
        return (self._folder / f"__0_{self._number}.distcp").open("wb")

    def __enter__(self) -> "_ShardFiles":
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def add(self, values: Tensor | bytes) -> BytesPlace:
        """Write a tensor as torch.save does, or bytes as they are; where they lie. OSError if the disk is full."""
        if self._file.tell() > FILE_BYTES:
            self._file.close()
            self._number += 1
            self._file = self._open()
        start = self._file.tell()
        try:
            if isinstance(values, bytes):
                self._file.write(values)
            else:
                torch.save(compact(values.contiguous()), self._file)
        except RuntimeError as error:  # of torch.save, around that of the disk
            raise cause_of(error) from error
        return BytesPlace(Path(self._file.name).name, start, self._file.tell() - start)
