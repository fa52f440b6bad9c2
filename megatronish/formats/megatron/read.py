"""How do checkpoints of Megatron-LM, in its `torch` format, become global tensors, and the other way?

A rank's file has arguments (megatron_args.py), `model`, or under virtual pipelining `model0`, `model1`, ..., and what
else a run resumes from, which is not read. Tensors are the rank's part, and layers are numbered from 0 in each chunk.
"""

import logging
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatronish.config.model import ModelConfig
from megatronish.errors import UserError
from megatronish.formats.megatron.arguments import model_of, seq_length_of, told, true_vocab_size
from megatronish.formats.megatron.names import (
    BEFORE_CORE,
    EMBEDDING,
    FILE,
    HEAD,
    LATEST,
    LAYER,
    NO_WEIGHTS,
    RELEASE,
    canonical,
    cuts,
    local_shape,
    place,
    rank_folder,
    rules,
)
from megatronish.formats.megatron.write import write
from megatronish.formats.torch_file.archive import TorchFile, memory_of
from megatronish.formats.torch_file.unpickler import Arguments, Stored
from megatronish.formats.weights import Description, LazyTensor, Model
from megatronish.mesh import Axis
from megatronish.sharding import Sharding

__all__ = ["read", "rules", "write"]
logger = logging.getLogger(__name__)

OLDEST_VERSION = 2.0  # before it, the rows of query_key_value lay in other orders
ITERATION = re.compile(r"[0-9]{1,18}")
CHUNK = re.compile(r"model(\d*)")
DEPTH = 8  # dicts in dicts, of models from before megatron-core


class _Rank(NamedTuple):
    """A rank's file: its arguments, and the chunks of the model it holds by number, tensors by name."""

    path: Path
    args: Mapping[str, Any]
    chunks: dict[int, dict[str, LazyTensor]]


def read(load: Path, *, vocab_size: int | None = None) -> Model:
    """The model of a folder that Megatron-LM saved into, or of one iteration's folder in it.

    The true vocabulary is `vocab_size`, else what the arguments say, else, with a warning, the padded one.
    """
    folder = _folder_of(load)
    first = _read_rank(_first_file(folder))
    before_core = any(name.startswith(BEFORE_CORE) for chunk in first.chunks.values() for name in chunk)
    try:
        model = model_of(first.args, before_core=before_core)
    except UserError as error:
        raise UserError(f"{first.path} cannot be converted: {error}") from error
    parts = _by_global_name(_read_ranks(folder, first), folder, model)
    if EMBEDDING not in parts:
        raise UserError(f"{folder} holds no {EMBEDDING}, so it holds no GPT; name another")
    padded = sum(part.shape[0] for part in parts[EMBEDDING])
    vocab_size = _vocab_size(vocab_size, first, padded)
    description = Description(model=model, vocab_size=vocab_size, seq_length=seq_length_of(first.args))
    wanted = cuts(description, padded_vocab_size=padded)
    copies = parts.pop(HEAD, None) if model.tied else None
    tensors = {name: _merged(folder, name, ranks, wanted.get(name)) for name, ranks in parts.items()}
    if copies is not None:
        of_first = parts[EMBEDDING]
        tensors[EMBEDDING] = _with_copy(tensors[EMBEDDING], of_first, copies, folder)
    return Model(description, tensors)


def _folder_of(load: Path) -> Path:
    """The folder of ranks that `load` stands for."""
    latest = load / LATEST
    if latest.is_file():
        text = latest.read_text(encoding="utf-8", errors="replace").strip()
        if text != RELEASE and not ITERATION.fullmatch(text):
            raise UserError(
                f"{latest} says {told(text)} and must say a number or {RELEASE}; name one iteration's folder"
            )
        load = load / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if (load / ".metadata").is_file():
        raise UserError(
            f"{load} is in Megatron-LM's format torch_dist, and of its formats torch is known here; let Megatron-LM "
            "convert it, with --ckpt-convert-format torch --ckpt-convert-save DIR"
        )
    return load


def _first_file(folder: Path) -> Path:
    found = sorted(folder.glob("mp_rank_*")) if folder.is_dir() else []
    if not found:
        raise UserError(f"{folder} holds no mp_rank_* folder; name a folder with {LATEST}, or one iteration's in it")
    return found[0] / FILE


def _read_ranks(folder: Path, first: _Rank) -> list[list[_Rank]]:
    """The ranks by stage and tensor rank. UserError that names one that is missing."""
    tp_size: Any = first.args.get("tensor_model_parallel_size", first.args.get("model_parallel_size", 1))
    pp_size: Any = first.args.get("pipeline_model_parallel_size", 1)
    if not all(type(size) is int and size > 0 for size in (tp_size, pp_size)):
        raise UserError(
            f"{first.path} says tensor parallel size {told(tp_size)} and pipeline parallel size {told(pp_size)}, "
            "which they cannot be; fetch it again"
        )
    paths: list[list[Path]] = []
    for pp in range(pp_size):
        paths.append([])
        for tp in range(tp_size):
            path = folder / rank_folder(tp, pp, pp_size) / FILE
            if not path.is_file():  # before the paths are listed that an absurd size asks for
                raise UserError(
                    f"{path} is missing: {first.path} says tensor parallel size {told(tp_size)} and pipeline parallel "
                    f"size {told(pp_size)}; bring the files of all ranks together"
                )
            paths[-1].append(path)
    return [[first if path == first.path else _read_rank(path) for path in stage] for stage in paths]


