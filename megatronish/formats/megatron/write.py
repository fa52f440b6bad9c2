"""Writer of Megatron-LM's `torch` format in any layout, one tensor in memory at a time.

The files of a stage's tensor ranks are open together: each global tensor is read once, cut, and its parts are written
to all of them. Stages are written one after the other.
"""

import logging
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from megatronish.config.fields import one_of
from megatronish.config.model import ModelConfig
from megatronish.errors import UserError
from megatronish.files import new_folder
from megatronish.formats.megatron.names import (
    EMBEDDING,
    FILE,
    HEAD,
    LATEST,
    LAYER,
    RELEASE,
    cuts,
    local_name,
    local_shape,
    place,
    rank_folder,
)
from megatronish.formats.megatron.our_arguments import arguments_of, flags_to_type
from megatronish.formats.torch_file.archive import TorchFileWriter
from megatronish.formats.weights import LazyTensor, Model
from megatronish.mesh import Axis
from megatronish.sharding import Sharding

logger = logging.getLogger(__name__)

VERSION = 3.0


def write(
    save: Path,
    model: Model,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine",
) -> None:
    """Write a folder that Megatron-LM loads as a `release`, with the tensor names of its `--transformer-impl`.

    UserError for a layout that the model cannot be cut into, RunError if the disk is full or fails.
    """
    description, tensors = model
    _check_layout(description.model, tp_size=tensor_parallel_size, pp_size=pipeline_parallel_size)
    padded = description.model.padded_vocab_size(description.vocab_size, tensor_parallel_size)
    wanted = cuts(description, padded_vocab_size=padded)
    args = arguments_of(
        description,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        transformer_impl=transformer_impl,
        dtype=tensors[EMBEDDING].dtype,
    )
    with new_folder(save, decisive=LATEST) as folder:
        for pp in range(pipeline_parallel_size):
            names = _stage(wanted, description.model, pp, pipeline_parallel_size)
            if transformer_impl == "local":
                names = {local_name(name): global_name for name, global_name in names.items()}
            paths = [
                folder / RELEASE / rank_folder(tp, pp, pipeline_parallel_size) / FILE
                for tp in range(tensor_parallel_size)
            ]
            _write_stage(paths, names, tensors, wanted, args)
        (folder / LATEST).write_text(RELEASE)
    if flags := flags_to_type(args):
        logger.warning("Megatron-LM's --use-checkpoint-args leaves out %s; type that too", " ".join(flags))


def _check_layout(model: ModelConfig, *, tp_size: int, pp_size: int) -> None:
    for what, number, axis, size in (
        ("key/value heads", model.num_kv_heads, "tensor", tp_size),
        ("heads", model.num_attention_heads, "tensor", tp_size),
        ("features of the MLP", model.ffn_size, "tensor", tp_size),
        ("layers", model.num_layers, "pipeline", pp_size),
    ):
        if size < 1 or number % size:
            fitting = [n for n in range(1, min(number, 64) + 1) if number % n == 0]
            raise UserError(f"{number} {what} cannot be cut by a {axis} parallel size of {size}; use {one_of(fitting)}")


def _stage(names: Mapping[str, Sharding], model: ModelConfig, pp: int, pp_size: int) -> dict[str, str]:
    """Names of a stage's tensors on that stage, with the global names of the same tensors."""
    per_stage = model.num_layers // pp_size
    stage = {}
    for name in names:
        if match := LAYER.fullmatch(name):
            layer = int(match[1]) - pp * per_stage
            if 0 <= layer < per_stage:
                stage[f"decoder.layers.{layer}.{match[2]}"] = name
        elif pp == (0 if name.startswith("embedding.") else pp_size - 1):
            stage[name] = name
    if model.tied and pp_size > 1 and pp == pp_size - 1:
        stage[HEAD] = EMBEDDING
    return stage


def _write_stage(
    paths: Sequence[Path],
    names: Mapping[str, str],
    tensors: Mapping[str, LazyTensor],
    wanted: Mapping[str, Sharding],
    args: Mapping[str, Any],
) -> None:
    """Write the files of a stage's tensor ranks together: each tensor is read once and cut."""
    # Every rank's pickle describes its parts by shape and dtype alone.
    parts = {
        name: LazyTensor(
            local_shape(wanted[global_name], len(paths)), tensors[global_name].dtype, tensors[global_name].read
        )
        for name, global_name in names.items()
    }
    content = {
        "args": Namespace(**args),
        "checkpoint_version": VERSION,
        "iteration": 0,
        "model": OrderedDict(parts),
    }
    with ExitStack() as stack:
        writers = []
        for path in paths:
            path.parent.mkdir(parents=True)
            writers.append(stack.enter_context(TorchFileWriter(path, content)))
        for global_name in names.values():
            whole = tensors[global_name].read()
            for rank, writer in enumerate(writers):
                writer.add(_rows(whole, wanted[global_name], Axis("tp", len(paths), rank)))
            del whole  # before the next is read


def _rows(whole: Tensor, cut: Sharding, tp: Axis) -> list[Tensor]:
    """A rank's part of a global tensor, as pieces of dim 0 in order; padding is zero."""
    pieces = [place(piece, whole) for piece in cut.pieces({"tp": tp})]
    missing = local_shape(cut, tp.size)[0] - sum(len(rows) for rows in pieces)
    return [*pieces, whole.new_zeros(missing, *whole.shape[1:])] if missing else pieces
