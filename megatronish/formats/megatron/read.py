"""Reader of Megatron-LM checkpoints in its `torch` format: the files of all ranks as one model of global tensors.

A rank's file has arguments (arguments.py), `model`, or with interleaving `model0`, `model1`, ..., and the state of the
run, which is not read. Tensors are the rank's parts, and layers are numbered from 0 in each chunk.

Reading has three phases. The pickles of all ranks give names and shapes of their tensors, which are lazy
(`read_ranks`). Parts are collected by global name, with layers numbered over all chunks (`_by_global_name`). Parts of
one tensor are merged when it is used, one part in memory in addition to the whole (`_merged`).
"""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.config.sections.model import ModelConfig
from megatronish.core.errors import UserError
from megatronish.formats.megatron.arguments import model_of, seq_length_of, vocab_size_of
from megatronish.formats.megatron.experts import by_expert
from megatronish.formats.megatron.grid import RankGrid, RankTensor, one_of
from megatronish.formats.megatron.latent import WAY_DOWN
from megatronish.formats.megatron.names import (
    BEFORE_CORE,
    EMBEDDING,
    FILE,
    HEAD,
    LATEST,
    LAYER,
    NO_WEIGHTS,
    PREDICTION,
    RELEASE,
    canonical_name,
    cuts,
    local_shape,
    numbered,
    place,
    refuse_encoder,
    rules,
)
from megatronish.formats.megatron.torch_dist.files import is_distributed
from megatronish.formats.megatron.torch_dist.read import read as read_distributed
from megatronish.formats.megatron.torch_dist.read import read_training as read_distributed_training
from megatronish.formats.megatron.values import quote
from megatronish.formats.megatron.write import write
from megatronish.formats.torch_file.archive import TorchFile, memory_of
from megatronish.formats.torch_file.unpickler import Arguments, Stored
from megatronish.formats.weights import Description, LazyTensor, Model, Training
from megatronish.parallel.mesh import Axis
from megatronish.parallel.sharding import Sharding

# Files of Megatron-LM's ranks in its `torch` format: found in a folder, and read without their tensors' elements.


OLDEST_VERSION = 2.0  # before it, the rows of query_key_value had other orders
ITERATION = re.compile(r"[0-9]{1,18}")
CHUNK = re.compile(r"model(\d*)")
DEPTH = 8  # levels of nested dicts in models older than megatron-core


class RankFile(NamedTuple):
    """File of a rank: its arguments, and its model chunks by number, each with lazy tensors by name.

    `others` are the names in it that are no weights.
    """

    path: Path
    args: Mapping[str, Any]
    chunks: dict[int, dict[str, RankTensor]]
    others: tuple[str, ...] = ()


def folder_of(load: Path) -> Path:
    """Folder with the ranks' folders: `load` itself, or that of the iteration which its LATEST file names."""
    # A folder of iterations has LATEST; without it, `load` may be one iteration's folder itself.
    latest = load / LATEST
    if latest.is_file():
        text = latest.read_text(encoding="utf-8", errors="replace").strip()
        if text != RELEASE and not ITERATION.fullmatch(text):
            raise UserError(
                f"{latest} says {quote(text)} and must say a number or {RELEASE}; name one iteration's folder"
            )
        load = load / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    return load


def first_file(folder: Path) -> Path:
    folders = sorted(folder.glob("mp_rank_*")) if folder.is_dir() else []
    if not folders:
        raise UserError(f"{folder} holds no mp_rank_* folder; name a folder with {LATEST}, or one iteration's in it")
    return folders[0] / FILE


def read_ranks(folder: Path, first: RankFile) -> tuple[RankGrid, list[list[RankFile]]]:
    """Files of all ranks, by stage, in the order of the grid; UserError, with the path, if one is missing."""
    # Sizes come from the first file; the others must exist under the names that follow from them, so no listing of the
    # folder is needed.
    grid = _grid_of(first)
    sizes = f"tensor parallel size {grid.tp} and pipeline parallel size {grid.pp}"
    if grid.ep > 1:
        sizes += f", expert parallel size {grid.ep} and expert tensor parallel size {grid.etp}"
    paths: list[list[Path]] = []
    for pp in range(grid.pp):
        paths.append([])
        for tp, ep in grid.ranks():
            path = folder / grid.folder(tp, pp, ep) / FILE
            if not path.is_file():  # at once: absurd sizes would make a list of billions of paths
                raise UserError(f"{path} is missing: {first.path} says {sizes}; bring the files of all ranks together")
            paths[-1].append(path)
    return grid, [[first if path == first.path else read_rank(path) for path in stage] for stage in paths]