def _read_rank(path: Path) -> _Rank:
    file = TorchFile(path)
    content = file.content if isinstance(file.content, dict) else {}
    args, version = content.get("args"), content.get("checkpoint_version", 0)
    trees = {int(match[1] or 0): content[key] for key in content if (match := CHUNK.fullmatch(str(key)))}
    if not trees or not isinstance(args, Arguments):
        lacking = "arguments" if trees else "model"
        raise UserError(f"{path} holds no {lacking}, so it is no checkpoint of Megatron-LM in its torch format")
    if not isinstance(version, int | float) or version < OLDEST_VERSION:
        raise UserError(
            f"{path} has checkpoint_version {told(version)}, whose queries, keys and values lie in another order; load "
            "it into a later Megatron-LM and save it again"
        )
    return _Rank(path, args.values, {n: dict(_flat(file, tree)) for n, tree in trees.items()})


def _flat(file: TorchFile, tree: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, LazyTensor]]:
    """The weights of a dict of tensors, or of such dicts, by names with dots."""
    if not isinstance(tree, dict) or depth > DEPTH:
        raise UserError(f"{file.path} holds no tensors where {prefix or 'its model'} should be; fetch it again")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Stored) and not name.endswith(NO_WEIGHTS):
            yield name, file.tensor(value)
        elif isinstance(value, dict):
            yield from _flat(file, value, f"{name}.", depth + 1)


def _by_global_name(ranks: list[list[_Rank]], folder: Path, model: ModelConfig) -> dict[str, list[LazyTensor]]:
    """Every tensor's parts, by tensor rank. Chunk 0 of all stages comes first, then chunk 1, ..."""
    found: dict[str, list[LazyTensor]] = {}
    num_layers = 0
    for chunk in sorted({number for stage in ranks for rank in stage for number in rank.chunks}):
        for stage in (stage for stage in ranks if any(chunk in rank.chunks for rank in stage)):  # others are empty
            parts = _chunk(stage, chunk)
            numbers = {int(match[1]) for name in parts if (match := LAYER.fullmatch(name))}
            if numbers != set(range(len(numbers))):
                raise UserError(f"{stage[0].path} holds layers {sorted(numbers)}, some are missing; fetch it again")
            for name, tensors in parts.items():
                if match := LAYER.fullmatch(name):
                    name = f"decoder.layers.{num_layers + int(match[1])}.{match[2]}"
                found.setdefault(name, tensors)
            num_layers += len(numbers)
    if num_layers != model.num_layers:
        raise UserError(
            f"{folder} holds {num_layers} layers, and its arguments say {model.num_layers}; bring the files of all "
            "ranks together"
        )
    return found


def _chunk(stage: list[_Rank], chunk: int) -> dict[str, list[LazyTensor]]:
    """A chunk's tensors, which all tensor ranks must have in the same shapes."""
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
    return {canonical(name): [rank.chunks[chunk][name] for rank in stage] for name in first.chunks[chunk]}


def _vocab_size(asked: int | None, first: _Rank, padded: int) -> int:
    if asked is not None and not 0 < asked <= padded:
        raise UserError(f"vocab_size={asked} does not fit the {padded} rows of the embedding; give the true vocabulary")
    told = true_vocab_size(first.args)
    if asked is None and (told is None or told > padded):
        logger.warning(
            "%s does not say its true vocabulary; all %d rows are kept, padding included, unless vocab_size says less",
            first.path,
            padded,
        )
        return padded
    return asked or told or padded


def _merged(folder: Path, name: str, parts: list[LazyTensor], cut: Sharding | None) -> LazyTensor:
    """A global tensor. One that the model does not have is left as the first rank has it."""
    if cut is None:
        return parts[0]
    wanted = local_shape(cut, len(parts))
    if parts[0].shape != wanted:
        raise UserError(
            f"{folder}: a rank's part of {name} is {list(parts[0].shape)}, and its arguments ask for {list(wanted)}; "
            "its weights and its arguments are of two models"
        )
    return LazyTensor(cut.shape, parts[0].dtype, partial(_merge, parts, cut))


def _merge(parts: Sequence[LazyTensor], cut: Sharding) -> Tensor:
    if len(parts) == 1 or not cut.cuts:
        return parts[0].read()[: cut.shape[0]]  # without the padding
    whole = torch.empty(cut.shape, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        values = part.read()
        for piece in cut.pieces({"tp": Axis("tp", len(parts), rank)}):
            place(piece, whole).copy_(piece.view(values))
        del values  # before the next is read
    return whole


def _with_copy(
    whole: LazyTensor, parts: Sequence[LazyTensor], copies: Sequence[LazyTensor], folder: Path
) -> LazyTensor:
    """A tied embedding, of which the last stage has a copy: UserError, when it is read, if the two differ."""

    def read() -> Tensor:
        for part, copy in zip(parts, copies, strict=True):
            if zlib.crc32(memory_of(part.read())) != zlib.crc32(memory_of(copy.read())):
                raise UserError(
                    f"{folder}: {EMBEDDING} differs between the first and the last stage, and its arguments say that "
                    "they share it; the files are of two checkpoints"
                )
        return whole.read()

    return LazyTensor(whole.shape, whole.dtype, read)
