"""Frozen models of a run: the one that its adapters are for, and the reference of a run that learns from preferences.

A base is loaded, and checked that it is the same one again. A reference is a frozen model, or its log-probabilities,
stored next to the data. They are computed before the first step by the model that the run starts from, and kept in the
cache of the data under a name with the identity of that model: another base, other data or another length of a row
never read them. A file is filled in as it is computed, so a run that is stopped continues where it was.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatronish.checkpoint.folder import find_checkpoint, read_state
from megatronish.core.errors import UserError
from megatronish.core.files import AtomicFile
from megatronish.core.remote import Location
from megatronish.data.chat.dataset import ChatDataset
from megatronish.data.chat.file import ChatFile
from megatronish.data.loader import Collator
from megatronish.engine.engine import Engine
from megatronish.engine.forward import PairPreparation, on_rank
from megatronish.formats import native
from megatronish.formats.load_sharded import load_weights, open_hf, quantised
from megatronish.formats.weights import LazyTensor, Model, identity_of
from megatronish.model.batch import MicroBatch
from megatronish.model.quantised import quantised_weights
from megatronish.parallel import comm
from megatronish.parallel.all_or_none import all_or_none
from megatronish.parallel.sharding import Sharding, fill_initial
from megatronish.train.checkpoint_state import base_tensors_of
from megatronish.train.folder import refuse_other_function
from megatronish.train.setup import TrainingJob


class Base(NamedTuple):
    """Base model of a run with adapters. `source` is where it was read, `identity` what it is (formats/weights.py).

    `origin` is the description that came with it, of another format.
    """

    source: str
    identity: str
    origin: dict[str, Any]


def load_base(job: TrainingJob, engine: Engine) -> Base:
    """Fill the frozen parameters from --load-hf, or from the checkpoint of --load and --ckpt-step. Collective."""
    keep, axis = job.config.checkpoint, engine.mesh.checkpoint_axis
    source = Path(keep.load_hf or keep.load or "")
    into = {name: each for name, each in base_tensors_of(engine).items() if not name.endswith(native.LOAD)}

    def read() -> Model:
        folder = find_checkpoint(source, step=keep.ckpt_step) if keep.load_hf is None and source.is_dir() else None
        if folder is not None:
            state = read_state(folder)
            refuse_adapters(state, source)
            refuse_other_function(state["config"], job.facts["config"], source=folder)
        model = native.read(source, step=keep.ckpt_step) if keep.load_hf is None else open_hf(source)
        load_weights(_as_held(model.tensors, engine), into, source=source)
        return model

    model = all_or_none(axis, read)
    engine.data_parallel.gather_parameters(frozen=True)
    return Base(os.path.abspath(source), identity_of(model.tensors, over=axis), dict(model.description.origin))


def refuse_adapters(state: Mapping[str, Any], source: Location | str) -> None:
    """UserError for a run with adapters: its checkpoints, which say `state`, hold no model that a run could start from.

    `source` is what --load names.
    """
    if (base := state.get("base")) is not None:
        raise UserError(
            f"--load {source} holds the adapters of {base.get('source')} alone; start that run again to continue it, "
            "or merge them into their model with megatronish convert --adapter, and start from the merged one"
        )


def draw_base(engine: Engine, *, seed: int) -> None:
    """Fill a quantised base with the initial values of its weights, as `initialize` fills one that is not quantised."""
    tensors = {}
    for name, _, held in quantised_weights(engine.stage.model):
        draw = partial(_drawn, held.dense, names=(seed, "init", name))
        tensors[name] = LazyTensor(held.dense.shape, torch.float32, draw)
    if not tensors:
        return
    stored = _as_held(tensors, engine)
    into = {name: each for name, each in base_tensors_of(engine).items() if name.removeprefix(native.PREFIX) in stored}
    load_weights(stored, into, source=Path("initial values"))
    engine.data_parallel.gather_parameters(frozen=True)


def _drawn(sharding: Sharding, *, names: tuple[str | int, ...]) -> Tensor:
    values = torch.empty(sharding.shape)
    fill_initial(values, sharding, (0,) * values.dim(), names=names)
    return values


def _as_held(tensors: Mapping[str, LazyTensor], engine: Engine) -> Mapping[str, LazyTensor]:
    """The base's tensors in the form in which this rank holds them: those of quantised layers in 4 bits."""
    return quantised(tensors, quantised_weights(engine.stage.model), device=engine.mesh.device)


def refuse_other_base(saved: Any, base: Base | None, checkpoint: Location) -> None:
    """UserError if the adapters of a checkpoint were trained with another model; `saved` is what its state says."""
    if base is None and saved is None:
        return
    if base is None:
        raise UserError(
            f"{checkpoint} holds adapters alone, of the model {saved['source']}; name their --adapter-type, and the "
            "model with --load-hf or --load"
        )
    if saved is None:
        raise UserError(f"{checkpoint} holds a whole model and no adapters; choose another --run-dir for adapters")
    if saved["identity"] != base.identity:
        raise UserError(
            f"the adapters of {checkpoint} were trained with {saved['source']}, with the weights "
            f"{saved['identity'][:12]}, and {base.source} has the weights {base.identity[:12]}; name that model with "
            "--load-hf or --load"
        )


def refuse_other_reference(saved: Any, reference: Base | None, checkpoint: Location) -> None:
    """UserError if a run was compared with another model; `saved` is what its state says."""
    if saved is None or reference is None or saved["identity"] == reference.identity:
        return
    raise UserError(
        f"the run of {checkpoint} is compared with {saved['source']}, with the weights {saved['identity'][:12]}, and "
        f"{reference.source} has the weights {reference.identity[:12]}; name that model with --load-hf or --load"
    )


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

    all_scores = comm.all_reduce(all_or_none(mesh.checkpoint_axis, begun), mesh.world)
    done = int((~all_scores[:, 0].isnan()).sum())
    if done < len(all_scores):
        say(f"log-probabilities of {file.path} by {reference.source}: {done:,} of {len(all_scores):,} pairs are stored")
    for first, scores in _scored(job, engine, data, number, first=done):
        all_scores[first : first + len(scores)] = scores
        all_or_none(mesh.checkpoint_axis, lambda: _write(path, all_scores) if mesh.is_main else None)
    return all_scores.numpy()


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
    assert isinstance(engine.preparation, PairPreparation), "the objective compares no completions"
    return engine.preparation.policy.without_adapters(on_rank(batches, engine.mesh))


def _together(
    engine: Engine, rows: Sequence[Sequence[int]], scores: Sequence[torch.Tensor], *, begin: int, end: int
) -> torch.Tensor:
    """[end - begin, 2] on all ranks, from what those have that end the model: tp and cp ranks have it alike."""
    mesh = engine.mesh
    sums = torch.zeros(end - begin, 2)
    counts = torch.zeros(end - begin, 1)
    if mesh.pp.is_last and mesh.tp.is_first and mesh.cp.is_first:
        for row, score in zip(rows, scores, strict=True):
            places = torch.tensor(row) - begin
            sums.index_add_(0, places, score.float().cpu())
            counts.index_add_(0, places, torch.ones(len(row), 1))
    both = comm.all_reduce(torch.cat((sums, counts), dim=1), mesh.world)
    return both[:, :2] / both[:, 2:]