def _grid_of(first: RankFile) -> RankGrid:
    """Sizes that the arguments say; UserError for what are none."""
    args = first.args
    # Arguments are foreign: any type, any size, and names that changed over the versions. Without an expert tensor size
    # it is the tensor size.
    tp: Any = args.get("tensor_model_parallel_size", args.get("model_parallel_size", 1))
    pp: Any = args.get("pipeline_model_parallel_size", 1)
    ep: Any = args.get("expert_model_parallel_size", 1)
    etp: Any = args.get("expert_tensor_parallel_size")
    sizes = {"tensor": tp, "pipeline": pp, "expert": ep, "expert tensor": tp if etp is None else etp}
    if not all(type(size) is int and 0 < size < 2**63 for size in sizes.values()):
        said = " and ".join(f"{name} parallel size {quote(size)}" for name, size in sizes.items())
        raise UserError(f"{first.path} says {said}, which is not possible; fetch it again")
    grid = RankGrid(tp, pp, ep, sizes["expert tensor"])
    # `RankGrid` needs it: a tensor rank then has one expert tensor rank.
    if grid.tp % grid.etp:
        raise UserError(
            f"{first.path} says expert tensor parallel size {grid.etp}, which does not divide its tensor parallel size "
            f"{grid.tp}; load it into Megatron-LM with --expert-tensor-parallel-size 1 and save it again"
        )
    return grid


def read_rank(path: Path) -> RankFile:
    file = TorchFile(path)
    content = file.content if isinstance(file.content, dict) else {}
    args, version = content.get("args"), content.get("checkpoint_version", 0)
    # `model` is chunk 0, as is `model0`; `args` is an Arguments object of the unpickler, on which nothing was called.
    trees = {int(match[1] or 0): content[key] for key in content if (match := CHUNK.fullmatch(str(key)))}
    if not trees or not isinstance(args, Arguments):
        lacking = "arguments" if trees else "model"
        raise UserError(f"{path} holds no {lacking}, so it is no checkpoint of Megatron-LM in its torch format")
    if not isinstance(version, int | float) or version < OLDEST_VERSION:
        raise UserError(
            f"{path} has checkpoint_version {quote(version)}, whose queries, keys and values lie in another order; "
            "load it into a later Megatron-LM and save it again"
        )
    others: list[str] = []
    chunks = {number: dict(_flat(file, tree, others)) for number, tree in trees.items()}
    return RankFile(path, args.values, chunks, tuple(others))


def _flat(
    file: TorchFile, tree: Any, others: list[str], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, RankTensor]]:
    """Weights in nested dicts of tensors, by their keys joined with dots; UserError if `tree` is no such dict.

    Names of what is no weight are added to `others`.
    """
    # Bounded: a pickle can hold a dict that holds itself.
    if not isinstance(tree, dict) or depth > DEPTH:
        raise UserError(f"{file.path} holds no tensors where {prefix or 'its model'} should be; fetch it again")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Stored) and not name.endswith(NO_WEIGHTS):
            lazy = file.tensor(value)
            yield name, RankTensor(lazy.shape, lazy.dtype, lazy.read, lazy.part, file.path)
        elif isinstance(value, dict):
            yield from _flat(file, value, others, f"{name}.", depth + 1)
        else:
            others.append(name)


__all__ = ["read", "read_training", "rules", "write"]


