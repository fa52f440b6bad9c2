"""Reference of a run that learns from preferences: a frozen model, or its log-probabilities, stored next to the data.

They are computed before the first step by the model that the run starts from, and kept in the cache of the data under a
name with the identity of that model: another base, other data or another length of a row never read them. A file is
filled in as it is computed, so a run that is stopped continues where it was.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatronish.core.files import AtomicFile
from megatronish.data.chat.dataset import ChatDataset
from megatronish.data.chat.file import ChatFile
from megatronish.data.collate import Collator
from megatronish.engine.engine import Engine, on_rank
from megatronish.model.batch import MicroBatch
from megatronish.parallel import comm
from megatronish.parallel.all_or_none import all_or_none
from megatronish.train.base_model import Base, load_base
from megatronish.train.setup import TrainingJob

FORMAT = "megatronish reference 1"
ROUNDS = 16
"""Rounds of micro-batches, one for each data rank, between two writes."""


def begin_reference(job: TrainingJob, engine: Engine, say: Callable[[str], None]) -> Base | None:
    """Make the reference of the run, if its weights are not those of the engine. Collective.

    Returns which model it is; None for a run without a reference, and for one that switches its adapters off, which
    knows its base.
    """
    if engine.reference is not None:
        reference = load_base(job, engine.reference)
        say(f"compared with the frozen model {reference.source}")
        return reference
    if job.config.reference != "stored":
        return None
    reference = load_base(job, engine)
    for data in (job.datasets.train, *job.datasets.valid.values(), job.datasets.test):
        if isinstance(data, ChatDataset):
            for number, file in enumerate(data.files):
                file.stored = _stored(job, engine, data, number, reference, say)
    return reference


def _path(job: TrainingJob, file: ChatFile, reference: Base) -> Path:
    """Place of the numbers of a file, in the cache of its tokens."""
    prefix = Path(file.masked.file.prefix)
    named = (FORMAT, file.identity, file.capacity, reference.identity, job.config.training.precision)
    return prefix.with_name(f"{prefix.name}-{hashlib.sha256(repr(named).encode()).hexdigest()[:32]}.reference.npy")


def _stored(
    job: TrainingJob, engine: Engine, data: ChatDataset, number: int, reference: Base, say: Callable[[str], None]
) -> NDArray[np.float32]:
    """Log-probabilities [pairs, 2] of a file, read by the main rank as far as they are there, and else computed."""
    file, mesh = data.files[number], engine.mesh
    path = _path(job, file, reference)

    def begun() -> torch.Tensor:
        if mesh.is_main and path.is_file():
            return torch.from_numpy(np.load(path))
        return torch.full((file.num_samples, 2), torch.nan if mesh.is_main else 0.0)

    found = comm.all_reduce(all_or_none(mesh.checkpoint_axis, begun), mesh.world)
    done = int((~found[:, 0].isnan()).sum())
    if done < len(found):
        say(f"log-probabilities of {file.path} by {reference.source}: {done:,} of {len(found):,} pairs are stored")
    for first, scores in _scored(job, engine, data, number, first=done):
        found[first : first + len(scores)] = scores
        all_or_none(mesh.checkpoint_axis, lambda: _write(path, found) if mesh.is_main else None)
    return found.numpy()


def _write(path: Path, numbers: torch.Tensor) -> None:
    with AtomicFile(path) as file:
        np.save(file.file, numbers.numpy())


def _scored(
    job: TrainingJob, engine: Engine, data: ChatDataset, number: int, *, first: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """(number of the first pair, [pairs, 2]) of the pairs from `first` on, in order, one in a row."""
    mesh, size = engine.mesh, job.config.training.micro_batch_size
    collate = Collator.of(job.config.data, eod=job.tokenizer.eod)
    count, stride = data.files[number].num_samples, size * mesh.dp.size
    for begin in range(first, count, stride * ROUNDS):
        end = min(begin + stride * ROUNDS, count)
        places = [start + mesh.dp.rank * size for start in range(begin, end, stride)]
        rows = [[min(place + row, end - 1) for row in range(size)] for place in places]  # the last pair fills up
        batches = [collate([data.row([(number, place)]) for place in row], row) for row in rows]
        yield begin, _together(engine, rows, _scores(engine, batches), begin=begin, end=end)


def _scores(engine: Engine, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """Log-probabilities [P, 2] of each micro-batch by the model that the run starts from, without its adapters."""
    assert engine.preparation is not None, "the objective compares no completions"
    return engine.preparation.policy.without_adapters(on_rank(batches, engine.mesh))


def _together(
    engine: Engine, rows: Sequence[Sequence[int]], scores: Sequence[torch.Tensor], *, begin: int, end: int
) -> torch.Tensor:
    """[end - begin, 2] on all ranks, from what those have that end the model: tp and cp ranks have it alike."""
    mesh = engine.mesh
    found = torch.zeros(end - begin, 2)
    counts = torch.zeros(end - begin, 1)
    if mesh.pp.is_last and mesh.tp.is_first and mesh.cp.is_first:
        for row, score in zip(rows, scores, strict=True):
            places = torch.tensor(row) - begin
            found.index_add_(0, places, score.float().cpu())
            counts.index_add_(0, places, torch.ones(len(row), 1))
    both = comm.all_reduce(torch.cat((found, counts), dim=1), mesh.world)
    return both[:, :2] / both[:, 2:]
