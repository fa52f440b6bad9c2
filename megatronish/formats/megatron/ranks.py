"""Files of Megatron-LM's ranks in its `torch` format: found in a folder, and read without their tensors' elements."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatronish.core.errors import UserError
from megatronish.formats.megatron.copies import RankTensor
from megatronish.formats.megatron.grid import RankGrid
from megatronish.formats.megatron.names import FILE, LATEST, NO_WEIGHTS, RELEASE
from megatronish.formats.megatron.values import quote
from megatronish.formats.torch_file.archive import TorchFile
from megatronish.formats.torch_file.unpickler import Arguments, Stored

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
    latest = load / LATEST
    if latest.is_file():
        text = latest.read_text(encoding="utf-8", errors="replace").strip()
        if text != RELEASE and not ITERATION.fullmatch(text):
            raise UserError(
                f"{latest} says {quote(text)} and must say a number or {RELEASE}; name one iteration's folder"
            )
        load = load / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if (load / ".metadata").is_file():
        raise UserError(
            f"{load} is in Megatron-LM's format torch_dist, and only its format torch is supported; let Megatron-LM "
            "convert it, with --ckpt-convert-format torch --ckpt-convert-save DIR"
        )
    return load


def first_file(folder: Path) -> Path:
    found = sorted(folder.glob("mp_rank_*")) if folder.is_dir() else []
    if not found:
        raise UserError(f"{folder} holds no mp_rank_* folder; name a folder with {LATEST}, or one iteration's in it")
    return found[0] / FILE


def read_ranks(folder: Path, first: RankFile) -> tuple[RankGrid, list[list[RankFile]]]:
    """Files of all ranks, by stage, in the order of the grid; UserError, with the path, if one is missing."""
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
    tp: Any = args.get("tensor_model_parallel_size", args.get("model_parallel_size", 1))
    pp: Any = args.get("pipeline_model_parallel_size", 1)
    ep: Any = args.get("expert_model_parallel_size", 1)
    etp: Any = args.get("expert_tensor_parallel_size")
    sizes = {"tensor": tp, "pipeline": pp, "expert": ep, "expert tensor": tp if etp is None else etp}
    if not all(type(size) is int and 0 < size < 2**63 for size in sizes.values()):
        said = " and ".join(f"{name} parallel size {quote(size)}" for name, size in sizes.items())
        raise UserError(f"{first.path} says {said}, which is not possible; fetch it again")
    grid = RankGrid(tp, pp, ep, sizes["expert tensor"])
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