def read(load: Path, *, vocab_size: int | None = None) -> Model:
    """Model of a folder that Megatron-LM saved into, or of one iteration's folder in it; tensors are lazy.

    The vocabulary without padding is `vocab_size`, else that of the arguments, else, with a warning, the padded one.
    """
    folder = folder_of(load)
    if is_distributed(folder):
        return read_distributed(folder, vocab_size=vocab_size)
    first = read_rank(first_file(folder))
    before_core = any(name.startswith(BEFORE_CORE) for chunk in first.chunks.values() for name in chunk)
    # Phase 1: the model from the first rank's arguments, and the tensors of all ranks, unread.
    try:
        model = model_of(first.args, before_core=before_core)
    except UserError as error:
        raise UserError(f"{first.path} cannot be converted: {error}") from error
    # Phase 2: parts of each tensor in the order of the tensor ranks, by its global name.
    grid, ranks = read_ranks(folder, first)
    refuse_encoder(
        folder, {name for stage in ranks for rank in stage for chunk in rank.chunks.values() for name in chunk}
    )
    parts = by_expert(_by_global_name(ranks, folder, model), grid, model.num_experts, folder=folder)
    if EMBEDDING not in parts:
        raise UserError(f"{folder} holds no {EMBEDDING}, so it holds no GPT; name another")
    # The padded vocabulary is the sum of the ranks' rows [V_padded / tp, D] of the embedding.
    padded = sum(part.shape[0] for part in parts[EMBEDDING])
    vocab_size = vocab_size_of(first.args, vocab_size, padded=padded, path=first.path)
    description = Description(model=model, vocab_size=vocab_size, seq_length=seq_length_of(first.args))
    # Phase 3, lazily: global tensors. A tied model has a copy of the embedding on its last stage, which must be equal.
    wanted = cuts(description, padded_vocab_size=padded, cuts_ways_down=_cuts_ways_down(parts, model))
    copies = parts.pop(HEAD, None) if model.tied else None
    left_out = dict.fromkeys(first.others, "a state or a buffer of Megatron-LM that is no weight")
    left_out |= {name: PREDICTION for name in parts if name.startswith("mtp.")}
    parts = {name: of_name for name, of_name in parts.items() if name not in left_out}
    tensors = {name: _merged(folder, name, ranks, wanted.get(name)) for name, ranks in parts.items()}
    if copies is not None and model.num_depths:  # where they embed further tokens, the head reads that embedding
        left_out[HEAD] = (
            "a head of the last stage, of which nothing is read: layers of multi-token prediction are there"
        )
    elif copies is not None:
        of_first = parts[EMBEDDING]
        tensors[EMBEDDING] = _with_copy(tensors[EMBEDDING], of_first, copies, folder)
        left_out[HEAD] = "the last stage's copy of the embedding, compared with it when that is read"
    return Model(replace(description, left_out=left_out), tensors)


def read_training(load: Path, description: Description, **_reading: Any) -> Training | None:
    """State of the training of the model that `read` reads from `load`; None where it is not whole there.

    In the format `torch` it never is.
    """
    folder = folder_of(load)
    return read_distributed_training(folder, description) if is_distributed(folder) else None


def _cuts_ways_down(parts: Mapping[str, Sequence[RankTensor]], model: ModelConfig) -> bool:
    """Whether tensor ranks have parts of the ways down to latents, as in megatron-core's own layers."""
    rows = {"q": model.q_lora_rank, "kv": model.kv_lora_rank + model.qk_pos_emb_head_dim}
    ways = {name: match[1] for name in parts if (match := WAY_DOWN.fullmatch(name))}
    return any(parts[name][0].shape[:1] != (rows[kind],) for name, kind in ways.items())


def _by_global_name(ranks: list[list[RankFile]], folder: Path, model: ModelConfig) -> dict[str, list[RankTensor]]:
    """Parts of every tensor in the order of the ranks of a stage, by global name; of experts, by their number there.

    Layers are numbered through chunk 0 of all stages, then chunk 1 of all stages, ..., the order of interleaving.
    UserError if layers are missing.
    """
    by_name: dict[str, list[RankTensor]] = {}
    num_layers = 0
    for chunk in sorted({number for stage in ranks for rank in stage for number in rank.chunks}):
        for stage in (
            stage for stage in ranks if any(chunk in rank.chunks for rank in stage)
        ):  # a stage may have no such chunk
            parts = _chunk(stage, chunk)
            numbers = {int(match[1]) for name in parts if (match := LAYER.fullmatch(name))}
            if numbers != set(range(len(numbers))):
                raise UserError(f"{stage[0].path} holds layers {sorted(numbers)}, some are missing; fetch it again")
            # Layer i of the chunk is layer num_layers + i of the model. A tied embedding is on two stages: the first
            # one's is taken, and the last one's has the name of the head.
            for name, tensors in parts.items():
                if match := LAYER.fullmatch(name):
                    name = f"decoder.layers.{num_layers + int(match[1])}.{match[2]}"
                by_name.setdefault(numbered(name, model), tensors)
            num_layers += len(numbers)
    if num_layers != model.num_layers:
        raise UserError(
            f"{folder} holds {num_layers} layers, and its arguments say {model.num_layers}; bring the files of all "
            "ranks together"
        )
    return by_name


def _chunk(stage: list[RankFile], chunk: int) -> dict[str, list[RankTensor]]:
    """Tensors of a chunk by name, a part for each tensor rank; UserError if names, shapes or dtypes differ."""
    # 1. Every tensor rank has the chunk, with the same names, shapes and dtypes: cut evenly, as Megatron-LM cuts,
    # padding included.
    for rank in stage:
        if chunk not in rank.chunks:
            raise UserError(f"{rank.path} lacks model{chunk}, which other tensor ranks have; fetch it again")
    first = stage[0]
    for rank in stage:
        named, others = first.chunks[chunk], rank.chunks[chunk]
        for name in (*named, *others):
            here, there = others.get(name), named.get(name)
            if here is None or there is None:
                lacking, having = (rank, first) if here is None else (first, rank)
                raise UserError(f"{lacking.path} lacks {name}, which {having.path} has; the files are of two models")
            if (here.shape, here.dtype) != (there.shape, there.dtype):
                raise UserError(
                    f"{rank.path}: {name} is {here.dtype} {list(here.shape)}, and {there.dtype} {list(there.shape)} "
                    f"in {first.path}; the files are of two models"
                )
    # 2. Names are translated once the ranks agree, so errors name what is in the files.
    return {canonical_name(name): [rank.chunks[chunk][name] for rank in stage] for name in first.chunks[chunk]}


def _merged(folder: Path, name: str, parts: list[RankTensor], cut: Sharding | None) -> LazyTensor:
    """Lazy global tensor. Of a tensor that the model does not have (`cut` is None), the first rank's part."""
    if cut is None:
        return parts[0]
    # A tensor that is not cut lies in the file of each tensor rank: one is read, all are compared.
    if not cut.cuts:
        parts = [one_of(name, parts)]
    # Known from headers: a wrong file is refused before any element is read.
    wanted = local_shape(cut, len(parts))
    if parts[0].shape != wanted:
        raise UserError(
            f"{folder}: a rank's part of {name} is {list(parts[0].shape)}, and its arguments ask for {list(wanted)}; "
            "its weights and its arguments are of two models"
        )
    return LazyTensor(cut.shape, parts[0].dtype, partial(_merge, parts, cut))


def _merge(parts: Sequence[LazyTensor], cut: Sharding) -> Tensor:
    if len(parts) == 1:
        return parts[0].read()[: cut.shape[0]]  # without the padding of the vocabulary
    # Cut: each rank's pieces go to their places in the global tensor. Padding has no piece, so it is left out.
    (axis,), whole = cut.cut_axes, torch.empty(cut.shape, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        values = part.read()
        for piece in cut.pieces({axis: Axis(axis, len(parts), rank)}):
            place(piece, whole).copy_(piece.view(values))
        del values  # before the next is read
    return whole


def _with_copy(
    whole: LazyTensor, parts: Sequence[LazyTensor], copies: Sequence[LazyTensor], folder: Path
) -> LazyTensor:
    """Lazy tied embedding, of which the last stage has a copy; UserError, when it is read, if the copy differs."""

    def read() -> Tensor:
        # Compared only when the embedding is read, part by part: no two whole tables are in memory.
        for part, copy in zip(parts, copies, strict=True):
            if zlib.crc32(memory_of(part.read())) != zlib.crc32(memory_of(copy.read())):
                raise UserError(
                    f"{folder}: {EMBEDDING} differs between the first and the last stage, and its arguments say that "
                    "they share it; the files are of two checkpoints"
                )
        return whole.read()

    return LazyTensor(whole.shape, whole.dtype, read)
